// Attention: decode against the formula, with the new token rotated before or within it.
#include "attention_bench.h"

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

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_decode(&b);
  test_decode_with_rope(&b);
  tear_down(&b);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
  return test_result();
}
