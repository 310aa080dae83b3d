// From logits to tokens, and elementwise operations: a small case of each, and what is refused.
#include "operation.h"

enum { ROWS = 4, COLUMNS = 6, CELLS = ROWS * COLUMNS };

typedef struct {
  fixture* f;
  float values[CELLS];
  void *input, *second, *output, *tokens;
} bench;

static bench set_up(fixture* f) {
  bench b = {.f = f};
  uint32_t state = 9;
  for (int i = 0; i < CELLS; ++i) b.values[i] = 3 * next_number(&state);
  const int32_t numbers[ROWS] = {1, 2, 3, 4};
  b.input = upload(f, b.values, sizeof b.values);
  b.second = upload(f, b.values, sizeof b.values);
  b.output = upload(f, b.values, sizeof b.values);
  b.tokens = upload(f, numbers, sizeof numbers);
  return b;
}

static void tear_down(bench* b) {
  release(b->f, b->input);
  release(b->f, b->second);
  release(b->f, b->output);
  release(b->f, b->tokens);
}

static nvb_tensor matrix(void* block) {
  return nvb_tensor_2d(block, NVB_DTYPE_F32, ROWS, COLUMNS);
}

OPERATION(softmax)
OPERATION(add)
OPERATION(multiply)
OPERATION(scale)
OPERATION(soft_cap)
OPERATION(convert)
OPERATION(activate)
OPERATION(argmax)
OPERATION(sample)

static void test_softmax(bench* b) {
  nvb_softmax_args good;
  nvb_softmax_args_init(&good);
  good.input = matrix(b->input);
  good.output = matrix(b->output);
  good.scale = 0.5f;
  CHECK_OK(nvb_softmax(b->f->backend, &good, b->f->stream));
  float out[CELLS];
  download(b->f, out, b->output, sizeof out);
  for (int row = 0; row < ROWS; ++row) {
    double sum = 0;
    for (int i = 0; i < COLUMNS; ++i) sum += exp(0.5 * b->values[row * COLUMNS + i]);
    for (int i = 0; i < COLUMNS; ++i) {
      CHECK_NEAR(out[row * COLUMNS + i], exp(0.5 * b->values[row * COLUMNS + i]) / sum, 1e-6);
    }
  }
  CHECK_OPERATION(softmax, good);
  nvb_softmax_args args = good;
  memset(&args.input, 0, sizeof args.input);
  REFUSED(softmax, "input", "missing");
  args.output = nvb_tensor_2d(b->output, NVB_DTYPE_F32, ROWS, COLUMNS - 1);
  REFUSED(softmax, "output", "5", "6");
  args.input = nvb_tensor_2d(b->input, NVB_DTYPE_I32, ROWS, COLUMNS);
  REFUSED(softmax, "input", "i32");
  args.output = nvb_tensor_2d(b->output, NVB_DTYPE_F32, ROWS + 1, COLUMNS);
  REFUSED(softmax, "output", "120 bytes", "past the end");
  args.scale = INFINITY;
  REFUSED(softmax, "scale is inf");
  args.reserved = 1;
  REFUSED(softmax, "reserved is 1");
}

