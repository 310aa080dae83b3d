// What a recording takes, what it refuses with the reason, and the states of a graph.
#include "graph_layer.h"

static void test_states(fixture* f) {
  nvb_graph *graph = NULL, *second = NULL;
  nvb_stream* other = NULL;
  float* data = ones(f);
  CHECK_OK(nvb_stream_create(f->backend, 0, &other));
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_create(f->backend, &second));
  CHECK_EQUAL(info_of(graph).state, NVB_GRAPH_EMPTY);
  CHECK_FAILS(nvb_graph_launch(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "nvb_graph_launch", "holds nothing");
  CHECK_FAILS(nvb_graph_end(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "nvb_graph_end", "not being recorded");
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_EQUAL(info_of(graph).state, NVB_GRAPH_RECORDING);
  CHECK_FAILS(nvb_graph_begin(graph, other), NVB_ERROR_INVALID_ARGUMENT, "being recorded already");
  CHECK_FAILS(nvb_graph_begin(second, f->stream), NVB_ERROR_INVALID_ARGUMENT, "recorded into a graph already");
  CHECK_FAILS(nvb_graph_launch(graph, other), NVB_ERROR_INVALID_ARGUMENT, "being recorded");
  CHECK_FAILS(nvb_graph_end(graph, other), NVB_ERROR_INVALID_ARGUMENT, "another stream");
  CHECK_FAILS(nvb_graph_end(second, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not being recorded");
  CHECK_FAILS(nvb_graph_describe(graph, NVB_GRAPH_FORMAT_TEXT, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT,
              "being recorded");
  // Another stream is none of the recording's business.
  CHECK_OK(add(f, data, other));
  CHECK_OK(nvb_stream_synchronize(other));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  check_value(f, data, 2);
  CHECK_EQUAL(info_of(graph).nodes, 0);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_FAILS(nvb_graph_begin(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "has been recorded");
  CHECK_FAILS(nvb_graph_end(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not being recorded");

  // A graph that goes ends its recording, and the stream's operations run again.
  CHECK_OK(nvb_graph_begin(second, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_graph_destroy(second));
  check_value(f, data, 2);
  CHECK_OK(add(f, data, f->stream));
  check_value(f, data, 4);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_graph_destroy(NULL));
  CHECK_INVALID(nvb_graph_destroy(graph));
  CHECK_OK(nvb_stream_destroy(other));
  release(f, data);
}

static void nothing(void* user_data) {
  (void)user_data;
}

static void no_plan(const nvb_kernel_plan* plan, void* user_data) {
  (void)plan;
  ++*(int*)user_data;
}

// What a graph cannot hold is refused with the reason, and the recording goes on.
static void test_refused(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graph = NULL;
  nvb_event* event = NULL;
  uint32_t finished = 0;
  int plans = 0;
  float* data = ones(f);
  float host[SEQUENCES * WIDTH];
  CHECK_OK(nvb_event_create(f->backend, &event));
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(add(f, data, f->stream));
#define REFUSED(call) CHECK_FAILS((call), NVB_ERROR_INVALID_ARGUMENT, "recorded into a graph")
  REFUSED(nvb_stream_synchronize(f->stream));
  REFUSED(nvb_stream_synchronize_for(f->stream, 1, &finished));
  REFUSED(nvb_stream_add_callback(f->stream, nothing, NULL));
  REFUSED(nvb_stream_wait_event(f->stream, event));
  REFUSED(nvb_event_record(event, f->stream));
  REFUSED(nvb_stream_set_workspace(f->stream, NULL, 0));
  REFUSED(nvb_memory_prefetch(f->memory, data, BYTES, 0, f->stream));
  REFUSED(nvb_kv_cache_reserve(l.cache, 0, 1, f->stream));
  REFUSED(nvb_kv_cache_truncate(l.cache, 0, 0, f->stream));
  REFUSED(nvb_kv_cache_release(l.cache, 0, f->stream));
  REFUSED(nvb_kv_cache_copy(l.cache, 0, 1, 0, f->stream));
  REFUSED(nvb_stream_explain(f->backend, f->stream, no_plan, &plans));
  REFUSED(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
  nvb_tensor part = rows(host, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* made = NULL;
  REFUSED(nvb_weight_create(f->backend, &desc, f->stream, &made));
  nvb_tensor values = nvb_tensor_2d(data, NVB_DTYPE_F32, WIDTH, WIDTH);
  CHECK_INVALID(nvb_weight_dequantize(l.query, &values, f->stream));
  if (!test_on_cpu()) {
    CHECK_FAILS(nvb_memory_copy(f->memory, host, data, BYTES, NVB_COPY_DEVICE_TO_HOST, f->stream),
                NVB_ERROR_INVALID_ARGUMENT, "pageable");
  }
  // Arguments are checked as ever.
  CHECK_INVALID(add(f, NULL, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_EQUAL(info_of(graph).nodes, 1);
  check_value(f, data, 1);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  check_value(f, data, 2);

  // An explanation cannot be ended as a recording, and a launch is explained operation by operation.
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, no_plan, &plans));
  nvb_graph* second = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &second));
  CHECK_FAILS(nvb_graph_begin(second, f->stream), NVB_ERROR_INVALID_ARGUMENT, "explained already");
  CHECK_INVALID(nvb_graph_end(second, f->stream));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
  CHECK_EQUAL(plans, 1);
  check_value(f, data, 2);
  CHECK_OK(nvb_graph_destroy(second));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_event_destroy(event));
  destroy_handles(&l);
  destroy_memory(f, &l);
  release(f, data);
}

static nvb_status get_info(void* info, void* graph) {
  return nvb_graph_get_info(graph, info);
}

static void test_handles(fixture* f) {
  nvb_graph *graph = NULL, *none = NULL;
  fixture stranger = open_fixture();
  CHECK_INVALID(nvb_graph_create(NULL, &graph));
  CHECK_INVALID(nvb_graph_create(f->backend, NULL));
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_INVALID(nvb_graph_begin(NULL, f->stream));
  CHECK_FAILS(nvb_graph_begin(foreign_handle(), f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a graph");
  CHECK_FAILS(nvb_graph_begin(graph, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  CHECK_FAILS(nvb_graph_begin(graph, stranger.stream), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_FAILS(nvb_graph_launch(graph, stranger.stream), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_FAILS(nvb_graph_end(graph, stranger.stream), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_INVALID(nvb_graph_launch(none, f->stream));
  nvb_graph_info info;
  nvb_graph_info_init(&info);
  CHECK_STRUCT(info, get_info, graph);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_INVALID(nvb_graph_begin(graph, f->stream));
  close_fixture(&stranger);
}

int main(void) {
  fixture f = open_fixture();
  test_states(&f);
  test_refused(&f);
  test_handles(&f);
  close_fixture(&f);
  return test_result();
}
