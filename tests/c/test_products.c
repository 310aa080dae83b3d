// Batched products, grouped products and layer normalisation: a small case of each, and what is refused.
#include "operation.h"

enum { CELLS = 48 };

// Blocks of CELLS floats that each test uses as it needs.
typedef struct {
  fixture* f;
  float values[CELLS];
  void *a, *b, *out, *offsets;
  nvb_weight* weight;  // [6, 4]: two experts of three rows, element (n, k) = values[4 n + k]
} bench;

static bench set_up(fixture* f) {
  bench b = {.f = f};
  uint32_t state = 5;
  for (int i = 0; i < CELLS; ++i) b.values[i] = next_number(&state);
  b.a = upload(f, b.values, sizeof b.values);
  b.b = upload(f, b.values, sizeof b.values);
  b.out = upload(f, b.values, sizeof b.values);
  const int32_t offsets[3] = {0, 1, 3};
  b.offsets = upload(f, offsets, sizeof offsets);
  nvb_tensor part = nvb_tensor_2d(b.values, NVB_DTYPE_F32, 6, 4);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.weight));
  return b;
}

static void tear_down(bench* b) {
  release(b->f, b->a);
  release(b->f, b->b);
  release(b->f, b->out);
  release(b->f, b->offsets);
  CHECK_OK(nvb_weight_destroy(b->weight));
}

OPERATION(matmul)
OPERATION(grouped_linear)
OPERATION(layer_norm)

static void test_matmul(bench* b) {
  nvb_matmul_args good;
  nvb_matmul_args_init(&good);
  good.a = nvb_tensor_3d(b->a, NVB_DTYPE_F32, 2, 2, 3);
  good.b = nvb_tensor_2d(b->b, NVB_DTYPE_F32, 4, 3);
  good.output = nvb_tensor_3d(b->out, NVB_DTYPE_F32, 2, 2, 4);
  good.transpose_b = 1;
  good.alpha = 0.5f;
  CHECK_OK(nvb_matmul(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int row = 0; row < 4; ++row) {
    for (int column = 0; column < 4; ++column) {
      double sum = 0;
      for (int k = 0; k < 3; ++k) sum += b->values[row * 3 + k] * b->values[column * 3 + k];
      CHECK_NEAR(out[row * 4 + column], 0.5 * sum, 1e-5);
    }
  }
  CHECK_OPERATION(matmul, good);
  CHECK_TENSOR(matmul, good, a);
  CHECK_TENSOR(matmul, good, b);
  CHECK_TENSOR(matmul, good, output);
  nvb_matmul_args args = good;
  args.transpose_b = 0;
  REFUSED(matmul, "op(a)", "3", "4");
  args.transpose_a = 2;
  REFUSED(matmul, "transpose_a is 2");
  args.a = nvb_tensor_3d(b->a, NVB_DTYPE_F32, 3, 2, 3);
  REFUSED(matmul, "tensor `a`", "batch axis of 3", "2");
  args.a = nvb_tensor_1d(b->a, NVB_DTYPE_F32, 6);
  REFUSED(matmul, "tensor `a`", "rank 1");
  args.b.dtype = NVB_DTYPE_BF16;
  REFUSED(matmul, "tensor `b`", "bf16", "f32");
  args.output = nvb_tensor_3d(b->out, NVB_DTYPE_F32, 2, 2, 5);
  REFUSED(matmul, "output", "2 × 5", "2 × 4");
  args.output.strides[0] = 0;
  args.output.strides[1] = 4;
  args.output.strides[2] = 1;
  REFUSED(matmul, "output", "overlap");
  args.alpha = INFINITY;
  REFUSED(matmul, "alpha is inf");
  args.reserved = 1;
  REFUSED(matmul, "reserved is 1");
}

static void test_grouped_linear(bench* b) {
  nvb_grouped_linear_args good;
  nvb_grouped_linear_args_init(&good);
  good.input = nvb_tensor_2d(b->a, NVB_DTYPE_F32, 3, 4);
  good.expert_offsets = nvb_tensor_1d(b->offsets, NVB_DTYPE_I32, 3);
  good.weight = b->weight;
  good.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 6);
  good.output = nvb_tensor_2d(b->out, NVB_DTYPE_F32, 3, 3);
  CHECK_OK(nvb_grouped_linear(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int token = 0; token < 3; ++token) {
    for (int n = 0; n < 3; ++n) {
      const int row = (token == 0 ? 0 : 3) + n;
      double sum = b->values[row];
      for (int k = 0; k < 4; ++k) sum += b->values[token * 4 + k] * b->values[row * 4 + k];
      CHECK_NEAR(out[token * 3 + n], sum, 1e-5);
    }
  }
  CHECK_OPERATION(grouped_linear, good);
  CHECK_TENSOR(grouped_linear, good, input);
  CHECK_TENSOR(grouped_linear, good, expert_offsets);
  CHECK_TENSOR(grouped_linear, good, bias);
  CHECK_TENSOR(grouped_linear, good, output);
  nvb_grouped_linear_args args = good;
  args.expert_offsets = nvb_tensor_1d(b->offsets, NVB_DTYPE_I32, 1);
  REFUSED(grouped_linear, "expert_offsets", "at least 2");
  args.expert_offsets.dtype = NVB_DTYPE_F32;
  REFUSED(grouped_linear, "expert_offsets", "f32", "i32");
  args.weight = NULL;
  REFUSED(grouped_linear, "weight", "NULL");
  args.input = nvb_tensor_2d(b->a, NVB_DTYPE_F32, 3, 5);
  REFUSED(grouped_linear, "input", "5 columns", "4");
  args.output = nvb_tensor_2d(b->out, NVB_DTYPE_F32, 3, 6);
  REFUSED(grouped_linear, "output", "3 rows of 6", "3 rows of 3");
  args.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 3);
  REFUSED(grouped_linear, "bias", "[3]", "[6]");
  args.activation = 9;
  REFUSED(grouped_linear, "activation is 9");
  args.experts = 9;
  REFUSED(grouped_linear, "experts is 9", "expert_offsets");
  // Six rows are not shared by four experts.
  const int32_t offsets[5] = {0, 1, 2, 2, 9};
  void* block = upload(b->f, offsets, sizeof offsets);
  args.expert_offsets = nvb_tensor_1d(block, NVB_DTYPE_I32, 5);
  REFUSED(grouped_linear, "6 rows", "4 experts");
  // Offsets that do not fit are named where the device can say so.
  args.expert_offsets = nvb_tensor_1d((char*)block + 8, NVB_DTYPE_I32, 3);
  if (test_on_cpu()) {
    REFUSED(grouped_linear, "expert_offsets[0] is 2", "3 rows");
  } else {
    CHECK_OK(nvb_grouped_linear(b->f->backend, &args, b->f->stream));
  }
  release(b->f, block);
}

