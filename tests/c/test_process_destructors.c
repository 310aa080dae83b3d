// The library is called when a thread, or the process, has begun to end: from handlers of atexit, from destructors of
// static objects and from those of pthread keys, after the calling thread has met an error.
#include <pthread.h>

#include "process.h"
#include "readers.h"

enum { KEYS = 3 };

static fixture f;
static pthread_key_t keys[KEYS];

static void fail_once(void) {
  nvb_backend* backend = NULL;
  nvb_backend_options options = device_options();
  options.device = "no device";
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "no device");
}

// Every call of the last error's, whether or not there is one.
static void read_last_error(void) {
  char text[256] = "x";
  CHECK(nvb_last_error_message(text, sizeof text) >= 1);
  CHECK(nvb_last_error_message(NULL, 0) >= 1);
  CHECK(nvb_last_error_cause(0, text, sizeof text) >= 1);
  CHECK(nvb_last_error_cause(7, text, sizeof text) == 1);
  nvb_error_detail detail;
  nvb_error_detail_init(&detail);
  CHECK_OK(nvb_last_error_get(&detail));
  nvb_memory_failure failure;
  nvb_memory_failure_init(&failure);
  CHECK_OK(nvb_last_error_get_memory(&failure));
}

// Whole objects, which start threads where there is work for some.
static void compute_late(void) {
  readers r = open_readers(&f);
  create_weight_and_cache(&r, f.stream);
  for (int i = 0; i < READERS; ++i) {
    check_ok(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(&r, f.stream));
  }
  CHECK_OK(nvb_weight_destroy(r.weight));
  create_weight(&r, f.stream, NVB_WEIGHT_FORMAT_INT4, &r.weight);
  CHECK_OK(nvb_weight_destroy(r.weight));
  CHECK_OK(nvb_kv_cache_destroy(r.cache));
  CHECK_OK(nvb_attention_destroy(r.attention));
  close_readers(&r);
}

// What an engine's destructors may still do. CUDA's driver may be gone already.
static void work_late(void) {
  read_last_error();
  fail_once();
  read_last_error();
  const int cpu = test_on_cpu();
  void* block = NULL;
  nvb_status status = nvb_memory_allocate(f.memory, 4096, f.stream, &block);
  if (cpu) CHECK_OK(status);
  if (status == NVB_OK) {
    status = nvb_memory_fill(f.memory, block, 1, 4096, f.stream);
    if (cpu) CHECK_OK(status);
    CHECK_OK(nvb_memory_free(f.memory, block, f.stream));
  }
  CHECK(nvb_memory_allocate(f.memory, (size_t)1 << 60, f.stream, &block) != NVB_OK);
  read_last_error();
  CHECK_INVALID(nvb_memory_free(f.memory, &f, f.stream));
  CHECK_INVALID(nvb_stream_synchronize(foreign_handle()));
  nvb_backend_options options = device_options();
  nvb_backend* late = NULL;
  status = nvb_backend_create(&options, &late);
  if (cpu) {
    CHECK_OK(status);
  } else if (status != NVB_OK) {
    CHECK_EQUAL(status, NVB_ERROR_CUDA_NOT_AVAILABLE);
  }
  CHECK_OK(nvb_backend_destroy(late));
  if (cpu) compute_late();
}

// Checks that fail now must still fail the child.
static void end_with_result(void) {
  if (test_result() != 0) _exit(1);
}

static void at_exit(void) {
  work_late();
  close_fixture(&f);
  end_with_result();
}

static int atexit_body(void) {
  CHECK_EQUAL(atexit(at_exit), 0);
  f = open_fixture();
  fail_once();
  return test_result();
}

// The destructor of a static object: it runs in every child, and works where the body asked for that.
static int destructor_works;

__attribute__((destructor)) static void destroy_static(void) {
  if (destructor_works) at_exit();
}

static int static_body(void) {
  destructor_works = 1;
  f = open_fixture();
  fail_once();
  return test_result();
}

// Sets its value again, so that the C library calls it in every round that it has, before and after the library's own.
static void destroy_key(void* value) {
  static _Thread_local int rounds;
  work_late();
  if (++rounds < 6) pthread_setspecific(*(pthread_key_t*)value, value);
}

static void* fail_in_thread(void* argument) {
  for (int i = 0; i < KEYS; ++i) pthread_setspecific(keys[i], &keys[i]);
  if (argument != NULL) fail_once();
  return NULL;
}

static int key_body(void) {
  f = open_fixture();
  // The backend's threads start here: Rust's library gives a thread that starts others 32 bytes, which a thread that
  // does so in its last moments does not give back.
  if (test_on_cpu()) compute_late();
  for (int i = 0; i < KEYS; ++i) {
    CHECK_EQUAL(pthread_key_create(&keys[i], destroy_key), 0);
    // The library's own keys come before some of ours and behind others.
    if (i == 0) fail_once();
  }
  for (int i = 0; i < 8; ++i) {
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, fail_in_thread, i % 2 == 0 ? &f : NULL), 0);
    pthread_join(thread, NULL);
  }
  close_fixture(&f);
  return test_result();
}

// Errors of threads that have ended take no memory.
static void* fail_and_end(void* unused) {
  (void)unused;
  fail_once();
  return NULL;
}

static int many_threads_body(void) {
  long before = 0;
  for (int i = 0; i < 4000; ++i) {
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, fail_and_end, NULL), 0);
    pthread_join(thread, NULL);
    if (i == 1000) before = resident_kilobytes();
  }
  CHECK_GROWTH(before);
  return test_result();
}

int main(void) {
  CHECK(run_in_child(atexit_body, "a handler of atexit"));
  CHECK(run_in_child(static_body, "a static destructor"));
  CHECK(run_in_child(key_body, "destructors of pthread keys"));
  CHECK(run_in_child(many_threads_body, "many threads with errors"));
  return test_result();
}
