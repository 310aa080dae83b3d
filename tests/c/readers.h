// Every call that reads a weight or a KV cache, each as a small case: what the tests of lifetimes, of sleep and of
// processes call. The tensors lie in a manager of their own, and what several threads write to one output is nobody's
// concern.
#ifndef NVBACKEND_TESTS_READERS_H
#define NVBACKEND_TESTS_READERS_H

#include "check.h"

// Prefill reads the whole cache, which is large enough to be given back by itself while a call that lets go of it
// computes.
enum { WIDTH = 64, TOKENS = 64, HEADS = 2, HEAD_DIM = WIDTH / HEADS, CAPACITY = 4096 };

typedef struct {
  fixture* f;
  nvb_memory_manager* tensors;
  void *input, *output, *integers, *offsets;
  nvb_weight* weight;
  nvb_kv_cache* cache;
  nvb_attention* attention;
} readers;

// On the heap: some threads that call this have small stacks.
static inline float* reader_values(uint32_t state) {
  float* values = malloc(WIDTH * WIDTH * sizeof *values);
  CHECK(values != NULL);
  for (int i = 0; i < WIDTH * WIDTH; ++i) values[i] = next_number(&state);
  return values;
}

static inline void create_weight(readers* r, nvb_stream* stream, uint32_t format, nvb_weight** weight) {
  float* values = reader_values(3);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.format = format;
  CHECK_OK(nvb_weight_create(r->f->backend, &desc, stream, weight));
  free(values);
}

static inline void create_cache(readers* r, nvb_kv_cache** cache) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = options.sequences = 1;
  options.kv_heads = HEADS;
  options.head_dim = HEAD_DIM;
  options.capacity = CAPACITY;
  CHECK_OK(nvb_kv_cache_create(r->f->backend, &options, cache));
}

static inline void create_weight_and_cache(readers* r, nvb_stream* stream) {
  create_weight(r, stream, NVB_WEIGHT_FORMAT_AS_IS, &r->weight);
  create_cache(r, &r->cache);
}

static inline void create_attention(readers* r, nvb_attention** attention) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = options.kv_heads = HEADS;
  options.head_dim = HEAD_DIM;
  CHECK_OK(nvb_attention_create(r->f->backend, &options, attention));
}

static inline void* reader_block(readers* r, const void* data, size_t bytes) {
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(r->tensors, bytes, r->f->stream, &block));
  CHECK_OK(nvb_memory_copy(r->tensors, block, data, bytes, NVB_COPY_HOST_TO_DEVICE, r->f->stream));
  CHECK_OK(nvb_stream_synchronize(r->f->stream));
  return block;
}

// With tensors and an attention; the weight and the cache are the test's to create.
static inline readers open_readers(fixture* f) {
  readers r = {.f = f};
  CHECK_OK(nvb_memory_manager_create(f->backend, NULL, &r.tensors));
  float* values = reader_values(9);
  int32_t integers[TOKENS];
  for (int i = 0; i < TOKENS; ++i) integers[i] = i;
  const int32_t offsets[2] = {0, TOKENS};
  r.input = reader_block(&r, values, TOKENS * WIDTH * sizeof(float));
  r.output = reader_block(&r, values, WIDTH * WIDTH * sizeof(float));
  r.integers = reader_block(&r, integers, sizeof integers);
  r.offsets = reader_block(&r, offsets, sizeof offsets);
  free(values);
  create_attention(&r, &r.attention);
  return r;
}

static inline void close_readers(readers* r) {
  CHECK_OK(nvb_memory_free(r->tensors, r->input, r->f->stream));
  CHECK_OK(nvb_memory_free(r->tensors, r->output, r->f->stream));
  CHECK_OK(nvb_memory_free(r->tensors, r->integers, r->f->stream));
  CHECK_OK(nvb_memory_free(r->tensors, r->offsets, r->f->stream));
  CHECK_OK(nvb_memory_manager_destroy(r->tensors));
}

static inline nvb_tensor reader_rows(void* data) {
  return nvb_tensor_2d(data, NVB_DTYPE_F32, TOKENS, WIDTH);
}

static inline nvb_tensor reader_heads(void* data) {
  return nvb_tensor_3d(data, NVB_DTYPE_F32, TOKENS, HEADS, HEAD_DIM);
}

