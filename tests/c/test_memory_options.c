// Memory managers of the engine's own: every option, over the device and over the host, and an engine's allocator.
#include "check.h"

enum { MIB = 1 << 20 };

static nvb_memory_options options_of(uint64_t limit) {
  nvb_memory_options options;
  nvb_memory_options_init(&options);
  options.limit = limit;
  options.margin = NVB_MEMORY_NONE;
  return options;
}

static nvb_memory_manager* create(nvb_backend* backend, const nvb_memory_options* options) {
  nvb_memory_manager* memory = NULL;
  CHECK_OK(nvb_memory_manager_create(backend, options, &memory));
  return memory;
}

static nvb_status create_with(void* value, void* context) {
  nvb_memory_manager* memory = NULL;
  nvb_status status = nvb_memory_manager_create(context, value, &memory);
  CHECK_OK(nvb_memory_manager_destroy(memory));
  // NULL options are the defaults; `CHECK_STRUCT` looks for an error there.
  return value == NULL ? nvb_memory_manager_create(context, NULL, NULL) : status;
}

static nvb_status create_backend_with(void* value, void* context) {
  (void)context;
  nvb_backend_options options = device_options();
  options.memory = value;
  nvb_backend* backend = NULL;
  nvb_status status = nvb_backend_create(&options, &backend);
  CHECK_OK(nvb_backend_destroy(backend));
  return status;
}

