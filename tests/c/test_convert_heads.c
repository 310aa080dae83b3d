// Heads rotated before they are rounded to FP8: what the call refuses, and that attention of FlashAttention 3's
// outliers then has at most 0.7 times the error, over tensors in FP8 and over a cache in FP8.
#include "operation.h"

enum { TOKENS = 2048, ROWS = 64, HEADS = 4, KV_HEADS = 2, DIM = 128, GROUP = HEADS / KV_HEADS };
enum { QUERY = ROWS * HEADS * DIM, KEYS = TOKENS * KV_HEADS * DIM };

typedef struct {
  fixture* f;
  void *query, *key, *value, *rounded_query, *rounded_key, *rounded_value, *output, *scales, *cache_scales, *positions;
  float query_numbers[QUERY], key_numbers[KEYS], value_numbers[KEYS];
  double expected[QUERY];
} bench;

OPERATION(convert_heads)

// Near normal: the sum of twelve numbers in [0, 1) less six.
static float next_normal(uint32_t* state) {
  float sum = 0;
  for (int i = 0; i < 12; ++i) sum += next_number(state);
  return sum / 2;
}

// Normal numbers, to one in a thousand of which one of deviation 10 is added (Shah et al. 2024, section 4.3).
static void fill(float* numbers, int count, uint32_t seed) {
  uint32_t state = seed;
  for (int i = 0; i < count; ++i) {
    numbers[i] = next_normal(&state);
    if (next_number(&state) > 0.998f) numbers[i] += 10 * next_normal(&state);
  }
}

// What the numbers give without rounding, every key seen.
static void compute(bench* b) {
  static double weights[TOKENS];
  for (int item = 0; item < ROWS * HEADS; ++item) {
    const int kv_head = item % HEADS / GROUP;
    double sum = 0;
    for (int token = 0; token < TOKENS; ++token) {
      double score = 0;
      for (int i = 0; i < DIM; ++i) {
        score += (double)b->query_numbers[item * DIM + i] * b->key_numbers[(token * KV_HEADS + kv_head) * DIM + i];
      }
      sum += weights[token] = exp(score / sqrt(DIM));
    }
    for (int i = 0; i < DIM; ++i) {
      double value = 0;
      for (int token = 0; token < TOKENS; ++token) {
        value += weights[token] * b->value_numbers[(token * KV_HEADS + kv_head) * DIM + i];
      }
      b->expected[item * DIM + i] = value / sum;
    }
  }
}

static nvb_convert_heads_args convert(void* from, void* to, uint32_t dtype, int tokens, int heads) {
  nvb_convert_heads_args args;
  nvb_convert_heads_args_init(&args);
  args.input = nvb_tensor_3d(from, NVB_DTYPE_F32, tokens, heads, DIM);
  args.output = nvb_tensor_3d(to, dtype, tokens, heads, DIM);
  args.seed = 2026;
  return args;
}

static double root_mean_square_error(bench* b) {
  static float output[QUERY];
  download(b->f, output, b->output, sizeof output);
  double sum = 0;
  for (int i = 0; i < QUERY; ++i) sum += pow(output[i] - b->expected[i], 2);
  return sqrt(sum / QUERY);
}

static nvb_attention* attention_of(fixture* f) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.bidirectional = 1;
  nvb_attention* attention = NULL;
  CHECK_OK(nvb_attention_create(f->backend, &options, &attention));
  return attention;
}

static const int32_t kQueryStarts[2] = {0, ROWS}, kKeyStarts[2] = {0, TOKENS}, kLength[1] = {TOKENS};

