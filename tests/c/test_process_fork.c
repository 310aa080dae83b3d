// Children of fork: handles of the parent answer with an error and can be destroyed, what the child creates works, and
// nothing hangs, whatever the parent's other threads were doing.
#include <pthread.h>
#include <stdatomic.h>

#include "process.h"
#include "readers.h"

#ifdef __SANITIZE_ADDRESS__
// GCC's AddressSanitizer (12) does not see to its allocator's locks in a fork: a child of threads that allocate hangs
// in its malloc.
enum { BUSY = 0 };
#else
enum { BUSY = 1 };
#endif
enum { WORKERS = 6, FORKS = 40 };

static fixture f;
static readers r;
static nvb_pool* pool;
static nvb_event* event;
static nvb_stream_manager* streams;
static nvb_configuration* configuration;
static atomic_int done;
static atomic_long rounds, logged;

#define CHECK_PARENTS(call, name) CHECK_FAILS(call, NVB_ERROR_INVALID_ARGUMENT, "the parent's", "forked", name)

// Ends the child at once: the leak checker would look for what threads held that are not here.
static void end_child(void) {
  _exit(test_result());
}

static void check_handles(void) {
  void* block = NULL;
  nvb_stream* stream = NULL;
  uint64_t bytes = 0;
  CHECK_PARENTS(nvb_stream_create(f.backend, 0, &stream), "backend");
  CHECK_PARENTS(nvb_memory_allocate(f.memory, 64, f.stream, &block), "memory manager");
  CHECK_PARENTS(nvb_memory_free(f.memory, r.input, f.stream), "memory manager");
  CHECK_PARENTS(nvb_pool_allocate(pool, 64, f.stream, &block), "pool");
  CHECK_PARENTS(nvb_stream_synchronize(f.stream), "stream");
  CHECK_PARENTS(nvb_event_synchronize(event), "event");
  CHECK_PARENTS(nvb_stream_manager_synchronize(streams), "stream manager");
  CHECK_PARENTS(nvb_configuration_validate(configuration), "configuration");
  CHECK_PARENTS(nvb_kv_cache_get_bytes(r.cache, &bytes), "KV cache");
  nvb_weight_info info;
  nvb_weight_info_init(&info);
  CHECK_PARENTS(nvb_weight_get_info(r.weight, &info), "weight");
  for (int i = 0; i < READERS; ++i) {
    const char* const words[] = {all_readers[i].name, "the parent's", NULL};
    check_fails(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(&r, f.stream), NVB_ERROR_INVALID_ARGUMENT,
                words);
  }
}

static void destroy_handles(void) {
  CHECK_OK(nvb_stream_destroy(f.stream));
  CHECK_OK(nvb_weight_destroy(r.weight));
  CHECK_OK(nvb_kv_cache_destroy(r.cache));
  CHECK_OK(nvb_attention_destroy(r.attention));
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_OK(nvb_event_destroy(event));
  CHECK_OK(nvb_stream_manager_destroy(streams));
  CHECK_OK(nvb_configuration_destroy(configuration));
  CHECK_OK(nvb_memory_manager_destroy(r.tensors));
  CHECK_OK(nvb_memory_manager_destroy(f.memory));
  CHECK_OK(nvb_backend_destroy(f.backend));
  CHECK_FAILS(nvb_backend_destroy(f.backend), NVB_ERROR_INVALID_ARGUMENT, "was destroyed");
  CHECK_OK(nvb_backend_destroy(NULL));
  CHECK_OK(nvb_weight_destroy(NULL));
}

static void count_line(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)level, (void)target, (void)message, (void)length;
  atomic_fetch_add((atomic_long*)user_data, 1);
}

// All that reads weights and caches, on a backend that this process has made, with work for the threads of its pool.
static void check_own_backend(const char* device) {
  const long before = logged;
  static atomic_long own_lines;
  fixture own = {NULL, NULL, NULL};
  nvb_backend_options options = device_options();
  options.device = device;
  options.log_level = NVB_LOG_TRACE;
  options.log_callback = count_line;
  options.log_user_data = &own_lines;
  CHECK_OK(nvb_backend_create(&options, &own.backend));
  CHECK_OK(nvb_backend_get_memory_manager(own.backend, 0, &own.memory));
  CHECK_OK(nvb_stream_create(own.backend, 0, &own.stream));
  readers mine = open_readers(&own);
  create_weight_and_cache(&mine, own.stream);
  for (int i = 0; i < READERS; ++i) {
    check_ok(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(&mine, own.stream));
  }
  CHECK_OK(nvb_stream_synchronize(own.stream));
  CHECK_OK(nvb_weight_destroy(mine.weight));
  create_weight(&mine, own.stream, NVB_WEIGHT_FORMAT_INT4, &mine.weight);
  CHECK_OK(nvb_weight_destroy(mine.weight));
  CHECK_OK(nvb_kv_cache_destroy(mine.cache));
  CHECK_OK(nvb_attention_destroy(mine.attention));
  close_readers(&mine);
  CHECK(nvb_memory_allocate(own.memory, (size_t)1 << 60, own.stream, &mine.input) != NVB_OK);
  CHECK_EQUAL(statistics_of(own.memory).blocks, 0);
  close_fixture(&own);
  CHECK(own_lines > 0);
  CHECK_EQUAL(logged - before, 0);  // The parent's callback hears of nothing.
}

static void check_cuda(void) {
  if (test_on_cpu()) return;
  nvb_backend_options options = device_options();
  nvb_backend* backend = NULL;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CUDA_NOT_AVAILABLE, "cannot be used after a fork");
}

