// A graph inside a CUDA graph of the caller's: its operations are captured with the caller's own, run when that is
// launched, and run on whatever becomes of the nvb_graph's other launches.
#include <dlfcn.h>

#include "graph_layer.h"

typedef struct {
  int (*retain)(void** context, int device);
  int (*set_current)(void* context);
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** graph);
  int (*instantiate)(void** launchable, void* graph, unsigned long long flags);
  int (*launch)(void* launchable, void* stream);
  int (*destroy)(void* graph);
  int (*destroy_launchable)(void* launchable);
} driver;

static driver open_driver(void) {
  driver found;
  const char* const names[] = {
      "cuDevicePrimaryCtxRetain",    "cuCtxSetCurrent", "cuStreamBeginCapture_v2", "cuStreamEndCapture",
      "cuGraphInstantiateWithFlags", "cuGraphLaunch",   "cuGraphDestroy",          "cuGraphExecDestroy"};
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) abort();
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    void* address = dlsym(library, names[i]);
    if (address == NULL) abort();
    memcpy((char*)&found + i * sizeof(void*), &address, sizeof address);
  }
  void* context = NULL;
  CHECK_EQUAL(found.retain(&context, 0), 0);
  CHECK_EQUAL(found.set_current(context), 0);
  return found;
}

enum { RELAXED = 2 };

static void end_capture(const driver* d, void* stream, void** launchable) {
  void* graph = NULL;
  CHECK_EQUAL(d->end(stream, &graph), 0);
  CHECK_EQUAL(d->instantiate(launchable, graph, 0), 0);
  CHECK_EQUAL(d->destroy(graph), 0);
}

static void set_input(fixture* f, const layer* l, const float* values) {
  CHECK_OK(nvb_memory_copy(f->memory, l->x, values, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  set_position(f, l, 0, f->stream);
}

static void test_capture(fixture* f, const driver* d) {
  layer l = create_layer(f);
  nvb_graph *graph = record(f, &l, f->stream), *late = record(f, &l, f->stream);
  float* extra = ones(f);
  nvb_stream* stream = NULL;
  void *native = NULL, *launchable = NULL;
  float initial[SEQUENCES * WIDTH], expected[SEQUENCES * WIDTH], found[SEQUENCES * WIDTH];
  CHECK_OK(nvb_stream_create(f->backend, 0, &stream));
  CHECK_OK(nvb_stream_get_native(stream, &native));
  download(f, initial, l.x, BYTES);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  download(f, expected, l.x, BYTES);
  // The caller's first call works on the graph's input, its last one beside it.
  CHECK_OK(add(f, extra, stream));
  CHECK_OK(nvb_stream_synchronize(stream));
  CHECK_EQUAL(d->begin(native, RELAXED), 0);
  CHECK_OK(nvb_memory_copy(f->memory, l.x, l.y, BYTES, NVB_COPY_DEVICE_TO_DEVICE, stream));
  CHECK_OK(nvb_graph_launch(graph, stream));
  CHECK_FAILS(nvb_graph_launch(late, stream), NVB_ERROR_INVALID_ARGUMENT, "launched before");
  CHECK_OK(add(f, extra, stream));
  end_capture(d, native, &launchable);
  check_value(f, extra, 2);

  for (int round = 0; round < 4; ++round) {
    set_input(f, &l, initial);
    CHECK_OK(nvb_memory_copy(f->memory, l.y, initial, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
    CHECK_OK(nvb_stream_synchronize(f->stream));
    CHECK_EQUAL(d->launch(launchable, native), 0);
    CHECK_OK(nvb_stream_synchronize(stream));
    download(f, found, l.x, BYTES);
    CHECK(memcmp(expected, found, sizeof found) == 0);
    // Whatever is done with the graph between two of them.
    if (round == 0) CHECK_OK(nvb_graph_share_workspace(graph, late));
    if (round == 1) CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O2, NULL));
    if (round == 2) {
      CHECK_OK(nvb_graph_launch(late, f->stream));
      CHECK_OK(nvb_graph_launch(graph, f->stream));
      CHECK_OK(nvb_stream_synchronize(f->stream));
    }
  }
  check_value(f, extra, 32);
  CHECK_EQUAL(d->destroy_launchable(launchable), 0);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_graph_destroy(late));
  CHECK_OK(nvb_stream_destroy(stream));
  destroy_handles(&l);
  destroy_memory(f, &l);
  release(f, extra);
}

int main(void) {
  if (test_on_cpu()) {
    printf("skipped: a stream of the CPU is captured by nobody\n");
    return 0;
  }
  fixture f = open_fixture();
  const driver d = open_driver();
  test_capture(&f, &d);
  close_fixture(&f);
  return test_result();
}
