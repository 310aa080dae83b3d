// KV caches: size, options, appends, and what is refused.
#include "check.h"

static nvb_status create(void* value, void* context) {
  nvb_kv_cache* cache = NULL;
  nvb_status status = nvb_kv_cache_create(((fixture*)context)->backend, value, &cache);
  CHECK((status == NVB_OK) == (cache != NULL));
  CHECK_OK(nvb_kv_cache_destroy(cache));
  return status;
}

static nvb_kv_cache_options small_cache(void) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = 2;
  options.sequences = 3;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.capacity = 10;
  options.dtype = NVB_DTYPE_F32;
  return options;
}

static void test_options(fixture* f) {
  nvb_kv_cache_options options = small_cache();
  CHECK_STRUCT(options, create, f);
  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_kv_cache* cache = NULL;
  uint64_t bytes = 0;
  for (uint32_t dtype = 0; dtype <= NVB_DTYPE_BF16; ++dtype) {
    options.dtype = dtype;
    CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
    CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
    int wide = dtype == NVB_DTYPE_F32 || (dtype == 0 && test_on_cpu());
    uint64_t expected = 2ull * 2 * 3 * 2 * 16 * 10 * (wide ? 4 : 2);
    CHECK(bytes >= expected && bytes < expected + 4 * 256);
    CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, bytes);
    CHECK_OK(nvb_kv_cache_destroy(cache));
  }
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);

  cache = foreign_handle();
#define REFUSED(...) \
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, &cache), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define FIELD_REFUSED(field, value, ...) \
  options = small_cache();               \
  options.field = (value);               \
  REFUSED(__VA_ARGS__)
  FIELD_REFUSED(layers, 0, "layers is 0");
  FIELD_REFUSED(sequences, 0, "sequences is 0");
  FIELD_REFUSED(kv_heads, 0, "kv_heads is 0");
  FIELD_REFUSED(head_dim, 0, "head_dim is 0");
  FIELD_REFUSED(head_dim, 577, "head_dim is 577", "576");
  FIELD_REFUSED(capacity, 0, "capacity is 0");
  FIELD_REFUSED(capacity, UINT32_MAX, "capacity is 4294967295", "2147483647");
  FIELD_REFUSED(dtype, NVB_DTYPE_I32, "i32");
  FIELD_REFUSED(dtype, 10, "dtype is 10");
  FIELD_REFUSED(value_dtype, 10, "value_dtype is 10");
  FIELD_REFUSED(value_dtype, NVB_DTYPE_I32, "i32");
  options = small_cache();
  options.layers = options.sequences = options.kv_heads = options.capacity = INT32_MAX;
  REFUSED("overflow");
  options = small_cache();
  options.layers = options.capacity = 1 << 20;
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, &cache), NVB_ERROR_OUT_OF_MEMORY, "KV cache", "1048576");
  options = small_cache();
  CHECK_FAILS(nvb_kv_cache_create(NULL, &options, &cache), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, NULL), NVB_ERROR_INVALID_ARGUMENT, "cache", "NULL");
  CHECK(cache == foreign_handle());
}

static nvb_status append(void* value, void* context) {
  return nvb_kv_cache_append(((fixture*)context)->backend, value, ((fixture*)context)->stream);
}