// Queries, keys and values in FP8 with scales of heads that the conversion writes.
static double error_over_tensors(bench* b, uint32_t rotate) {
  float* scales = b->scales;
  void* const from[3] = {b->query, b->key, b->value};
  void* const to[3] = {b->rounded_query, b->rounded_key, b->rounded_value};
  for (int i = 0; i < 3; ++i) {
    nvb_convert_heads_args args =
        convert(from[i], to[i], NVB_DTYPE_FP8_E4M3, i == 0 ? ROWS : TOKENS, i == 0 ? HEADS : KV_HEADS);
    args.rotate = i < 2 ? rotate : 0;
    args.scales = nvb_tensor_1d(scales + i * KV_HEADS, NVB_DTYPE_F32, KV_HEADS);
    args.write_scales = 1;
    CHECK_OK(nvb_convert_heads(b->f->backend, &args, b->f->stream));
  }
  nvb_attention* attention = attention_of(b->f);
  nvb_attention_prefill_args prefill;
  nvb_attention_prefill_args_init(&prefill);
  prefill.query = nvb_tensor_3d(b->rounded_query, NVB_DTYPE_FP8_E4M3, ROWS, HEADS, DIM);
  prefill.key = nvb_tensor_3d(b->rounded_key, NVB_DTYPE_FP8_E4M3, TOKENS, KV_HEADS, DIM);
  prefill.value = nvb_tensor_3d(b->rounded_value, NVB_DTYPE_FP8_E4M3, TOKENS, KV_HEADS, DIM);
  prefill.output = nvb_tensor_3d(b->output, NVB_DTYPE_F32, ROWS, HEADS, DIM);
  prefill.query_starts = kQueryStarts;
  prefill.key_starts = kKeyStarts;
  prefill.sequence_count = 1;
  prefill.query_scale = nvb_tensor_1d(scales, NVB_DTYPE_F32, KV_HEADS);
  prefill.key_scale = nvb_tensor_1d(scales + KV_HEADS, NVB_DTYPE_F32, KV_HEADS);
  prefill.value_scale = nvb_tensor_1d(scales + 2 * KV_HEADS, NVB_DTYPE_F32, KV_HEADS);
  CHECK_OK(nvb_attention_prefill(attention, &prefill, b->f->stream));
  CHECK_OK(nvb_attention_destroy(attention));
  return root_mean_square_error(b);
}