static void test_own_manager(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_memory_options options = options_of(96 * MIB);
  nvb_memory_manager* own = create(f->backend, &options);
  void *a = NULL, *b = NULL;
  CHECK_OK(nvb_memory_allocate(own, 80 * MIB, f->stream, &a));
  CHECK_FAILS(nvb_memory_allocate(own, 40 * MIB, f->stream, &b), NVB_ERROR_OUT_OF_MEMORY, "limit is 100663296");
  CHECK_OK(nvb_memory_allocate(f->memory, 40 * MIB, f->stream, &b));
  CHECK_EQUAL(statistics_of(own).allocated, 80 * MIB);
  CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, 40 * MIB);

  // Blocks know their manager; operations take either's.
  CHECK_FAILS(nvb_memory_free(own, b, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_FAILS(nvb_memory_free(f->memory, a, NULL), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_memory_fill(own, a, 0, 64, f->stream));
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  softmax.input = softmax.output = nvb_tensor_2d(a, NVB_DTYPE_F32, 2, 8);
  CHECK_OK(nvb_softmax(f->backend, &softmax, f->stream));
  float values[16];
  CHECK_OK(nvb_memory_copy(own, values, a, sizeof values, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_NEAR(values[0], 0.125, 1e-6);
  softmax.input.shape[0] = 80 * MIB / 32 + 1;
  softmax.output = softmax.input;
  CHECK_FAILS(nvb_softmax(f->backend, &softmax, f->stream), NVB_ERROR_INVALID_ARGUMENT, "runs past the end");
  release(f, b);
  CHECK_OK(nvb_memory_free(own, a, f->stream));
  CHECK_OK(nvb_memory_manager_destroy(own));
  CHECK_FAILS(nvb_memory_allocate(own, 8, NULL, &a), NVB_ERROR_INVALID_ARGUMENT, "destroyed");

  // It outlives the backend's handle, and takes what was never freed with it.
  fixture other = open_fixture();
  own = create(other.backend, NULL);
  CHECK_OK(nvb_backend_destroy(other.backend));
  CHECK_OK(nvb_memory_allocate(own, 1000, other.stream, &a));
  CHECK_OK(nvb_stream_destroy(other.stream));
  CHECK_OK(nvb_memory_manager_destroy(other.memory));
  CHECK_OK(nvb_memory_manager_destroy(own));
}

static void test_host(fixture* f) {
  nvb_memory_options options = options_of(0);
  options.space = NVB_MEMORY_HOST;
  options.limit_fraction = 0.25;
  nvb_memory_manager* host = create(f->backend, &options);
  nvb_memory_statistics statistics = statistics_of(host);
  CHECK(statistics.device_total > 0 && statistics.limit > 0 && statistics.limit <= statistics.device_total / 4 + 1);
  unsigned char *a = NULL, *b = NULL;
  CHECK_OK(nvb_memory_allocate(host, 5 * MIB, f->stream, (void**)&a));
  CHECK_OK(nvb_memory_allocate(host, 700, NULL, (void**)&b));
  memset(a, 0x11, 5 * MIB);
  CHECK_OK(nvb_memory_fill(host, b, 0x22, 700, f->stream));
  CHECK_OK(nvb_memory_copy(host, a + 1, b, 700, NVB_COPY_DEVICE_TO_DEVICE, f->stream));
  CHECK(a[0] == 0x11 && a[1] == 0x22 && a[700] == 0x22 && a[701] == 0x11);
  CHECK_OK(nvb_memory_free(host, a, f->stream));
  CHECK_OK(nvb_memory_free(host, b, NULL));
  uint64_t released = 0;
  CHECK_OK(nvb_memory_trim(host, 0, &released));
  CHECK_EQUAL(statistics_of(host).reserved, 0);
  CHECK(released >= 5 * MIB);
  CHECK_OK(nvb_memory_manager_destroy(host));
}

static void refuse(nvb_backend* backend, const nvb_memory_options* options, const char* word) {
  nvb_memory_manager* memory = foreign_handle();
  CHECK_FAILS(nvb_memory_manager_create(backend, options, &memory), NVB_ERROR_CONFIGURATION, word);
  CHECK(memory == foreign_handle());
}

static void test_wrong_options(fixture* f) {
  nvb_memory_options options = options_of(0);
  CHECK_STRUCT(options, create_with, f->backend);
  nvb_memory_manager* memory = foreign_handle();
  CHECK_FAILS(nvb_memory_manager_create(NULL, &options, &memory), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_memory_manager_create(f->backend, &options, NULL), NVB_ERROR_INVALID_ARGUMENT, "memory", "NULL");

#define REFUSE(field, value, word)      \
  do {                                  \
    options = options_of(0);            \
    options.field = (value);            \
    refuse(f->backend, &options, word); \
  } while (0)
  REFUSE(space, 2, "space is 2");
  REFUSE(limit_of, 3, "limit_of is 3");
  REFUSE(leak_tracking, 4, "leak_tracking is 4");
  REFUSE(spill, 4, "spill is 4");
  REFUSE(pooling, 3, "pooling is 3");
  REFUSE(zero_on_free, 3, "zero_on_free is 3");
  REFUSE(growth, 3, "growth is 3");
  REFUSE(growth, NVB_SWITCH_OFF, "memory.initial_bytes 0");
  REFUSE(range_bytes, 1000, "range_bytes is 1000");
  REFUSE(limit_fraction, 1.5, "limit_fraction is 1.5");
  REFUSE(limit_fraction, -0.5, "limit_fraction is -0.5");
  REFUSE(limit_fraction, NAN, "limit_fraction is NaN");
  REFUSE(trace_events, UINT64_MAX, "trace_events");
  nvb_allocator allocator;
  nvb_allocator_init(&allocator);
  REFUSE(allocator, &allocator, "lacks");
  options = options_of(100);
  options.limit_fraction = 0.5;
  refuse(f->backend, &options, "memory.limit is 100 and memory.limit_fraction 0.5");

  options = options_of(64 * MIB);
  options.initial_bytes = 65 * MIB;
  refuse(f->backend, &options, "memory.initial_bytes is 68157440 and memory.limit 67108864");
  options.initial_bytes = UINT64_MAX;
  refuse(f->backend, &options, "memory.initial_bytes is 18446744073709551615");
  // More than the device has.
  options = options_of(0);
  options.initial_bytes = 1ull << 49;
  CHECK_FAILS(nvb_memory_manager_create(f->backend, &options, &memory), NVB_ERROR_OUT_OF_MEMORY, "initial size");
  CHECK(memory == foreign_handle());
  options = options_of(0);
  options.reserved = 1;
  CHECK_FAILS(nvb_memory_manager_create(f->backend, &options, &memory), NVB_ERROR_INVALID_ARGUMENT, "reserved is 1");
}

// A large block of the host that was hardly used gets no memory when it is overwritten: what nobody touched is zero.
static void test_untouched_block(fixture* f, nvb_memory_manager* memory) {
  if (!test_on_cpu()) {
    printf("Untouched blocks are not tested: the memory is not the host's\n");
    return;
  }
  enum { BYTES = 512 * MIB };
  const size_t written[] = {0, 100 * MIB + 17, 300 * MIB - 1, BYTES - 1};
  unsigned char *block = NULL, *again = NULL;
  CHECK_OK(nvb_memory_allocate(memory, BYTES, f->stream, (void**)&block));
  for (int i = 0; i < 4; ++i) block[written[i]] = 0x77;
  long before = resident_kilobytes();
  CHECK_OK(nvb_memory_free(memory, block, f->stream));
  CHECK(resident_kilobytes() - before < 32 * 1024);
  CHECK_OK(nvb_memory_allocate(memory, BYTES, f->stream, (void**)&again));
  CHECK(again == block);
  for (int i = 0; i < 4; ++i) CHECK_EQUAL(again[written[i]], 0);
  CHECK_OK(nvb_memory_free(memory, again, f->stream));
}

static void test_options(fixture* f) {
  nvb_memory_options options = options_of(128 * MIB);
  options.initial_bytes = 32 * MIB;
  nvb_memory_manager* memory = create(f->backend, &options);
  CHECK_EQUAL(statistics_of(memory).reserved, 32 * MIB);
  CHECK_EQUAL(statistics_of(memory).margin, 0);
  CHECK_OK(nvb_memory_manager_destroy(memory));

  options = options_of(0);
  options.limit_fraction = 0.5;
  options.limit_of = NVB_LIMIT_OF_FREE;
  options.margin = 1000;
  memory = create(f->backend, &options);
  nvb_memory_statistics statistics = statistics_of(memory);
  CHECK(statistics.limit > 0 && statistics.limit <= statistics.device_total / 2 + 1 && statistics.margin == 1000);
  CHECK_OK(nvb_memory_manager_destroy(memory));

  // Freed memory carries nothing to its next owner.
  options = options_of(64 * MIB);
  options.zero_on_free = NVB_SWITCH_ON;
  options.thread_cache_bytes = NVB_MEMORY_NONE;
  memory = create(f->backend, &options);
  unsigned char *block = NULL, *again = NULL, values[4096];
  CHECK_OK(nvb_memory_allocate(memory, 4096, f->stream, (void**)&block));
  CHECK_OK(nvb_memory_fill(memory, block, 0x77, 4096, f->stream));
  CHECK_OK(nvb_memory_free(memory, block, f->stream));
  CHECK_OK(nvb_memory_allocate(memory, 4096, f->stream, (void**)&again));
  CHECK_OK(nvb_memory_copy(memory, values, again, sizeof values, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK(again != block || (values[0] == 0 && values[4095] == 0));
  CHECK_OK(nvb_memory_free(memory, again, f->stream));
  CHECK_OK(nvb_memory_set_limit(memory, 0));
  test_untouched_block(f, memory);
  CHECK_OK(nvb_memory_manager_destroy(memory));

  // Without pooling nothing is kept.
  options = options_of(0);
  options.pooling = NVB_SWITCH_OFF;
  memory = create(f->backend, &options);
  CHECK_OK(nvb_memory_allocate(memory, 1000, f->stream, (void**)&block));
  CHECK_OK(nvb_memory_fill(memory, block, 1, 1000, f->stream));
  CHECK_EQUAL(statistics_of(memory).reserved, 1000);
  CHECK_OK(nvb_memory_free(memory, block, f->stream));
  CHECK_EQUAL(statistics_of(memory).reserved, 0);
  CHECK_OK(nvb_memory_manager_destroy(memory));

  // What the device has no room for goes to the host, if it may.
  options = options_of(64 * MIB);
  options.wait_microseconds = 2000;
  for (options.spill = NVB_SPILL_PINNED; options.spill <= NVB_SPILL_MANAGED; ++options.spill) {
    memory = create(f->backend, &options);
    void *first = NULL, *spilled = NULL;
    CHECK_OK(nvb_memory_allocate(memory, 60 * MIB, f->stream, &first));
    CHECK_OK(nvb_memory_allocate(memory, 30 * MIB, f->stream, &spilled));
    CHECK_EQUAL(statistics_of(memory).spilled, 30 * MIB);
    CHECK_OK(nvb_memory_fill(memory, spilled, 3, 30 * MIB, f->stream));
    CHECK_OK(nvb_memory_free(memory, spilled, f->stream));
    CHECK_OK(nvb_memory_free(memory, first, f->stream));
    CHECK_EQUAL(statistics_of(memory).spilled, 0);
    CHECK_OK(nvb_memory_manager_destroy(memory));
  }
}

static void test_backend_options(void) {
  nvb_memory_options memory = options_of(0);
  CHECK_OK(create_backend_with(&memory, NULL));
  CHECK_OK(create_backend_with(NULL, NULL));
  memory.struct_size = 3;
  CHECK_FAILS(create_backend_with(&memory, NULL), NVB_ERROR_ABI_MISMATCH, "nvb_memory_options", "struct_size");
  memory = options_of(0);
  memory.space = NVB_MEMORY_HOST;
  CHECK_FAILS(create_backend_with(&memory, NULL), NVB_ERROR_CONFIGURATION, "space");
  memory = options_of(80 * MIB);
  nvb_backend_options options = device_options();
  options.memory = &memory;
  options.memory_limit = 70 * MIB;
  nvb_backend* backend = NULL;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "memory_limit");
  options.memory_limit = 0;
  // A struct that ends inside a pointer: half of one would be followed.
  options.struct_size = offsetof(nvb_backend_options, memory) + 4;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_ABI_MISMATCH, "nvb_backend_options",
              "inside the pointer");
  options.struct_size = sizeof options;
  CHECK_OK(nvb_backend_create(&options, &backend));
  nvb_memory_manager* manager = NULL;
  CHECK_OK(nvb_backend_get_memory_manager(backend, 0, &manager));
  CHECK_EQUAL(statistics_of(manager).limit, 80 * MIB);
  CHECK_OK(nvb_memory_manager_destroy(manager));
  CHECK_OK(nvb_backend_destroy(backend));
}

// An engine's allocator: it cuts one block of the backend's own manager into pieces, as an engine with an arena would.
typedef struct {
  nvb_memory_manager* from;
  nvb_stream* stream;
  size_t capacity, live_bytes, misalign;
  int allocations, frees, wrong;
} arena;

static void* arena_allocate(size_t bytes, size_t alignment, void* stream, void* user_data) {
  arena* self = user_data;
  void* pointer = NULL;
  (void)stream;
  if (bytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) ++self->wrong;
  if (self->live_bytes + bytes > self->capacity) return NULL;
  if (nvb_memory_allocate_aligned(self->from, bytes + self->misalign, alignment, self->stream, &pointer) != NVB_OK) {
    return NULL;
  }
  ++self->allocations;
  self->live_bytes += bytes;
  return (char*)pointer + self->misalign;
}

static void arena_free(void* pointer, size_t bytes, void* stream, void* user_data) {
  arena* self = user_data;
  (void)stream;
  ++self->frees;
  self->live_bytes -= bytes;
  if (nvb_memory_free(self->from, (char*)pointer - self->misalign, self->stream) != NVB_OK) ++self->wrong;
}

static void test_allocator(fixture* f) {
  arena engine = {f->memory, f->stream, 10 * MIB, 0, 0, 0, 0, 0};
  nvb_allocator allocator;
  nvb_allocator_init(&allocator);
  allocator.allocate = arena_allocate;
  allocator.free = arena_free;
  allocator.user_data = &engine;
  nvb_memory_options options = options_of(8 * MIB);
  options.allocator = &allocator;
  options.leak_tracking = NVB_LEAK_TRACKING_FULL;
  nvb_memory_manager* memory = create(f->backend, &options);
  void *a = NULL, *b = foreign_handle();
  CHECK_OK(nvb_memory_allocate(memory, 1000, f->stream, &a));
  CHECK_OK(nvb_memory_allocate_aligned(memory, 5 * MIB, 65536, f->stream, &b));
  CHECK_EQUAL((uintptr_t)b % 65536, 0);
  CHECK_EQUAL(engine.allocations, 2);
  CHECK_OK(nvb_memory_fill(memory, b, 1, 5 * MIB, f->stream));
  nvb_memory_statistics statistics = statistics_of(memory);
  CHECK(statistics.allocated == 1000 + 5 * MIB && statistics.blocks == 2 && statistics.reserved >= 1000 + 5 * MIB);
  char report[4096];
  CHECK_OK(nvb_memory_get_leak_report(memory, report, sizeof report, NULL));
  CHECK(strstr(report, "2 live blocks") != NULL);
  // The manager's limit, and then the engine's want.
  void* out = foreign_handle();
  CHECK_FAILS(nvb_memory_allocate(memory, 4 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "limit is");
  CHECK_OK(nvb_memory_set_limit(memory, 0));
  CHECK_FAILS(nvb_memory_allocate(memory, 6 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "engine's allocator");
  CHECK_FAILS(nvb_memory_sleep(memory, 0, NULL), NVB_ERROR_UNSUPPORTED, "range");
  CHECK_OK(nvb_memory_free(memory, b, f->stream));
  CHECK_FAILS(nvb_memory_free(memory, b, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  engine.misalign = 8;
  CHECK_FAILS(nvb_memory_allocate(memory, 100, f->stream, &out), NVB_ERROR_MEMORY_ALLOCATION, "no multiple of 256");
  engine.misalign = 0;
  CHECK(out == foreign_handle());
  // A pool's blocks come from the engine too, and what is left goes back to it with the manager.
  nvb_pool* pool = NULL;
  CHECK_OK(nvb_pool_create(memory, "engine", &pool));
  CHECK_OK(nvb_pool_allocate(pool, 3000, f->stream, &b));
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_OK(nvb_memory_manager_destroy(memory));
  CHECK_EQUAL(engine.live_bytes, 0);
  CHECK_EQUAL(engine.frees, engine.allocations);
  CHECK_EQUAL(engine.wrong, 0);
}

int main(void) {
  fixture f = open_fixture();
  test_own_manager(&f);
  test_host(&f);
  test_wrong_options(&f);
  test_options(&f);
  test_backend_options();
  test_allocator(&f);
  close_fixture(&f);
  return test_result();
}
