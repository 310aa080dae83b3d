// Streams, events and kernel launches. Work is done when it is queued, but for functions of the host's that wait for
// something; time is a count of queued work.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

struct stream {
  bool dead;
  int64_t polls;  // queries until the queued work counts as finished
  int priority;
  atomic_int running;  // functions of the host's that have not returned
  graph* capture;      // NULL: it is not captured
};

// Numerically lower is more urgent.
enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };

typedef struct {
  bool dead;
  const stream* recorded;  // on this stream; NULL: not at all
  int64_t polls;
  double milliseconds;
} event;

static stream default_stream;
static double now;  // milliseconds
static atomic_int all_running;

static void wait_until_returned(const atomic_int* running) {
  while (atomic_load(running) != 0) usleep(50);
}

void wait_for_host_functions(void) {
  wait_until_returned(&all_running);
}

stream* live_stream(const char* function, void* handle) {
  if (handle == NULL) return &default_stream;
  stream* found = handle;
  if (!found->dead) return found;
  violation(function, INVALID_HANDLE, "the stream was destroyed");
  return NULL;
}

graph** capture_of(stream* queue) {
  return &queue->capture;
}

void enqueue(stream* queue) {
  now += 0.5;
  queue->polls = fake.settings[FAKE_POLLS];
}

int cuStreamCreateWithPriority(stream** created, unsigned flags, int priority) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)flags;
  if (c.runs) {
    // Never given back, so that a handle that is used too long is recognised.
    *created = calloc(1, sizeof **created);
    if (*created == NULL) abort();
    (*created)->priority = priority > LEAST_PRIORITY      ? LEAST_PRIORITY
                           : priority < GREATEST_PRIORITY ? GREATEST_PRIORITY
                                                          : priority;
    ++fake.books.streams;
  }
  return finish(c);
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  call c = begin(__func__, NEEDS_CONTEXT);
  if (c.runs) {
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
  }
  return finish(c);
}

int cuStreamGetPriority(void* handle, int* priority) {
  call c = begin(__func__, stream_flags(handle));
  const stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL) {
    *priority = queue->priority;
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

int cuStreamDestroy_v2(stream* destroyed) {
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs) {
    if (live_stream(c.function, destroyed) == NULL) {
      c.status = INVALID_HANDLE;
    } else {
      end_capture(destroyed);
      destroyed->dead = true;
      --fake.books.streams;
    }
  }
  return finish(c);
}

int cuStreamSynchronize(void* handle) {
  wait_until_returned(handle == NULL ? &default_stream.running : &((stream*)handle)->running);
  call c = begin(__func__, stream_flags(handle) | RELEASES);
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL && queue->capture != NULL) {
    c.status = violation(c.function, INVALID_VALUE, "a wait for a stream that is captured");
  } else if (queue != NULL) {
    queue->polls = 0;
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

static int poll(int64_t* left) {
  if (*left == 0) return SUCCESS;
  --*left;
  return NOT_READY;
}

int cuStreamQuery(void* handle) {
  call c = begin(__func__, stream_flags(handle));
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (c.runs) c.status = queue == NULL ? INVALID_HANDLE : queue->running ? NOT_READY : poll(&queue->polls);
  return finish(c);
}

int cuStreamIsCapturing(void* handle, int* capturing) {
  call c = begin(__func__, stream_flags(handle));
  if (c.runs) {
    stream* queue = live_stream(c.function, handle);
    *capturing = queue != NULL && queue->capture != NULL;
    if (queue == NULL) c.status = INVALID_HANDLE;
  }
  return finish(c);
}

static _Thread_local int capture_mode;

int fake_capture_mode(void) {
  return capture_mode;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  enum { RELAXED = 2 };
  call c = begin(__func__, 0);
  if (c.runs) {
    if (*mode < 0 || *mode > RELAXED) {
      c.status = violation(c.function, INVALID_VALUE, "no mode");
    } else {
      const int before = capture_mode;
      capture_mode = *mode;
      *mode = before;
    }
  }
  return finish(c);
}

typedef struct {
  stream* queue;
  void (*function)(void*);
  void* argument;
} host_function;

static void* run_host_function(void* argument) {
  const host_function work = *(host_function*)argument;
  free(argument);
  work.function(work.argument);
  atomic_fetch_sub(&work.queue->running, 1);
  atomic_fetch_sub(&all_running, 1);
  return NULL;
}

// Runs the function in a thread of its own, as the driver does. One that returns soon has returned with this call, so
// that tests see the same in each run.
static void start(stream* queue, void (*function)(void*), void* argument) {
  enum { MOST_WAITS = 4000 };  // some 0.3 s
  wait_until_returned(&queue->running);
  host_function* work = malloc(sizeof *work);
  if (work == NULL) abort();
  *work = (host_function){queue, function, argument};
  atomic_fetch_add(&queue->running, 1);
  atomic_fetch_add(&all_running, 1);
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_host_function, work) != 0) abort();
  pthread_detach(thread);
  for (int waits = 0; waits < MOST_WAITS && atomic_load(&queue->running) != 0; ++waits) usleep(50);
}