// F32 queries over a cache in FP8 whose scales are those of the keys and values that it gets.
static double error_over_cache(bench* b, uint32_t rotate) {
  fixture* f = b->f;
  float* scales = b->cache_scales;
  for (int i = 0; i < 2; ++i) {
    // A calibration needs the scales alone; the rounded elements are not used.
    nvb_convert_heads_args args =
        convert(i == 0 ? b->key : b->value, b->rounded_key, NVB_DTYPE_FP8_E4M3, TOKENS, KV_HEADS);
    args.rotate = i == 0 ? rotate : 0;
    args.scales = nvb_tensor_1d(scales + i * KV_HEADS, NVB_DTYPE_F32, KV_HEADS);
    args.write_scales = 1;
    CHECK_OK(nvb_convert_heads(f->backend, &args, f->stream));
  }
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = options.sequences = 1;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = TOKENS;
  options.dtype = NVB_DTYPE_FP8_E4M3;
  options.key_scales = nvb_tensor_2d(scales, NVB_DTYPE_F32, 1, KV_HEADS);
  options.value_scales = nvb_tensor_2d(scales + KV_HEADS, NVB_DTYPE_F32, 1, KV_HEADS);
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  // Queries and keys are rotated where they lie.
  void* query = upload(f, b->query_numbers, sizeof b->query_numbers);
  void* key = upload(f, b->key_numbers, sizeof b->key_numbers);
  if (rotate) {
    nvb_convert_heads_args args = convert(query, query, NVB_DTYPE_F32, ROWS, HEADS);
    args.rotate = 1;
    CHECK_OK(nvb_convert_heads(f->backend, &args, f->stream));
    args = convert(key, key, NVB_DTYPE_F32, TOKENS, KV_HEADS);
    args.rotate = 1;
    CHECK_OK(nvb_convert_heads(f->backend, &args, f->stream));
  }
  nvb_kv_cache_append_args append;
  nvb_kv_cache_append_args_init(&append);
  append.key = nvb_tensor_3d(key, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.value = nvb_tensor_3d(b->value, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.positions = nvb_tensor_1d(b->positions, NVB_DTYPE_I32, TOKENS);
  append.cache = cache;
  CHECK_OK(nvb_kv_cache_append(f->backend, &append, f->stream));
  nvb_attention* attention = attention_of(f);
  nvb_attention_prefill_args prefill;
  nvb_attention_prefill_args_init(&prefill);
  prefill.query = nvb_tensor_3d(query, NVB_DTYPE_F32, ROWS, HEADS, DIM);
  prefill.output = nvb_tensor_3d(b->output, NVB_DTYPE_F32, ROWS, HEADS, DIM);
  prefill.query_starts = kQueryStarts;
  prefill.kv_lengths = kLength;
  prefill.sequence_count = 1;
  prefill.cache = cache;
  CHECK_OK(nvb_attention_prefill(attention, &prefill, f->stream));
  const double error = root_mean_square_error(b);
  CHECK_OK(nvb_attention_destroy(attention));
  CHECK_OK(nvb_kv_cache_destroy(cache));
  release(f, query);
  release(f, key);
  return error;
}

static void check_refusals(bench* b) {
  nvb_convert_heads_args good = convert(b->query, b->rounded_query, NVB_DTYPE_FP8_E4M3, ROWS, HEADS);
  good.scales = nvb_tensor_1d(b->scales, NVB_DTYPE_F32, KV_HEADS);
  good.rotate = good.write_scales = 1;
  CHECK_OPERATION(convert_heads, good);
  nvb_convert_heads_args args = good;
  args.rotate = 2;
  REFUSED(convert_heads, "rotate is 2");
  args.scales.shape[0] = 3;
  REFUSED(convert_heads, "3 entries", "4 heads");
  args.output = nvb_tensor_3d(b->output, NVB_DTYPE_F32, ROWS, HEADS, DIM);
  REFUSED(convert_heads, "`scales`", "f32");
  args.input.dtype = NVB_DTYPE_FP8_E5M2;
  REFUSED(convert_heads, "`input`", "fp8 e5m2");
  args.input.shape[2] = args.output.shape[2] = 100;
  REFUSED(convert_heads, "head_dim is 100", "multiple of 8");
  args.output.data = b->query;
  REFUSED(convert_heads, "overlaps");
}

int main(void) {
  fixture f = open_fixture();
  static bench b;
  b.f = &f;
  fill(b.query_numbers, QUERY, 1);
  fill(b.key_numbers, KEYS, 2);
  fill(b.value_numbers, KEYS, 3);
  compute(&b);
  static int32_t positions[TOKENS];
  for (int i = 0; i < TOKENS; ++i) positions[i] = i;
  static const float zeros[4 * KV_HEADS];
  b.query = upload(&f, b.query_numbers, sizeof b.query_numbers);
  b.key = upload(&f, b.key_numbers, sizeof b.key_numbers);
  b.value = upload(&f, b.value_numbers, sizeof b.value_numbers);
  b.rounded_query = upload(&f, b.query_numbers, QUERY);
  b.rounded_key = upload(&f, b.key_numbers, KEYS);
  b.rounded_value = upload(&f, b.key_numbers, KEYS);
  b.output = upload(&f, b.query_numbers, sizeof b.query_numbers);
  b.scales = upload(&f, zeros, sizeof zeros);
  b.cache_scales = upload(&f, zeros, sizeof zeros);
  b.positions = upload(&f, positions, sizeof positions);

  check_refusals(&b);
  const double tensors = error_over_tensors(&b, 0), rotated_tensors = error_over_tensors(&b, 1);
  const double cached = error_over_cache(&b, 0), rotated_cached = error_over_cache(&b, 1);
  printf("RMSE over FP8 tensors %.2e, rotated %.2e (%.2f); over an FP8 cache %.2e, rotated %.2e (%.2f)\n", tensors,
         rotated_tensors, rotated_tensors / tensors, cached, rotated_cached, rotated_cached / cached);
  CHECK(tensors > 0 && rotated_tensors <= 0.7 * tensors);
  CHECK(cached > 0 && rotated_cached <= 0.7 * cached);

  void* owned[] = {b.query,         b.key,    b.value,  b.rounded_query, b.rounded_key,
                   b.rounded_value, b.output, b.scales, b.cache_scales,  b.positions};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) release(&f, owned[i]);
  return operation_test_result(&f);
}
