// What a sleeping memory manager holds is refused wherever a call would read or write it: weights, KV caches, and
// tensors of other managers than the backend's own.
#include "readers.h"

static void check_all_succeed(const readers* r, nvb_stream* stream) {
  for (int i = 0; i < READERS; ++i) {
    check_ok(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(r, stream));
    CHECK_OK(nvb_stream_synchronize(stream));
  }
}

static void check_all_fail(const readers* r, nvb_stream* stream, const char* word) {
  for (int i = 0; i < READERS; ++i) {
    const char* const words[] = {all_readers[i].name, "asleep", "nvb_memory_wake", word, NULL};
    check_fails(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(r, stream), NVB_ERROR_INVALID_ARGUMENT,
                words);
  }
}

static void test_weights_and_caches(fixture* f, readers* r) {
  create_weight_and_cache(r, f->stream);
  check_all_succeed(r, f->stream);
  for (int keep = 1; keep >= 0; --keep) {
    CHECK_OK(nvb_memory_sleep(f->memory, (uint32_t)keep, NULL));
    check_all_fail(r, f->stream, NULL);
    // What no memory is needed for is answered.
    nvb_weight_info info;
    nvb_weight_info_init(&info);
    CHECK_OK(nvb_weight_get_info(r->weight, &info));
    uint64_t bytes = 0;
    CHECK_OK(nvb_kv_cache_get_bytes(r->cache, &bytes));
    nvb_linear_case product;
    nvb_linear_case_init(&product);
    product.rows = 1;
    product.weight = r->weight;
    product.input_dtype = NVB_DTYPE_F32;
    size_t needed = 0;
    CHECK_OK(nvb_kernel_explain(f->backend, &product, NULL, 0, &needed));
    nvb_linear_args args;
    nvb_linear_args_init(&args);
    args.input = args.output = nvb_tensor_2d(NULL, NVB_DTYPE_F32, TOKENS, WIDTH);
    args.output.data = (void*)4096;
    args.weight = r->weight;
    CHECK_OK(nvb_linear_get_workspace_size(f->backend, &args, &needed));
    CHECK_FAILS(nvb_tune_linear(f->backend, &product, 1, NULL, NULL, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "asleep");
    CHECK_OK(nvb_memory_wake(f->memory, NULL));
    check_all_succeed(r, f->stream);
  }
  // Objects may go while their memory sleeps.
  CHECK_OK(nvb_memory_sleep(f->memory, 0, NULL));
  CHECK_OK(nvb_weight_destroy(r->weight));
  CHECK_OK(nvb_kv_cache_destroy(r->cache));
  CHECK_OK(nvb_memory_wake(f->memory, NULL));
  CHECK_EQUAL(statistics_of(f->memory).blocks, 0);
}

// A weight that reads the caller's block sleeps with that.
static void test_borrowed_weight(fixture* f, readers* r) {
  nvb_memory_manager* lender = NULL;
  void* block = NULL;
  CHECK_OK(nvb_memory_manager_create(f->backend, NULL, &lender));
  CHECK_OK(nvb_memory_allocate(lender, WIDTH * WIDTH * sizeof(float), f->stream, &block));
  CHECK_OK(nvb_memory_fill(lender, block, 0, WIDTH * WIDTH * sizeof(float), f->stream));
  nvb_tensor part = nvb_tensor_2d(block, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.source = NVB_SOURCE_BORROWED;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &r->weight));
  CHECK_OK(read_by_linear(r, f->stream));
  CHECK_OK(nvb_memory_sleep(lender, 1, NULL));
  CHECK_FAILS(read_by_linear(r, f->stream), NVB_ERROR_INVALID_ARGUMENT, "nvb_linear", "asleep");
  CHECK_FAILS(read_by_dequantize(r, f->stream), NVB_ERROR_INVALID_ARGUMENT, "nvb_weight_dequantize", "asleep");
  CHECK_OK(nvb_memory_wake(lender, NULL));
  CHECK_OK(read_by_linear(r, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_OK(nvb_weight_destroy(r->weight));
  // A manager that goes in its sleep leaves its addresses to others.
  CHECK_OK(nvb_memory_sleep(lender, 0, NULL));
  CHECK_OK(nvb_memory_free(lender, block, f->stream));
  CHECK_OK(nvb_memory_manager_destroy(lender));
}

// The backend's own manager is awake; that of the tensors is not.
static void test_tensors_of_another_manager(fixture* f, readers* r) {
  create_weight_and_cache(r, f->stream);
  CHECK_OK(nvb_memory_sleep(r->tensors, 1, NULL));
  check_all_fail(r, f->stream, NULL);
  float host[64] = {0};
  void* block = upload(f, host, sizeof host);
  CHECK_FAILS(nvb_memory_copy(f->memory, block, r->input, 64, NVB_COPY_DEVICE_TO_DEVICE, f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_FAILS(nvb_memory_copy(f->memory, r->input, block, 64, NVB_COPY_DEVICE_TO_DEVICE, f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_OK(nvb_memory_wake(r->tensors, NULL));
  check_all_succeed(r, f->stream);
  CHECK_OK(nvb_memory_copy(f->memory, block, r->input, 64, NVB_COPY_DEVICE_TO_DEVICE, f->stream));
  release(f, block);
  CHECK_OK(nvb_weight_destroy(r->weight));
  CHECK_OK(nvb_kv_cache_destroy(r->cache));
}

// On the CPU a tensor may lie in any memory, another backend's included.
static void test_another_backend(fixture* f) {
  fixture other = open_fixture();
  float values[256] = {0};
  void* block = upload(&other, values, sizeof values);
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = nvb_tensor_1d(block, NVB_DTYPE_F32, 256);
  args.factor = 2;
  if (test_on_cpu()) CHECK_OK(nvb_scale(f->backend, &args, f->stream));
  CHECK_OK(nvb_memory_sleep(other.memory, 1, NULL));
  CHECK_FAILS(nvb_scale(f->backend, &args, f->stream), NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_FAILS(nvb_stream_set_workspace(other.stream, block, 1024), NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_OK(nvb_memory_wake(other.memory, NULL));
  release(&other, block);
  close_fixture(&other);
}

int main(void) {
  fixture f = open_fixture();
  readers r = open_readers(&f);
  test_weights_and_caches(&f, &r);
  test_borrowed_weight(&f, &r);
  test_tensors_of_another_manager(&f, &r);
  test_another_backend(&f);
  CHECK_OK(nvb_attention_destroy(r.attention));
  close_readers(&r);
  close_fixture(&f);
  return test_result();
}
