// Graphs: what is recorded gives what the calls give, whoever still holds handles; and what is refused.
#include <pthread.h>

#include "check.h"

enum {
  SEQUENCES = 2,
  WIDTH = 64,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD_DIM = 16,
  KV_WIDTH = KV_HEADS * HEAD_DIM,
  HIDDEN = 128,
  CAPACITY = 32,
  STEPS = 3,
  NODES = 13,
  BYTES = SEQUENCES * WIDTH * 4,
};

// One layer of a transformer with all that it works on.
typedef struct layer {
  nvb_weight *query, *key, *value, *output, *gate, *up, *down;
  nvb_kv_cache* cache;
  nvb_attention* attention;
  // Activations, one behind the other in one block.
  float *x, *normed, *q, *k, *v, *attended, *y, *gated, *upped, *activated, *copied, *norm;
  int32_t *positions, *sequences;
} layer;

static nvb_weight* weight(fixture* f, int64_t rows, int64_t columns, uint32_t seed) {
  static _Thread_local float values[HIDDEN * WIDTH];
  for (int64_t i = 0; i < rows * columns; ++i) values[i] = next_number(&seed) / 8;
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, rows, columns);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* made = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &made));
  return made;
}

static layer create_layer(fixture* f) {
  layer l = {
      .query = weight(f, WIDTH, WIDTH, 1),
      .key = weight(f, KV_WIDTH, WIDTH, 2),
      .value = weight(f, KV_WIDTH, WIDTH, 3),
      .output = weight(f, WIDTH, WIDTH, 4),
      .gate = weight(f, HIDDEN, WIDTH, 5),
      .up = weight(f, HIDDEN, WIDTH, 6),
      .down = weight(f, WIDTH, HIDDEN, 7),
  };
  nvb_kv_cache_options cache;
  nvb_kv_cache_options_init(&cache);
  cache.layers = 1;
  cache.sequences = SEQUENCES;
  cache.kv_heads = KV_HEADS;
  cache.head_dim = HEAD_DIM;
  cache.capacity = CAPACITY;
  cache.dtype = NVB_DTYPE_F32;
  CHECK_OK(nvb_kv_cache_create(f->backend, &cache, &l.cache));
  nvb_attention_options attention;
  nvb_attention_options_init(&attention);
  attention.query_heads = HEADS;
  attention.kv_heads = KV_HEADS;
  attention.head_dim = HEAD_DIM;
  CHECK_OK(nvb_attention_create(f->backend, &attention, &l.attention));

  static float host[SEQUENCES * (6 * WIDTH + 2 * KV_WIDTH + 3 * HIDDEN) + WIDTH];
  uint32_t state = 11;
  for (size_t i = 0; i < sizeof host / sizeof *host; ++i) host[i] = next_number(&state);
  float* at = upload(f, host, sizeof host);
  float** const places[] = {&l.x, &l.normed, &l.q,     &l.k,         &l.v,      &l.attended,
                            &l.y, &l.gated,  &l.upped, &l.activated, &l.copied, &l.norm};
  const int widths[] = {WIDTH, WIDTH, WIDTH, KV_WIDTH, KV_WIDTH, WIDTH, WIDTH, HIDDEN, HIDDEN, HIDDEN, WIDTH};
  for (size_t i = 0; i < sizeof places / sizeof *places; ++i) {
    *places[i] = at;
    if (i < sizeof widths / sizeof *widths) at += SEQUENCES * widths[i];
  }
  const int32_t numbers[2 * SEQUENCES] = {0, 0, 0, 1};
  l.positions = upload(f, numbers, sizeof numbers);
  l.sequences = l.positions + SEQUENCES;
  return l;
}

static void destroy_handles(layer* l) {
  nvb_weight* const weights[] = {l->query, l->key, l->value, l->output, l->gate, l->up, l->down};
  for (size_t i = 0; i < sizeof weights / sizeof *weights; ++i) CHECK_OK(nvb_weight_destroy(weights[i]));
  CHECK_OK(nvb_kv_cache_destroy(l->cache));
  CHECK_OK(nvb_attention_destroy(l->attention));
}

static void destroy_memory(fixture* f, layer* l) {
  release(f, l->x);
  release(f, l->positions);
}

static nvb_tensor rows(void* data, int64_t width) {
  return nvb_tensor_2d(data, NVB_DTYPE_F32, SEQUENCES, width);
}

static nvb_tensor heads(void* data, int64_t count) {
  nvb_tensor tensor = {.data = data, .dtype = NVB_DTYPE_F32, .rank = 3, .shape = {SEQUENCES, count, HEAD_DIM}};
  return tensor;
}

static nvb_tensor numbers(void* data) {
  nvb_tensor tensor = {.data = data, .dtype = NVB_DTYPE_I32, .rank = 1, .shape = {SEQUENCES}};
  return tensor;
}

