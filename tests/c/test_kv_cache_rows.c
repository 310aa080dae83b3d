// Caches in INT8, Q8_0 and Q4_0, also of two formats, of the library's memory and of the engine's: what is appended
// comes back through attention, and a row has the bytes that the header says.
#include "check.h"

enum { LAYERS = 2, LAYER = 1, KV_HEADS = 2, HEADS = 4, DIM = 64, TOKENS = 5, CAPACITY = 8 };
enum { ROW = KV_HEADS * DIM, PLACES = KV_HEADS * CAPACITY };

// Bytes of a row of 64 elements.
static uint64_t row_bytes(uint32_t dtype) {
  return dtype == NVB_DTYPE_KV_Q4_0 ? 48 : dtype == NVB_DTYPE_F32 ? 256 : 80;
}

// Integers times 1/4 whose largest magnitude makes 1/4 the scale of every block: what comes back is exact.
static void fill(float* numbers, uint32_t dtype, uint32_t* state) {
  const int most = dtype == NVB_DTYPE_KV_Q4_0 ? 7 : 127;
  for (int i = 0; i < TOKENS * ROW; ++i) {
    numbers[i] = floorf(next_number(state) * (float)most) / 4;
    if (i % 32 == 5) numbers[i] = dtype == NVB_DTYPE_KV_Q4_0 ? -2.0f : 127 / 4.0f;
  }
}

typedef struct {
  float key[TOKENS * ROW], value[TOKENS * ROW], query[HEADS * DIM];
} numbers;

static nvb_kv_cache_options options_of(uint32_t key, uint32_t value) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = LAYERS;
  options.sequences = 1;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = CAPACITY;
  options.dtype = key;
  options.value_dtype = value;
  return options;
}

// The last token attends to all.
static void check_cache(fixture* f, const numbers* given, nvb_kv_cache* cache) {
  const int32_t places[TOKENS] = {0, 1, 2, 3, 4};
  void* key = upload(f, given->key, sizeof given->key);
  void* value = upload(f, given->value, sizeof given->value);
  void* query = upload(f, given->query, sizeof given->query);
  void* to = upload(f, given->query, sizeof given->query);
  void* positions = upload(f, places, sizeof places);
  nvb_kv_cache_append_args append;
  nvb_kv_cache_append_args_init(&append);
  append.key = nvb_tensor_3d(key, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.value = nvb_tensor_3d(value, NVB_DTYPE_F32, TOKENS, KV_HEADS, DIM);
  append.positions = nvb_tensor_1d(positions, NVB_DTYPE_I32, TOKENS);
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
  decode.query = nvb_tensor_3d(query, NVB_DTYPE_F32, 1, HEADS, DIM);
  decode.output = nvb_tensor_3d(to, NVB_DTYPE_F32, 1, HEADS, DIM);
  decode.cache = cache;
  decode.layer = LAYER;
  decode.positions = nvb_tensor_1d((int32_t*)positions + TOKENS - 1, NVB_DTYPE_I32, 1);
  CHECK_OK(nvb_attention_decode(attention, &decode, f->stream));
  float output[HEADS * DIM];
  download(f, output, to, sizeof output);
  for (int head = 0; head < HEADS; ++head) {
    const int kv_head = head / (HEADS / KV_HEADS);
    double scores[TOKENS], most = -INFINITY, sum = 0;
    for (int token = 0; token < TOKENS; ++token) {
      scores[token] = 0;
      for (int i = 0; i < DIM; ++i)
        scores[token] += given->query[head * DIM + i] * given->key[token * ROW + kv_head * DIM + i] / sqrt(DIM);
      most = fmax(most, scores[token]);
    }
    for (int token = 0; token < TOKENS; ++token) sum += exp(scores[token] - most);
    for (int i = 0; i < DIM; ++i) {
      double expected = 0;
      for (int token = 0; token < TOKENS; ++token)
        expected += exp(scores[token] - most) / sum * given->value[token * ROW + kv_head * DIM + i];
      CHECK_NEAR(output[head * DIM + i], expected, 1e-4);
    }
  }
  CHECK_OK(nvb_attention_destroy(attention));
  void* owned[] = {key, value, query, to, positions};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) release(f, owned[i]);
}

