// Threads with small stacks, as engines with many connections have them, make every call that works, and those that
// fail: 64 KiB on the CPU, and what the header asks for with a GPU, where the driver alone takes 57 KiB in its first
// call. The C library takes a library's thread-locals out of that size as well.
#include <pthread.h>

#include "readers.h"

enum { CPU_STACK_BYTES = 64 * 1024, GPU_STACK_BYTES = 256 * 1024 };

static fixture f;

static void make_all_calls(fixture* own) {
  readers r = open_readers(own);
  create_weight_and_cache(&r, own->stream);
  for (int i = 0; i < READERS; ++i) {
    check_ok(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(&r, own->stream));
  }
  CHECK_OK(nvb_stream_synchronize(own->stream));
  CHECK_OK(nvb_weight_destroy(r.weight));
  for (uint32_t format = NVB_WEIGHT_FORMAT_BF16; format <= NVB_WEIGHT_FORMAT_F32; ++format) {
    create_weight(&r, own->stream, format, &r.weight);
    if (format != NVB_WEIGHT_FORMAT_F32 && format != NVB_WEIGHT_FORMAT_F16) CHECK_OK(read_by_linear(&r, own->stream));
    CHECK_OK(read_by_dequantize(&r, own->stream));
    CHECK_OK(nvb_weight_destroy(r.weight));
  }
  nvb_rms_norm_args norm;
  nvb_rms_norm_args_init(&norm);
  norm.input = reader_rows(r.input);
  norm.output = reader_rows(r.output);
  CHECK_OK(nvb_rms_norm(own->backend, &norm, own->stream));
  nvb_matmul_args product;
  nvb_matmul_args_init(&product);
  product.a = product.b = reader_rows(r.input);
  product.output = nvb_tensor_2d(r.output, NVB_DTYPE_F32, TOKENS, TOKENS);
  product.transpose_b = 1;
  CHECK_OK(nvb_matmul(own->backend, &product, own->stream));
  nvb_sample_args sample;
  nvb_sample_args_init(&sample);
  sample.logits = reader_rows(r.input);
  sample.tokens = nvb_tensor_1d(r.integers, NVB_DTYPE_I32, TOKENS);
  CHECK_OK(nvb_sample(own->backend, &sample, own->stream));
  nvb_argmax_args argmax;
  nvb_argmax_args_init(&argmax);
  argmax.logits = sample.logits;
  argmax.tokens = sample.tokens;
  CHECK_OK(nvb_argmax(own->backend, &argmax, own->stream));
  CHECK_OK(nvb_stream_synchronize(own->stream));
  CHECK_OK(nvb_kv_cache_destroy(r.cache));
  CHECK_OK(nvb_attention_destroy(r.attention));
  close_readers(&r);
}

static void tune_and_explain(fixture* own) {
  nvb_linear_case product;
  nvb_linear_case_init(&product);
  product.rows = 1;
  product.columns = product.depth = 64;
  product.format = NVB_WEIGHT_FORMAT_INT8;
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  CHECK_OK(nvb_tune_linear(own->backend, &product, 1, &options, NULL, NULL, NULL));
  size_t needed = 0;
  CHECK_OK(nvb_kernel_explain(own->backend, &product, NULL, 0, &needed));
}

static void use_memory(fixture* own) {
  for (int shift = 0; shift < 26; ++shift) {
    void* block = NULL;
    CHECK_OK(nvb_memory_allocate(own->memory, (size_t)1 << shift, own->stream, &block));
    CHECK_OK(nvb_memory_free(own->memory, block, own->stream));
  }
  void* block = NULL;
  CHECK(nvb_memory_allocate(own->memory, (size_t)1 << 60, own->stream, &block) == NVB_ERROR_OUT_OF_MEMORY);
  char text[512];
  CHECK(nvb_last_error_message(text, sizeof text) > 1);
  size_t needed = 0;
  CHECK_OK(nvb_memory_get_leak_report(own->memory, NULL, 0, &needed));
  CHECK_OK(nvb_memory_write_snapshot(own->memory, "/tmp/nvbackend_stacks_snapshot.json"));
  unlink("/tmp/nvbackend_stacks_snapshot.json");
  uint64_t released = 0;
  nvb_status status = nvb_memory_sleep(own->memory, 1, &released);
  if (status == NVB_OK) CHECK_OK(nvb_memory_wake(own->memory, NULL));
  CHECK_OK(nvb_memory_trim(own->memory, 0, NULL));
  nvb_pool* pool = NULL;
  CHECK_OK(nvb_pool_create(own->memory, "pool", &pool));
  CHECK_OK(nvb_pool_allocate(pool, 1000, own->stream, &block));
  CHECK_OK(nvb_pool_destroy(pool));
}

static void use_files(void) {
  nvb_gguf* file = NULL;
  CHECK_FAILS(nvb_gguf_open("/proc/self/exe", &file), NVB_ERROR_INVALID_ARGUMENT, "GGUF");
  nvb_configuration* configuration = NULL;
  CHECK_OK(nvb_configuration_create(0, &configuration));
  CHECK_OK(nvb_configuration_set(configuration, "device", test_device()));
  size_t needed = 0;
  CHECK_OK(nvb_configuration_get_json(configuration, NULL, 0, &needed));
  nvb_backend* configured = NULL;
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.configuration = configuration;
  CHECK_OK(nvb_backend_create(&options, &configured));
  CHECK_OK(nvb_backend_destroy(configured));
  CHECK_OK(nvb_configuration_destroy(configuration));
}

// Everything on a backend of the thread's own, which it also creates and destroys.
static void* use_own_backend(void* unused) {
  (void)unused;
  fixture own = open_fixture();
  make_all_calls(&own);
  use_memory(&own);
  use_files();
  tune_and_explain(&own);
  close_fixture(&own);
  return NULL;
}

// And on one that is shared.
static void* use_shared_backend(void* unused) {
  (void)unused;
  fixture own = f;
  CHECK_OK(nvb_stream_create(f.backend, 0, &own.stream));
  make_all_calls(&own);
  CHECK_OK(nvb_stream_destroy(own.stream));
  return NULL;
}

static void run(void* (*body)(void*), int count) {
  pthread_t threads[8];
  pthread_attr_t attributes;
  CHECK_EQUAL(pthread_attr_init(&attributes), 0);
  CHECK_EQUAL(pthread_attr_setstacksize(&attributes, test_on_cpu() ? CPU_STACK_BYTES : GPU_STACK_BYTES), 0);
  for (int i = 0; i < count; ++i) CHECK_EQUAL(pthread_create(&threads[i], &attributes, body, NULL), 0);
  for (int i = 0; i < count; ++i) pthread_join(threads[i], NULL);
  pthread_attr_destroy(&attributes);
}

int main(void) {
#ifdef __SANITIZE_ADDRESS__
  puts("skipped: small stacks under AddressSanitizer, whose frames and red zones take several times the room");
  return 0;
#endif
  run(use_own_backend, 1);
  f = open_fixture();
  run(use_shared_backend, 8);
  close_fixture(&f);
  return test_result();
}