static void test_elementwise(bench* b) {
  typedef nvb_status (*operation)(const nvb_backend*, const nvb_elementwise_args*, nvb_stream*);
  static const operation operations[6] = {nvb_add, nvb_multiply, nvb_scale, nvb_soft_cap, nvb_convert, nvb_activate};
  float out[CELLS];
  for (int kind = 0; kind < 6; ++kind) {
    nvb_elementwise_args args;
    nvb_elementwise_args_init(&args);
    args.input = matrix(b->input);
    args.output = matrix(b->output);
    // One row for all.
    if (kind < 2) args.second = nvb_tensor_2d(b->second, NVB_DTYPE_F32, 1, COLUMNS);
    args.factor = 1.5f;
    args.activation = NVB_ACTIVATION_SILU;
    CHECK_OK(operations[kind](b->f->backend, &args, b->f->stream));
    download(b->f, out, b->output, sizeof out);
    for (int i = 0; i < CELLS; ++i) {
      double x = b->values[i], y = b->values[i % COLUMNS];
      const double expected[6] = {x + y, x * y, 1.5 * x, 1.5 * tanh(x / 1.5), x, x / (1 + exp(-x))};
      CHECK_NEAR(out[i], expected[kind], 1e-5);
    }
  }
  nvb_elementwise_args good, args;
  nvb_elementwise_args_init(&good);
  good.input = good.output = matrix(b->input);
  good.factor = 1;
  CHECK_OPERATION(scale, good);
  CHECK_OPERATION(convert, good);
  CHECK_OPERATION(activate, good);
  // Beside a huge cap even the smallest number is not 0.
  float tiny[CELLS] = {1e-45f, -3e-42f, 1e-38f, 7e-20f, -1};
  args = good;
  void* small = upload(b->f, tiny, sizeof tiny);
  args.input = args.output = matrix(small);
  args.factor = 3e38f;
  CHECK_OK(nvb_soft_cap(b->f->backend, &args, b->f->stream));
  download(b->f, out, small, sizeof out);
  CHECK(memcmp(out, tiny, sizeof tiny) == 0);
  release(b->f, small);
  args = good;
  args.activation = 4;
  REFUSED(activate, "activation is 4", "0 to 3");
  args.factor = 0;
  REFUSED(soft_cap, "cap is 0");
  args.factor = -1;
  REFUSED(soft_cap, "cap is -1");
  args.factor = NAN;
  REFUSED(scale, "factor is NaN");
  args.second = matrix(b->second);
  REFUSED(convert, "second");
  REFUSED(add, "second", "missing");
  args.output = nvb_tensor_2d(b->output, NVB_DTYPE_F32, ROWS - 1, COLUMNS);
  REFUSED(convert, "output", "3 rows", "4 rows");
  args.output = nvb_tensor_2d(b->output, NVB_DTYPE_I32, ROWS, COLUMNS);
  REFUSED(convert, "output", "i32");
  args.input = nvb_tensor_2d(b->input, 0, ROWS, COLUMNS);
  REFUSED(convert, "input", "dtype 0");
  // soft_cap's factor has no default, so a smaller struct that lacks it is an error; the larger ones are fine.
  CHECK_OPERATION(soft_cap, good);
  good.second = matrix(b->second);
  CHECK_OPERATION(add, good);
  CHECK_OPERATION(multiply, good);
  args = good;
  args.second = nvb_tensor_2d(b->second, NVB_DTYPE_F32, 2, COLUMNS);
  REFUSED(multiply, "second", "2 rows", "4 rows");
}

static void test_argmax(bench* b) {
  nvb_argmax_args good;
  nvb_argmax_args_init(&good);
  good.logits = matrix(b->second);
  good.tokens = nvb_tensor_1d(b->tokens, NVB_DTYPE_I32, ROWS);
  CHECK_OK(nvb_argmax(b->f->backend, &good, b->f->stream));
  int32_t tokens[ROWS];
  download(b->f, tokens, b->tokens, sizeof tokens);
  for (int row = 0; row < ROWS; ++row) {
    int best = 0;
    for (int i = 1; i < COLUMNS; ++i) {
      if (b->values[row * COLUMNS + i] > b->values[row * COLUMNS + best]) best = i;
    }
    CHECK_EQUAL(tokens[row], best);
  }
  CHECK_OPERATION(argmax, good);
  nvb_argmax_args args = good;
  args.tokens = nvb_tensor_1d(b->tokens, NVB_DTYPE_I32, ROWS - 1);
  REFUSED(argmax, "tokens", "[3]", "[4]");
  args.tokens = nvb_tensor_1d(b->tokens, NVB_DTYPE_F32, ROWS);
  REFUSED(argmax, "tokens", "f32", "i32");
  args.logits = nvb_tensor_2d(b->second, NVB_DTYPE_F32, ROWS, 0);
  REFUSED(argmax, "logits", "no columns");
  args.logits = nvb_tensor_2d(b->second, NVB_DTYPE_I32, ROWS, COLUMNS);
  REFUSED(argmax, "logits", "i32");
  memset(&args.tokens, 0, sizeof args.tokens);
  REFUSED(argmax, "tokens", "missing");
}

