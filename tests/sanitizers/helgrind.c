// For helgrind (`make test-helgrind`): threads that use the memory manager from C as an engine does, each with blocks
// of its own, and blocks handed over under a pthread lock. Helgrind knows locks and not the library's atomics, so what
// is inside the library is left out (helgrind.txt), and memory that comes from it is told to be new.
#include <nvbackend.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <valgrind/helgrind.h>

enum { THREADS = 4, STEPS = 400, PLACES = 8 };

static nvb_backend* backend;
static nvb_memory_manager* memory;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  uint64_t* block;
  size_t words;
} places[PLACES];
static uint64_t reclaimed;
static int failures;

static void check(nvb_status status) {
  if (status == NVB_OK || status == NVB_ERROR_OUT_OF_MEMORY) return;
  char text[512];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "helgrind: %s\n", text);
  pthread_mutex_lock(&lock);
  ++failures;
  pthread_mutex_unlock(&lock);
}

// Called by whichever thread found no memory.
static uint64_t reclaim(uint64_t bytes, void* user_data) {
  (void)bytes;
  (void)user_data;
  pthread_mutex_lock(&lock);
  ++reclaimed;
  pthread_mutex_unlock(&lock);
  return 0;
}

static void use(uint64_t* block, size_t words) {
  for (size_t i = 0; i < words; i += 64) block[i] += i;
}

static void* work(void* argument) {
  uintptr_t number = (uintptr_t)argument;
  nvb_stream* stream = NULL;
  check(nvb_stream_create(backend, 0, &stream));
  for (uintptr_t step = 0; step < STEPS; ++step) {
    const size_t words = 64u << ((step + number) % 12);
    void* pointer = NULL;
    check(nvb_memory_allocate(memory, words * 8, stream, &pointer));
    if (pointer == NULL) continue;
    VALGRIND_HG_CLEAN_MEMORY(pointer, words * 8);
    memset(pointer, 0, words * 8);
    use(pointer, words);
    // The block goes to another thread, and another thread's comes here.
    pthread_mutex_lock(&lock);
    const size_t place = (step * 7 + number) % PLACES;
    uint64_t* received = places[place].block;
    const size_t received_words = places[place].words;
    places[place].block = pointer;
    places[place].words = words;
    pthread_mutex_unlock(&lock);
    if (received != NULL) {
      use(received, received_words);
      check(nvb_memory_free(memory, received, stream));
    }
    if (step % 50 == 0) {
      nvb_pool* pool = NULL;
      check(nvb_pool_create(memory, "helgrind", &pool));
      check(nvb_pool_allocate(pool, 5000, stream, &pointer));
      check(nvb_pool_destroy(pool));
      check(nvb_memory_trim(memory, 0, NULL));
    }
  }
  check(nvb_stream_destroy(stream));
  return NULL;
}

int main(void) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cpu";
  options.threads = 1;
  check(nvb_backend_create(&options, &backend));
  nvb_memory_options memory_options;
  nvb_memory_options_init(&memory_options);
  memory_options.limit = 64u << 20;
  memory_options.range_bytes = 1u << 30;
  check(nvb_memory_manager_create(backend, &memory_options, &memory));
  uint64_t id;
  check(nvb_memory_add_reclaim_callback(memory, reclaim, NULL, 0, &id));
  // Little is left, so that threads meet in the out-of-memory ladder as well.
  void* large = NULL;
  check(nvb_memory_allocate(memory, 56u << 20, NULL, &large));
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; ++i) pthread_create(&threads[i], NULL, work, (void*)i);
  for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
#ifdef PLANT_A_RACE
  // Proof that helgrind watches: two threads write to one block with no lock between them.
  pthread_create(&threads[0], NULL, work, (void*)0);
  places[0].block[0] = 1;
  pthread_join(threads[0], NULL);
#endif
  for (int i = 0; i < PLACES; ++i) check(nvb_memory_free(memory, places[i].block, NULL));
  check(nvb_memory_free(memory, large, NULL));
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  check(nvb_memory_get_statistics(memory, &statistics));
  check(nvb_memory_manager_destroy(memory));
  check(nvb_backend_destroy(backend));
  printf("helgrind: %llu allocations, %llu left, %llu times asked to reclaim\n",
         (unsigned long long)statistics.allocations, (unsigned long long)statistics.blocks,
         (unsigned long long)reclaimed);
  return failures != 0 || statistics.blocks != 0 || reclaimed == 0;
}
