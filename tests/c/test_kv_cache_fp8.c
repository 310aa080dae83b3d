// A cache in FP8 with scales of heads, of the library's memory and of the engine's: what is appended comes back through
// attention.
#include "check.h"

enum { LAYERS = 2, LAYER = 1, KV_HEADS = 2, HEADS = 4, DIM = 16, TOKENS = 5, CAPACITY = 8 };
enum { ROW = KV_HEADS * DIM, ELEMENTS = LAYERS * KV_HEADS * CAPACITY * DIM };

static const float kKeyScales[LAYERS * KV_HEADS] = {9, 9, 0.5f, 0.25f};
static const float kValueScales[LAYERS * KV_HEADS] = {9, 9, 0.125f, 2};

typedef struct {
  fixture* f;
  void *key, *value, *query, *output, *positions, *key_scales, *value_scales;
  float key_numbers[TOKENS * ROW], value_numbers[TOKENS * ROW], query_numbers[HEADS * DIM];
} bench;

// Multiples of a scale by integers up to 8, which E4M3 and E5M2 both hold: what comes back is exact.
static bench set_up(fixture* f) {
  bench b = {.f = f};
  uint32_t state = 11;
  for (int i = 0; i < TOKENS * ROW; ++i) {
    const int head = i / DIM % KV_HEADS;
    b.key_numbers[i] = floorf(next_number(&state) * 4) * kKeyScales[LAYER * KV_HEADS + head];
    b.value_numbers[i] = floorf(next_number(&state) * 4) * kValueScales[LAYER * KV_HEADS + head];
  }
  for (int i = 0; i < HEADS * DIM; ++i) b.query_numbers[i] = next_number(&state);
  const int32_t positions[TOKENS] = {0, 1, 2, 3, 4};
  b.key = upload(f, b.key_numbers, sizeof b.key_numbers);
  b.value = upload(f, b.value_numbers, sizeof b.value_numbers);
  b.query = upload(f, b.query_numbers, sizeof b.query_numbers);
  b.output = upload(f, b.query_numbers, sizeof b.query_numbers);
  b.positions = upload(f, positions, sizeof positions);
  b.key_scales = upload(f, kKeyScales, sizeof kKeyScales);
  b.value_scales = upload(f, kValueScales, sizeof kValueScales);
  return b;
}

static nvb_kv_cache_options options_of(const bench* b, uint32_t dtype) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = LAYERS;
  options.sequences = 1;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = CAPACITY;
  options.dtype = dtype;
  options.key_scales = nvb_tensor_2d(b->key_scales, NVB_DTYPE_F32, LAYERS, KV_HEADS);
  options.value_scales = nvb_tensor_2d(b->value_scales, NVB_DTYPE_F32, LAYERS, KV_HEADS);
  return options;
}

