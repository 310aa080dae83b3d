// One layer of a transformer whose decode step a graph records, and small operations beside it, for the programs that
// test graphs.
#ifndef NVBACKEND_TESTS_GRAPH_LAYER_H
#define NVBACKEND_TESTS_GRAPH_LAYER_H

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

static inline nvb_weight* weight(fixture* f, int64_t rows, int64_t columns, uint32_t seed) {
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

static inline layer create_layer(fixture* f) {
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

static inline void destroy_handles(layer* l) {
  nvb_weight* const weights[] = {l->query, l->key, l->value, l->output, l->gate, l->up, l->down};
  for (size_t i = 0; i < sizeof weights / sizeof *weights; ++i) CHECK_OK(nvb_weight_destroy(weights[i]));
  CHECK_OK(nvb_kv_cache_destroy(l->cache));
  CHECK_OK(nvb_attention_destroy(l->attention));
}

static inline void destroy_memory(fixture* f, layer* l) {
  release(f, l->x);
  release(f, l->positions);
}

static inline nvb_tensor rows(void* data, int64_t width) {
  return nvb_tensor_2d(data, NVB_DTYPE_F32, SEQUENCES, width);
}

static inline nvb_tensor heads(void* data, int64_t count) {
  nvb_tensor tensor = {.data = data, .dtype = NVB_DTYPE_F32, .rank = 3, .shape = {SEQUENCES, count, HEAD_DIM}};
  return tensor;
}

static inline nvb_tensor numbers(void* data) {
  nvb_tensor tensor = {.data = data, .dtype = NVB_DTYPE_I32, .rank = 1, .shape = {SEQUENCES}};
  return tensor;
}

static inline void product(fixture* f, nvb_weight* weight, nvb_tensor input, nvb_tensor output, float* residual,
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
static inline void step(fixture* f, const layer* l, nvb_stream* stream) {
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

static inline void set_position(fixture* f, const layer* l, int32_t position, nvb_stream* stream) {
  const int32_t positions[SEQUENCES] = {position, position};
  CHECK_OK(nvb_memory_copy(f->memory, l->positions, positions, sizeof positions, NVB_COPY_HOST_TO_DEVICE, stream));
  CHECK_OK(nvb_stream_synchronize(stream));
}

static inline nvb_graph* record(fixture* f, const layer* l, nvb_stream* stream) {
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, stream));
  step(f, l, stream);
  CHECK_OK(nvb_graph_end(graph, stream));
  return graph;
}

static inline nvb_graph_info info_of(nvb_graph* graph) {
  nvb_graph_info info;
  nvb_graph_info_init(&info);
  CHECK_OK(nvb_graph_get_info(graph, &info));
  return info;
}

static inline nvb_status add(fixture* f, void* data, nvb_stream* stream) {
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.second = args.output = rows(data, WIDTH);
  return nvb_add(f->backend, &args, stream);
}

static inline float* ones(fixture* f) {
  float values[SEQUENCES * WIDTH];
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) values[i] = 1;
  return upload(f, values, sizeof values);
}

static inline void check_value(fixture* f, const float* data, float expected) {
  float values[SEQUENCES * WIDTH];
  download(f, values, data, sizeof values);
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) CHECK_EQUAL(values[i], expected);
}

// What `give` writes of the graph in `format`; the caller frees it.
static inline char* text_of(nvb_graph* graph, uint32_t format,
                            nvb_status (*give)(const nvb_graph*, uint32_t, char*, size_t, size_t*)) {
  size_t needed = 0;
  CHECK_OK(give(graph, format, NULL, 0, &needed));
  char* text = malloc(needed);
  if (text == NULL) abort();
  CHECK_OK(give(graph, format, text, needed, NULL));
  CHECK_EQUAL(strlen(text) + 1, needed);
  return text;
}

#endif  // NVBACKEND_TESTS_GRAPH_LAYER_H
