// memory: what the memory manager does for an engine, step by step, each checked.
//
//   memory [DEVICE [SNAPSHOT]]     DEVICE: "auto" (the default), "cpu", "cuda:N"; SNAPSHOT: a file to write
//
// A manager of its own with a limit of 256 MiB stands in for a full GPU. The program shows pools, running out of
// memory and getting some back, statistics, giving memory back, sleeping, and the report of a block that was forgotten.
// `tools/memory_timeline.py SNAPSHOT` draws what happened.
#include <inttypes.h>
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20, SEQUENCES = 12, SEQUENCE_BYTES = 16 * MIB };

// This program ends at the first error that it does not expect; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "memory: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "memory: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

static double mib(uint64_t bytes) {
  return (double)bytes / MIB;
}

static nvb_memory_statistics statistics_of(nvb_memory_manager* memory, const char* when) {
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  MUST(nvb_memory_get_statistics(memory, &statistics));
  printf("  %-16s %6.1f MiB in use, %6.1f at peak; %6.1f held, %6.1f of them cached\n", when, mib(statistics.allocated),
         mib(statistics.peak), mib(statistics.reserved), mib(statistics.cached));
  return statistics;
}

// Pools: the blocks of a request end together, whatever became of each.
static void use_pools(nvb_memory_manager* memory, nvb_stream* stream) {
  printf("pools\n");
  nvb_pool *requests = NULL, *layers = NULL;
  MUST(nvb_pool_create(memory, "requests", &requests));
  MUST(nvb_pool_create(memory, "layers", &layers));
  void* block = NULL;
  for (size_t i = 1; i <= 64; ++i) MUST(nvb_pool_allocate(requests, i * 10000, stream, &block));
  MUST(nvb_pool_free(requests, block, stream));
  MUST(nvb_pool_allocate_aligned(layers, 3 * MIB, 65536, stream, &block));

  nvb_pool* const pools[] = {requests, layers};
  for (int i = 0; i < 2; ++i) {
    nvb_pool_statistics statistics;
    nvb_pool_statistics_init(&statistics);
    MUST(nvb_pool_get_statistics(pools[i], &statistics));
    char name[32];
    MUST(nvb_pool_get_name(pools[i], name, sizeof name, NULL));
    printf("  %-10s %2" PRIu64 " blocks, %5.1f MiB\n", name, statistics.blocks, mib(statistics.allocated));
  }
  uint64_t freed = 0;
  MUST(nvb_pool_clear(requests, &freed));
  EXPECT(freed == 63);
  MUST(nvb_pool_destroy(requests));
  MUST(nvb_pool_destroy(layers));
}

// Sequences that nobody waits for just now: the engine can give up their caches and fill them again later.
typedef struct {
  nvb_memory_manager* memory;
  nvb_stream* stream;
  void* caches[SEQUENCES];
  int count;
} idle_sequences;

static uint64_t give_up_sequences(uint64_t bytes, void* user_data) {
  idle_sequences* idle = user_data;
  uint64_t freed = 0;
  while (freed < bytes && idle->count > 0) {
    if (nvb_memory_free(idle->memory, idle->caches[--idle->count], idle->stream) != NVB_OK) break;
    freed += SEQUENCE_BYTES;
  }
  printf("  asked for %.0f MiB, gave up sequences of %.0f\n", mib(bytes), mib(freed));
  return freed;
}