// The last token attends to all.
static void check_cache(bench* b, nvb_kv_cache* cache) {
  fixture* f = b->f;
  nvb_kv_cache_append_args append;
  nvb_kv_cache_append_args_init(&append);
  append.key = nvb_tensor_3d(b->key, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.value = nvb_tensor_3d(b->value, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.positions = nvb_tensor_1d(b->positions, NVB_DTYPE_I32, TOKENS);
  append.cache = cache;
  append.layer = LAYER;
  CHECK_OK(nvb_kv_cache_append(f->backend, &append, f->stream));
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  nvb_attention* attention = NULL;
  CHECK_OK(nvb_attention_create(f->backend, &options, &attention));
  nvb_attention_decode_args decode;
  nvb_attention_decode_args_init(&decode);
  decode.query = nvb_tensor_3d(b->query, NVB_DTYPE_F32, 1, HEADS, DIM);
  decode.output = nvb_tensor_3d(b->output, NVB_DTYPE_F32, 1, HEADS, DIM);
  decode.cache = cache;
  decode.layer = LAYER;
  decode.positions = nvb_tensor_1d((int32_t*)b->positions + TOKENS - 1, NVB_DTYPE_I32, 1);
  CHECK_OK(nvb_attention_decode(attention, &decode, f->stream));
  float output[HEADS * DIM];
  download(f, output, b->output, sizeof output);
  for (int head = 0; head < HEADS; ++head) {
    const int kv_head = head / (HEADS / KV_HEADS);
    double weights[TOKENS], sum = 0;
    for (int token = 0; token < TOKENS; ++token) {
      double score = 0;
      for (int i = 0; i < DIM; ++i)
        score += b->query_numbers[head * DIM + i] * b->key_numbers[token * ROW + kv_head * DIM + i];
      sum += weights[token] = exp(score / sqrt(DIM));
    }
    for (int i = 0; i < DIM; ++i) {
      double expected = 0;
      for (int token = 0; token < TOKENS; ++token)
        expected += weights[token] / sum * b->value_numbers[token * ROW + kv_head * DIM + i];
      CHECK_NEAR(output[head * DIM + i], expected, 1e-5);
    }
  }
  CHECK_OK(nvb_attention_destroy(attention));
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  const uint32_t dtypes[] = {NVB_DTYPE_FP8_E4M3, NVB_DTYPE_FP8_E5M2};
  for (int i = 0; i < 2; ++i) {
    nvb_kv_cache_options options = options_of(&b, dtypes[i]);
    nvb_kv_cache* cache = NULL;
    CHECK_OK(nvb_kv_cache_create(f.backend, &options, &cache));
    uint64_t bytes = 0;
    CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
    CHECK_EQUAL(bytes, 2 * ELEMENTS);
    check_cache(&b, cache);
    CHECK_OK(nvb_kv_cache_destroy(cache));

    // The same in the engine's memory, whose dtype need not be said again.
    nvb_tensor memory[2 * LAYERS];
    void* blocks[2 * LAYERS];
    static const char zeros[ELEMENTS / LAYERS];
    for (int at = 0; at < 2 * LAYERS; ++at) {
      blocks[at] = upload(&f, zeros, sizeof zeros);
      memory[at] = nvb_tensor_3d(blocks[at], dtypes[i], 1, KV_HEADS, CAPACITY);
      memory[at].rank = 4;
      memory[at].shape[3] = DIM;
    }
    options.dtype = 0;
    options.memory = memory;
    options.memory_count = 2 * LAYERS;
    CHECK_OK(nvb_kv_cache_create(f.backend, &options, &cache));
    check_cache(&b, cache);
    CHECK_OK(nvb_kv_cache_destroy(cache));
    for (int at = 0; at < 2 * LAYERS; ++at) release(&f, blocks[at]);
  }

  nvb_kv_cache* cache = NULL;
  nvb_kv_cache_options wrong = options_of(&b, NVB_DTYPE_F32);
#define REFUSED(...) \
  CHECK_FAILS(nvb_kv_cache_create(f.backend, &wrong, &cache), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  REFUSED("key_scales", "f32");
  wrong = options_of(&b, NVB_DTYPE_FP8_E4M3);
  wrong.value_scales.shape[1] = 1;
  REFUSED("value_scales", "[2, 1]", "[2, 2]");
  wrong = options_of(&b, NVB_DTYPE_FP8_E4M3);
  wrong.key_scales.dtype = NVB_DTYPE_BF16;
  REFUSED("key_scales", "bf16", "f32");
  wrong = options_of(&b, 10);
  REFUSED("dtype is 10");
  wrong = options_of(&b, NVB_DTYPE_KV_INT8);
  REFUSED("key_scales", "int8 rows");
  // No operation takes such a tensor.
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  softmax.input = softmax.output = nvb_tensor_2d(b.query, NVB_DTYPE_FP8_E4M3, 4, 16);
  CHECK_FAILS(nvb_softmax(f.backend, &softmax, f.stream), NVB_ERROR_INVALID_ARGUMENT, "fp8 e4m3");

  void* owned[] = {b.key, b.value, b.query, b.output, b.positions, b.key_scales, b.value_scales};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) release(&f, owned[i]);
  close_fixture(&f);
  return test_result();
}
