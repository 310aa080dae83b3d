// A process that ends while threads are inside the library: by exit on the main thread or on another, behind the main
// thread's own end, while handles are destroyed, and from a callback of the library.
#include <pthread.h>
#include <stdatomic.h>

#include "process.h"
#include "readers.h"

enum { WORKERS = 8, TIMES = 2 };

static fixture f;
static readers r;
static atomic_int rounds[WORKERS];

static void* compute(void* argument) {
  const int number = (int)(intptr_t)argument;
  nvb_stream* stream = NULL;
  CHECK_OK(nvb_stream_create(f.backend, 0, &stream));
  // The process may be ending: calls that fail then are nobody's loss.
  for (int i = number;; ++i) {
    nvb_status status = all_readers[i % READERS].call(&r, stream);
    void* block = NULL;
    if (nvb_memory_allocate(f.memory, (size_t)1 << (8 + i % 16), stream, &block) == NVB_OK) {
      status = nvb_memory_free(f.memory, block, stream);
    }
    if (number == 0) {
      static float values[WIDTH * WIDTH];
      nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
      nvb_weight_desc desc;
      nvb_weight_desc_init(&desc);
      desc.parts = &part;
      desc.part_count = 1;
      desc.format = NVB_WEIGHT_FORMAT_INT4;
      nvb_weight* weight = NULL;
      status = nvb_weight_create(f.backend, &desc, stream, &weight);
      if (status == NVB_OK) status = nvb_weight_destroy(weight);
    }
    if (status != NVB_OK) status = nvb_stream_synchronize(stream);
    atomic_fetch_add(&rounds[number], 1);
  }
  return NULL;
}

// Opens the library and keeps it busy. The threads are never joined. Each has made every call once before the process
// ends: cuBLASLt's first search for an algorithm registers what runs before any handler of the library's, and crashes.
static void start(void) {
  f = open_fixture();
  r = open_readers(&f);
  create_weight_and_cache(&r, f.stream);
  CHECK_OK(nvb_stream_synchronize(f.stream));
  for (int i = 0; i < WORKERS; ++i) {
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, compute, (void*)(intptr_t)i), 0);
    pthread_detach(thread);
  }
  for (int i = 0; i < WORKERS; ++i) {
    while (atomic_load(&rounds[i]) < READERS) nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
}

static int exit_on_main_thread(void) {
  start();
  return test_result();
}

static void* exit_here(void* unused) {
  (void)unused;
  exit(test_result());
}

static int exit_on_another_thread(void) {
  start();
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, exit_here, NULL), 0);
  pthread_join(thread, NULL);
  return 1;
}

static int leave_main_thread_first(void) {
#ifdef __SANITIZE_ADDRESS__
  puts("skipped: the main thread's end, since LeakSanitizer does not see what that thread held");
  return 0;
#endif
  start();
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, exit_here, NULL), 0);
  pthread_exit(NULL);
}

// Destroys everything as an engine's static objects do. The memory of the tensors stays, because calls are given its
// address and no handle.
static void destroy_all(void) {
  CHECK_OK(nvb_stream_destroy(f.stream));
  CHECK_OK(nvb_weight_destroy(r.weight));
  CHECK_OK(nvb_kv_cache_destroy(r.cache));
  CHECK_OK(nvb_attention_destroy(r.attention));
  CHECK_OK(nvb_memory_manager_destroy(f.memory));
  CHECK_OK(nvb_backend_destroy(f.backend));
  if (test_result() != 0) _exit(1);
}

static int destroy_while_exiting(void) {
  start();
  CHECK_EQUAL(atexit(destroy_all), 0);
  return test_result();
}

static void exit_from_log(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)level, (void)target, (void)message, (void)length, (void)user_data;
  exit(test_result());
}

static int exit_in_a_callback(void) {
  start();
  nvb_backend_options options = device_options();
  options.log_level = NVB_LOG_INFO;
  options.log_callback = exit_from_log;
  nvb_backend* backend = NULL;
  CHECK_OK(nvb_backend_create(&options, &backend));
  return 1;
}

static const struct {
  const char* name;
  int (*body)(void);
} endings[] = {
    {"exit on the main thread", exit_on_main_thread},
    {"exit on another thread", exit_on_another_thread},
    {"the main thread ends first", leave_main_thread_first},
    {"handles are destroyed while the process exits", destroy_while_exiting},
    {"exit in a callback", exit_in_a_callback},
};

int main(void) {
  for (int time = 0; time < TIMES; ++time) {
    for (size_t i = 0; i < sizeof endings / sizeof *endings; ++i) CHECK(run_in_child(endings[i].body, endings[i].name));
  }
  return test_result();
}
