// Times of a graph's nodes: all are there, nothing that was in memory changes, and wrong calls are refused.
#include "graph_layer.h"

static int occurrences(const char* text, const char* word) {
  int count = 0;
  for (; (text = strstr(text, word)) != NULL; ++text) ++count;
  return count;
}

// The number behind the first `name` in the text.
static double number_of(const char* text, const char* name) {
  const char* at = strstr(text, name);
  CHECK(at != NULL);
  return at == NULL ? 0 : strtod(at + strlen(name), NULL);
}

static void test_layer(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graph = record(f, &l, f->stream);
  float before[SEQUENCES * WIDTH], after[SEQUENCES * WIDTH];
  download(f, before, l.x, BYTES);
  nvb_graph_profile_options options;
  nvb_graph_profile_options_init(&options);
  options.launches = 3;
  options.stream = f->stream;
  CHECK_OK(nvb_graph_profile(graph, &options));
  // The layer adds to `x`, which was put back.
  download(f, after, l.x, BYTES);
  CHECK(memcmp(before, after, sizeof after) == 0);

  char* text = text_of(graph, NVB_GRAPH_FORMAT_TEXT, nvb_graph_get_profile);
  CHECK(strstr(text, "13 nodes") != NULL && strstr(text, "The sum is no launch") != NULL);
  CHECK(strstr(text, "12 memory_fill") != NULL && strstr(text, "7 linear") != NULL);
  free(text);

  text = text_of(graph, NVB_GRAPH_FORMAT_JSON, nvb_graph_get_profile);
  CHECK_EQUAL(occurrences(text, "\"index\":"), NODES);
  double sum = 0;
  for (const char* at = strstr(text, "\"nodes\":"); (at = strstr(at, "\"seconds\":")) != NULL; ++at) {
    sum += number_of(at, "\"seconds\":");
  }
  const double told = number_of(text, "\"sum_seconds\":");
  CHECK(told > 0 && fabs(sum - told) < 1e-6 * told && number_of(text, "\"launch_seconds\":") > 0);
  free(text);

  text = text_of(graph, NVB_GRAPH_FORMAT_CHROME_TRACE, nvb_graph_get_profile);
  CHECK_EQUAL(occurrences(text, "\"ph\":\"X\""), NODES);
  CHECK(strstr(text, "\"traceEvents\":[") != NULL && strstr(text, "\"name\":\"5 attention_decode\"") != NULL);
  free(text);

  // What is profiled is the list that is launched.
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O2, NULL));
  CHECK_OK(nvb_graph_profile(graph, &options));
  text = text_of(graph, NVB_GRAPH_FORMAT_JSON, nvb_graph_get_profile);
  CHECK_EQUAL(occurrences(text, "\"index\":"), info_of(graph).nodes);
  free(text);
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_handles(&l);
  destroy_memory(f, &l);
}

// A list without nodes, and one that is longer than what is queued at once.
static void test_edges(fixture* f) {
  float* data = ones(f);
  for (int count = 0; count <= 150; count += 75) {
    nvb_graph* graph = NULL;
    CHECK_OK(nvb_graph_create(f->backend, &graph));
    CHECK_OK(nvb_graph_begin(graph, f->stream));
    for (int i = 0; i < count; ++i) CHECK_OK(add(f, data, f->stream));
    CHECK_OK(nvb_graph_end(graph, f->stream));
    CHECK_OK(nvb_graph_profile(graph, NULL));
    check_value(f, data, 1);
    char* text = text_of(graph, NVB_GRAPH_FORMAT_CHROME_TRACE, nvb_graph_get_profile);
    CHECK_EQUAL(occurrences(text, "\"ph\":\"X\""), count);
    free(text);
    CHECK_OK(nvb_graph_destroy(graph));
  }
  release(f, data);
}

static void test_errors(fixture* f) {
  nvb_graph *graph = NULL, *other = NULL;
  float* data = ones(f);
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_create(f->backend, &other));
  CHECK_FAILS(nvb_graph_profile(graph, NULL), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_FAILS(nvb_graph_get_profile(graph, 0, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "was not profiled");
  nvb_graph_profile_options options;
  nvb_graph_profile_options_init(&options);
  options.launches = 1;
  options.stream = f->stream;
  // NULL stands for the defaults, so the checks of structs that must be given do not apply.
  CHECK_OK(nvb_graph_profile(graph, NULL));
  const size_t size = options.struct_size;
  options.struct_size = 1;
  CHECK_FAILS(nvb_graph_profile(graph, &options), NVB_ERROR_ABI_MISMATCH, "struct_size");
  options.struct_size = size;
  CHECK_OK(nvb_graph_profile(graph, &options));
  CHECK_FAILS(nvb_graph_get_profile(graph, 2, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "format is 2");
  CHECK_FAILS(nvb_graph_get_profile(graph, 4, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "format is 4");
  options.launches = 65537;
  CHECK_FAILS(nvb_graph_profile(graph, &options), NVB_ERROR_INVALID_ARGUMENT, "65537");
  options.launches = 1;
  options.reserved = 1;
  CHECK_INVALID(nvb_graph_profile(graph, &options));
  options.reserved = 0;
  options.stream = foreign_handle();
  CHECK_INVALID(nvb_graph_profile(graph, &options));
  // A stream whose calls are recorded runs nothing.
  options.stream = f->stream;
  CHECK_OK(nvb_graph_begin(other, f->stream));
  CHECK_INVALID(nvb_graph_profile(graph, &options));
  CHECK_OK(nvb_graph_end(other, f->stream));
  CHECK_OK(nvb_memory_sleep(f->memory, 1, NULL));
  CHECK_FAILS(nvb_graph_profile(graph, &options), NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_OK(nvb_memory_wake(f->memory, NULL));
  // The earlier profile is still there.
  CHECK_OK(nvb_graph_get_profile(graph, NVB_GRAPH_FORMAT_TEXT, NULL, 0, NULL));
  CHECK_OK(nvb_graph_destroy(other));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_INVALID(nvb_graph_profile(graph, &options));
  CHECK_INVALID(nvb_graph_get_profile(graph, 0, NULL, 0, NULL));
  release(f, data);
}

int main(void) {
  fixture f = open_fixture();
  test_layer(&f);
  test_edges(&f);
  test_errors(&f);
  close_fixture(&f);
  return test_result();
}
