// Captures and graphs: what is queued on a stream that is captured becomes a list, which a launch does again.
#include <stdlib.h>

#include "internal.h"

// A captured list; instantiated, it may be launched.
struct graph {
  bool dead;
  bool is_launchable;
  size_t count;
  work* list;
};

static graph* create(bool is_launchable) {
  // Never given back, so that a handle that is used too long is recognised.
  graph* created = calloc(1, sizeof *created);
  if (created == NULL) abort();
  created->is_launchable = is_launchable;
  ++fake.books.graphs;
  return created;
}

static void append(graph* to, work next) {
  to->list = grow(to->list, to->count, sizeof *to->list);
  to->list[to->count++] = next;
}

bool capture_work(stream* queue, work captured) {
  graph* capture = *capture_of(queue);
  if (capture != NULL) append(capture, captured);
  return capture != NULL;
}

static bool is_live(call* c, const graph* used, bool is_launchable) {
  if (used != NULL && !used->dead && used->is_launchable == is_launchable) return true;
  c->status = violation(c->function, INVALID_VALUE, "no live graph of this kind");
  return false;
}

static void destroy(graph* destroyed) {
  destroyed->dead = true;
  free(destroyed->list);
  destroyed->list = NULL;
  --fake.books.graphs;
}

int cuStreamBeginCapture_v2(void* handle, int mode) {
  enum { LAST_MODE = 2 };
  call c = begin(__func__, NEEDS_CONTEXT);
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL && (handle == NULL || mode < 0 || mode > LAST_MODE || *capture_of(queue) != NULL)) {
    c.status = violation(c.function, INVALID_VALUE, "the default stream, no mode, or a capture in a capture");
  } else if (queue != NULL) {
    *capture_of(queue) = create(false);
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

// A capture ends also when the call reports a fault, which then gives no graph.
int cuStreamEndCapture(void* handle, graph** captured) {
  call c = begin(__func__, NEEDS_CONTEXT | RELEASES);
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL && *capture_of(queue) == NULL) {
    c.status = violation(c.function, INVALID_VALUE, "the stream is not captured");
  } else if (queue != NULL) {
    if (c.fault == SUCCESS) {
      *captured = *capture_of(queue);
    } else {
      destroy(*capture_of(queue));
    }
    *capture_of(queue) = NULL;
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

void end_capture(stream* queue) {
  if (*capture_of(queue) != NULL) destroy(*capture_of(queue));
  *capture_of(queue) = NULL;
}

int cuGraphInstantiateWithFlags(graph** launchable, graph* from, unsigned long long flags) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)flags;
  if (c.runs && is_live(&c, from, false)) {
    *launchable = create(true);
    for (size_t i = 0; i < from->count; ++i) append(*launchable, from->list[i]);
  }
  return finish(c);
}

int cuGraphLaunch(graph* launched, void* handle) {
  call c = begin(__func__, NEEDS_CONTEXT);
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL && *capture_of(queue) != NULL) {
    // Driver 580 ends the capture.
    c.status = violation(c.function, CAPTURE_UNSUPPORTED, "a launch of a graph on a stream that is captured");
  } else if (queue != NULL && is_live(&c, launched, true)) {
    for (size_t i = 0; i < launched->count && c.status == SUCCESS; ++i) c.status = run_work(&c, &launched->list[i]);
    enqueue(queue);
  } else if (c.runs && queue == NULL) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

static int destroy_graph(const char* function, graph* destroyed, bool is_launchable) {
  call c = begin(function, NEEDS_INIT | RELEASES);
  if (c.runs && is_live(&c, destroyed, is_launchable)) destroy(destroyed);
  return finish(c);
}

int cuGraphDestroy(graph* destroyed) {
  return destroy_graph(__func__, destroyed, false);
}

int cuGraphExecDestroy(graph* destroyed) {
  return destroy_graph(__func__, destroyed, true);
}