// The function runs outside the lock, as it may take locks of its own; it may not call the driver.
int cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  call c = begin(__func__, stream_flags(handle));
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  const bool queued = queue != NULL;
  if (queued) {
    enqueue(queue);
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  const int status = finish(c);
  if (queued) start(queue, function, argument);
  return status;
}

static bool is_live(call* c, const event* used) {
  if (!used->dead) return true;
  c->status = violation(c->function, INVALID_HANDLE, "the event was destroyed");
  return false;
}

int cuStreamWaitEvent(void* handle, event* waited, unsigned flags) {
  call c = begin(__func__, stream_flags(handle));
  (void)flags;
  if (c.runs && is_live(&c, waited)) {
    const stream* queue = live_stream(c.function, handle);
    if (queue == NULL) {
      c.status = INVALID_HANDLE;
    } else if (queue->capture != NULL && waited->recorded != NULL && waited->recorded->capture == NULL) {
      c.status = violation(c.function, CAPTURE_ISOLATION, "a wait of a captured stream for an event outside");
    } else if (waited->recorded != NULL && waited->recorded != queue) {
      ++fake.books.waits;
    }
  }
  return finish(c);
}

int cuEventCreate(event** created, unsigned flags) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)flags;
  if (c.runs) {
    *created = calloc(1, sizeof **created);
    if (*created == NULL) abort();
    ++fake.books.events;
  }
  return finish(c);
}

int cuEventDestroy_v2(event* destroyed) {
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs && is_live(&c, destroyed)) {
    destroyed->dead = true;
    --fake.books.events;
  }
  return finish(c);
}

int cuEventRecord(event* recorded, void* handle) {
  call c = begin(__func__, stream_flags(handle));
  if (c.runs && is_live(&c, recorded)) {
    if (live_stream(c.function, handle) == NULL) {
      c.status = INVALID_HANDLE;
    } else {
      recorded->recorded = live_stream(c.function, handle);
      recorded->polls = fake.settings[FAKE_POLLS];
      recorded->milliseconds = now;
    }
  }
  return finish(c);
}

int cuEventQuery(event* asked) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs && is_live(&c, asked)) {
    const bool held = asked->recorded != NULL && asked->recorded->running != 0;
    c.status = held ? NOT_READY : poll(&asked->polls);
  }
  return finish(c);
}

// An event has finished when it was found so, or one that was recorded after it on its stream.
static bool has_finished(const event* asked, const event* later) {
  return asked->polls == 0 || (later->polls == 0 && later->recorded == asked->recorded);
}

int cuEventSynchronize(event* waited) {
  if (waited->recorded != NULL) wait_until_returned(&waited->recorded->running);
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs && is_live(&c, waited)) waited->polls = 0;
  return finish(c);
}

int cuEventElapsedTime(float* milliseconds, event* start, event* stop) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs && is_live(&c, start) && is_live(&c, stop)) {
    if (start->recorded == NULL || stop->recorded == NULL) {
      c.status = INVALID_HANDLE;
    } else if (!has_finished(start, stop) || stop->polls != 0) {
      c.status = NOT_READY;
    } else {
      *milliseconds = (float)(stop->milliseconds - start->milliseconds);
    }
  }
  return finish(c);
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)function;
  (void)attribute;
  (void)value;
  return finish(c);
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** parameters,
                   void** extra) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)function;
  (void)parameters;
  (void)extra;
  if (c.runs) {
    stream* queue = live_stream(c.function, handle);
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (queue == NULL) {
      c.status = INVALID_HANDLE;
    } else if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_y > 65535 || grid_z > 65535 || threads == 0 ||
               threads > 1024 || shared_bytes > 227u << 10) {
      c.status = violation(c.function, INVALID_VALUE, "a grid, block or shared memory that no device can run");
    } else {
      const work launch = {.kind = WORK_LAUNCH};
      if (!capture_work(queue, launch)) {
        run_work(&c, &launch);
        enqueue(queue);
      }
    }
  }
  return finish(c);
}
