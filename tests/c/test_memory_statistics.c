// What a memory manager says of itself: statistics, recovery steps, peaks, the leak report and the snapshot.
#include <fcntl.h>
#include <pthread.h>

#include "check.h"

enum { MIB = 1 << 20 };

static nvb_memory_manager* tracked(fixture* f, uint32_t leak_tracking, uint64_t trace_events) {
  nvb_memory_options options;
  nvb_memory_options_init(&options);
  options.limit = 256 * MIB;
  options.margin = NVB_MEMORY_NONE;
  options.leak_tracking = leak_tracking;
  options.trace_events = trace_events;
  nvb_memory_manager* memory = NULL;
  if (!CHECK_OK(nvb_memory_manager_create(f->backend, &options, &memory))) exit(1);
  return memory;
}

static nvb_status get_statistics(void* value, void* context) {
  return nvb_memory_get_statistics(context, value);
}

static nvb_status get_recovery_step(void* value, void* context) {
  return nvb_memory_get_recovery_step_statistics(context, NVB_RECOVERY_STEP_TRIM, value);
}

static void test_statistics(fixture* f) {
  nvb_memory_manager* memory = tracked(f, NVB_LEAK_TRACKING_OFF, 0);
  nvb_memory_statistics statistics = statistics_of(memory);
  CHECK_STRUCT(statistics, get_statistics, memory);
  CHECK_FAILS(nvb_memory_get_statistics(NULL, &statistics), NVB_ERROR_INVALID_ARGUMENT, "memory manager", "NULL");
  CHECK(statistics.allocated == 0 && statistics.reserved == 0 && statistics.limit == 256 * MIB &&
        statistics.margin == 0 && statistics.fragmentation == 0);
  CHECK(statistics.largest_free > 0 && statistics.device_free > 0 && statistics.device_free <= statistics.device_total);

  void *small = NULL, *large = NULL;
  CHECK_OK(nvb_memory_allocate(memory, 1000, f->stream, &small));
  CHECK_OK(nvb_memory_allocate(memory, 30 * MIB, f->stream, &large));
  statistics = statistics_of(memory);
  CHECK(statistics.allocated == 1000 + 30 * MIB && statistics.peak == statistics.allocated && statistics.blocks == 2);
  CHECK_EQUAL(statistics.reserved, 32 * MIB);
  CHECK_EQUAL(statistics.cached, statistics.reserved - statistics.allocated);
  CHECK_EQUAL(statistics.free, 0);
  CHECK_NEAR(statistics.fragmentation, (2.0 * MIB - 1000) / (32.0 * MIB), 1e-6);
  CHECK_OK(nvb_memory_free(memory, large, f->stream));
  CHECK_OK(nvb_memory_trim(memory, 0, NULL));
  CHECK_OK(nvb_memory_reset_peaks(memory));
  statistics = statistics_of(memory);
  CHECK(statistics.peak == 1000 && statistics.peak_reserved == statistics.reserved && statistics.spilled == 0 &&
        statistics.captured == 0);
  CHECK(statistics.allocations == 2 && statistics.frees == 1);
  CHECK_OK(nvb_memory_free(memory, small, f->stream));

  uint64_t device_free = 0, device_total = 0;
  CHECK_OK(nvb_memory_query_device(memory, &device_free, &device_total));
  CHECK(device_free > 0 && device_free <= device_total);
  CHECK_OK(nvb_memory_query_device(memory, NULL, NULL));
  statistics = statistics_of(memory);
  CHECK(statistics.device_total == device_total && statistics.unaccounted <= device_total);
  CHECK_FAILS(nvb_memory_query_device(NULL, &device_free, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_memory_reset_peaks(NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");

  nvb_memory_recovery_step_statistics step;
  nvb_memory_recovery_step_statistics_init(&step);
  CHECK_STRUCT(step, get_recovery_step, memory);
  for (uint32_t i = 0; i < NVB_RECOVERY_STEP_COUNT; ++i) {
    CHECK_OK(nvb_memory_get_recovery_step_statistics(memory, i, &step));
    CHECK(step.name[0] != '\0' && step.helped <= step.tried);
  }
  CHECK_FAILS(nvb_memory_get_recovery_step_statistics(memory, NVB_RECOVERY_STEP_COUNT, &step),
              NVB_ERROR_INVALID_ARGUMENT, "step is 7");
  CHECK_FAILS(nvb_memory_get_recovery_step_statistics(NULL, 0, &step), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

// Counts of two threads add up, whichever of them frees.
typedef struct {
  fixture* f;
  nvb_memory_manager* memory;
  void* blocks[500];
} work;

static void* allocate_all(void* argument) {
  work* self = argument;
  check_thread = 1;
  nvb_stream* stream = NULL;
  CHECK_OK(nvb_stream_create(self->f->backend, 0, &stream));
  for (int i = 0; i < 500; ++i) CHECK_OK(nvb_memory_allocate(self->memory, 1 + 997 * i, stream, &self->blocks[i]));
  CHECK_OK(nvb_stream_destroy(stream));
  return NULL;
}

static void test_two_threads(fixture* f) {
  work state = {f, tracked(f, NVB_LEAK_TRACKING_OFF, 0), {NULL}};
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, allocate_all, &state), 0);
  for (int i = 0; i < 200; ++i) (void)statistics_of(state.memory);
  pthread_join(thread, NULL);
  nvb_memory_statistics statistics = statistics_of(state.memory);
  CHECK_EQUAL(statistics.blocks, 500);
  CHECK_EQUAL(statistics.allocated, 500 + 997 * (499 * 500 / 2));
  for (int i = 0; i < 500; ++i) CHECK_OK(nvb_memory_free(state.memory, state.blocks[i], f->stream));
  statistics = statistics_of(state.memory);
  CHECK(statistics.blocks == 0 && statistics.allocated == 0 && statistics.frees == 500);
  CHECK_OK(nvb_memory_manager_destroy(state.memory));
}

static nvb_pool_statistics pool_statistics_of(nvb_pool* pool) {
  nvb_pool_statistics statistics;
  nvb_pool_statistics_init(&statistics);
  CHECK_OK(nvb_pool_get_statistics(pool, &statistics));
  return statistics;
}

// Peaks of a few small blocks, which a thread counts by itself, outlast the blocks' ends: one by one, with their pool's
// content, and with the pool. The peaks of a manager start again without those of its pools.
static void test_small_peaks(fixture* f) {
  enum { BLOCKS = 10, BYTES = 5000 };
  nvb_memory_manager* memory = tracked(f, NVB_LEAK_TRACKING_OFF, 0);
  nvb_pool* pool = NULL;
  void *outside = NULL, *blocks[BLOCKS];
  CHECK_OK(nvb_memory_allocate(memory, BYTES, f->stream, &outside));
  CHECK_OK(nvb_pool_create(memory, "small", &pool));
  for (int i = 0; i < BLOCKS; ++i) CHECK_OK(nvb_pool_allocate(pool, BYTES, f->stream, &blocks[i]));
  uint64_t freed = 0;
  CHECK_OK(nvb_pool_clear(pool, &freed));
  nvb_pool_statistics statistics = pool_statistics_of(pool);
  CHECK_EQUAL(freed, BLOCKS);
  CHECK_EQUAL(statistics.allocated, 0);
  CHECK_EQUAL(statistics.peak, BLOCKS * BYTES);
  CHECK_EQUAL(statistics.frees, BLOCKS);
  CHECK_EQUAL(statistics_of(memory).allocated, BYTES);
  CHECK_EQUAL(statistics_of(memory).peak, (BLOCKS + 1) * BYTES);

  CHECK_OK(nvb_memory_reset_peaks(memory));
  CHECK_EQUAL(statistics_of(memory).peak, BYTES);
  CHECK_EQUAL(pool_statistics_of(pool).peak, BLOCKS * BYTES);
  for (int i = 0; i < BLOCKS; ++i) CHECK_OK(nvb_pool_allocate(pool, 2 * BYTES, f->stream, &blocks[i]));
  for (int i = 0; i < BLOCKS; ++i) CHECK_OK(nvb_pool_free(pool, blocks[i], f->stream));
  CHECK_OK(nvb_memory_reset_peaks(memory));
  CHECK_EQUAL(statistics_of(memory).peak, BYTES);
  CHECK_EQUAL(pool_statistics_of(pool).peak, 2 * BLOCKS * BYTES);

  for (int i = 0; i < 2 * BLOCKS; ++i) CHECK_OK(nvb_pool_allocate(pool, BYTES, f->stream, &blocks[0]));
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_EQUAL(statistics_of(memory).peak, (2 * BLOCKS + 1) * BYTES);
  CHECK_EQUAL(statistics_of(memory).allocated, BYTES);
  CHECK_OK(nvb_memory_free(memory, outside, f->stream));
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

static char* text_of(nvb_status (*get)(nvb_memory_manager*, char*, size_t, size_t*), nvb_memory_manager* memory) {
  size_t needed = 0, again = 0;
  CHECK_OK(get(memory, NULL, 0, &needed));
  CHECK(needed > 1);
  // Room for a number that has grown by a digit in between, as ages do.
  size_t capacity = needed + 256;
  char* text = malloc(capacity);
  if (text == NULL) abort();
  CHECK_OK(get(memory, text, capacity, &again));
  CHECK_EQUAL(strlen(text) + 1, again);
  char start[9];
  CHECK_OK(get(memory, start, sizeof start, NULL));
  CHECK(strlen(start) == 8 && strncmp(text, start, 8) == 0);
  CHECK_FAILS(get(NULL, text, capacity, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  return text;
}

static void test_leak_report(fixture* f) {
  const uint32_t modes[] = {NVB_LEAK_TRACKING_OFF, NVB_LEAK_TRACKING_SAMPLED, NVB_LEAK_TRACKING_FULL};
  const char* const words[] = {"tracking is off", "one allocation in about 524288 bytes", "from"};
  for (int i = 0; i < 3; ++i) {
    nvb_memory_manager* memory = tracked(f, modes[i], 0);
    void* blocks[3];
    for (int j = 0; j < 3; ++j) CHECK_OK(nvb_memory_allocate(memory, 7 * MIB, f->stream, &blocks[j]));
    char* report = text_of(nvb_memory_get_leak_report, memory);
    CHECK(strstr(report, "3 live blocks of 22020096 bytes") == report);
    CHECK(strstr(report, words[i]) != NULL);
    // The one loop above is the one place.
    if (i > 0) CHECK(strstr(report, "22020096 bytes in 3 blocks, oldest") != NULL);
    free(report);
    for (int j = 0; j < 3; ++j) CHECK_OK(nvb_memory_free(memory, blocks[j], f->stream));
    report = text_of(nvb_memory_get_leak_report, memory);
    CHECK(strstr(report, "0 live blocks of 0 bytes") == report && strstr(report, "oldest") == NULL);
    free(report);
    CHECK_OK(nvb_memory_manager_destroy(memory));
  }
}

static int count(const char* text, const char* word) {
  int found = 0;
  for (; (text = strstr(text, word)) != NULL; text += strlen(word)) ++found;
  return found;
}

static void test_snapshot(fixture* f) {
  nvb_memory_manager* memory = tracked(f, NVB_LEAK_TRACKING_FULL, 1000);
  nvb_pool* pool = NULL;
  CHECK_OK(nvb_pool_create(memory, "a \"quoted\" pool", &pool));
  void *small = NULL, *large = NULL, *pooled = NULL, *pinned = NULL, *out = NULL;
  CHECK_OK(nvb_memory_allocate(memory, 700, f->stream, &small));
  CHECK_OK(nvb_memory_allocate(memory, 9 * MIB, f->stream, &large));
  CHECK_OK(nvb_memory_allocate_pinned(memory, 4096, &pinned));
  CHECK_OK(nvb_pool_allocate(pool, 1234, f->stream, &pooled));
  CHECK_FAILS(nvb_memory_allocate(memory, 300 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "limit");
  CHECK_OK(nvb_memory_free(memory, small, f->stream));

  char* json = text_of(nvb_memory_get_snapshot, memory);
  CHECK(json[0] == '{' && strcmp(json + strlen(json) - 3, "\n}\n") == 0);
  CHECK(count(json, "{") == count(json, "}") && count(json, "[") == count(json, "]"));
  const char* const words[] = {"\"version\": 1",
                               "\"a \\\"quoted\\\" pool\"",
                               "\"limit\": 268435456",
                               "\"sites\": [\n",
                               "\"block_bytes\": 1280,",
                               "9437184, 10485760, \"large\", null]",
                               "1234, 1280, \"small\", \"a",
                               "4096, 4096, \"pinned\", null]"};
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i) {
    if (strstr(json, words[i]) == NULL) check_fail(__FILE__, __LINE__, words[i], json);
  }
  CHECK_EQUAL(count(json, "\"allocate\""), 4);
  CHECK_EQUAL(count(json, "\"free\", "), 1);
  CHECK_EQUAL(count(json, "\"out_of_memory\""), 1);
  CHECK(count(json, "\"recovery_step\"") >= 1);

  // A pool's blocks that end with it end in the trace too, which alone keeps its name then.
  CHECK_OK(nvb_pool_destroy(pool));
  free(json);
  json = text_of(nvb_memory_get_snapshot, memory);
  CHECK_EQUAL(count(json, "\"free\", "), 2);
  CHECK_EQUAL(count(json, "quoted"), 1);
  CHECK(strstr(json, "\"pools\": [\n\"a \\\"quoted\\\" pool\"], \"columns\"") != NULL);
  free(json);

  char path[] = "/tmp/nvb_snapshot_XXXXXX";
  int file = mkstemp(path);
  CHECK(file >= 0);
  CHECK_OK(nvb_memory_write_snapshot(memory, path));
  // The file is another one now, under the same name.
  close(file);
  file = open(path, O_RDONLY);
  char start[64] = "";
  CHECK(read(file, start, sizeof start - 1) > 0 && strncmp(start, "{\n\"version\": 1", 14) == 0);
  close(file);
  unlink(path);
  CHECK_FAILS(nvb_memory_write_snapshot(memory, "/no/such/folder/file"), NVB_ERROR_IO, "/no/such/folder/file");
  CHECK_FAILS(nvb_memory_write_snapshot(memory, NULL), NVB_ERROR_INVALID_ARGUMENT, "path");
  CHECK_FAILS(nvb_memory_write_snapshot(NULL, path), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_free(memory, large, f->stream));
  CHECK_OK(nvb_memory_free(memory, pinned, f->stream));
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

int main(void) {
  fixture f = open_fixture();
  test_statistics(&f);
  test_two_threads(&f);
  test_small_peaks(&f);
  test_leak_report(&f);
  test_snapshot(&f);
  close_fixture(&f);
  return test_result();
}
