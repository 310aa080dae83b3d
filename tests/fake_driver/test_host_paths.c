// The shared library's host side on the fake driver, under AddressSanitizer too: whatever driver call fails, nothing is
// left over, neither in the driver's books nor in host memory. NVIDIA's runtime, which is linked into the library, does
// not start on a driver that is not NVIDIA's: launches fail, and say so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "../c/check.h"
#include "fake_driver.h"

static void (*fail_call)(int64_t call, int status, int mode);
static void (*get_books)(fake_books* books);
static const char* (*violation)(void);
static int (*set_current_context)(void* context);

// A function of the driver that the library opens, too. Through memory, as C has no conversion from an address to a
// function.
static void find(void* driver, const char* name, void* function) {
  void* address = dlsym(driver, name);
  if (address == NULL) exit(2);
  memcpy(function, &address, sizeof address);
}

typedef struct {
  nvb_backend* backend;
  nvb_memory_manager* memory;
  nvb_stream* stream;
  nvb_event* event;
  nvb_weight* weight;
  nvb_kv_cache* cache;
  void* block;
  void* pinned;
} objects;

enum { BYTES = 4096 };

// Stops at the first call that fails and returns its status.
static nvb_status run(objects* o) {
  nvb_status status;
#define TRY(call) \
  if ((status = (call)) != NVB_OK) return status
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cuda:0";
  options.vendor_libraries = NVB_SWITCH_OFF;
  TRY(nvb_backend_create(&options, &o->backend));
  TRY(nvb_backend_get_memory_manager(o->backend, 0, &o->memory));
  TRY(nvb_stream_create(o->backend, 0, &o->stream));
  TRY(nvb_event_create(o->backend, &o->event));
  TRY(nvb_memory_allocate(o->memory, BYTES, o->stream, &o->block));
  TRY(nvb_host_allocate(o->backend, BYTES, &o->pinned));
  memset(o->pinned, 5, BYTES);
  TRY(nvb_memory_copy(o->memory, o->block, o->pinned, BYTES, NVB_COPY_HOST_TO_DEVICE, o->stream));
  TRY(nvb_memory_copy(o->memory, o->pinned, o->block, BYTES, NVB_COPY_DEVICE_TO_HOST, o->stream));
  TRY(nvb_event_record(o->event, o->stream));
  TRY(nvb_stream_wait_event(o->stream, o->event));
  TRY(nvb_stream_synchronize(o->stream));

  float rows[2][3][5] = {{{1}}};
  nvb_tensor parts[2];
  memset(parts, 0, sizeof parts);
  for (int i = 0; i < 2; ++i) {
    parts[i] = (nvb_tensor){.data = rows[i], .dtype = NVB_DTYPE_F32, .rank = 2, .shape = {3, 5}};
  }
  nvb_weight_desc desc = {.struct_size = sizeof desc, .parts = parts, .part_count = 2, .arrangement = NVB_WEIGHT_GATED};
  TRY(nvb_weight_create(o->backend, &desc, o->stream, &o->weight));
  nvb_kv_cache_options sizes = {
      .struct_size = sizeof sizes, .layers = 2, .sequences = 2, .kv_heads = 1, .head_dim = 16, .capacity = 8};
  TRY(nvb_kv_cache_create(o->backend, &sizes, &o->cache));
#undef TRY
  return NVB_OK;
}

static void destroy(objects* o) {
  CHECK_OK(nvb_kv_cache_destroy(o->cache));
  CHECK_OK(nvb_weight_destroy(o->weight));
  if (o->backend != NULL) CHECK_OK(nvb_host_free(o->backend, o->pinned, BYTES));
  // The rest after the backend: each keeps of it what it needs.
  CHECK_OK(nvb_backend_destroy(o->backend));
  if (o->memory != NULL) CHECK_OK(nvb_memory_free(o->memory, o->block, o->stream));
  CHECK_OK(nvb_event_destroy(o->event));
  CHECK_OK(nvb_stream_destroy(o->stream));
  CHECK_OK(nvb_memory_manager_destroy(o->memory));
  memset(o, 0, sizeof *o);
}

