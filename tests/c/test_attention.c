// Attention: prefill against the formula, and what is refused.
#include "attention_bench.h"

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
  test_options(&b);
  test_growth(&b);
  tear_down(&b);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
  return test_result();
}