static void test_sample(bench* b) {
  nvb_sample_args good;
  nvb_sample_args_init(&good);
  good.logits = matrix(b->second);
  good.tokens = nvb_tensor_1d(b->tokens, NVB_DTYPE_I32, ROWS);
  good.probabilities = nvb_tensor_1d(b->output, NVB_DTYPE_F32, ROWS);
  good.temperature = 1;
  good.seed = 12345;
  int32_t first[ROWS], tokens[ROWS];
  float probabilities[ROWS];
  CHECK_OK(nvb_sample(b->f->backend, &good, b->f->stream));
  download(b->f, first, b->tokens, sizeof first);
  download(b->f, probabilities, b->output, sizeof probabilities);
  for (int row = 0; row < ROWS; ++row) {
    CHECK(first[row] >= 0 && first[row] < COLUMNS);
    double sum = 0;
    for (int i = 0; i < COLUMNS; ++i) sum += exp(b->values[row * COLUMNS + i]);
    CHECK_NEAR(probabilities[row], exp(b->values[row * COLUMNS + first[row]]) / sum, 1e-5);
  }
  // The same seed draws the same tokens; the largest logit is all that temperature 0 and top-k 1 leave.
  CHECK_OK(nvb_sample(b->f->backend, &good, b->f->stream));
  download(b->f, tokens, b->tokens, sizeof tokens);
  CHECK(memcmp(first, tokens, sizeof tokens) == 0);
  nvb_argmax_args argmax;
  nvb_argmax_args_init(&argmax);
  argmax.logits = good.logits;
  argmax.tokens = good.tokens;
  CHECK_OK(nvb_argmax(b->f->backend, &argmax, b->f->stream));
  download(b->f, first, b->tokens, sizeof first);
  nvb_sample_args args = good;
  for (int greedy = 0; greedy < 3; ++greedy) {
    args = good;
    if (greedy == 0) args.temperature = 0;
    if (greedy == 1) args.top_k = 1;
    if (greedy == 2) args.top_p = 1e-6f;
    CHECK_OK(nvb_sample(b->f->backend, &args, b->f->stream));
    download(b->f, tokens, b->tokens, sizeof tokens);
    CHECK(memcmp(first, tokens, sizeof tokens) == 0);
  }
  CHECK_OPERATION(sample, good);
  args = good;
  args.temperature = -1;
  REFUSED(sample, "temperature is -1");
  args.temperature = INFINITY;
  REFUSED(sample, "temperature is inf");
  args.top_p = -0.5f;
  REFUSED(sample, "top_p is -0.5");
  args.top_p = NAN;
  REFUSED(sample, "top_p is NaN");
  args.sequences = nvb_tensor_1d(b->input, NVB_DTYPE_I32, ROWS + 1);
  REFUSED(sample, "sequences", "[5]", "[4]");
  args.positions = nvb_tensor_1d(b->input, NVB_DTYPE_F32, ROWS);
  REFUSED(sample, "positions", "f32", "i32");
  args.probabilities = nvb_tensor_1d(b->output, NVB_DTYPE_F16, ROWS);
  REFUSED(sample, "probabilities", "f16", "f32");
  memset(&args.logits, 0, sizeof args.logits);
  REFUSED(sample, "logits", "missing");
  args.reserved = 1;
  REFUSED(sample, "reserved is 1");
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_softmax(&b);
  test_elementwise(&b);
  test_argmax(&b);
  test_sample(&b);
  tear_down(&b);
  return operation_test_result(&f);
}
