// Attention: what changes scores beyond causal masks and windows.
#include "attention_bench.h"

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

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_head_terms(&b);
  test_row_masks(&b);
  tear_down(&b);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
  return test_result();
}