static inline nvb_status read_by_linear(const readers* r, nvb_stream* stream) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = reader_rows(r->input);
  args.output = reader_rows(r->output);
  args.weight = r->weight;
  return nvb_linear(r->f->backend, &args, stream);
}

static inline nvb_status read_by_grouped_linear(const readers* r, nvb_stream* stream) {
  nvb_grouped_linear_args args;
  nvb_grouped_linear_args_init(&args);
  args.input = reader_rows(r->input);
  args.expert_offsets = nvb_tensor_1d(r->offsets, NVB_DTYPE_I32, 2);
  args.output = reader_rows(r->output);
  args.weight = r->weight;
  return nvb_grouped_linear(r->f->backend, &args, stream);
}

static inline nvb_status read_by_embedding(const readers* r, nvb_stream* stream) {
  nvb_embedding_args args;
  nvb_embedding_args_init(&args);
  args.tokens = nvb_tensor_1d(r->integers, NVB_DTYPE_I32, TOKENS);
  args.output = reader_rows(r->output);
  args.table = r->weight;
  return nvb_embedding(r->f->backend, &args, stream);
}

static inline nvb_status read_by_dequantize(const readers* r, nvb_stream* stream) {
  nvb_tensor output = nvb_tensor_2d(r->output, NVB_DTYPE_F32, WIDTH, WIDTH);
  return nvb_weight_dequantize(r->weight, &output, stream);
}

static inline nvb_status write_by_append(const readers* r, nvb_stream* stream) {
  nvb_kv_cache_append_args args;
  nvb_kv_cache_append_args_init(&args);
  args.key = args.value = reader_heads(r->input);
  args.positions = nvb_tensor_1d(r->integers, NVB_DTYPE_I32, TOKENS);
  args.cache = r->cache;
  return nvb_kv_cache_append(r->f->backend, &args, stream);
}

static inline nvb_status write_by_rope(const readers* r, nvb_stream* stream) {
  nvb_rope_args args;
  nvb_rope_args_init(&args);
  args.query = args.key = args.value = reader_heads(r->input);
  args.query_output = reader_heads(r->output);
  args.positions = nvb_tensor_1d(r->integers, NVB_DTYPE_I32, TOKENS);
  args.cache = r->cache;
  return nvb_rope(r->f->backend, &args, stream);
}

static inline nvb_status read_by_prefill(const readers* r, nvb_stream* stream) {
  const int32_t starts[2] = {0, TOKENS}, lengths[1] = {CAPACITY};
  nvb_attention_prefill_args args;
  nvb_attention_prefill_args_init(&args);
  args.query = reader_heads(r->input);
  args.output = reader_heads(r->output);
  args.query_starts = starts;
  args.sequence_count = 1;
  args.kv_lengths = lengths;
  args.cache = r->cache;
  return nvb_attention_prefill(r->attention, &args, stream);
}

static inline nvb_status read_by_decode(const readers* r, nvb_stream* stream) {
  nvb_attention_decode_args args;
  nvb_attention_decode_args_init(&args);
  args.query = nvb_tensor_3d(r->input, NVB_DTYPE_F32, 1, HEADS, HEAD_DIM);
  args.output = nvb_tensor_3d(r->output, NVB_DTYPE_F32, 1, HEADS, HEAD_DIM);
  args.positions = nvb_tensor_1d(r->integers, NVB_DTYPE_I32, 1);
  args.cache = r->cache;
  return nvb_attention_decode(r->attention, &args, stream);
}

static const struct {
  const char* name;
  nvb_status (*call)(const readers* r, nvb_stream* stream);
} all_readers[] = {
    {"nvb_linear", read_by_linear},
    {"nvb_grouped_linear", read_by_grouped_linear},
    {"nvb_embedding", read_by_embedding},
    {"nvb_weight_dequantize", read_by_dequantize},
    {"nvb_kv_cache_append", write_by_append},
    {"nvb_rope", write_by_rope},
    {"nvb_attention_prefill", read_by_prefill},
    {"nvb_attention_decode", read_by_decode},
};
enum { READERS = sizeof all_readers / sizeof *all_readers };

#endif  // NVBACKEND_TESTS_READERS_H
