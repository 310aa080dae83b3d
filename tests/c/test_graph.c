// Graphs: what is recorded gives what the calls give, whoever still holds handles.
#include "graph_layer.h"

// What STEPS eager steps leave in `x` and in its copy.
static void run_eagerly(fixture* f, float results[2][SEQUENCES * WIDTH]) {
  layer l = create_layer(f);
  for (int32_t i = 0; i < STEPS; ++i) {
    set_position(f, &l, i, f->stream);
    step(f, &l, f->stream);
  }
  download(f, results[0], l.x, BYTES);
  download(f, results[1], l.copied, BYTES);
  destroy_handles(&l);
  destroy_memory(f, &l);
}

// Launches on `stream`, which the graph may not have been recorded on, and compares with eager calls bit by bit.
static void check_launches(fixture* f, const layer* l, nvb_graph* graph, nvb_stream* stream) {
  float expected[2][SEQUENCES * WIDTH], results[2][SEQUENCES * WIDTH];
  run_eagerly(f, expected);
  for (int32_t i = 0; i < STEPS; ++i) {
    set_position(f, l, i, stream);
    CHECK_OK(nvb_graph_launch(graph, stream));
  }
  CHECK_OK(nvb_stream_synchronize(stream));
  download(f, results[0], l->x, BYTES);
  download(f, results[1], l->copied, BYTES);
  CHECK(memcmp(expected, results, sizeof results) == 0);
}

// Nothing runs while it is recorded; the graph keeps what it needs of destroyed handles, and another stream may launch
// it.
static void test_layer(fixture* f) {
  layer l = create_layer(f);
  nvb_stream *recorded = NULL, *other = NULL;
  CHECK_OK(nvb_stream_create(f->backend, 0, &recorded));
  CHECK_OK(nvb_stream_create(f->backend, 0, &other));
  float before[SEQUENCES * WIDTH], after[SEQUENCES * WIDTH];
  download(f, before, l.x, BYTES);
  nvb_graph* graph = record(f, &l, recorded);
  download(f, after, l.x, BYTES);
  CHECK(memcmp(before, after, sizeof after) == 0);
  destroy_handles(&l);
  CHECK_OK(nvb_stream_destroy(recorded));
  nvb_graph_info info = info_of(graph);
  CHECK_EQUAL(info.state, NVB_GRAPH_RECORDED);
  CHECK_EQUAL(info.nodes, NODES);
  CHECK(info.operations > 2.0 * SEQUENCES * WIDTH * (2 * WIDTH + 2 * KV_WIDTH + 3 * HIDDEN) && info.bytes > 0);
  check_launches(f, &l, graph, other);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_stream_destroy(other));
  destroy_memory(f, &l);
}

// Objects end in any order, the backend before its graph.
static void test_order_of_ends(void) {
  fixture f = open_fixture();
  layer l = create_layer(&f);
  nvb_graph* graph = record(&f, &l, NULL);
  CHECK_OK(nvb_graph_launch(graph, NULL));
  CHECK_OK(nvb_backend_synchronize(f.backend));
  destroy_handles(&l);
  destroy_memory(&f, &l);
  close_fixture(&f);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_INVALID(nvb_graph_launch(graph, NULL));
}

// A copy out of page-locked memory reads it at each launch.
static void test_host_copies(fixture* f) {
  enum { COUNT = SEQUENCES * WIDTH };
  float* pinned = NULL;
  CHECK_OK(nvb_host_allocate(f->backend, 2 * BYTES, (void**)&pinned));
  float* data = ones(f);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(nvb_memory_copy(f->memory, data, pinned, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_memory_copy(f->memory, pinned + COUNT, data, BYTES, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  for (int round = 1; round < 4; ++round) {
    for (int i = 0; i < COUNT; ++i) pinned[i] = (float)(i + round);
    CHECK_OK(nvb_graph_launch(graph, f->stream));
    CHECK_OK(nvb_stream_synchronize(f->stream));
    for (int i = 0; i < COUNT; ++i) CHECK_EQUAL(pinned[COUNT + i], 2 * (i + round));
  }
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_host_free(f->backend, pinned, 2 * BYTES));
  release(f, data);
}

// Memory that sleeps is refused by a launch as it is by a call, and read as it is once it is awake again.
static void test_sleep(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graph = record(f, &l, f->stream);
  destroy_handles(&l);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_memory_sleep(f->memory, 1, NULL));
  CHECK_FAILS(nvb_graph_launch(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "asleep", "node");
  CHECK_OK(nvb_memory_wake(f->memory, NULL));
  static float initial[SEQUENCES * WIDTH];
  layer again = create_layer(f);
  download(f, initial, again.x, BYTES);
  CHECK_OK(nvb_memory_copy(f->memory, l.x, initial, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  check_launches(f, &l, graph, f->stream);
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_handles(&again);
  destroy_memory(f, &again);
  destroy_memory(f, &l);
}

static void test_descriptions(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graph = record(f, &l, f->stream);
  static const char* const words[][4] = {
      {"13 nodes", "0 rms_norm: ", "1 linear: ", "after 0"},
      {"\"operation\":\"attention_decode\"", "\"dependencies\":[1, 2, 3]", "\"form\":\"f32[2, 64]\"",
       "the cache's keys"},
      {"digraph", "n0 [label=\"0 rms_norm", "n0 -> n1;", "n11 -> n12;"},
  };
  for (uint32_t format = 0; format < 3; ++format) {
    char* text = text_of(graph, format, nvb_graph_describe);
    for (int i = 0; i < 4; ++i) {
      if (strstr(text, words[format][i]) == NULL) check_fail(__FILE__, __LINE__, words[format][i], text);
    }
    free(text);
  }
  CHECK_FAILS(nvb_graph_describe(graph, 3, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "format is 3");
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_handles(&l);
  destroy_memory(f, &l);
}

int main(void) {
  fixture f = open_fixture();
  test_layer(&f);
  test_order_of_ends();
  test_host_copies(&f);
  test_sleep(&f);
  test_descriptions(&f);
  close_fixture(&f);
  return test_result();
}
