// What the C tests share: checks that count their failures, a device to test on, and matrices of wrong calls.
//
// NVB_TEST_DEVICE names the device ("cpu" without it). A test ends with `return test_result();`.
#ifndef NVBACKEND_TESTS_CHECK_H
#define NVBACKEND_TESTS_CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nvbackend.h"

// Threads fail checks too, each under its own number.
static _Thread_local int check_thread;
static _Atomic int check_failures;

// Checks hold texts, which would be on the stack of a test once for each check if they were inlined: 24 KiB of a
// thread's 64.
#define CHECK_APART __attribute__((noinline, unused))

static inline int test_result(void) {
  if (check_failures != 0) fprintf(stderr, "%d checks failed\n", check_failures);
  return check_failures != 0;
}

static inline void check_fail(const char* file, int line, const char* what, const char* why) {
  ++check_failures;
  fprintf(stderr, "%s:%d: thread %d: %s: %s\n", file, line, check_thread, what, why);
}

// With NVB_TEST_STOP set, a program ends where a call of its first thread fails that should not: after it the program
// holds no more what it reckons with. Other threads go on, because the first may not end what they use.
static inline void check_stop(nvb_status status) {
  if (status != NVB_OK && check_thread == 0 && getenv("NVB_TEST_STOP") != NULL) exit(1);
}

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) check_fail(__FILE__, __LINE__, #condition, "does not hold"); \
  } while (0)