int main(void) {
  fixture f = open_fixture();
  const uint32_t dtypes[][2] = {{NVB_DTYPE_KV_INT8, 0},
                                {NVB_DTYPE_KV_Q8_0, 0},
                                {NVB_DTYPE_KV_Q4_0, 0},
                                {NVB_DTYPE_KV_INT8, NVB_DTYPE_KV_Q4_0},
                                {NVB_DTYPE_KV_Q4_0, NVB_DTYPE_F32},
                                {NVB_DTYPE_F32, NVB_DTYPE_KV_Q8_0}};
  uint32_t state = 11;
  for (size_t at = 0; at < sizeof dtypes / sizeof *dtypes; ++at) {
    const uint32_t key = dtypes[at][0], value = dtypes[at][1] != 0 ? dtypes[at][1] : key;
    static numbers given;
    fill(given.key, key, &state);
    fill(given.value, value, &state);
    for (int i = 0; i < HEADS * DIM; ++i) given.query[i] = next_number(&state) / 8;
    nvb_kv_cache_options options = options_of(key, dtypes[at][1]);
    nvb_kv_cache* cache = NULL;
    CHECK_OK(nvb_kv_cache_create(f.backend, &options, &cache));
    uint64_t bytes = 0;
    CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
    CHECK_EQUAL(bytes, LAYERS * PLACES * (row_bytes(key) + row_bytes(value)));
    check_cache(&f, &given, cache);
    CHECK_OK(nvb_kv_cache_destroy(cache));

    // The same in the engine's memory, whose dtypes need not be said again. The last extent is a row's bytes.
    nvb_tensor memory[2 * LAYERS];
    void* blocks[2 * LAYERS];
    static const char zeros[PLACES * 256];
    for (int i = 0; i < 2 * LAYERS; ++i) {
      const uint32_t dtype = i % 2 == 0 ? key : value;
      blocks[i] = upload(&f, zeros, PLACES * row_bytes(dtype));
      memory[i] = nvb_tensor_3d(blocks[i], dtype, 1, KV_HEADS, CAPACITY);
      memory[i].rank = 4;
      memory[i].shape[3] = dtype == NVB_DTYPE_F32 ? DIM : (int64_t)row_bytes(dtype);
    }
    options.dtype = options.value_dtype = 0;
    options.memory = memory;
    options.memory_count = 2 * LAYERS;
    CHECK_OK(nvb_kv_cache_create(f.backend, &options, &cache));
    check_cache(&f, &given, cache);
    CHECK_OK(nvb_kv_cache_destroy(cache));
    options.value_dtype = NVB_DTYPE_BF16;
    CHECK_FAILS(nvb_kv_cache_create(f.backend, &options, &cache), NVB_ERROR_INVALID_ARGUMENT, "value_dtype is bf16");
    for (int i = 0; i < 2 * LAYERS; ++i) release(&f, blocks[i]);
  }
  nvb_kv_cache* cache = NULL;
  nvb_kv_cache_options wrong = options_of(NVB_DTYPE_KV_INT8, 0);
  wrong.values_in_keys = 1;
  CHECK_FAILS(nvb_kv_cache_create(f.backend, &wrong, &cache), NVB_ERROR_INVALID_ARGUMENT, "values_in_keys",
              "int8 rows");
  // No operation takes such a tensor.
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  float x[64] = {0};
  void* data = upload(&f, x, sizeof x);
  softmax.input = softmax.output = nvb_tensor_2d(data, NVB_DTYPE_KV_INT8, 4, 16);
  CHECK_FAILS(nvb_softmax(f.backend, &softmax, f.stream), NVB_ERROR_INVALID_ARGUMENT, "int8 rows");
  release(&f, data);
  close_fixture(&f);
  return test_result();
}