static void run_out_of_memory(nvb_memory_manager* memory, nvb_stream* stream) {
  printf("protection\n");
  idle_sequences idle = {memory, stream, {NULL}, 0};
  while (idle.count < SEQUENCES) MUST(nvb_memory_allocate(memory, SEQUENCE_BYTES, stream, &idle.caches[idle.count++]));
  void* prompt = NULL;
  const size_t prompt_bytes = (size_t)100 * MIB;

  // An error, with everything that one wants to know; nothing else has changed.
  EXPECT(nvb_memory_check_available(memory, prompt_bytes) == NVB_ERROR_OUT_OF_MEMORY);
  EXPECT(nvb_memory_allocate(memory, prompt_bytes, stream, &prompt) == NVB_ERROR_OUT_OF_MEMORY);
  EXPECT(prompt == NULL);
  nvb_memory_failure failure;
  nvb_memory_failure_init(&failure);
  MUST(nvb_last_error_get_memory(&failure));
  printf("  refused: %.0f MiB requested, limit %.0f, %.0f in use, %.0f held; recovery steps tried:",
         mib(failure.requested), mib(failure.limit), mib(failure.allocated), mib(failure.held));
  for (uint32_t step = 0; step < NVB_RECOVERY_STEP_COUNT; ++step) {
    nvb_memory_recovery_step_statistics statistics;
    nvb_memory_recovery_step_statistics_init(&statistics);
    MUST(nvb_memory_get_recovery_step_statistics(memory, step, &statistics));
    if ((failure.recovery_steps_tried >> step & 1) != 0) printf(" %s;", statistics.name);
  }
  printf("\n");
  EXPECT(failure.requested == prompt_bytes && failure.limit == 256 * MIB);

  // With something to give up, the same call succeeds.
  uint64_t id = 0;
  MUST(nvb_memory_add_reclaim_callback(memory, give_up_sequences, &idle, 0, &id));
  MUST(nvb_memory_allocate(memory, prompt_bytes, stream, &prompt));
  EXPECT(idle.count < SEQUENCES && idle.count > 0);
  MUST(nvb_memory_remove_reclaim_callback(memory, id));
  statistics_of(memory, "with the prompt");
  MUST(nvb_memory_free(memory, prompt, stream));
  while (idle.count > 0) MUST(nvb_memory_free(memory, idle.caches[--idle.count], stream));
}

// An idle engine leaves the device to others, and finds its memory as it was.
static void give_back(nvb_memory_manager* memory, nvb_stream* stream) {
  printf("giving back\n");
  const char secret[] = "kept across sleep";
  char back[sizeof secret] = "";
  void* block = NULL;
  MUST(nvb_memory_allocate(memory, 8 * MIB, stream, &block));
  MUST(nvb_memory_copy(memory, block, secret, sizeof secret, NVB_COPY_HOST_TO_DEVICE, stream));
  uint64_t released = 0, taken = 0;
  MUST(nvb_memory_trim(memory, 0, &released));
  printf("  trim gave back %.0f MiB\n", mib(released));
  MUST(nvb_memory_sleep(memory, 1, &released));
  const nvb_memory_statistics asleep = statistics_of(memory, "asleep");
  EXPECT(asleep.reserved == 0 && asleep.allocated == 8 * MIB);
  MUST(nvb_memory_wake(memory, &taken));
  EXPECT(taken == released);
  MUST(nvb_memory_copy(memory, back, block, sizeof back, NVB_COPY_DEVICE_TO_HOST, stream));
  MUST(nvb_stream_synchronize(stream));
  EXPECT(strcmp(back, secret) == 0);
  statistics_of(memory, "awake again");
  MUST(nvb_memory_free(memory, block, stream));
}

static void report_leaks(nvb_memory_manager* memory, nvb_stream* stream) {
  printf("leak report\n");
  void* forgotten = NULL;
  MUST(nvb_memory_allocate(memory, 12345, stream, &forgotten));
  size_t needed = 0;
  MUST(nvb_memory_get_leak_report(memory, NULL, 0, &needed));
  // A few more bytes, because ages grow between the two calls.
  char* report = malloc(needed + 64);
  EXPECT(report != NULL);
  MUST(nvb_memory_get_leak_report(memory, report, needed + 64, NULL));
  fputs(report, stdout);
  EXPECT(strstr(report, "1 live blocks of 12345 bytes") != NULL);
  free(report);
  MUST(nvb_memory_free(memory, forgotten, stream));
}

int main(int count, char** arguments) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = count > 1 ? arguments[1] : "auto";
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  nvb_stream* stream = NULL;
  MUST(nvb_stream_create(backend, 0, &stream));

  nvb_memory_options memory_options;
  nvb_memory_options_init(&memory_options);
  memory_options.limit = 256 * MIB;
  memory_options.trace_events = 4096;
  memory_options.leak_tracking = NVB_LEAK_TRACKING_FULL;
  nvb_memory_manager* memory = NULL;
  MUST(nvb_memory_manager_create(backend, &memory_options, &memory));

  use_pools(memory, stream);
  run_out_of_memory(memory, stream);
  give_back(memory, stream);
  report_leaks(memory, stream);
  if (count > 2) {
    MUST(nvb_memory_write_snapshot(memory, arguments[2]));
    printf("snapshot in %s\n", arguments[2]);
  }
  const nvb_memory_statistics last = statistics_of(memory, "at the end");
  EXPECT(last.blocks == 0);

  MUST(nvb_memory_manager_destroy(memory));
  nvb_stream_destroy(stream);
  nvb_backend_destroy(backend);
  return 0;
}
