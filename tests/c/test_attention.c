// Attention: prefill and decode against the formula, and what is refused.
#include "check.h"

enum { HEADS = 2, KV_HEADS = 1, DIM = 8, LENGTH = 12, SEQUENCES = 2, CAPACITY = 16, ROW = HEADS * DIM };

typedef struct {
  fixture* f;
  nvb_attention* attention;
  nvb_kv_cache* cache;
  float query[LENGTH * ROW], key[LENGTH * DIM], value[LENGTH * DIM];
  void *query_block, *output_block, *lse_block, *key_block, *value_block, *position_block, *sequence_block;
} bench;

static nvb_attention_options two_heads(void) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  return options;
}

static nvb_status create(void* value, void* context) {
  nvb_attention* attention = NULL;
  nvb_status status = nvb_attention_create(((bench*)context)->f->backend, value, &attention);
  CHECK((status == NVB_OK) == (attention != NULL));
  CHECK_OK(nvb_attention_destroy(attention));
  return status;
}

// The keys and values of twelve tokens, in sequence 1 of the cache's layer 1.
static bench set_up(fixture* f) {
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

static void tear_down(bench* b) {
  void* blocks[] = {b->query_block, b->output_block,   b->lse_block,     b->key_block,
                    b->value_block, b->position_block, b->sequence_block};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) release(b->f, blocks[i]);
  CHECK_OK(nvb_attention_destroy(b->attention));
  CHECK_OK(nvb_kv_cache_destroy(b->cache));
}

