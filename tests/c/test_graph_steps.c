// Graphs that are launched for days: a hundred thousand launches, and some thousand replaced addresses, take nothing
// that stays.
#include "graph_layer.h"

enum { LAUNCHES = 100000, LAUNCHES_OF_LAYER = 2000, REPLACEMENTS = 2000 };

// What the first launches take, the rest must not add to: neither blocks, nor bytes of the device, nor main memory.
static void check_as_before(fixture* f, const nvb_memory_statistics* before, long kilobytes) {
  const nvb_memory_statistics after = statistics_of(f->memory);
  CHECK_EQUAL(after.allocations, before->allocations);
  CHECK_EQUAL(after.allocated, before->allocated);
  CHECK_EQUAL(after.reserved, before->reserved);
  CHECK_GROWTH(kilobytes);
}

// A queue is waited for now and then, as an engine does that reads tokens. The first failure ends it.
static void launch_often(fixture* f, nvb_graph* graph, int count) {
  nvb_status status = NVB_OK;
  for (int i = 0; i < count && status == NVB_OK; ++i) {
    status = nvb_graph_launch(graph, f->stream);
    if (status == NVB_OK && i % 64 == 63) status = nvb_stream_synchronize(f->stream);
  }
  CHECK_OK(status);
  CHECK_OK(nvb_stream_synchronize(f->stream));
}

static void test_launches(fixture* f) {
  float* data = ones(f);
  float* copy = ones(f);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(nvb_memory_copy(f->memory, copy, data, BYTES, NVB_COPY_DEVICE_TO_DEVICE, f->stream));
  CHECK_OK(add(f, copy, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  launch_often(f, graph, 1000);
  const nvb_memory_statistics before = statistics_of(f->memory);
  const long kilobytes = resident_kilobytes();
  launch_often(f, graph, LAUNCHES);
  check_as_before(f, &before, kilobytes);
  check_value(f, copy, 2);
  check_value(f, data, 1);
  CHECK_OK(nvb_graph_destroy(graph));
  release(f, data);
  release(f, copy);
}

// A layer's step, whose cache and workspace are used again.
static void test_layer(fixture* f) {
  layer l = create_layer(f);
  set_position(f, &l, 5, f->stream);
  nvb_graph* graph = record(f, &l, f->stream);
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O2, NULL));
  launch_often(f, graph, 100);
  const nvb_memory_statistics before = statistics_of(f->memory);
  const long kilobytes = resident_kilobytes();
  launch_often(f, graph, LAUNCHES_OF_LAYER);
  check_as_before(f, &before, kilobytes);
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_handles(&l);
  destroy_memory(f, &l);
}

// Each replacement prepares the graph again, and the launch before it is forgotten.
static void test_replacements(fixture* f) {
  float* places[2] = {ones(f), ones(f)};
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, places[0], 0, BYTES, f->stream));
  CHECK_OK(add(f, places[0], f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  nvb_memory_statistics before = {0};
  long kilobytes = 0;
  nvb_status status = NVB_OK;
  for (int i = 0; i < REPLACEMENTS && status == NVB_OK; ++i) {
    if (i == REPLACEMENTS / 10) {
      before = statistics_of(f->memory);
      kilobytes = resident_kilobytes();
    }
    status = nvb_graph_rebind(graph, places[i % 2], BYTES, places[(i + 1) % 2]);
    if (status == NVB_OK) status = nvb_graph_launch(graph, f->stream);
    if (status == NVB_OK) status = nvb_stream_synchronize(f->stream);
  }
  CHECK_OK(status);
  const nvb_memory_statistics after = statistics_of(f->memory);
  CHECK_EQUAL(after.allocated, before.allocated);
  CHECK_EQUAL(after.blocks, before.blocks);
  CHECK_GROWTH(kilobytes);
  check_value(f, places[0], 0);
  check_value(f, places[1], 0);
  CHECK_OK(nvb_graph_destroy(graph));
  release(f, places[0]);
  release(f, places[1]);
}

int main(void) {
  fixture f = open_fixture();
  test_launches(&f);
  test_layer(&f);
  test_replacements(&f);
  close_fixture(&f);
  return test_result();
}