static void test_append(fixture* f) {
  enum { TOKENS = 3, ROW = 2 * 16 };
  nvb_kv_cache_options options = small_cache();
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  float values[TOKENS * ROW];
  for (int i = 0; i < TOKENS * ROW; ++i) values[i] = (float)i;
  const int32_t positions[TOKENS] = {0, 9, 4}, sequences[TOKENS] = {2, 0, 2}, outside[TOKENS] = {0, 10, 4};
  void *block = upload(f, values, sizeof values), *where = upload(f, positions, sizeof positions);
  void *sequence_block = upload(f, sequences, sizeof sequences), *outside_block = upload(f, outside, sizeof outside);
  nvb_kv_cache_append_args args;
  nvb_kv_cache_append_args_init(&args);
  args.key = args.value = nvb_tensor_3d(block, NVB_DTYPE_F32, TOKENS, 2, 16);
  args.positions = nvb_tensor_1d(where, NVB_DTYPE_I32, TOKENS);
  args.sequences = nvb_tensor_1d(sequence_block, NVB_DTYPE_I32, TOKENS);
  args.cache = cache;
  args.layer = 1;
  CHECK_STRUCT(args, append, f);
  CHECK_OK(nvb_kv_cache_append(f->backend, &args, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));

#define APPEND_REFUSED(...) \
  CHECK_FAILS(nvb_kv_cache_append(f->backend, &args, f->stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  nvb_kv_cache_append_args good = args;
  args.layer = 2;
  APPEND_REFUSED("layer is 2", "2 layers");
  args = good;
  args.cache = NULL;
  APPEND_REFUSED("KV cache", "NULL");
  args.cache = foreign_handle();
  APPEND_REFUSED("not a KV cache");
  args = good;
  args.key = nvb_tensor_3d(block, NVB_DTYPE_F32, TOKENS, 1, 16);
  APPEND_REFUSED("key", "1 heads of 16", "2 of 16");
  args = good;
  args.value = nvb_tensor_3d(block, NVB_DTYPE_F32, TOKENS, 2, 8);
  APPEND_REFUSED("value", "[3, heads, 16]");
  args = good;
  args.value = nvb_tensor_3d(block, NVB_DTYPE_F32, TOKENS + 1, 2, 16);
  APPEND_REFUSED("value", "512 bytes", "past the end");
  args = good;
  args.positions = nvb_tensor_1d(where, NVB_DTYPE_F32, TOKENS);
  APPEND_REFUSED("positions", "f32", "i32");
  args = good;
  args.sequences = nvb_tensor_1d(sequence_block, NVB_DTYPE_I32, TOKENS - 1);
  APPEND_REFUSED("sequences", "[2]", "[3]");
  args = good;
  memset(&args.key, 0, sizeof args.key);
  APPEND_REFUSED("key", "missing");
  args = good;
  memset(&args.positions, 0, sizeof args.positions);
  APPEND_REFUSED("positions", "missing");
  args = good;
  args.reserved = 1;
  APPEND_REFUSED("reserved is 1");
  args = good;
  args.positions = nvb_tensor_1d(outside_block, NVB_DTYPE_I32, TOKENS);
  if (test_on_cpu()) {
    APPEND_REFUSED("position 10", "10 tokens");
  } else {
    CHECK_OK(nvb_kv_cache_append(f->backend, &args, f->stream));
    CHECK_OK(nvb_stream_synchronize(f->stream));
  }
  CHECK_FAILS(nvb_kv_cache_append(NULL, &good, f->stream), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  release(f, block);
  release(f, where);
  release(f, sequence_block);
  release(f, outside_block);
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_FAILS(nvb_kv_cache_append(f->backend, &good, f->stream), NVB_ERROR_INVALID_ARGUMENT, "KV cache", "destroyed");
}

static void test_handles(fixture* f) {
  nvb_kv_cache_options options = small_cache();
  nvb_kv_cache* cache = NULL;
  uint64_t bytes = 7;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  CHECK_FAILS(nvb_kv_cache_get_bytes(cache, NULL), NVB_ERROR_INVALID_ARGUMENT, "bytes", "NULL");
  CHECK_FAILS(nvb_kv_cache_get_bytes(NULL, &bytes), NVB_ERROR_INVALID_ARGUMENT, "KV cache", "NULL");
  CHECK_FAILS(nvb_kv_cache_get_bytes((nvb_kv_cache*)f->stream, &bytes), NVB_ERROR_INVALID_ARGUMENT, "not a KV cache");
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_FAILS(nvb_kv_cache_get_bytes(cache, &bytes), NVB_ERROR_INVALID_ARGUMENT, "KV cache", "destroyed");
  CHECK_FAILS(nvb_kv_cache_destroy(cache), NVB_ERROR_INVALID_ARGUMENT, "KV cache", "destroyed");
  CHECK_OK(nvb_kv_cache_destroy(NULL));
  CHECK_EQUAL(bytes, 7);
}

static void test_growth(fixture* f) {
  nvb_kv_cache_options options = small_cache();
  nvb_memory_statistics before = statistics_of(f->memory);
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    nvb_kv_cache* cache = NULL;
    CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
    CHECK_OK(nvb_kv_cache_destroy(cache));
  }
  CHECK_GROWTH(kilobytes);
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
}

int main(void) {
  fixture f = open_fixture();
  test_options(&f);
  test_append(&f);
  test_handles(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
