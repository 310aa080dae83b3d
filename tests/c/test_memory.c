// The memory manager: blocks of every kind, copies, fills, the limit, host memory.
#include "check.h"

static void test_blocks(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  CHECK(before.device_total > 0 && before.device_free <= before.device_total);
  void *a = NULL, *b = foreign_handle();
  CHECK_OK(nvb_memory_allocate(f->memory, 1, f->stream, &a));
  CHECK_EQUAL((uintptr_t)a % 256, 0);
  CHECK_OK(nvb_memory_allocate(f->memory, 100000, NULL, &b));
  CHECK_EQUAL((uintptr_t)b % 256, 0);
  nvb_memory_statistics now = statistics_of(f->memory);
  CHECK_EQUAL(now.allocated - before.allocated, 100001);
  CHECK_EQUAL(now.blocks - before.blocks, 2);
  CHECK_EQUAL(now.allocations - before.allocations, 2);
  CHECK(now.peak >= now.allocated);

  CHECK_FAILS(nvb_memory_free(f->memory, (char*)b + 1, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_memory_free(f->memory, b, NULL));
  CHECK_FAILS(nvb_memory_free(f->memory, b, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block", "freed before");
  int local;
  CHECK_FAILS(nvb_memory_free(f->memory, &local, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_memory_free(f->memory, NULL, f->stream));
  CHECK_OK(nvb_memory_free(f->memory, a, f->stream));
  now = statistics_of(f->memory);
  CHECK_EQUAL(now.allocated, before.allocated);
  CHECK_EQUAL(now.frees - before.frees, 2);

  void* out = foreign_handle();
  CHECK_FAILS(nvb_memory_allocate(f->memory, 0, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "bytes is 0");
  CHECK_FAILS(nvb_memory_allocate(f->memory, 8, f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer", "NULL");
  CHECK_FAILS(nvb_memory_allocate(NULL, 8, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "memory manager", "NULL");
  CHECK_FAILS(nvb_memory_allocate(f->memory, 8, foreign_handle(), &out), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  CHECK_FAILS(nvb_memory_free(NULL, out, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");

  // More than any machine has; the numbers are in the detail.
  const size_t huge[] = {(size_t)1 << 50, SIZE_MAX / 2, SIZE_MAX};
  for (size_t i = 0; i < sizeof huge / sizeof *huge; ++i) {
    CHECK_FAILS(nvb_memory_allocate(f->memory, huge[i], f->stream, &out), NVB_ERROR_OUT_OF_MEMORY,
                "nvb_memory_allocate");
    nvb_error_detail detail;
    nvb_error_detail_init(&detail);
    CHECK_OK(nvb_last_error_get(&detail));
    CHECK_EQUAL(detail.status, NVB_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(detail.requested, huge[i]);
  }
  CHECK(out == foreign_handle());
  now = statistics_of(f->memory);
  CHECK_EQUAL(now.allocated, before.allocated);
  CHECK_EQUAL(now.failures - before.failures, 3);
}

// Small and large blocks in one call, with NULL among them, and more of them than a thread keeps.
static void test_many(fixture* f) {
  enum { COUNT = 700 };
  static void* blocks[COUNT];
  const uint64_t allocated = statistics_of(f->memory).allocated;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < COUNT; ++i) {
      blocks[i] = NULL;
      if (i % 50 != 7) {
        CHECK_OK(nvb_memory_allocate(f->memory, i % 100 == 0 ? 4 << 20 : 1 + 700 * (i % 9), f->stream, &blocks[i]));
      }
    }
    CHECK_OK(nvb_memory_free_many(f->memory, blocks, COUNT, round == 1 ? NULL : f->stream));
    CHECK_EQUAL(statistics_of(f->memory).allocated, allocated);
  }
  CHECK_OK(nvb_memory_free_many(f->memory, NULL, 0, f->stream));
  CHECK_OK(nvb_memory_free_many(f->memory, blocks, 0, NULL));

  // What stands before the first that is not live is freed, the rest is not.
  for (int i = 0; i < 40; ++i) CHECK_OK(nvb_memory_allocate(f->memory, 5000, f->stream, &blocks[i]));
  void* twice[40];
  memcpy(twice, blocks, sizeof twice);
  twice[30] = blocks[3];
  CHECK_FAILS(nvb_memory_free_many(f->memory, twice, 40, f->stream), NVB_ERROR_INVALID_ARGUMENT, "pointers[30]",
              "live block");
  CHECK_EQUAL(statistics_of(f->memory).allocated - allocated, 10 * 5000);
  CHECK_OK(nvb_memory_free_many(f->memory, blocks + 30, 10, f->stream));
  CHECK_EQUAL(statistics_of(f->memory).allocated, allocated);

  CHECK_FAILS(nvb_memory_free_many(f->memory, NULL, 2, f->stream), NVB_ERROR_INVALID_ARGUMENT, "pointers", "NULL");
  CHECK_FAILS(nvb_memory_free_many(NULL, blocks, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_memory_free_many(f->memory, blocks, 1, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
}

static void test_copies(fixture* f) {
  enum { BYTES = 1000 };
  unsigned char from[BYTES], back[BYTES];
  for (int i = 0; i < BYTES; ++i) from[i] = (unsigned char)(i * 7 + 1);
  void *a = upload(f, from, BYTES), *b = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, BYTES, f->stream, &b));
  CHECK_OK(nvb_memory_fill(f->memory, b, 0xee, BYTES, f->stream));
  CHECK_OK(nvb_memory_copy(f->memory, (char*)b + 3, (char*)a + 10, 500, NVB_COPY_DEVICE_TO_DEVICE, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, (char*)b + BYTES - 1, 0x11, 1, f->stream));
  download(f, back, b, BYTES);
  CHECK(back[0] == 0xee && back[2] == 0xee && back[503] == 0xee && back[BYTES - 2] == 0xee && back[BYTES - 1] == 0x11);
  CHECK(memcmp(back + 3, from + 10, 500) == 0);
  CHECK_OK(nvb_memory_copy(f->memory, NULL, NULL, 0, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, NULL, 0, 0, f->stream));

  nvb_status (*const copy)(nvb_memory_manager*, void*, const void*, size_t, uint32_t, nvb_stream*) = nvb_memory_copy;
  CHECK_FAILS(copy(f->memory, a, from, 8, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "kind is 0", "1 to 3");
  CHECK_FAILS(copy(f->memory, a, from, 8, 4, f->stream), NVB_ERROR_INVALID_ARGUMENT, "kind is 4", "1 to 3");
  CHECK_FAILS(copy(f->memory, a, from, BYTES + 1, NVB_COPY_HOST_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT,
              "destination", "1001");
  CHECK_FAILS(copy(f->memory, (char*)a + 1, b, BYTES, NVB_COPY_DEVICE_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT,
              "destination", "1000");
  CHECK_FAILS(copy(f->memory, a, (char*)b + 999, 2, NVB_COPY_DEVICE_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT,
              "source", "2 bytes");
  CHECK_FAILS(copy(f->memory, back, (char*)b + 1, SIZE_MAX, NVB_COPY_DEVICE_TO_HOST, f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "source");
  CHECK_FAILS(copy(f->memory, NULL, from, 8, NVB_COPY_HOST_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT,
              "destination", "NULL");
  CHECK_FAILS(copy(f->memory, a, NULL, 8, NVB_COPY_HOST_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT, "source",
              "NULL");
  CHECK_FAILS(copy(NULL, a, from, 8, NVB_COPY_HOST_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(copy(f->memory, a, from, 8, NVB_COPY_HOST_TO_DEVICE, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT,
              "not a stream");
  CHECK_FAILS(nvb_memory_fill(f->memory, b, 256, 8, f->stream), NVB_ERROR_INVALID_ARGUMENT, "value is 256", "255");
  CHECK_FAILS(nvb_memory_fill(f->memory, b, 0, BYTES + 1, f->stream), NVB_ERROR_INVALID_ARGUMENT, "1001");
  CHECK_FAILS(nvb_memory_fill(f->memory, back, 0, 8, f->stream), NVB_ERROR_INVALID_ARGUMENT, "destination",
              "live block");
  CHECK_FAILS(nvb_memory_fill(NULL, b, 0, 8, f->stream), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  if (!test_on_cpu()) {
    CHECK_FAILS(copy(f->memory, back, from, 8, NVB_COPY_HOST_TO_DEVICE, f->stream), NVB_ERROR_INVALID_ARGUMENT,
                "destination");
    CHECK_FAILS(copy(f->memory, back, from, 8, NVB_COPY_DEVICE_TO_HOST, f->stream), NVB_ERROR_INVALID_ARGUMENT,
                "source");
  }
  release(f, a);
  release(f, b);
}

static void test_alignment(fixture* f) {
  void* out = foreign_handle();
  for (size_t alignment = 1; alignment <= 2 << 20; alignment *= 2) {
    const size_t sizes[] = {1, 300, 70000, 3 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
      void* block = NULL;
      CHECK_OK(nvb_memory_allocate_aligned(f->memory, sizes[i], alignment, f->stream, &block));
      CHECK_EQUAL((uintptr_t)block % alignment, 0);
      CHECK_OK(nvb_memory_fill(f->memory, block, 1, sizes[i], f->stream));
      release(f, block);
    }
  }
  const size_t wrong[] = {0, 3, 768, 4 << 20, SIZE_MAX};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    CHECK_FAILS(nvb_memory_allocate_aligned(f->memory, 8, wrong[i], f->stream, &out), NVB_ERROR_INVALID_ARGUMENT,
                "alignment is", "power of two");
  }
  CHECK_FAILS(nvb_memory_allocate_aligned(f->memory, 0, 256, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT,
              "bytes is 0");
  CHECK_FAILS(nvb_memory_allocate_aligned(f->memory, SIZE_MAX, 256, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "bytes");
  CHECK_FAILS(nvb_memory_allocate_aligned(f->memory, 8, 256, f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer");
  CHECK_FAILS(nvb_memory_allocate_aligned(NULL, 8, 256, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK(out == foreign_handle());
}

static void test_tensors(fixture* f) {
  const int64_t shape[4] = {3, 5, 7, 2};
  size_t bytes = 0;
  CHECK_OK(nvb_tensor_bytes(NVB_DTYPE_BF16, 4, shape, &bytes));
  CHECK_EQUAL(bytes, 3 * 5 * 7 * 2 * 2);
  CHECK_OK(nvb_tensor_bytes(NVB_DTYPE_F32, 1, shape, &bytes));
  CHECK_EQUAL(bytes, 12);

  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_tensor tensor;
  CHECK_OK(nvb_memory_allocate_tensor(f->memory, NVB_DTYPE_F32, 2, shape, f->stream, &tensor));
  CHECK(tensor.dtype == NVB_DTYPE_F32 && tensor.rank == 2 && tensor.shape[0] == 3 && tensor.shape[1] == 5);
  CHECK(tensor.strides[0] == 0 && tensor.strides[1] == 0);
  CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, 60);
  // An operation takes it as it is.
  CHECK_OK(nvb_memory_fill(f->memory, tensor.data, 0, 60, f->stream));
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  softmax.input = softmax.output = tensor;
  CHECK_OK(nvb_softmax(f->backend, &softmax, f->stream));
  float values[15];
  download(f, values, tensor.data, sizeof values);
  CHECK_NEAR(values[14], 0.2, 1e-6);
  release(f, tensor.data);

  const struct {
    uint32_t dtype, rank;
    int64_t shape[4];
    const char* word;
  } wrong[] = {
      {0, 1, {1, 1, 1, 1}, "dtype is 0"},
      {99, 1, {1, 1, 1, 1}, "dtype is 99"},
      {NVB_DTYPE_F32, 0, {1, 1, 1, 1}, "rank is 0"},
      {NVB_DTYPE_F32, 5, {1, 1, 1, 1}, "rank is 5"},
      {NVB_DTYPE_F32, 2, {4, -1, 1, 1}, "extent is -1"},
      {NVB_DTYPE_F32, 2, {4, 0, 1, 1}, "no elements"},
      {NVB_DTYPE_F32, 2, {INT64_MAX, 1, 1, 1}, "overflows"},
      {NVB_DTYPE_F32, 4, {1 << 20, 1 << 20, 1 << 20, 1 << 20}, "overflows"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    size_t same = 7;
    CHECK_FAILS(nvb_tensor_bytes(wrong[i].dtype, wrong[i].rank, wrong[i].shape, &same), NVB_ERROR_INVALID_ARGUMENT,
                wrong[i].word);
    CHECK_EQUAL(same, 7);
    CHECK_FAILS(
        nvb_memory_allocate_tensor(f->memory, wrong[i].dtype, wrong[i].rank, wrong[i].shape, f->stream, &tensor),
        NVB_ERROR_INVALID_ARGUMENT, wrong[i].word);
  }
  CHECK_FAILS(nvb_tensor_bytes(NVB_DTYPE_F32, 2, NULL, &bytes), NVB_ERROR_INVALID_ARGUMENT, "shape", "NULL");
  CHECK_FAILS(nvb_tensor_bytes(NVB_DTYPE_F32, 2, shape, NULL), NVB_ERROR_INVALID_ARGUMENT, "bytes", "NULL");
  CHECK_FAILS(nvb_memory_allocate_tensor(f->memory, NVB_DTYPE_F32, 2, shape, f->stream, NULL),
              NVB_ERROR_INVALID_ARGUMENT, "tensor", "NULL");
  CHECK_FAILS(nvb_memory_allocate_tensor(NULL, NVB_DTYPE_F32, 2, shape, f->stream, &tensor), NVB_ERROR_INVALID_ARGUMENT,
              "NULL");
  const int64_t huge[2] = {1 << 25, 1 << 25};
  CHECK_FAILS(nvb_memory_allocate_tensor(f->memory, NVB_DTYPE_F32, 2, huge, f->stream, &tensor),
              NVB_ERROR_OUT_OF_MEMORY, "4503599627370496");
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
}

// Unified and page-locked memory: host and device meet in it, and the same call frees it.
static void test_other_memory(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  enum { BYTES = 1 << 20 };
  unsigned char* managed = NULL;
  unsigned char* pinned = NULL;
  CHECK_OK(nvb_memory_allocate_managed(f->memory, BYTES, (void**)&managed));
  CHECK_OK(nvb_memory_allocate_pinned(f->memory, BYTES, (void**)&pinned));
  CHECK(managed != NULL && pinned != NULL && (uintptr_t)managed % 256 == 0 && (uintptr_t)pinned % 256 == 0);
  if (managed == NULL || pinned == NULL) return;
  CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, 2 * BYTES);
  memset(pinned, 0x37, BYTES);
  for (uint32_t advice = NVB_ADVICE_READ_MOSTLY; advice <= NVB_ADVICE_NONE; ++advice) {
    CHECK_OK(nvb_memory_advise(f->memory, managed, BYTES, advice));
  }
  CHECK_OK(nvb_memory_prefetch(f->memory, managed, BYTES, 0, f->stream));
  CHECK_OK(nvb_memory_fill(f->memory, managed, 0x21, BYTES, f->stream));
  CHECK_OK(nvb_memory_copy(f->memory, managed + 7, pinned, 1000, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_memory_prefetch(f->memory, managed, BYTES, 1, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK(managed[6] == 0x21 && managed[7] == 0x37 && managed[1006] == 0x37 && managed[1007] == 0x21);

  void *block = NULL, *out = foreign_handle();
  CHECK_OK(nvb_memory_allocate(f->memory, 64, f->stream, &block));
  CHECK_OK(nvb_memory_advise(f->memory, block, 64, NVB_ADVICE_READ_MOSTLY));
  CHECK_OK(nvb_memory_prefetch(f->memory, pinned, BYTES, 1, f->stream));
  release(f, block);
  CHECK_FAILS(nvb_memory_advise(f->memory, managed, BYTES, 0), NVB_ERROR_INVALID_ARGUMENT, "advice is 0", "1 to 5");
  CHECK_FAILS(nvb_memory_advise(f->memory, managed, BYTES + 1, NVB_ADVICE_NONE), NVB_ERROR_INVALID_ARGUMENT,
              "live block");
  CHECK_FAILS(nvb_memory_advise(f->memory, managed, 0, NVB_ADVICE_NONE), NVB_ERROR_INVALID_ARGUMENT, "0 bytes");
  CHECK_FAILS(nvb_memory_advise(f->memory, &before, 8, NVB_ADVICE_NONE), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_FAILS(nvb_memory_prefetch(f->memory, managed, BYTES, 2, f->stream), NVB_ERROR_INVALID_ARGUMENT, "to_host is 2");
  CHECK_FAILS(nvb_memory_prefetch(f->memory, NULL, 8, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_FAILS(nvb_memory_free(f->memory, managed + 256, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  release(f, managed);
  release(f, pinned);
  CHECK_FAILS(nvb_memory_free(f->memory, managed, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  nvb_status (*const both[])(nvb_memory_manager*, size_t, void**) = {nvb_memory_allocate_managed,
                                                                     nvb_memory_allocate_pinned};
  for (int i = 0; i < 2; ++i) {
    CHECK_FAILS(both[i](f->memory, 0, &out), NVB_ERROR_INVALID_ARGUMENT, "bytes is 0");
    CHECK_FAILS(both[i](f->memory, 8, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer", "NULL");
    CHECK_FAILS(both[i](NULL, 8, &out), NVB_ERROR_INVALID_ARGUMENT, "memory manager", "NULL");
    CHECK_FAILS(both[i](f->memory, (size_t)1 << 50, &out), NVB_ERROR_OUT_OF_MEMORY, "nvb_memory_allocate_");
  }
  CHECK(out == foreign_handle());
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
}

static void test_host_memory(fixture* f) {
  unsigned char* host = NULL;
  void* out = foreign_handle();
  CHECK_OK(nvb_host_allocate(f->backend, 4096, (void**)&host));
  memset(host, 0x42, 4096);
  void* block = upload(f, host, 4096);
  memset(host, 0, 4096);
  download(f, host, block, 4096);
  CHECK(host[0] == 0x42 && host[4095] == 0x42);
  release(f, block);
  CHECK_OK(nvb_host_free(f->backend, host, 4096));
  CHECK_OK(nvb_host_free(f->backend, NULL, 4096));
  CHECK_FAILS(nvb_host_allocate(f->backend, 0, &out), NVB_ERROR_INVALID_ARGUMENT, "bytes is 0");
  CHECK_FAILS(nvb_host_allocate(f->backend, 8, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer", "NULL");
  CHECK_FAILS(nvb_host_allocate(NULL, 8, &out), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_host_free(NULL, &out, 8), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_host_allocate(f->backend, (size_t)1 << 50, &out), NVB_ERROR_OUT_OF_MEMORY, "nvb_host_allocate");
  CHECK(out == foreign_handle());
}

static void test_limit(void) {
  nvb_backend_options options = device_options();
  options.memory_limit = 10000;
  fixture f = {NULL, NULL, NULL};
  CHECK_OK(nvb_backend_create(&options, &f.backend));
  CHECK_OK(nvb_backend_get_memory_manager(f.backend, 0, &f.memory));
  void *a = NULL, *b = foreign_handle();
  CHECK_OK(nvb_memory_allocate(f.memory, 6000, NULL, &a));
  CHECK_FAILS(nvb_memory_allocate(f.memory, 4001, NULL, &b), NVB_ERROR_OUT_OF_MEMORY, "4001", "6000", "10000",
              "memory limit");
  nvb_error_detail detail;
  nvb_error_detail_init(&detail);
  CHECK_OK(nvb_last_error_get(&detail));
  CHECK(detail.status == NVB_ERROR_OUT_OF_MEMORY && detail.requested == 4001 && detail.limit == 10000);
  CHECK(b == foreign_handle());
  // Weights and caches count too.
  nvb_kv_cache* cache = NULL;
  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = cache_options.sequences = cache_options.kv_heads = 1;
  cache_options.head_dim = 64;
  cache_options.capacity = 64;
  cache_options.dtype = NVB_DTYPE_F32;
  CHECK_FAILS(nvb_kv_cache_create(f.backend, &cache_options, &cache), NVB_ERROR_OUT_OF_MEMORY, "KV cache", "10000");
  float values[64 * 64] = {0};
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 64, 64);
  nvb_weight* weight = NULL;
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  CHECK_FAILS(nvb_weight_create(f.backend, &desc, NULL, &weight), NVB_ERROR_OUT_OF_MEMORY, "weight [64, 64]", "10000");
  CHECK(cache == NULL && weight == NULL);
  CHECK_OK(nvb_memory_allocate(f.memory, 4000, NULL, &b));
  nvb_memory_statistics statistics = statistics_of(f.memory);
  CHECK(statistics.allocated == 10000 && statistics.peak == 10000 && statistics.limit == 10000 &&
        statistics.failures == 3);
  CHECK_OK(nvb_memory_free(f.memory, a, NULL));
  CHECK_OK(nvb_memory_free(f.memory, b, NULL));
  CHECK_OK(nvb_memory_manager_destroy(f.memory));
  CHECK_OK(nvb_backend_destroy(f.backend));
}

static void test_handles(fixture* f) {
  // Two handles are one manager.
  nvb_memory_manager* second = NULL;
  void* block = NULL;
  CHECK_OK(nvb_backend_get_memory_manager(f->backend, 0, &second));
  CHECK_OK(nvb_memory_allocate(second, 64, NULL, &block));
  CHECK_OK(nvb_memory_manager_destroy(second));
  CHECK_FAILS(nvb_memory_free(second, block, NULL), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  CHECK_FAILS(nvb_memory_manager_destroy(second), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  CHECK_FAILS(nvb_memory_manager_destroy((nvb_memory_manager*)f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a memory");
  CHECK_OK(nvb_memory_manager_destroy(NULL));
  release(f, block);
  // The stream of another backend.
  fixture other = open_fixture();
  CHECK_FAILS(nvb_memory_allocate(f->memory, 64, other.stream, &block), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_OK(nvb_memory_allocate(other.memory, 64, NULL, &block));
  CHECK_FAILS(nvb_memory_free(f->memory, block, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_memory_free(other.memory, block, NULL));
  close_fixture(&other);
}

static void test_growth(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    void *block = NULL, *host = NULL;
    CHECK_OK(nvb_memory_allocate(f->memory, 100000, f->stream, &block));
    CHECK_OK(nvb_memory_fill(f->memory, block, 1, 100000, f->stream));
    CHECK_OK(nvb_memory_free(f->memory, block, f->stream));
    if (i % 10 == 0) {
      CHECK_OK(nvb_host_allocate(f->backend, 100000, &host));
      memset(host, 1, 100000);
      CHECK_OK(nvb_host_free(f->backend, host, 100000));
    }
  }
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_GROWTH(kilobytes);
  nvb_memory_statistics after = statistics_of(f->memory);
  CHECK_EQUAL(after.allocated, before.allocated);
  CHECK_EQUAL(after.blocks, before.blocks);
  CHECK_EQUAL(after.allocations - before.allocations, 1100);
}

int main(void) {
  fixture f = open_fixture();
  test_blocks(&f);
  test_many(&f);
  test_copies(&f);
  test_alignment(&f);
  test_tensors(&f);
  test_other_memory(&f);
  test_host_memory(&f);
  test_limit();
  test_handles(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
