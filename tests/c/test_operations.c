// The operations of a layer: a small case of each against its formula, and what is refused.
#include "operation.h"

enum { ROWS = 3, WIDTH = 8, CELLS = ROWS * WIDTH };

// A block of CELLS floats that each test uses as it needs.
typedef struct {
  fixture* f;
  float values[CELLS];
  void *a, *b, *out, *integers;
  nvb_weight* weight;  // [4, 8], element (n, k) = values[n * WIDTH + k] of the first four rows, wrapped around
  nvb_weight* gated;
  nvb_weight* square;  // [8, 8], likewise
} bench;

static float weight_value(const bench* b, int n, int k) {
  return b->values[(n * WIDTH + k) % CELLS];
}

static bench set_up(fixture* f) {
  bench b = {.f = f};
  uint32_t state = 3;
  for (int i = 0; i < CELLS; ++i) b.values[i] = next_number(&state);
  b.a = upload(f, b.values, sizeof b.values);
  b.b = upload(f, b.values, sizeof b.values);
  b.out = upload(f, b.values, sizeof b.values);
  const int32_t integers[ROWS] = {2, 0, 3};
  b.integers = upload(f, integers, sizeof integers);
  float matrix[WIDTH * WIDTH];
  for (int i = 0; i < WIDTH * WIDTH; ++i) matrix[i] = weight_value(&b, i / WIDTH, i % WIDTH);
  nvb_tensor parts[2] = {nvb_tensor_2d(matrix, NVB_DTYPE_F32, 4, WIDTH),
                         nvb_tensor_2d(matrix, NVB_DTYPE_F32, 4, WIDTH)};
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = parts;
  desc.part_count = 1;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.weight));
  desc.part_count = 2;
  desc.arrangement = NVB_WEIGHT_GATED;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.gated));
  parts[0] = nvb_tensor_2d(matrix, NVB_DTYPE_F32, WIDTH, WIDTH);
  desc.part_count = 1;
  desc.arrangement = NVB_WEIGHT_STACKED;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.square));
  return b;
}

static void tear_down(bench* b) {
  release(b->f, b->a);
  release(b->f, b->b);
  release(b->f, b->out);
  release(b->f, b->integers);
  CHECK_OK(nvb_weight_destroy(b->weight));
  CHECK_OK(nvb_weight_destroy(b->gated));
  CHECK_OK(nvb_weight_destroy(b->square));
}

static nvb_tensor matrix(void* block, int64_t rows, int64_t columns) {
  return nvb_tensor_2d(block, NVB_DTYPE_F32, rows, columns);
}

OPERATION(embedding)
OPERATION(rms_norm)
OPERATION(linear)
OPERATION(gated_activation)
OPERATION(rope)