static void product(fixture* f, nvb_weight* weight, nvb_tensor input, nvb_tensor output, float* residual,
                    nvb_stream* stream) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = input;
  args.weight = weight;
  args.output = output;
  if (residual != NULL) args.residual = rows(residual, output.shape[1]);
  CHECK_OK(nvb_linear(f->backend, &args, stream));
}

// The calls of a decode step: NODES of them.
static void step(fixture* f, const layer* l, nvb_stream* stream) {
  nvb_rms_norm_args norm;
  nvb_rms_norm_args_init(&norm);
  norm.input = rows(l->x, WIDTH);
  norm.weight = nvb_tensor_1d(l->norm, NVB_DTYPE_F32, WIDTH);
  norm.output = rows(l->normed, WIDTH);
  CHECK_OK(nvb_rms_norm(f->backend, &norm, stream));
  product(f, l->query, rows(l->normed, WIDTH), rows(l->q, WIDTH), NULL, stream);
  product(f, l->key, rows(l->normed, WIDTH), rows(l->k, KV_WIDTH), NULL, stream);
  product(f, l->value, rows(l->normed, WIDTH), rows(l->v, KV_WIDTH), NULL, stream);

  nvb_rope_args rope;
  nvb_rope_args_init(&rope);
  rope.query = rope.query_output = heads(l->q, HEADS);
  rope.key = heads(l->k, KV_HEADS);
  rope.value = heads(l->v, KV_HEADS);
  rope.positions = numbers(l->positions);
  rope.sequences = numbers(l->sequences);
  rope.cache = l->cache;
  CHECK_OK(nvb_rope(f->backend, &rope, stream));
  nvb_attention_decode_args decode;
  nvb_attention_decode_args_init(&decode);
  decode.query = heads(l->q, HEADS);
  decode.output = heads(l->attended, HEADS);
  decode.cache = l->cache;
  decode.positions = numbers(l->positions);
  CHECK_OK(nvb_attention_decode(l->attention, &decode, stream));
  product(f, l->output, rows(l->attended, WIDTH), rows(l->y, WIDTH), l->x, stream);

  product(f, l->gate, rows(l->y, WIDTH), rows(l->gated, HIDDEN), NULL, stream);
  product(f, l->up, rows(l->y, WIDTH), rows(l->upped, HIDDEN), NULL, stream);
  nvb_gated_activation_args activation;
  nvb_gated_activation_args_init(&activation);
  activation.gate = rows(l->gated, HIDDEN);
  activation.up = rows(l->upped, HIDDEN);
  activation.output = rows(l->activated, HIDDEN);
  activation.activation = NVB_ACTIVATION_SILU;
  CHECK_OK(nvb_gated_activation(f->backend, &activation, stream));
  product(f, l->down, rows(l->activated, HIDDEN), rows(l->x, WIDTH), l->y, stream);
  CHECK_OK(nvb_memory_copy(f->memory, l->copied, l->x, BYTES, NVB_COPY_DEVICE_TO_DEVICE, stream));
  CHECK_OK(nvb_memory_fill(f->memory, l->copied, 7, 4, stream));
}

static void set_position(fixture* f, const layer* l, int32_t position, nvb_stream* stream) {
  const int32_t positions[SEQUENCES] = {position, position};
  CHECK_OK(nvb_memory_copy(f->memory, l->positions, positions, sizeof positions, NVB_COPY_HOST_TO_DEVICE, stream));
  CHECK_OK(nvb_stream_synchronize(stream));
}

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

static nvb_graph* record(fixture* f, const layer* l, nvb_stream* stream) {
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, stream));
  step(f, l, stream);
  CHECK_OK(nvb_graph_end(graph, stream));
  return graph;
}

static nvb_graph_info info_of(nvb_graph* graph) {
  nvb_graph_info info;
  nvb_graph_info_init(&info);
  CHECK_OK(nvb_graph_get_info(graph, &info));
  return info;
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

static nvb_status add(fixture* f, void* data, nvb_stream* stream) {
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.second = args.output = rows(data, WIDTH);
  return nvb_add(f->backend, &args, stream);
}

static float* ones(fixture* f) {
  float values[SEQUENCES * WIDTH];
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) values[i] = 1;
  return upload(f, values, sizeof values);
}

static void check_value(fixture* f, const float* data, float expected) {
  float values[SEQUENCES * WIDTH];
  download(f, values, data, sizeof values);
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) CHECK_EQUAL(values[i], expected);
}

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

