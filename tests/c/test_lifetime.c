// A call holds every handle that it was given until it returns, and work that is queued holds its memory: threads read
// a weight, a cache, an attention and a stream while another thread destroys them and makes new ones.
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "readers.h"

enum { THREADS = 8, RENEWALS = 150 };

static fixture f;
static readers r;
// What the threads share, as numbers: handles are no addresses, and each is replaced while it is in use.
static _Atomic(nvb_weight*) weight;
static _Atomic(nvb_kv_cache*) cache;
static _Atomic(nvb_attention*) attention;
static _Atomic(nvb_stream*) stream;
static _Atomic(nvb_memory_manager*) manager;
static atomic_int done, succeeded;

// A handle that has just been destroyed is an error that names the call; everything else succeeds.
static void check_outcome(const char* name, nvb_status status) {
  if (status == NVB_OK) {
    atomic_fetch_add(&succeeded, 1);
    return;
  }
  const char* const words[] = {name, "was destroyed", NULL};
  check_fails(__FILE__, __LINE__, name, status, NVB_ERROR_INVALID_ARGUMENT, words);
}

static void* read_all(void* number) {
  check_thread = (int)(intptr_t)number;
  for (int i = check_thread; !atomic_load(&done) && check_failures == 0; ++i) {
    readers mine = r;
    mine.weight = weight;
    mine.cache = cache;
    mine.attention = attention;
    nvb_stream* on = stream;
    check_outcome(all_readers[i % READERS].name, all_readers[i % READERS].call(&mine, on));
    void* block = NULL;
    nvb_memory_manager* from = manager;
    const size_t bytes = (size_t)1 << (8 + i % 15);
    nvb_status status = nvb_memory_allocate(from, bytes, on, &block);
    check_outcome("nvb_memory_allocate", status);
    if (status == NVB_OK) {
      status = nvb_memory_free(from, block, on);
      // Its stream may be gone, and then the block is freed without it. A manager that is gone frees it itself.
      if (status != NVB_OK) nvb_memory_free(from, block, NULL);
    }
    check_outcome("nvb_stream_synchronize", nvb_stream_synchronize(on));
  }
  return NULL;
}

static void renew_all(int turn) {
  nvb_weight* new_weight = NULL;
  nvb_kv_cache* new_cache = NULL;
  nvb_attention* new_attention = NULL;
  nvb_stream* new_stream = NULL;
  nvb_memory_manager* new_manager = NULL;
  create_weight(&r, f.stream, turn % 2 == 0 ? NVB_WEIGHT_FORMAT_AS_IS : NVB_WEIGHT_FORMAT_INT8, &new_weight);
  CHECK_OK(nvb_weight_destroy(atomic_exchange(&weight, new_weight)));
  create_cache(&r, &new_cache);
  CHECK_OK(nvb_kv_cache_destroy(atomic_exchange(&cache, new_cache)));
  create_attention(&r, &new_attention);
  CHECK_OK(nvb_attention_destroy(atomic_exchange(&attention, new_attention)));
  CHECK_OK(nvb_stream_create(f.backend, 0, &new_stream));
  CHECK_OK(nvb_stream_destroy(atomic_exchange(&stream, new_stream)));
  if (turn % 16 == 0) {
    CHECK_OK(nvb_memory_manager_create(f.backend, NULL, &new_manager));
    CHECK_OK(nvb_memory_manager_destroy(atomic_exchange(&manager, new_manager)));
  }
  // What was held comes back, and is given away for good.
  CHECK_OK(nvb_memory_trim(f.memory, 0, NULL));
}

int main(void) {
  f = open_fixture();
  r = open_readers(&f);
  renew_all(0);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; ++i) {
    CHECK_EQUAL(pthread_create(&threads[i], NULL, read_all, (void*)(intptr_t)(i + 1)), 0);
  }
  for (int turn = 0; turn < RENEWALS && check_failures == 0; ++turn) {
    renew_all(turn);
    while (succeeded < 4 * turn && check_failures == 0) nanosleep(&(struct timespec){0, 100000}, NULL);
  }
  atomic_store(&done, 1);
  for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
  CHECK_OK(nvb_weight_destroy(weight));
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_OK(nvb_attention_destroy(attention));
  CHECK_OK(nvb_attention_destroy(r.attention));
  CHECK_OK(nvb_stream_destroy(stream));
  CHECK_OK(nvb_memory_manager_destroy(manager));
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_readers(&r);
  close_fixture(&f);
  return test_result();
}