static void expect_nothing_left(void) {
  fake_books books;
  get_books(&books);
  CHECK_EQUAL(books.contexts, 0);
  CHECK_EQUAL(books.blocks, 0);
  CHECK_EQUAL(books.host_blocks, 0);
  CHECK_EQUAL(books.mappings, 0);
  CHECK_EQUAL(books.physicals, 0);
  CHECK_EQUAL(books.pools, 0);
  CHECK_EQUAL(books.streams, 0);
  CHECK_EQUAL(books.events, 0);
  if (books.violations != 0) fprintf(stderr, "%s\n", violation());
  CHECK_EQUAL(books.violations, 0);
}

static void launch_without_runtime(void) {
  enum { NOT_FOUND = 500 };
  objects o = {0};
  CHECK_OK(run(&o));
  nvb_tensor tensor = {.data = o.block, .dtype = NVB_DTYPE_F32, .rank = 2, .shape = {4, 16}};
  nvb_elementwise_args args = {.struct_size = sizeof args, .input = tensor, .second = tensor, .output = tensor};
  for (int i = 0; i < 2; ++i) {
    CHECK_FAILS(nvb_add(o.backend, &args, o.stream), NVB_ERROR_KERNEL_LAUNCH, "500");
    nvb_error_detail detail = {.struct_size = sizeof detail};
    CHECK_OK(nvb_last_error_get(&detail));
    CHECK_EQUAL(detail.cuda_code, NOT_FOUND);
  }
  destroy(&o);
  expect_nothing_left();
}

// In a child of a process that has used the driver: it is not called, and the CPU serves the child.
static void check_child(objects* o) {
  fake_books before, after;
  get_books(&before);
  nvb_backend_options options = {.struct_size = sizeof options, .device = "cuda:0"};
  nvb_backend* backend = NULL;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CUDA_NOT_AVAILABLE, "cannot be used after a fork");
  CHECK_FAILS(nvb_stream_synchronize(o->stream), NVB_ERROR_INVALID_ARGUMENT, "the parent's");
  CHECK_FAILS(nvb_memory_free(o->memory, o->block, o->stream), NVB_ERROR_INVALID_ARGUMENT, "the parent's");
  CHECK_OK(nvb_weight_destroy(o->weight));
  CHECK_OK(nvb_kv_cache_destroy(o->cache));
  CHECK_OK(nvb_event_destroy(o->event));
  CHECK_OK(nvb_stream_destroy(o->stream));
  CHECK_OK(nvb_memory_manager_destroy(o->memory));
  CHECK_OK(nvb_backend_destroy(o->backend));
  for (int i = 0; i < 2; ++i) {
    options.device = i == 0 ? "cpu" : "auto";
    CHECK_OK(nvb_backend_create(&options, &backend));
    CHECK_OK(nvb_backend_destroy(backend));
  }
  get_books(&after);
  CHECK_EQUAL(after.calls, before.calls);
}

static void fork_after_driver(void) {
  objects o = {0};
  CHECK_OK(run(&o));
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    check_child(&o);
    _exit(test_result());
  }
  int status = 1;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  destroy(&o);
  expect_nothing_left();
}

int main(void) {
  void* driver = dlopen(getenv("NVB_LIBCUDA"), RTLD_NOW);
  if (driver == NULL) return 2;
  find(driver, "fake_fail", &fail_call);
  find(driver, "fake_get_books", &get_books);
  find(driver, "fake_violation", &violation);
  find(driver, "cuCtxSetCurrent", &set_current_context);

  int64_t calls = 0;
  for (int mode = FAKE_ONCE; mode <= FAKE_FOREVER; ++mode) {
    fake_books before, after;
    do {
      objects o = {0};
      get_books(&before);
      fail_call(++calls, 2, mode);
      run(&o);
      destroy(&o);
      fail_call(0, 0, FAKE_ONCE);
      get_books(&after);
      // Where every call fails, it could not be put back.
      set_current_context(NULL);
      expect_nothing_left();
    } while (after.faults != before.faults && test_result() == 0);
    printf("%lld calls failed in turn\n", (long long)calls - 1);
    CHECK(calls > 100);
    calls = 0;
  }
  launch_without_runtime();
  fork_after_driver();
  return test_result();
}
