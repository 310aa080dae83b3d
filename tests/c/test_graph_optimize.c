// Optimised graphs: levels, switches, marks and what is measured.
#include "graph_layer.h"

static nvb_status get_pass(void* info, void* index) {
  return nvb_graph_pass_get(*(uint32_t*)index, info);
}

// Levels, switches and marks reach the passes, and each optimisation begins with what was recorded.
static void test_optimize(fixture* f) {
  uint32_t passes = 0, index = 0;
  CHECK_OK(nvb_graph_pass_count(&passes));
  CHECK(passes > 0);
  nvb_graph_pass_info pass;
  nvb_graph_pass_info_init(&pass);
  CHECK_STRUCT(pass, get_pass, &index);
  CHECK_INVALID(nvb_graph_pass_get(passes, &pass));

  float* data = ones(f);
  float* other = ones(f);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_FAILS(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, NULL), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, other, 1, BYTES, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, other, 2, BYTES, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_FAILS(nvb_graph_get_report(graph, NVB_GRAPH_FORMAT_TEXT, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT,
              "not optimised");

  nvb_graph_optimize_options options;
  nvb_graph_optimize_options_init(&options);
  CHECK_OK(nvb_graph_optimize(graph, 17, &options));
  CHECK_EQUAL(info_of(graph).nodes, 2);
  options.unknown_level_is_error = 1;
  CHECK_FAILS(nvb_graph_optimize(graph, 17, &options), NVB_ERROR_INVALID_ARGUMENT, "level is 17");
  options.disabled_passes = "dead_work, scale";
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, &options));
  CHECK_EQUAL(info_of(graph).nodes, 3);
  options.disabled_passes = "dead";
  CHECK_FAILS(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, &options), NVB_ERROR_INVALID_ARGUMENT, "`dead` is no pass");
  options.disabled_passes = NULL;
  options.maximum_error = -1;
  CHECK_INVALID(nvb_graph_optimize(graph, NVB_OPTIMIZE_O3, &options));
  options.maximum_error = 0;
  options.measure_times = options.measure_errors = 1;
  options.launches = 2;
  options.stream = f->stream;
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O2, &options));
  // What was measured is put back.
  check_value(f, data, 1);
  char* text = text_of(graph, NVB_GRAPH_FORMAT_TEXT, nvb_graph_get_report);
  CHECK(strstr(text, "dead_work: 0 memory_fill -> nothing (exact)") != NULL && strstr(text, "medians of 2") != NULL);
  free(text);
  text = text_of(graph, NVB_GRAPH_FORMAT_JSON, nvb_graph_get_report);
  CHECK(strstr(text, "\"different\":0") != NULL);
  free(text);
  CHECK_INVALID(nvb_graph_get_report(graph, NVB_GRAPH_FORMAT_GRAPHVIZ, NULL, 0, NULL));

  nvb_tensor tensor = rows(other, WIDTH);
  CHECK_INVALID(nvb_graph_mark_internal(graph, NULL));
  CHECK_OK(nvb_graph_mark_internal(graph, &tensor));
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, NULL));
  CHECK_EQUAL(info_of(graph).nodes, 1);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  check_value(f, data, 2);
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O0, NULL));
  CHECK_EQUAL(info_of(graph).nodes, 3);

  // The sum goes to other memory.
  float* third = ones(f);
  CHECK_OK(nvb_graph_rebind(graph, data, BYTES, third));
  CHECK_FAILS(nvb_graph_rebind(graph, data, BYTES, third), NVB_ERROR_INVALID_ARGUMENT, "no node names");
  CHECK_INVALID(nvb_graph_rebind(graph, third, BYTES, NULL));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  check_value(f, data, 2);
  check_value(f, third, 2);
  CHECK_OK(nvb_graph_destroy(graph));
  release(f, data);
  release(f, other);
  release(f, third);
}

int main(void) {
  fixture f = open_fixture();
  test_optimize(&f);
  close_fixture(&f);
  return test_result();
}