// Two integers are equal; prints both if they are not.
#define CHECK_EQUAL(actual, expected) \
  check_equal(__FILE__, __LINE__, #actual, (long long)(actual), (long long)(expected))

static inline void check_equal(const char* file, int line, const char* what, long long actual, long long expected) {
  if (actual == expected) return;
  char why[96];
  snprintf(why, sizeof why, "is %lld; %lld is expected", actual, expected);
  check_fail(file, line, what, why);
}

// The call succeeds.
#define CHECK_OK(call) check_ok(__FILE__, __LINE__, #call, (call))

CHECK_APART static int check_ok(const char* file, int line, const char* what, nvb_status status) {
  if (status == NVB_OK) return 1;
  char why[640];
  int length = snprintf(why, sizeof why, "%s: ", nvb_status_name(status));
  nvb_last_error_message(why + length, sizeof why - (size_t)length);
  check_fail(file, line, what, why);
  check_stop(status);
  return 0;
}

// The call fails with this status, and its text holds every one of the words: it names the value and the limit.
#define CHECK_FAILS(call, expected, ...) \
  check_fails(__FILE__, __LINE__, #call, (call), (expected), (const char* const[]){__VA_ARGS__, NULL})
// The call is refused as invalid, whatever the text says.
#define CHECK_INVALID(call) CHECK_FAILS(call, NVB_ERROR_INVALID_ARGUMENT, "nvb_")

CHECK_APART static void check_fails(const char* file, int line, const char* what, nvb_status status,
                                    nvb_status expected, const char* const* words) {
  char text[1024], why[1280];
  nvb_last_error_message(text, sizeof text);
  if (status != expected) {
    snprintf(why, sizeof why, "%s (%s); %s is expected", nvb_status_name(status), status == NVB_OK ? "" : text,
             nvb_status_name(expected));
    check_fail(file, line, what, why);
    check_stop(status);
    return;
  }
  for (; *words != NULL; ++words) {
    if (strstr(text, *words) == NULL) {
      snprintf(why, sizeof why, "\"%s\" is not in \"%s\"", *words, text);
      check_fail(file, line, what, why);
    }
  }
}

// |actual - expected| is at most tolerance · (1 + |expected|); NaN never is.
#define CHECK_NEAR(actual, expected, tolerance) \
  check_near(__FILE__, __LINE__, #actual, (double)(actual), (double)(expected), (tolerance))

static inline void check_near(const char* file, int line, const char* what, double actual, double expected,
                              double tolerance) {
  if (fabs(actual - expected) <= tolerance * (1 + fabs(expected))) return;
  char why[96];
  snprintf(why, sizeof why, "is %.9g; %.9g is expected", actual, expected);
  check_fail(file, line, what, why);
}

// The device -------------------------------------------------------------------------------------------------------

static inline const char* test_device(void) {
  const char* name = getenv("NVB_TEST_DEVICE");
  return name != NULL && name[0] != '\0' ? name : "cpu";
}

static inline int test_on_cpu(void) {
  return strcmp(test_device(), "cpu") == 0;
}

// Options that choose the test's device, with two threads where that is the CPU.
static inline nvb_backend_options device_options(void) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = test_device();
  options.threads = 2;
  return options;
}

// A backend with its memory and a stream; `open_fixture…` ends the program if there is no such device.
typedef struct {
  nvb_backend* backend;
  nvb_memory_manager* memory;
  nvb_stream* stream;
} fixture;

static inline fixture open_fixture_on(const char* device) {
  fixture f = {NULL, NULL, NULL};
  nvb_backend_options options = device_options();
  options.device = device;
  if (!CHECK_OK(nvb_backend_create(&options, &f.backend)) ||
      !CHECK_OK(nvb_backend_get_memory_manager(f.backend, 0, &f.memory)) ||
      !CHECK_OK(nvb_stream_create(f.backend, 0, &f.stream))) {
    exit(1);
  }
  return f;
}

static inline fixture open_fixture(void) {
  return open_fixture_on(test_device());
}

static inline void close_fixture(fixture* f) {
  CHECK_OK(nvb_stream_destroy(f->stream));
  CHECK_OK(nvb_memory_manager_destroy(f->memory));
  CHECK_OK(nvb_backend_destroy(f->backend));
}

static inline nvb_memory_statistics statistics_of(nvb_memory_manager* memory) {
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  CHECK_OK(nvb_memory_get_statistics(memory, &statistics));
  return statistics;
}

// A block that holds a copy of `bytes` of host memory.
static inline void* upload(fixture* f, const void* data, size_t bytes) {
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, bytes, f->stream, &block));
  CHECK_OK(nvb_memory_copy(f->memory, block, data, bytes, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  return block;
}

static inline void download(fixture* f, void* data, const void* block, size_t bytes) {
  CHECK_OK(nvb_memory_copy(f->memory, data, block, bytes, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
}

static inline void release(fixture* f, void* block) {
  CHECK_OK(nvb_memory_free(f->memory, block, f->stream));
}

// A repeatable stream of numbers in [-1, 1).
static inline float next_number(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

// Kilobytes of main memory that the process holds now.
static inline long resident_kilobytes(void) {
  long pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%*s %ld", &pages) != 1)
    check_fail(__FILE__, __LINE__, "/proc/self/statm", "unreadable");
  if (file != NULL) fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

// How much the process may grow while objects come and go. Under AddressSanitizer freed memory waits in a quarantine,
// and a driver keeps caches of its own.
static inline long growth_limit_kilobytes(void) {
#ifdef __SANITIZE_ADDRESS__
  return 400000;
#else
  return test_on_cpu() ? 4096 : 32768;
#endif
}

static inline void check_growth(const char* file, int line, long before) {
  long growth = resident_kilobytes() - before;
  if (growth > growth_limit_kilobytes()) check_equal(file, line, "kilobytes that the process has grown by", growth, 0);
}
#define CHECK_GROWTH(before) check_growth(__FILE__, __LINE__, (before))

#ifdef __SANITIZE_ADDRESS__
// The CUDA driver maps memory where AddressSanitizer would otherwise keep a gap, and keeps what it never frees.
const char* __asan_default_options(void);
const char* __asan_default_options(void) {
  return "protect_shadow_gap=0:detect_leaks=1";
}
const char* __lsan_default_suppressions(void);
const char* __lsan_default_suppressions(void) {
  return "leak:libcuda.so\n";
}
#endif

// Wrong structs ----------------------------------------------------------------------------------------------------

// A call with one versioned struct, the rest of its arguments being right.
typedef nvb_status (*struct_call)(void* value, void* context);

static inline nvb_status call_with_size(const void* valid, size_t copied, size_t stated, size_t allocated, int junk,
                                        struct_call call, void* context) {
  unsigned char* value = malloc(allocated);
  if (value == NULL) abort();
  memset(value, junk, allocated);
  memcpy(value, valid, copied < allocated ? copied : allocated);
  memcpy(value, &stated, sizeof stated);
  nvb_status status = call(value, context);
  free(value);
  return status;
}

// `valid` is accepted; so are larger structs whose rest is zero. Sizes that make no sense and rests that are in use are
// NVB_ERROR_ABI_MISMATCH; a smaller struct is an older caller's, whatever its missing fields then mean; NULL is
// NVB_ERROR_INVALID_ARGUMENT.
#define CHECK_STRUCT(valid, call, context) \
  check_struct(__FILE__, __LINE__, #call, &(valid), sizeof(valid), (call), (context))

static inline void check_struct(const char* file, int line, const char* what, const void* valid, size_t size,
                                struct_call call, void* context) {
  check_ok(file, line, what, call_with_size(valid, size, size, size, 0, call, context));
  check_ok(file, line, what, call_with_size(valid, size, size + 8, size + 8, 0, call, context));
  check_ok(file, line, what, call_with_size(valid, size, 1 << 16, 1 << 16, 0, call, context));
  const char* const names_size[] = {"struct_size", NULL};
  const char* const names_rest[] = {"beyond", NULL};
  const size_t senseless[] = {0, 1, sizeof(size_t) - 1, (1 << 16) + 1, SIZE_MAX / 2, SIZE_MAX};
  for (size_t i = 0; i < sizeof senseless / sizeof *senseless; ++i) {
    nvb_status status = call_with_size(valid, size, senseless[i], size, 0, call, context);
    check_fails(file, line, what, status, NVB_ERROR_ABI_MISMATCH, names_size);
  }
  nvb_status status = call_with_size(valid, size, size + 8, size + 8, 0x5a, call, context);
  check_fails(file, line, what, status, NVB_ERROR_ABI_MISMATCH, names_rest);
  // Fields are cut off whole: half a pointer would be no older caller's.
  for (size_t smaller = sizeof(size_t); smaller < size; smaller += 8) {
    status = call_with_size(valid, smaller, smaller, smaller, 0, call, context);
    if (status == NVB_ERROR_ABI_MISMATCH || status == NVB_ERROR_INTERNAL) {
      check_fails(file, line, what, status, NVB_OK, names_size + 1);
    }
  }
  const char* const names_null[] = {"NULL", NULL};
  check_fails(file, line, what, call(NULL, context), NVB_ERROR_INVALID_ARGUMENT, names_null);
}

// A handle that is no handle: the address of an object of the caller.
static inline void* foreign_handle(void) {
  static uint64_t object[4];
  return object;
}

#endif  // NVBACKEND_TESTS_CHECK_H