static void test_embedding(bench* b) {
  nvb_embedding_args good;
  nvb_embedding_args_init(&good);
  good.tokens = nvb_tensor_1d(b->integers, NVB_DTYPE_I32, ROWS);
  good.table = b->weight;
  good.output = matrix(b->out, ROWS, WIDTH);
  good.scale = 2;
  CHECK_OK(nvb_embedding(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  const int tokens[ROWS] = {2, 0, 3};
  download(b->f, out, b->out, sizeof out);
  for (int i = 0; i < CELLS; ++i) CHECK_NEAR(out[i], 2 * weight_value(b, tokens[i / WIDTH], i % WIDTH), 1e-6);
  CHECK_OPERATION(embedding, good);
  CHECK_TENSOR(embedding, good, tokens);
  CHECK_TENSOR(embedding, good, output);
  nvb_embedding_args args = good;
  args.table = b->gated;
  REFUSED(embedding, "gated");
  args.table = NULL;
  REFUSED(embedding, "weight", "NULL");
  args.tokens.dtype = NVB_DTYPE_F32;
  REFUSED(embedding, "tokens", "f32", "i32");
  args.output = matrix(b->out, ROWS, WIDTH - 1);
  REFUSED(embedding, "output", "7", "8");
  args.output = matrix(b->out, ROWS - 1, WIDTH);
  REFUSED(embedding, "output", "2 rows", "3 rows");
  args.output.strides[0] = WIDTH - 1;
  args.output.strides[1] = 1;
  REFUSED(embedding, "output", "overlap", "8");
  args.scale = NAN;
  REFUSED(embedding, "scale is NaN");
  args.reserved = 1;
  REFUSED(embedding, "reserved is 1");
  // Tokens 0, 4, -1: the table has four rows.
  const int32_t outside[3] = {0, 4, -1};
  void* block = upload(b->f, outside, sizeof outside);
  args.tokens = nvb_tensor_1d(block, NVB_DTYPE_I32, 3);
  if (test_on_cpu()) {
    REFUSED(embedding, "tokens[1] is 4", "4 rows");
  } else {
    CHECK_OK(nvb_embedding(b->f->backend, &args, b->f->stream));
    download(b->f, out, b->out, sizeof out);
    for (int i = WIDTH; i < CELLS; ++i) CHECK(out[i] == 0);
  }
  release(b->f, block);
}

static void test_rms_norm(bench* b) {
  nvb_rms_norm_args good;
  nvb_rms_norm_args_init(&good);
  good.input = matrix(b->a, ROWS, WIDTH);
  good.residual = matrix(b->b, ROWS, WIDTH);
  good.post_weight = good.weight = nvb_tensor_1d(b->b, NVB_DTYPE_F32, WIDTH);
  good.output = matrix(b->out, ROWS, WIDTH);
  good.weight_offset = 1;
  CHECK_OK(nvb_rms_norm(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int row = 0; row < ROWS; ++row) {
    const float* x = b->values + row * WIDTH;
    double s[WIDTH], square = 0, sum = 0;
    for (int i = 0; i < WIDTH; ++i) square += x[i] * x[i];
    for (int i = 0; i < WIDTH; ++i) {
      s[i] = x[i] + x[i] / sqrt(square / WIDTH + 1e-6) * (1 + b->values[i]);
      sum += s[i] * s[i];
    }
    for (int i = 0; i < WIDTH; ++i) {
      CHECK_NEAR(out[row * WIDTH + i], s[i] / sqrt(sum / WIDTH + 1e-6) * (1 + b->values[i]), 1e-5);
    }
  }
  CHECK_OPERATION(rms_norm, good);
  CHECK_TENSOR(rms_norm, good, input);
  CHECK_TENSOR(rms_norm, good, residual);
  CHECK_TENSOR(rms_norm, good, weight);
  CHECK_TENSOR(rms_norm, good, post_weight);
  CHECK_TENSOR(rms_norm, good, output);
  nvb_rms_norm_args args = good;
  memset(&args.output, 0, sizeof args.output);
  REFUSED(rms_norm, "output", "residual_output");
  memset(&args.input, 0, sizeof args.input);
  REFUSED(rms_norm, "input", "missing");
  args.weight = nvb_tensor_1d(b->b, NVB_DTYPE_F32, WIDTH + 1);
  REFUSED(rms_norm, "weight", "[9]", "[8]");
  args.residual = matrix(b->b, ROWS - 1, WIDTH);
  REFUSED(rms_norm, "residual", "2 rows", "3 rows");
  args.input.dtype = NVB_DTYPE_I32;
  REFUSED(rms_norm, "input", "i32");
  args.epsilon = -1;
  REFUSED(rms_norm, "epsilon is -1");
  args.weight_offset = 0.5f;
  REFUSED(rms_norm, "weight_offset is 0.5", "0 or 1");
  void* wide = NULL;
  CHECK_OK(nvb_memory_allocate(b->f->memory, 65537 * 4, b->f->stream, &wide));
  args.input = args.output = matrix(wide, 1, 65537);
  memset(&args.residual, 0, sizeof args.residual);
  memset(&args.weight, 0, sizeof args.weight);
  memset(&args.post_weight, 0, sizeof args.post_weight);
  REFUSED(rms_norm, "65537", "65536");
  release(b->f, wide);
}

static void test_linear(bench* b) {
  nvb_linear_args good;
  nvb_linear_args_init(&good);
  good.input = matrix(b->a, ROWS, WIDTH);
  good.weight = b->weight;
  good.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 4);
  good.output = matrix(b->out, ROWS, 4);
  good.activation = NVB_ACTIVATION_SILU;
  CHECK_OK(nvb_linear(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int i = 0; i < ROWS * 4; ++i) {
    double sum = b->values[i % 4];
    for (int k = 0; k < WIDTH; ++k) sum += b->values[i / 4 * WIDTH + k] * weight_value(b, i % 4, k);
    CHECK_NEAR(out[i], sum / (1 + exp(-sum)), 1e-5);
  }
  CHECK_OPERATION(linear, good);
  CHECK_TENSOR(linear, good, input);
  CHECK_TENSOR(linear, good, bias);
  CHECK_TENSOR(linear, good, output);
  nvb_linear_args args = good;
  args.activation = 4;
  REFUSED(linear, "activation is 4", "0 to 3");
  args.activation = UINT32_MAX;
  REFUSED(linear, "activation is 4294967295");
  args.weight = NULL;
  REFUSED(linear, "weight", "NULL");
  args.weight = (nvb_weight*)b->f->stream;
  REFUSED(linear, "not a weight");
  args.input = matrix(b->a, ROWS, WIDTH - 1);
  REFUSED(linear, "input", "7 columns", "[4, 8]");
  args.input = nvb_tensor_2d(b->a, NVB_DTYPE_BF16, ROWS, WIDTH);
  REFUSED(linear, "input", "bf16", "f32");
  args.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 5);
  REFUSED(linear, "bias", "[5]", "[4]");
  args.output = matrix(b->out, ROWS, 5);
  REFUSED(linear, "output", "5", "4");
  args.output = matrix(b->out, ROWS - 1, 4);
  REFUSED(linear, "output", "2 rows", "3 rows");
  args.weight = b->gated;
  args.bias = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 4);
  REFUSED(linear, "bias", "[4]", "[8]");
  args.reserved = 9;
  REFUSED(linear, "reserved is 9");
}

// The sum with a residual, which is then the output.
static void test_linear_residual(bench* b) {
  float first[ROWS * 4];
  for (int i = 0; i < ROWS * 4; ++i) first[i] = 0.25f * (float)i - 1.0f;
  void* residual = upload(b->f, first, sizeof first);
  nvb_linear_args good;
  nvb_linear_args_init(&good);
  good.input = matrix(b->a, ROWS, WIDTH);
  good.weight = b->weight;
  good.residual = matrix(residual, ROWS, 4);
  good.output = matrix(b->out, ROWS, 4);
  for (int in_place = 0; in_place < 2; ++in_place) {
    if (in_place) good.output = good.residual;
    CHECK_OK(nvb_linear(b->f->backend, &good, b->f->stream));
    float out[ROWS * 4];
    download(b->f, out, good.output.data, sizeof out);
    for (int i = 0; i < ROWS * 4; ++i) {
      double sum = first[i];
      for (int k = 0; k < WIDTH; ++k) sum += b->values[i / 4 * WIDTH + k] * weight_value(b, i % 4, k);
      CHECK_NEAR(out[i], sum, 1e-5);
    }
  }
  good.output = matrix(b->out, ROWS, 4);
  CHECK_TENSOR(linear, good, residual);
  nvb_linear_args args = good;
  args.residual = matrix(residual, ROWS, 3);
  REFUSED(linear, "residual", "3 rows of 3", "3 rows of 4");
  args.residual = nvb_tensor_2d(b->out, NVB_DTYPE_BF16, ROWS, 4);
  REFUSED(linear, "residual", "same memory", "bf16");
  args.residual = matrix(b->out, ROWS, 4);
  args.residual.strides[0] = 5;
  args.residual.strides[1] = 1;
  REFUSED(linear, "residual", "same memory", "5 apart");
  release(b->f, residual);
}

static void test_gated_activation(bench* b) {
  nvb_gated_activation_args good;
  nvb_gated_activation_args_init(&good);
  good.gate = matrix(b->a, ROWS, WIDTH);
  good.up = matrix(b->b, ROWS, WIDTH);
  good.output = matrix(b->out, ROWS, WIDTH);
  good.activation = NVB_ACTIVATION_GELU_ERF;
  CHECK_OK(nvb_gated_activation(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->out, sizeof out);
  for (int i = 0; i < CELLS; ++i) {
    double x = b->values[i];
    CHECK_NEAR(out[i], 0.5 * x * (1 + erf(x / sqrt(2))) * x, 1e-5);
  }
  CHECK_OPERATION(gated_activation, good);
  CHECK_TENSOR(gated_activation, good, gate);
  CHECK_TENSOR(gated_activation, good, up);
  CHECK_TENSOR(gated_activation, good, output);
  nvb_gated_activation_args args = good;
  args.activation = 4;
  REFUSED(gated_activation, "activation is 4", "0 to 3");
  args.up = matrix(b->b, ROWS, WIDTH - 1);
  REFUSED(gated_activation, "up", "7", "8");
  args.up = nvb_tensor_2d(b->b, NVB_DTYPE_F16, ROWS, WIDTH);
  REFUSED(gated_activation, "up", "f16", "f32");
  args.output = matrix(b->out, ROWS - 1, WIDTH);
  REFUSED(gated_activation, "output", "2 rows", "3 rows");
  args.reserved = 1;
  REFUSED(gated_activation, "reserved is 1");
}

// Rows in 8 bits of a good call, given with wrong contents.
static void check_quantized_rows(int line, const char* name, void* args, nvb_quantized_rows* rows, struct_call call,
                                 bench* b) {
  const nvb_quantized_rows good = *rows;
  const char* words[3] = {name, NULL, NULL};
#define ROWS_REFUSED(word)                                                             \
  words[1] = (word);                                                                   \
  check_fails(__FILE__, line, name, call(args, b), NVB_ERROR_INVALID_ARGUMENT, words); \
  *rows = good
  rows->format = NVB_WEIGHT_FORMAT_INT4;
  ROWS_REFUSED("format 6");
  rows->format = 0;
  ROWS_REFUSED("format 0");
  rows->scales = NULL;
  ROWS_REFUSED("no scales");
  rows->data = NULL;
  ROWS_REFUSED("NULL data");
  rows->scales = (float*)((char*)rows->scales + 1);
  ROWS_REFUSED("not aligned");
  rows->rows = -1;
  ROWS_REFUSED("-1");
  rows->columns = -1;
  ROWS_REFUSED("-1");
  rows->row_stride = -8;
  ROWS_REFUSED("-8");
  rows->row_stride = WIDTH - 1;
  ROWS_REFUSED("row stride of 7");
  rows->row_stride = INT64_MAX;
  ROWS_REFUSED("overflows");
  rows->rows = INT64_MAX;
  ROWS_REFUSED("overflows");
  rows->rows = 1000000;
  ROWS_REFUSED("past the end");
  rows->columns = WIDTH - 1;
  ROWS_REFUSED("7");
  // A product says so of its output.
  words[0] = "2 rows";
  rows->rows = ROWS - 1;
  ROWS_REFUSED("3 rows");
  rows->given_scales = 3;
  words[0] = "given_scales";
  ROWS_REFUSED("is 3");
#undef ROWS_REFUSED
}

static float largest(const float* row) {
  float most = 0;
  for (int i = 0; i < WIDTH; ++i) most = fmaxf(most, fabsf(row[i]));
  return most;
}

// Scales that make `code` of each row's largest value, and the codes nearest to value / scale.
static void check_codes(const bench* b, const nvb_quantized_rows* codes, const float* values, float code) {
  float scales[ROWS];
  int8_t q[CELLS];
  download(b->f, q, codes->data, sizeof q);
  download(b->f, scales, codes->scales, sizeof scales);
  for (int i = 0; i < CELLS; ++i) {
    const float scale = scales[i / WIDTH];
    CHECK(scale == largest(values + i / WIDTH * WIDTH) / code);
    CHECK_NEAR(q[i], values[i] / scale, 0.5001);
  }
}

// rms_norm, gated_activation and linear leave 8 bits behind, and linear takes them.
static void test_quantized_rows(bench* b) {
  nvb_quantized_rows codes = {.rows = ROWS, .columns = WIDTH, .format = NVB_WEIGHT_FORMAT_INT8};
  const int8_t nothing[CELLS] = {0};
  const float no_scales[ROWS + 1] = {0};
  codes.data = upload(b->f, nothing, sizeof nothing);
  codes.scales = upload(b->f, no_scales, sizeof no_scales);

  nvb_rms_norm_args norm;
  nvb_rms_norm_args_init(&norm);
  norm.input = matrix(b->a, ROWS, WIDTH);
  norm.output = matrix(b->out, ROWS, WIDTH);
  norm.quantized_output = codes;
  CHECK_OK(nvb_rms_norm(b->f->backend, &norm, b->f->stream));
  float out[CELLS], scales[ROWS];
  int8_t q[CELLS];
  download(b->f, out, b->out, sizeof out);
  download(b->f, q, codes.data, sizeof q);
  download(b->f, scales, codes.scales, sizeof scales);
  check_codes(b, &codes, out, 127);
  CHECK_STRUCT(norm, call_rms_norm, b);
  check_quantized_rows(__LINE__, "quantized_output", &norm, &norm.quantized_output, call_rms_norm, b);
  memset(&norm.output, 0, sizeof norm.output);
  CHECK_OK(nvb_rms_norm(b->f->backend, &norm, b->f->stream));

  nvb_linear_args linear;
  nvb_linear_args_init(&linear);
  linear.quantized_input = codes;
  linear.weight = b->weight;
  linear.output = matrix(b->out, ROWS, 4);
  CHECK_OK(nvb_linear(b->f->backend, &linear, b->f->stream));
  download(b->f, out, b->out, sizeof out);
  for (int i = 0; i < ROWS * 4; ++i) {
    double sum = 0;
    for (int k = 0; k < WIDTH; ++k) sum += (double)scales[i / 4] * q[i / 4 * WIDTH + k] * weight_value(b, i % 4, k);
    CHECK_NEAR(out[i], sum, 1e-5);
  }
  CHECK_STRUCT(linear, call_linear, b);
  check_quantized_rows(__LINE__, "quantized_input", &linear, &linear.quantized_input, call_linear, b);
  linear.input = matrix(b->a, ROWS, WIDTH);
  CHECK_FAILS(nvb_linear(b->f->backend, &linear, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "input", "quantized_input",
              "both");

  // And linear leaves them: of the float output's values, with scales of its own and with given ones, and alone.
  memset(&linear.quantized_input, 0, sizeof linear.quantized_input);
  memset(&linear.quantized_output, 0, sizeof linear.quantized_output);
  linear.weight = b->square;
  linear.output = matrix(b->out, ROWS, WIDTH);
  linear.quantized_output = codes;
  CHECK_OK(nvb_linear(b->f->backend, &linear, b->f->stream));
  download(b->f, out, b->out, sizeof out);
  check_codes(b, &codes, out, 127);
  float given[ROWS + 1] = {0};
  for (int row = 0; row < ROWS; ++row) given[row] = largest(out + row * WIDTH) / 64;
  release(b->f, codes.scales);
  codes.scales = upload(b->f, given, sizeof given);
  linear.quantized_output.scales = codes.scales;
  linear.quantized_output.given_scales = 1;
  memset(&linear.output, 0, sizeof linear.output);
  CHECK_OK(nvb_linear(b->f->backend, &linear, b->f->stream));
  check_codes(b, &codes, out, 64);
  CHECK_STRUCT(linear, call_linear, b);
  linear.quantized_output.given_scales = 0;
  check_quantized_rows(__LINE__, "quantized_output", &linear, &linear.quantized_output, call_linear, b);
  memset(&linear.quantized_output, 0, sizeof linear.quantized_output);
  CHECK_FAILS(nvb_linear(b->f->backend, &linear, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "output", "missing");

  nvb_gated_activation_args gated;
  nvb_gated_activation_args_init(&gated);
  gated.gate = matrix(b->a, ROWS, WIDTH);
  gated.up = matrix(b->b, ROWS, WIDTH);
  gated.quantized_output = codes;
  CHECK_OK(nvb_gated_activation(b->f->backend, &gated, b->f->stream));
  download(b->f, q, codes.data, sizeof q);
  download(b->f, scales, codes.scales, sizeof scales);
  for (int i = 0; i < CELLS; ++i) {
    CHECK_NEAR(q[i] * scales[i / WIDTH], b->values[i] * b->values[i], 0.51 * scales[i / WIDTH]);
  }
  CHECK_STRUCT(gated, call_gated_activation, b);
  check_quantized_rows(__LINE__, "quantized_output", &gated, &gated.quantized_output, call_gated_activation, b);
  memset(&gated.quantized_output, 0, sizeof gated.quantized_output);
  CHECK_FAILS(nvb_gated_activation(b->f->backend, &gated, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "output",
              "quantized_output");
  release(b->f, codes.data);
  release(b->f, codes.scales);
}

static void test_rope(bench* b) {
  nvb_rope_args good;
  nvb_rope_args_init(&good);
  good.query = nvb_tensor_3d(b->a, NVB_DTYPE_F32, ROWS, 2, 4);
  good.query_output = nvb_tensor_3d(b->out, NVB_DTYPE_F32, ROWS, 2, 4);
  good.positions = nvb_tensor_1d(b->integers, NVB_DTYPE_I32, ROWS);
  CHECK_OK(nvb_rope(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  const int positions[ROWS] = {2, 0, 3};
  download(b->f, out, b->out, sizeof out);
  for (int head = 0; head < ROWS * 2; ++head) {
    for (int i = 0; i < 2; ++i) {
      double angle = positions[head / 2] * pow(10000, -2.0 * i / 4);
      double x = b->values[head * 4 + i], y = b->values[head * 4 + i + 2];
      CHECK_NEAR(out[head * 4 + i], x * cos(angle) - y * sin(angle), 1e-5);
      CHECK_NEAR(out[head * 4 + i + 2], y * cos(angle) + x * sin(angle), 1e-5);
    }
  }
  CHECK_OPERATION(rope, good);
  CHECK_TENSOR(rope, good, query);
  CHECK_TENSOR(rope, good, query_output);
  CHECK_TENSOR(rope, good, positions);
  nvb_rope_args args = good;
  args.rotary_dim = 3;
  REFUSED(rope, "rotary_dim is 3", "4");
  args.rotary_dim = 6;
  REFUSED(rope, "rotary_dim is 6", "4");
  args.base = -1;
  REFUSED(rope, "base is -1");
  args.position_scale = INFINITY;
  REFUSED(rope, "position_scale is inf");
  args.query_scale = NAN;
  REFUSED(rope, "query_scale is NaN");
  args.query_norm = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 3);
  REFUSED(rope, "query_norm", "[3]", "[4]");
  args.query_norm = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 4);
  args.epsilon = -1;
  REFUSED(rope, "epsilon is -1");
  args.query_norm = nvb_tensor_1d(b->b, NVB_DTYPE_F32, 4);
  args.weight_offset = 2;
  REFUSED(rope, "weight_offset is 2", "0 or 1");
  memset(&args.query, 0, sizeof args.query);
  REFUSED(rope, "query");
  memset(&args.query_output, 0, sizeof args.query_output);
  REFUSED(rope, "query_output");
  args.query = nvb_tensor_2d(b->a, NVB_DTYPE_F32, ROWS, WIDTH);
  REFUSED(rope, "rank 2", "3");
  args.query_output = nvb_tensor_3d(b->out, NVB_DTYPE_F32, ROWS, 1, 4);
  REFUSED(rope, "query_output", "[3, 1, 4]", "[3, 2, 4]");
  args.key = good.query;
  REFUSED(rope, "key", "key_output", "cache");
  args.value = good.query;
  REFUSED(rope, "value", "cache");
  args.cache = (nvb_kv_cache*)b->weight;
  REFUSED(rope, "not a KV cache");
  args.positions.dtype = NVB_DTYPE_F32;
  REFUSED(rope, "positions", "f32", "i32");
  args.positions = nvb_tensor_1d(b->integers, NVB_DTYPE_I32, ROWS - 1);
  REFUSED(rope, "query", "[3, 2, 4]", "[2, heads, 4]");
  args.reserved = 1;
  REFUSED(rope, "reserved is 1");
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_embedding(&b);
  test_rms_norm(&b);
  test_linear(&b);
  test_linear_residual(&b);
  test_gated_activation(&b);
  test_quantized_rows(&b);
  test_rope(&b);
  tear_down(&b);
  return operation_test_result(&f);
}