static void test_layer_norm(bench* b) {
  nvb_layer_norm_args good;
  nvb_layer_norm_args_init(&good);
  good.input = nvb_tensor_2d(b->a, NVB_DTYPE_F32, 3, 8);
  good.residual = nvb_tensor_2d(b->b, NVB_DTYPE_F32, 3, 8);
  good.weight = good.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 8);
  good.output = nvb_tensor_2d(b->out, NVB_DTYPE_F32, 3, 8);
  CHECK_OK(nvb_layer_norm(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int row = 0; row < 3; ++row) {
    double mean = 0, variance = 0;
    for (int i = 0; i < 8; ++i) mean += 2 * b->values[row * 8 + i] / 8;
    for (int i = 0; i < 8; ++i) variance += pow(2 * b->values[row * 8 + i] - mean, 2) / 8;
    for (int i = 0; i < 8; ++i) {
      const double norm = (2 * b->values[row * 8 + i] - mean) / sqrt(variance + 1e-5);
      CHECK_NEAR(out[row * 8 + i], norm * b->values[i] + b->values[i], 1e-5);
    }
  }
  CHECK_OPERATION(layer_norm, good);
  CHECK_TENSOR(layer_norm, good, input);
  CHECK_TENSOR(layer_norm, good, residual);
  CHECK_TENSOR(layer_norm, good, weight);
  CHECK_TENSOR(layer_norm, good, bias);
  CHECK_TENSOR(layer_norm, good, output);
  nvb_layer_norm_args args = good;
  memset(&args.output, 0, sizeof args.output);
  REFUSED(layer_norm, "output", "residual_output");
  memset(&args.input, 0, sizeof args.input);
  REFUSED(layer_norm, "input", "missing");
  args.weight = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 7);
  REFUSED(layer_norm, "weight", "[7]", "[8]");
  args.bias.dtype = NVB_DTYPE_BF16;
  REFUSED(layer_norm, "bias", "bf16", "f32");
  args.residual = nvb_tensor_2d(b->b, NVB_DTYPE_F32, 2, 8);
  REFUSED(layer_norm, "residual", "2 rows", "3 rows");
  args.epsilon = -1;
  REFUSED(layer_norm, "epsilon is -1");
  args.input.dtype = NVB_DTYPE_I32;
  REFUSED(layer_norm, "input", "i32");
  args.reserved = 1;
  REFUSED(layer_norm, "reserved is 1");
  void* wide = NULL;
  CHECK_OK(nvb_memory_allocate(b->f->memory, 65537 * 4, b->f->stream, &wide));
  args.input = args.output = nvb_tensor_2d(wide, NVB_DTYPE_F32, 1, 65537);
  memset(&args.residual, 0, sizeof args.residual);
  memset(&args.weight, 0, sizeof args.weight);
  memset(&args.bias, 0, sizeof args.bias);
  REFUSED(layer_norm, "65537", "65536");
  release(b->f, wide);
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_matmul(&b);
  test_grouped_linear(&b);
  test_layer_norm(&b);
  tear_down(&b);
  return operation_test_result(&f);
}