// Query row `row` at `position` sees the keys 0 … position.
static void check_row(const bench* b, const float* output, const float* lse, int row, int position) {
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

static nvb_attention_prefill_args prefill_args(const bench* b) {
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

static nvb_attention_decode_args decode_args(const bench* b) {
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

static void check_outputs(const bench* b, int rows) {
  float output[LENGTH * ROW], lse[LENGTH * HEADS];
  download(b->f, output, b->output_block, sizeof output);
  download(b->f, lse, b->lse_block, sizeof lse);
  for (int row = 0; row < rows; ++row) check_row(b, output + row * ROW, lse + row * HEADS, row, row);
}

static nvb_status prefill(void* value, void* context) {
  return nvb_attention_prefill(((bench*)context)->attention, value, ((bench*)context)->f->stream);
}

static nvb_status decode(void* value, void* context) {
  return nvb_attention_decode(((bench*)context)->attention, value, ((bench*)context)->f->stream);
}

static void test_prefill(bench* b) {
  nvb_stream* stream = b->f->stream;
  const float poison[LENGTH * ROW] = {0};
  nvb_attention_prefill_args good = prefill_args(b), args = good;
  CHECK_STRUCT(args, prefill, b);
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  check_outputs(b, LENGTH);

  // Half of the weights: other outputs than with all, the same ones twice, others again with another offset, and the
  // lse of all.
  float all[LENGTH * HEADS], sums[LENGTH * HEADS], outputs[3][LENGTH * ROW];
  download(b->f, all, b->lse_block, sizeof all);
  args.dropout = 0.5f;
  args.dropout_seed = 7;
  for (int run = 0; run < 3; ++run) {
    args.dropout_offset = run < 2 ? 1 : 2;
    CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
    download(b->f, outputs[run], b->output_block, sizeof outputs[run]);
    download(b->f, sums, b->lse_block, sizeof sums);
    CHECK(memcmp(all, sums, sizeof sums) == 0);
  }
  CHECK(memcmp(outputs[0], outputs[1], sizeof outputs[0]) == 0);
  CHECK(memcmp(outputs[0], outputs[2], sizeof outputs[0]) != 0);
  args = good;

  // Over tensors, in two sequences of which the first is empty.
  CHECK_OK(nvb_memory_copy(b->f->memory, b->output_block, poison, sizeof poison, NVB_COPY_HOST_TO_DEVICE, stream));
  const int32_t starts[3] = {0, 0, LENGTH};
  args.cache = NULL;
  args.sequences = args.kv_lengths = NULL;
  args.query_starts = args.key_starts = starts;
  args.sequence_count = 2;
  args.key = nvb_tensor_3d(b->key_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  args.value = nvb_tensor_3d(b->value_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  check_outputs(b, LENGTH);
  nvb_attention_prefill_args tensors = args;

#define REFUSED(...)                                                                                        \
  CHECK_FAILS(nvb_attention_prefill(b->attention, &args, stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  args = good
  args = good;
  args.query_starts = NULL;
  REFUSED("query_starts", "NULL");
  args.kv_lengths = NULL;
  REFUSED("kv_lengths", "NULL");
  args.sequence_count = (size_t)INT32_MAX + 1;
  REFUSED("sequence_count", "2147483648");
  args.sequence_count = SIZE_MAX;
  REFUSED("sequence_count");
  const int32_t too_long[1] = {CAPACITY + 1}, too_short[1] = {LENGTH - 1}, no_sequence[1] = {SEQUENCES},
                to_eleven[2] = {0, 11};
  args.kv_lengths = too_long;
  REFUSED("kv_lengths[0] is 17", "16 tokens");
  args.kv_lengths = too_short;
  REFUSED("12 query rows", "11 keys");
  args.sequences = no_sequence;
  REFUSED("sequence 2", "2 sequences");
  args.query_starts = to_eleven;
  REFUSED("query_starts", "11", "12");
  args.layer = 2;
  REFUSED("layer is 2", "2 layers");
  args.cache = foreign_handle();
  REFUSED("not a KV cache");
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_F32, LENGTH, 1, DIM);
  REFUSED("query", "1 heads", "2");
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_F32, LENGTH, HEADS, DIM / 2);
  REFUSED("query", "heads, 8]");
  args.query = nvb_tensor_2d(b->query_block, NVB_DTYPE_F32, LENGTH, ROW);
  REFUSED("query", "rank 2", "3");
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_F16, LENGTH, HEADS, DIM);
  REFUSED("query", "f16", "f32");
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_I32, LENGTH, HEADS, DIM);
  REFUSED("query", "i32");
  args.output.strides[0] = 1;
  args.output.strides[1] = DIM;
  args.output.strides[2] = 1;
  REFUSED("output", "overlap");
  args.output = nvb_tensor_3d((char*)b->output_block + 4, NVB_DTYPE_F32, LENGTH, HEADS, DIM);
  REFUSED("output", "past the end");
  memset(&args.output, 0, sizeof args.output);
  REFUSED("output", "missing");
  args.lse = nvb_tensor_2d(b->lse_block, NVB_DTYPE_F16, LENGTH, HEADS);
  REFUSED("lse", "f16", "f32");
  args.lse = nvb_tensor_2d(b->lse_block, NVB_DTYPE_F32, HEADS, LENGTH);
  REFUSED("lse", "[2, 12]", "[12, 2]");
  args.reserved = 3;
  REFUSED("reserved is 3");
  args.dropout = 1;
  REFUSED("dropout is 1");
  args.dropout = NAN;
  REFUSED("dropout is NaN");
  args.dropout = 0.5f;
  args.dropout_offset = UINT64_C(1) << 48;
  REFUSED("dropout_offset is 281474976710656", "2^48");
  args.reserved_dropout = 1;
  REFUSED("reserved is 1");
  args.dropout_device_offset = nvb_tensor_1d(b->position_block, NVB_DTYPE_I32, 1);
  REFUSED("dropout_device_offset", "[1]", "[2]");
  args = tensors;
  args.key_starts = NULL;
  REFUSED("key_starts", "NULL");
  args = tensors;
  args.key = nvb_tensor_3d(b->key_block, NVB_DTYPE_F32, LENGTH, HEADS, DIM / 2);
  REFUSED("key", "heads, 8]");
  args = tensors;
  memset(&args.value, 0, sizeof args.value);
  REFUSED("value", "missing");
  float host[LENGTH * ROW] = {0};
  if (!test_on_cpu()) {
    args.query = nvb_tensor_3d(host, NVB_DTYPE_F32, LENGTH, HEADS, DIM);
    REFUSED("query", "not memory of");
  }
  CHECK_FAILS(nvb_attention_prefill(NULL, &good, stream), NVB_ERROR_INVALID_ARGUMENT, "attention", "NULL");
  CHECK_FAILS(nvb_attention_prefill((nvb_attention*)stream, &good, stream), NVB_ERROR_INVALID_ARGUMENT,
              "not an attention");
  CHECK_FAILS(nvb_attention_prefill(b->attention, &good, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
}

// Starts and lengths in device memory, over a cache and over tensors.
static void test_device_lengths(bench* b) {
  nvb_stream* stream = b->f->stream;
  const int32_t starts[3] = {0, 0, LENGTH}, lengths[2] = {0, LENGTH}, places[2] = {0, 1}, long_lengths[2] = {0, 17};
  void *start_block = upload(b->f, starts, sizeof starts), *length_block = upload(b->f, lengths, sizeof lengths),
       *place_block = upload(b->f, places, sizeof places),
       *long_block = upload(b->f, long_lengths, sizeof long_lengths);
  nvb_attention_prefill_args good = prefill_args(b), args;
  good.query_starts = good.sequences = good.kv_lengths = NULL;
  good.sequence_count = 0;
  good.device_query_starts = nvb_tensor_1d(start_block, NVB_DTYPE_I32, 3);
  good.device_kv_lengths = nvb_tensor_1d(length_block, NVB_DTYPE_I32, 2);
  good.device_sequences = nvb_tensor_1d(place_block, NVB_DTYPE_I32, 2);
  good.max_query_rows = LENGTH;
  args = good;
  const float zeros[LENGTH * ROW] = {0};
  CHECK_OK(nvb_memory_copy(b->f->memory, b->output_block, zeros, sizeof zeros, NVB_COPY_HOST_TO_DEVICE, stream));
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  check_outputs(b, LENGTH);
  args.cache = NULL;
  memset(&args.device_kv_lengths, 0, sizeof args.device_kv_lengths);
  memset(&args.device_sequences, 0, sizeof args.device_sequences);
  args.key = nvb_tensor_3d(b->key_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  args.value = nvb_tensor_3d(b->value_block, NVB_DTYPE_F32, LENGTH, KV_HEADS, DIM);
  nvb_attention_prefill_args tensors = args;
  CHECK_FAILS(nvb_attention_prefill(b->attention, &args, stream), NVB_ERROR_INVALID_ARGUMENT, "device_key_starts");
  args.device_key_starts = nvb_tensor_1d(start_block, NVB_DTYPE_I32, 3);
  CHECK_OK(nvb_memory_copy(b->f->memory, b->output_block, zeros, sizeof zeros, NVB_COPY_HOST_TO_DEVICE, stream));
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  check_outputs(b, LENGTH);
  args = good;
  args.query_starts = whole;
  REFUSED("device_query_starts", "query_starts");
  args.kv_lengths = whole_length;
  REFUSED("device_query_starts", "kv_lengths");
  args.sequence_count = 3;
  REFUSED("sequence_count is 3", "2");
  args.max_query_rows = LENGTH + 1;
  REFUSED("max_query_rows is 13", "12");
  args.max_kv_length = CAPACITY + 1;
  REFUSED("max_kv_length is 17", "16");
  memset(&args.device_kv_lengths, 0, sizeof args.device_kv_lengths);
  REFUSED("device_kv_lengths", "missing");
  args.device_kv_lengths = nvb_tensor_1d(length_block, NVB_DTYPE_F32, 2);
  REFUSED("device_kv_lengths", "f32");
  args = prefill_args(b);
  args.device_kv_lengths = nvb_tensor_1d(length_block, NVB_DTYPE_I32, 2);
  REFUSED("device_kv_lengths", "without `device_query_starts`");
  args = tensors;
  args.device_key_starts = nvb_tensor_1d(start_block, NVB_DTYPE_I32, 2);
  REFUSED("device_key_starts", "[2]", "[3]");
  if (test_on_cpu()) {
    args.device_kv_lengths = nvb_tensor_1d(long_block, NVB_DTYPE_I32, 2);
    REFUSED("sequence 1", "17 keys");
  }
  void* blocks[] = {start_block, length_block, place_block, long_block};
  CHECK_OK(nvb_stream_synchronize(stream));
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) release(b->f, blocks[i]);
}

static void test_decode(bench* b) {
  nvb_stream* stream = b->f->stream;
  nvb_attention_decode_args good = decode_args(b), args = good;
  CHECK_STRUCT(args, decode, b);
  CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
  check_outputs(b, 3);
  args.max_kv_length = 3;
  CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
  check_outputs(b, 3);
  args = good;
  // The first token of the one sequence, as a prefix of all three rows.
  args.prefix_tokens = args.prefix_sequence = 1;
  CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
  check_outputs(b, 3);
  args = good;
#undef REFUSED
#define REFUSED(...)                                                                                       \
  CHECK_FAILS(nvb_attention_decode(b->attention, &args, stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  args = good
  args.max_kv_length = CAPACITY + 1;
  REFUSED("max_kv_length is 17", "16");
  args.cache = NULL;
  REFUSED("KV cache", "NULL");
  args.layer = 7;
  REFUSED("layer is 7", "2 layers");
  args.prefix_tokens = CAPACITY + 1;
  REFUSED("prefix_tokens is 17", "max_kv_length is 16");
  args.prefix_sequence = 1;
  REFUSED("prefix_sequence is 1 and prefix_tokens 0");
  args.prefix_tokens = 1;
  args.prefix_sequence = SEQUENCES;
  REFUSED("prefix_sequence is 2", "2 sequences");
  args.rows_per_sequence = 2;
  REFUSED("3 rows", "multiple of rows_per_sequence, 2");
  args.rows_per_sequence = 17;
  REFUSED("rows_per_sequence is 17", "1 to 16");
  args.reserved = 1;
  REFUSED("reserved is 1");
  memset(&args.sequences, 0, sizeof args.sequences);
  REFUSED("3 sequences without `sequences`", "has 2");
  memset(&args.positions, 0, sizeof args.positions);
  REFUSED("positions", "missing");
  args.positions = nvb_tensor_1d(b->position_block, NVB_DTYPE_I32, 2);
  REFUSED("positions", "[2]", "[3]");
  args.positions = nvb_tensor_1d(b->position_block, NVB_DTYPE_BF16, 3);
  REFUSED("positions", "bf16", "i32");
  args.query = nvb_tensor_3d(b->query_block, NVB_DTYPE_BF16, 3, HEADS, DIM);
  REFUSED("query", "bf16", "f32");
  const int32_t outside[3] = {0, CAPACITY, 1};
  void* block = upload(b->f, outside, sizeof outside);
  args.positions = nvb_tensor_1d(block, NVB_DTYPE_I32, 3);
  if (test_on_cpu()) {
    REFUSED("16", "16 tokens");
  } else {
    float output[3 * ROW];
    CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
    download(b->f, output, b->output_block, sizeof output);
    check_row(b, output, NULL, 0, 0);
    check_row(b, output + 2 * ROW, NULL, 2, 1);
    for (int i = 0; i < ROW; ++i) CHECK(output[ROW + i] == 0);
  }
  release(b->f, block);
  args = good;
  CHECK_FAILS(nvb_attention_decode(NULL, &args, stream), NVB_ERROR_INVALID_ARGUMENT, "attention", "NULL");

  nvb_attention_options options = two_heads();
  options.bidirectional = 1;
  nvb_attention* bidirectional = NULL;
  CHECK_OK(nvb_attention_create(b->f->backend, &options, &bidirectional));
  CHECK_FAILS(nvb_attention_decode(bidirectional, &args, stream), NVB_ERROR_ATTENTION, "bidirectional");
  CHECK_OK(nvb_attention_destroy(bidirectional));
}

// One new token behind all that the cache has, rotated and appended by the attention, and by nvb_rope in front of it.
static void test_decode_with_rope(bench* b) {
  nvb_stream* stream = b->f->stream;
  const int32_t position = LENGTH;
  float row[ROW + 2 * KV_HEADS * DIM], together[ROW], apart[ROW], query[ROW];
  for (int i = 0; i < ROW + 2 * KV_HEADS * DIM; ++i) row[i] = 0.01f * (float)(i % 37) - 0.2f;
  void* row_block = upload(b->f, row, sizeof row);
  void* position_block = upload(b->f, &position, sizeof position);
  nvb_attention_decode_args good = decode_args(b), args;
  good.query = nvb_tensor_3d(row_block, NVB_DTYPE_F32, 1, HEADS, DIM);
  good.output = nvb_tensor_3d(b->output_block, NVB_DTYPE_F32, 1, HEADS, DIM);
  good.lse = nvb_tensor_2d(b->lse_block, NVB_DTYPE_F32, 1, HEADS);
  good.positions = nvb_tensor_1d(position_block, NVB_DTYPE_I32, 1);
  good.sequences = nvb_tensor_1d(b->sequence_block, NVB_DTYPE_I32, 1);
  args = good;
  args.key = nvb_tensor_3d((float*)row_block + ROW, NVB_DTYPE_F32, 1, KV_HEADS, DIM);
  args.value = nvb_tensor_3d((float*)row_block + ROW + KV_HEADS * DIM, NVB_DTYPE_F32, 1, KV_HEADS, DIM);
  args.query_norm = nvb_tensor_1d((float*)row_block + ROW, NVB_DTYPE_F32, DIM);
  args.base = 100;
  args.query_scale = 0.5f;
  args.weight_offset = 1;
  good = args;

#undef REFUSED
#define REFUSED(...)                                                                                       \
  CHECK_FAILS(nvb_attention_decode(b->attention, &args, stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  args = good
  memset(&args.key, 0, sizeof args.key);
  REFUSED("`value` is given without `key`");
  memset(&args.value, 0, sizeof args.value);
  REFUSED("value", "missing");
  args.rotary_dim = DIM + 2;
  REFUSED("rotary_dim is");
  args.weight_offset = 0.5f;
  REFUSED("weight_offset is 0.5");
  args.key.shape[2] = DIM / 2;
  REFUSED("key");

  if (!test_on_cpu()) {
    // No kernel takes F32 here, and nothing is computed.
    CHECK_FAILS(nvb_attention_decode(b->attention, &args, stream), NVB_ERROR_UNSUPPORTED, "nvb_rope");
  } else {
    CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
    download(b->f, together, b->output_block, sizeof together);
    download(b->f, query, row_block, sizeof query);
    CHECK(memcmp(query, row, sizeof query) == 0);

    nvb_rope_args rope;
    nvb_rope_args_init(&rope);
    rope.query = rope.query_output = args.query;
    rope.query_norm = args.query_norm;
    rope.key = args.key;
    rope.value = args.value;
    rope.positions = args.positions;
    rope.sequences = args.sequences;
    rope.cache = args.cache;
    rope.layer = args.layer;
    rope.base = args.base;
    rope.query_scale = args.query_scale;
    rope.weight_offset = args.weight_offset;
    CHECK_OK(nvb_rope(b->f->backend, &rope, stream));
    memset(&args.key, 0, sizeof args.key);
    memset(&args.value, 0, sizeof args.value);
    memset(&args.query_norm, 0, sizeof args.query_norm);
    CHECK_OK(nvb_attention_decode(b->attention, &args, stream));
    download(b->f, apart, b->output_block, sizeof apart);
    CHECK(memcmp(together, apart, sizeof apart) == 0);
    CHECK(memcmp(query, apart, sizeof apart) != 0);
  }
  release(b->f, row_block);
  release(b->f, position_block);
}

// Sinks, slopes and a chunk of one token, in which each row sees its own key alone.
static void test_head_terms(bench* b) {
  nvb_stream* stream = b->f->stream;
  const float sinks[HEADS] = {0.5f, -1.0f}, slopes[HEADS] = {0.25f, 0.5f};
  void *sink_block = upload(b->f, sinks, sizeof sinks), *slope_block = upload(b->f, slopes, sizeof slopes);
  nvb_attention_options options = two_heads();
  options.chunk = 1;
  nvb_attention* chunked = NULL;
  CHECK_OK(nvb_attention_create(b->f->backend, &options, &chunked));
  nvb_attention_prefill_args good = prefill_args(b), args;
  good.sinks = nvb_tensor_1d(sink_block, NVB_DTYPE_F32, HEADS);
  good.alibi_slopes = nvb_tensor_1d(slope_block, NVB_DTYPE_F32, HEADS);
  args = good;
  CHECK_OK(nvb_attention_prefill(chunked, &args, stream));
  float output[LENGTH * ROW], lse[LENGTH * HEADS];
  download(b->f, output, b->output_block, sizeof output);
  download(b->f, lse, b->lse_block, sizeof lse);
  for (int i = 0; i < LENGTH * HEADS; ++i) {
    double score = 0;
    for (int d = 0; d < DIM; ++d) score += b->query[i * DIM + d] * b->key[i / HEADS * DIM + d];
    const double sum = exp(score / sqrt(DIM)) + exp(sinks[i % HEADS]);
    CHECK_NEAR(lse[i], log(sum), 1e-5);
    for (int d = 0; d < DIM; ++d) {
      CHECK_NEAR(output[i * DIM + d], exp(score / sqrt(DIM)) / sum * b->value[i / HEADS * DIM + d], 1e-5);
    }
  }
  nvb_attention_decode_args step = decode_args(b);
  step.sinks = good.sinks;
  step.alibi_slopes = good.alibi_slopes;
  CHECK_OK(nvb_attention_decode(chunked, &step, stream));
  step.sinks = nvb_tensor_1d(sink_block, NVB_DTYPE_F32, 1);
  CHECK_FAILS(nvb_attention_decode(chunked, &step, stream), NVB_ERROR_INVALID_ARGUMENT, "sinks", "[1]", "[2]");
  args.alibi_slopes = nvb_tensor_1d(slope_block, NVB_DTYPE_I32, HEADS);
  CHECK_FAILS(nvb_attention_prefill(chunked, &args, stream), NVB_ERROR_INVALID_ARGUMENT, "alibi_slopes", "i32");
  CHECK_OK(nvb_stream_synchronize(stream));
  CHECK_OK(nvb_attention_destroy(chunked));
  release(b->f, sink_block);
  release(b->f, slope_block);
}

// Trees, bits and prefixes: a tree of one line is a causal mask, roots and bits show each row its own key, a prefix
// shows all keys.
static void test_row_masks(bench* b) {
  nvb_stream* stream = b->f->stream;
  int32_t line[LENGTH], roots[LENGTH], own[LENGTH];
  for (int i = 0; i < LENGTH; ++i) {
    line[i] = i - 1;
    roots[i] = -1;
    own[i] = 1 << i;
  }
  void *line_block = upload(b->f, line, sizeof line), *root_block = upload(b->f, roots, sizeof roots);
  void* own_block = upload(b->f, own, sizeof own);
  nvb_attention_prefill_args good = prefill_args(b), args = good;
  args.tree_parents = nvb_tensor_1d(line_block, NVB_DTYPE_I32, LENGTH);
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  check_outputs(b, LENGTH);

  float output[LENGTH * ROW], lse[LENGTH * HEADS];
  for (int with_bits = 0; with_bits < 2; ++with_bits) {
    args = good;
    if (with_bits) {
      args.mask = nvb_tensor_2d(own_block, NVB_DTYPE_I32, LENGTH, 1);
    } else {
      args.tree_parents = nvb_tensor_1d(root_block, NVB_DTYPE_I32, LENGTH);
    }
    CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
    download(b->f, output, b->output_block, sizeof output);
    download(b->f, lse, b->lse_block, sizeof lse);
    for (int i = 0; i < LENGTH * HEADS; ++i) {
      double score = 0;
      for (int d = 0; d < DIM; ++d) score += b->query[i * DIM + d] * b->key[i / HEADS * DIM + d];
      CHECK_NEAR(lse[i], score / sqrt(DIM), 1e-5);
      for (int d = 0; d < DIM; ++d) CHECK_NEAR(output[i * DIM + d], b->value[i / HEADS * DIM + d], 1e-5);
    }
  }

  args = good;
  args.prefix_lengths = whole_length;
  CHECK_OK(nvb_attention_prefill(b->attention, &args, stream));
  download(b->f, output, b->output_block, sizeof output);
  download(b->f, lse, b->lse_block, sizeof lse);
  for (int row = 0; row < LENGTH; ++row) check_row(b, output + row * ROW, lse + row * HEADS, row, LENGTH - 1);

#define MASK_REFUSED(...)                                                                                   \
  CHECK_FAILS(nvb_attention_prefill(b->attention, &args, stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  args = good
  args = good;
  const int32_t too_long[1] = {LENGTH + 1};
  args.prefix_lengths = too_long;
  MASK_REFUSED("prefix_lengths[0] is 13", "12 keys");
  args.tree_parents = nvb_tensor_1d(line_block, NVB_DTYPE_F32, LENGTH);
  MASK_REFUSED("tree_parents", "f32", "i32");
  args.tree_parents = nvb_tensor_1d(line_block, NVB_DTYPE_I32, LENGTH - 1);
  MASK_REFUSED("tree_parents", "[11]", "[12]");
  args.mask = nvb_tensor_2d(own_block, NVB_DTYPE_I32, LENGTH - 1, 1);
  MASK_REFUSED("mask", "[11, 1]", "words of 32 keys");
  nvb_attention_options options = two_heads();
  options.bidirectional = 1;
  nvb_attention* both_ways = NULL;
  CHECK_OK(nvb_attention_create(b->f->backend, &options, &both_ways));
  args.tree_parents = nvb_tensor_1d(line_block, NVB_DTYPE_I32, LENGTH);
  CHECK_FAILS(nvb_attention_prefill(both_ways, &args, stream), NVB_ERROR_ATTENTION, "tree_parents", "bidirectional");
  CHECK_OK(nvb_attention_destroy(both_ways));

  // Few keys are not divided.
  size_t bytes = 1;
  CHECK_OK(nvb_attention_prefill_get_workspace_size(b->attention, &good, &bytes));
  CHECK_EQUAL(bytes, 0);
  CHECK_FAILS(nvb_attention_prefill_get_workspace_size(b->attention, &good, NULL), NVB_ERROR_INVALID_ARGUMENT, "bytes");
  release(b->f, line_block);
  release(b->f, root_block);
  release(b->f, own_block);
}

static void test_options(bench* b) {
  nvb_attention_options options = two_heads();
  CHECK_STRUCT(options, create, b);
  nvb_attention* attention = foreign_handle();
#define OPTION_REFUSED(field, value, status, ...) \
  options = two_heads();                          \
  options.field = (value);                        \
  CHECK_FAILS(nvb_attention_create(b->f->backend, &options, &attention), (status), __VA_ARGS__)
  OPTION_REFUSED(head_dim, 0, NVB_ERROR_ATTENTION, "head_dim is 0", "576");
  OPTION_REFUSED(head_dim, 577, NVB_ERROR_ATTENTION, "head_dim is 577", "576");
  OPTION_REFUSED(kv_heads, 0, NVB_ERROR_ATTENTION, "2 query heads", "0 key/value heads");
  OPTION_REFUSED(query_heads, 0, NVB_ERROR_ATTENTION, "0 query heads");
  OPTION_REFUSED(kv_heads, 3, NVB_ERROR_ATTENTION, "2 query heads", "3 key/value heads");
  OPTION_REFUSED(scale, NAN, NVB_ERROR_ATTENTION, "scale is NaN");
  OPTION_REFUSED(scale, INFINITY, NVB_ERROR_ATTENTION, "scale is inf");
  OPTION_REFUSED(scale, -1.0f, NVB_ERROR_ATTENTION, "scale is -1");
  OPTION_REFUSED(soft_cap, -1.0f, NVB_ERROR_ATTENTION, "soft_cap is -1");
  OPTION_REFUSED(soft_cap, NAN, NVB_ERROR_ATTENTION, "soft_cap is NaN");
  OPTION_REFUSED(window, UINT32_MAX, NVB_ERROR_INVALID_ARGUMENT, "window is 4294967295", "2147483647");
  OPTION_REFUSED(chunk, UINT32_MAX, NVB_ERROR_INVALID_ARGUMENT, "chunk is 4294967295", "2147483647");
  OPTION_REFUSED(sink_tokens, 1, NVB_ERROR_ATTENTION, "sink_tokens", "window");
  OPTION_REFUSED(sink_tokens, 257, NVB_ERROR_ATTENTION, "sink_tokens is 257", "256");
  OPTION_REFUSED(bidirectional, 2, NVB_ERROR_INVALID_ARGUMENT, "bidirectional is 2");
  OPTION_REFUSED(value_dim, 513, NVB_ERROR_ATTENTION, "value_dim is 513", "512");
  options = two_heads();
  CHECK_FAILS(nvb_attention_create(NULL, &options, &attention), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_attention_create(b->f->backend, &options, NULL), NVB_ERROR_INVALID_ARGUMENT, "attention", "NULL");
  CHECK(attention == foreign_handle());
  CHECK_OK(nvb_attention_create(b->f->backend, &options, &attention));
  CHECK_OK(nvb_attention_destroy(attention));
  CHECK_FAILS(nvb_attention_destroy(attention), NVB_ERROR_INVALID_ARGUMENT, "attention", "destroyed");
  nvb_attention_decode_args args = decode_args(b);
  CHECK_FAILS(nvb_attention_decode(attention, &args, NULL), NVB_ERROR_INVALID_ARGUMENT, "attention", "destroyed");
  CHECK_OK(nvb_attention_destroy(NULL));
}

static void test_growth(bench* b) {
  nvb_attention_options options = two_heads();
  nvb_attention_decode_args args = decode_args(b);
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    nvb_attention* attention = NULL;
    CHECK_OK(nvb_attention_create(b->f->backend, &options, &attention));
    CHECK_OK(nvb_attention_decode(attention, &args, b->f->stream));
    CHECK_OK(nvb_attention_destroy(attention));
  }
  CHECK_OK(nvb_stream_synchronize(b->f->stream));
  CHECK_GROWTH(kilobytes);
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_prefill(&b);
  test_device_lengths(&b);
  test_head_terms(&b);
  test_row_masks(&b);
  test_decode(&b);
  test_decode_with_rope(&b);
  test_options(&b);
  test_growth(&b);
  tear_down(&b);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
  return test_result();
}