static char* described(nvb_graph* graph, uint32_t format) {
  size_t needed = 0;
  CHECK_OK(nvb_graph_describe(graph, format, NULL, 0, &needed));
  char* text = malloc(needed);
  if (text == NULL) abort();
  CHECK_OK(nvb_graph_describe(graph, format, text, needed, NULL));
  CHECK_EQUAL(strlen(text) + 1, needed);
  return text;
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
    char* text = described(graph, format);
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

static char* report_of(nvb_graph* graph, uint32_t format) {
  size_t needed = 0;
  CHECK_OK(nvb_graph_get_report(graph, format, NULL, 0, &needed));
  char* text = malloc(needed);
  if (text == NULL) abort();
  CHECK_OK(nvb_graph_get_report(graph, format, text, needed, NULL));
  CHECK_EQUAL(strlen(text) + 1, needed);
  return text;
}

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
  char* text = report_of(graph, NVB_GRAPH_FORMAT_TEXT);
  CHECK(strstr(text, "dead_work: 0 memory_fill -> nothing (exact)") != NULL && strstr(text, "medians of 2") != NULL);
  free(text);
  text = report_of(graph, NVB_GRAPH_FORMAT_JSON);
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

// A node that fails leaves the backend, the graph and the stream usable.
static void test_failing_node(fixture* f) {
  if (!test_on_cpu()) return;  // A GPU gives rows of zeros for a token outside the table.
  nvb_weight* table = weight(f, 8, WIDTH, 1);
  int32_t tokens[SEQUENCES] = {1, 8};
  int32_t* ids = upload(f, tokens, sizeof tokens);
  float* data = ones(f);
  nvb_embedding_args args;
  nvb_embedding_args_init(&args);
  args.tokens = numbers(ids);
  args.table = table;
  args.output = rows(data, WIDTH);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_embedding(f->backend, &args, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_FAILS(nvb_graph_launch(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "node 1, embedding", "8");
  tokens[1] = 7;
  CHECK_OK(nvb_memory_copy(f->memory, ids, tokens, sizeof tokens, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_weight_destroy(table));
  release(f, ids);
  release(f, data);
}

typedef struct thread_of_graph {
  fixture f;
  int number;
} thread_of_graph;

static void* run_thread(void* argument) {
  thread_of_graph* thread = argument;
  fixture* f = &thread->f;
  check_thread = thread->number;
  float* data = ones(f);
  for (int round = 0; round < 20; ++round) {
    nvb_graph* graph = NULL;
    CHECK_OK(nvb_memory_fill(f->memory, data, 0, BYTES, f->stream));
    CHECK_OK(nvb_graph_create(f->backend, &graph));
    CHECK_OK(nvb_graph_begin(graph, f->stream));
    CHECK_OK(nvb_memory_fill(f->memory, data, (uint32_t)thread->number, BYTES, f->stream));
    CHECK_OK(nvb_graph_end(graph, f->stream));
    for (int i = 0; i < 5; ++i) CHECK_OK(nvb_graph_launch(graph, f->stream));
    CHECK_OK(nvb_graph_destroy(graph));
    unsigned char values[BYTES];
    download(f, values, data, sizeof values);
    for (int i = 0; i < BYTES; ++i) CHECK_EQUAL(values[i], thread->number);
  }
  release(f, data);
  return NULL;
}

// Two threads record and launch graphs of their own on streams of one backend.
static void test_threads(fixture* f) {
  thread_of_graph threads[2];
  pthread_t running[2];
  for (int i = 0; i < 2; ++i) {
    threads[i] = (thread_of_graph){.f = *f, .number = i + 1};
    CHECK_OK(nvb_stream_create(f->backend, 0, &threads[i].f.stream));
    CHECK(pthread_create(&running[i], NULL, run_thread, &threads[i]) == 0);
  }
  for (int i = 0; i < 2; ++i) {
    pthread_join(running[i], NULL);
    CHECK_OK(nvb_stream_destroy(threads[i].f.stream));
  }
}

// Graphs that come and go, and launches, leave nothing behind.
static void test_growth(fixture* f) {
  float* data = ones(f);
  long before = 0;
  for (int round = 0; round < 2000; ++round) {
    if (round == 200) before = resident_kilobytes();
    nvb_graph* graph = NULL;
    CHECK_OK(nvb_graph_create(f->backend, &graph));
    CHECK_OK(nvb_graph_begin(graph, f->stream));
    CHECK_OK(add(f, data, f->stream));
    if (round % 2 == 0) CHECK_OK(nvb_graph_end(graph, f->stream));
    if (round % 4 == 0) CHECK_OK(nvb_graph_launch(graph, f->stream));
    CHECK_OK(nvb_graph_destroy(graph));
  }
  CHECK_GROWTH(before);
  release(f, data);
}

int main(void) {
  fixture f = open_fixture();
  test_layer(&f);
  test_order_of_ends();
  test_states(&f);
  test_refused(&f);
  test_host_copies(&f);
  test_sleep(&f);
  test_descriptions(&f);
  test_handles(&f);
  test_optimize(&f);
  test_failing_node(&f);
  test_threads(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
