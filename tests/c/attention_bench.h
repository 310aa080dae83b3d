// What the programs that test attention share: two heads over the keys of twelve tokens, and the formula.
#ifndef NVBACKEND_TESTS_ATTENTION_BENCH_H
#define NVBACKEND_TESTS_ATTENTION_BENCH_H

#include "check.h"

enum { HEADS = 2, KV_HEADS = 1, DIM = 8, LENGTH = 12, SEQUENCES = 2, CAPACITY = 16, ROW = HEADS * DIM };

typedef struct {
  fixture* f;
  nvb_attention* attention;
  nvb_kv_cache* cache;
  float query[LENGTH * ROW], key[LENGTH * DIM], value[LENGTH * DIM];
  void *query_block, *output_block, *lse_block, *key_block, *value_block, *position_block, *sequence_block;
} bench;

static inline nvb_attention_options two_heads(void) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  return options;
}

static inline nvb_status create(void* value, void* context) {
  nvb_attention* attention = NULL;
  nvb_status status = nvb_attention_create(((bench*)context)->f->backend, value, &attention);
  CHECK((status == NVB_OK) == (attention != NULL));
  CHECK_OK(nvb_attention_destroy(attention));
  return status;
}

// The keys and values of twelve tokens, in sequence 1 of the cache's layer 1.
static inline bench set_up(fixture* f) {
  bench b = {.f = f};
  uint32_t state = 5;
  for (int i = 0; i < LENGTH * ROW; ++i) b.query[i] = next_number(&state);
  for (int i = 0; i < LENGTH * DIM; ++i) b.key[i] = next_number(&state);
  for (int i = 0; i < LENGTH * DIM; ++i) b.value[i] = next_number(&state);
  int32_t positions[LENGTH], sequences[LENGTH];
  for (int i = 0; i < LENGTH; ++i) {
    positions[i] = i;
    sequences[i] = 1;
  }
  b.query_block = upload(f, b.query, sizeof b.query);
  b.output_block = upload(f, b.query, sizeof b.query);
  b.lse_block = upload(f, b.query, LENGTH * HEADS * sizeof(float));
  b.key_block = upload(f, b.key, sizeof b.key);
  b.value_block = upload(f, b.value, sizeof b.value);
  b.position_block = upload(f, positions, sizeof positions);
  b.sequence_block = upload(f, sequences, sizeof sequences);
  nvb_attention_options options = two_heads();
  CHECK_OK(nvb_attention_create(f->backend, &options, &b.attention));
  nvb_kv_cache_options cache;
  nvb_kv_cache_options_init(&cache);
  cache.layers = 2;
  cache.sequences = SEQUENCES;
  cache.kv_heads = KV_HEADS;
  cache.head_dim = DIM;
  cache.capacity = CAPACITY;
  cache.dtype = NVB_DTYPE_F32;
  CHECK_OK(nvb_kv_cache_create(f->backend, &cache, &b.cache));
  nvb_kv_cache_append_args append;
  nvb_kv_cache_append_args_init(&append);
  append.key = nvb_tensor_3d(b.key_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  append.value = nvb_tensor_3d(b.value_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  append.positions = nvb_tensor_1d(b.position_block, NVB_DTYPE_I32, LENGTH);
  append.sequences = nvb_tensor_1d(b.sequence_block, NVB_DTYPE_I32, LENGTH);
  append.cache = b.cache;
  append.layer = 1;
  CHECK_OK(nvb_kv_cache_append(f->backend, &append, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  return b;
}

static inline void tear_down(bench* b) {
  void* blocks[] = {b->query_block, b->output_block,   b->lse_block,     b->key_block,
                    b->value_block, b->position_block, b->sequence_block};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) release(b->f, blocks[i]);
  CHECK_OK(nvb_attention_destroy(b->attention));
  CHECK_OK(nvb_kv_cache_destroy(b->cache));
}

// Query row `row` at `position` sees the keys 0 … position.
static inline void check_row(const bench* b, const float* output, const float* lse, int row, int position) {
  for (int head = 0; head < HEADS; ++head) {
    double scores[LENGTH], sum = 0, expected[DIM] = {0};
    for (int key = 0; key <= position; ++key) {
      double score = 0;
      for (int i = 0; i < DIM; ++i) score += b->query[row * ROW + head * DIM + i] * b->key[key * DIM + i];
      scores[key] = exp(score / sqrt(DIM));
      sum += scores[key];
    }
    for (int key = 0; key <= position; ++key) {
      for (int i = 0; i < DIM; ++i) expected[i] += scores[key] / sum * b->value[key * DIM + i];
    }
    for (int i = 0; i < DIM; ++i) CHECK_NEAR(output[head * DIM + i], expected[i], 1e-5);
    if (lse != NULL) CHECK_NEAR(lse[head], log(sum), 1e-5);
  }
}

static const int32_t whole[2] = {0, LENGTH};
static const int32_t last_sequence[1] = {1}, whole_length[1] = {LENGTH};

static inline nvb_attention_prefill_args prefill_args(const bench* b) {
  nvb_attention_prefill_args args;
  nvb_attention_prefill_args_init(&args);
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_F32, LENGTH, HEADS, DIM);
  args.output = nvb_tensor_3d(b->output_block, NVB_DTYPE_F32, LENGTH, HEADS, DIM);
  args.lse = nvb_tensor_2d(b->lse_block, NVB_DTYPE_F32, LENGTH, HEADS);
  args.query_starts = whole;
  args.sequence_count = 1;
  args.cache = b->cache;
  args.sequences = last_sequence;
  args.kv_lengths = whole_length;
  args.layer = 1;
  return args;
}

static inline nvb_attention_decode_args decode_args(const bench* b) {
  nvb_attention_decode_args args;
  nvb_attention_decode_args_init(&args);
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_F32, 3, HEADS, DIM);
  args.output = nvb_tensor_3d(b->output_block, NVB_DTYPE_F32, 3, HEADS, DIM);
  args.lse = nvb_tensor_2d(b->lse_block, NVB_DTYPE_F32, 3, HEADS);
  args.cache = b->cache;
  args.positions = nvb_tensor_1d(b->position_block, NVB_DTYPE_I32, 3);
  args.sequences = nvb_tensor_1d(b->sequence_block, NVB_DTYPE_I32, 3);
  args.layer = 1;
  return args;
}

static inline void check_outputs(const bench* b, int rows) {
  float output[LENGTH * ROW], lse[LENGTH * HEADS];
  download(b->f, output, b->output_block, sizeof output);
  download(b->f, lse, b->lse_block, sizeof lse);
  for (int row = 0; row < rows; ++row) check_row(b, output + row * ROW, lse + row * HEADS, row, row);
}

static inline nvb_status prefill(void* value, void* context) {
  return nvb_attention_prefill(((bench*)context)->attention, value, ((bench*)context)->f->stream);
}

static inline nvb_status decode(void* value, void* context) {
  return nvb_attention_decode(((bench*)context)->attention, value, ((bench*)context)->f->stream);
}

#endif  // NVBACKEND_TESTS_ATTENTION_BENCH_H