static void* destroy_in_thread(void* unused) {
  (void)unused;
  destroy_handles();
  return NULL;
}

static void child(int number) {
  if (number % 2 == 0) check_handles();
  check_cuda();
  if (number % 3 != 0) check_own_backend("cpu");
  if (number % 4 == 0) {
    // A thread of the child ends with claims of its own, and the main one with the parent's.
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, destroy_in_thread, NULL), 0);
    pthread_join(thread, NULL);
  } else {
    destroy_handles();
  }
  if (number % 3 == 0) check_own_backend("cpu");
  if (number % 5 == 0) {
    // The child of a child.
    fflush(NULL);
    pid_t grandchild = fork();
    if (grandchild == 0) {
      check_own_backend("cpu");
      end_child();
    }
    CHECK(child_succeeds(grandchild, "a grandchild"));
  }
  end_child();
}

// Computes, converts, allocates, creates and logs until told to stop.
static void* work(void* argument) {
  const int number = (int)(intptr_t)argument;
  nvb_stream* stream = NULL;
  CHECK_OK(nvb_stream_create(f.backend, 0, &stream));
  for (int i = number; !done; ++i) {
    check_ok(__FILE__, __LINE__, "work", all_readers[i % READERS].call(&r, stream));
    void* blocks[40] = {NULL};
    for (int k = 0; k < 40; ++k) CHECK_OK(nvb_memory_allocate(f.memory, (size_t)64 << k % 16, stream, &blocks[k]));
    CHECK_OK(nvb_memory_free_many(f.memory, blocks, 40, stream));
    if (number == 0) {
      nvb_weight* weight = NULL;
      create_weight(&r, stream, NVB_WEIGHT_FORMAT_INT8, &weight);
      CHECK_OK(nvb_weight_destroy(weight));
    } else if (number == 1) {
      nvb_backend_options options = device_options();
      options.log_level = NVB_LOG_TRACE;
      options.log_callback = count_line;
      options.log_user_data = &logged;
      nvb_backend* backend = NULL;
      CHECK_OK(nvb_backend_create(&options, &backend));
      CHECK_OK(nvb_backend_destroy(backend));
    }
    atomic_fetch_add(&rounds, 1);
  }
  CHECK_OK(nvb_stream_destroy(stream));
  return NULL;
}

// The thread that forks has used everything as well, and ends in the child with what it had.
static void* end_in_child(void* unused) {
  (void)unused;
#ifdef __SANITIZE_ADDRESS__
  puts("skipped: the end of the thread that forked, where LeakSanitizer looks for what the parent's threads held");
  return NULL;
#endif
  if (!test_on_cpu()) {
    puts("skipped: the end of the thread that forked, where handlers of CUDA's driver run that are the parent's");
    return NULL;
  }
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f.memory, 256, f.stream, &block));
  CHECK_OK(nvb_memory_free(f.memory, block, f.stream));
  CHECK_INVALID(nvb_stream_synchronize(NULL));
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    // Its destructors run, and then the process ends, with the last thread.
    check_own_backend("cpu");
    if (test_result() != 0) _exit(1);
    pthread_exit(NULL);
  }
  CHECK(child_succeeds(pid, "the end of the thread that forked"));
  return NULL;
}

int main(void) {
  // A child that is forked before the library has done anything is a process like any other.
  fflush(NULL);
  pid_t early = fork();
  if (early == 0) {
    check_own_backend(test_device());
    end_child();
  }
  CHECK(child_succeeds(early, "a child of an idle parent"));

  f = open_fixture();
  r = open_readers(&f);
  create_weight_and_cache(&r, f.stream);
  CHECK_OK(nvb_pool_create(f.memory, "pool", &pool));
  CHECK_OK(nvb_event_create(f.backend, &event));
  CHECK_OK(nvb_stream_manager_create(f.backend, NULL, &streams));
  CHECK_OK(nvb_configuration_create(0, &configuration));
  pthread_t threads[WORKERS], forking;
  if (!BUSY) puts("skipped: children of threads at work, which hang in AddressSanitizer's own allocator");
  const int workers = BUSY ? WORKERS : 0;
  for (int i = 0; i < workers; ++i) CHECK_EQUAL(pthread_create(&threads[i], NULL, work, (void*)(intptr_t)i), 0);
  while (rounds < workers && check_failures == 0) nanosleep(&(struct timespec){0, 1000000}, NULL);
  for (int number = 0; number < FORKS && check_failures == 0; ++number) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) child(number);
    char name[32];
    snprintf(name, sizeof name, "child %d", number);
    CHECK(child_succeeds(pid, name));
  }
  CHECK_EQUAL(pthread_create(&forking, NULL, end_in_child, NULL), 0);
  pthread_join(forking, NULL);
  done = 1;
  for (int i = 0; i < workers; ++i) pthread_join(threads[i], NULL);
  // The parent has noticed nothing.
  for (int i = 0; i < READERS; ++i) {
    check_ok(__FILE__, __LINE__, all_readers[i].name, all_readers[i].call(&r, f.stream));
  }
  CHECK_OK(nvb_stream_synchronize(f.stream));
  CHECK_OK(nvb_weight_destroy(r.weight));
  CHECK_OK(nvb_kv_cache_destroy(r.cache));
  CHECK_OK(nvb_attention_destroy(r.attention));
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_OK(nvb_event_destroy(event));
  CHECK_OK(nvb_stream_manager_destroy(streams));
  CHECK_OK(nvb_configuration_destroy(configuration));
  close_readers(&r);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
  return test_result();
}
