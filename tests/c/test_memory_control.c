// Keeping within bounds: the limit and its error, reclaim callbacks, trim, sleep and wake.
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "check.h"

enum { MIB = 1 << 20 };

static nvb_memory_manager* limited(fixture* f, uint64_t limit) {
  nvb_memory_options options;
  nvb_memory_options_init(&options);
  options.limit = limit;
  options.margin = NVB_MEMORY_NONE;
  nvb_memory_manager* memory = NULL;
  if (!CHECK_OK(nvb_memory_manager_create(f->backend, &options, &memory))) exit(1);
  return memory;
}

static nvb_status get_failure(void* value, void* context) {
  (void)context;
  return nvb_last_error_get_memory(value);
}

static void test_error(fixture* f) {
  nvb_memory_manager* memory = limited(f, 64 * MIB);
  void *block = NULL, *out = foreign_handle();
  CHECK_OK(nvb_memory_allocate(memory, 40 * MIB, f->stream, &block));
  CHECK_FAILS(nvb_memory_allocate(memory, 30 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY,
              "31457280 bytes requested", "limit is 67108864", "41943040 allocated", "tried caches",
              "raise the memory limit by at least");
  nvb_memory_failure failure;
  nvb_memory_failure_init(&failure);
  CHECK_OK(nvb_last_error_get_memory(&failure));
  CHECK(failure.requested == 30 * MIB && failure.limit == 64 * MIB && failure.allocated == 40 * MIB);
  CHECK(failure.held == failure.allocated + failure.cached && failure.largest_free > 0);
  CHECK(failure.device_total > 0 && failure.device_free <= failure.device_total);
  CHECK((failure.recovery_steps_tried & 1U << NVB_RECOVERY_STEP_CACHES) != 0 &&
        (failure.recovery_steps_tried & 1U << NVB_RECOVERY_STEP_SPILL) == 0);
  CHECK_EQUAL(failure.reserved, 0);
  CHECK_STRUCT(failure, get_failure, NULL);
  // Another kind of error has no numbers.
  CHECK_INVALID(nvb_memory_allocate(memory, 0, f->stream, &out));
  CHECK_OK(nvb_last_error_get_memory(&failure));
  CHECK(failure.requested == 0 && failure.held == 0 && failure.recovery_steps_tried == 0);

  CHECK_OK(nvb_memory_check_available(memory, 0));
  CHECK_OK(nvb_memory_check_available(memory, 24 * MIB));
  CHECK_FAILS(nvb_memory_check_available(memory, 24 * MIB + 1), NVB_ERROR_OUT_OF_MEMORY, "limit is 67108864");
  CHECK_OK(nvb_last_error_get_memory(&failure));
  CHECK_EQUAL(failure.requested, 24 * MIB + 1);
  CHECK_FAILS(nvb_memory_check_available(memory, UINT64_MAX), NVB_ERROR_OUT_OF_MEMORY, "limit");
  CHECK_FAILS(nvb_memory_check_available(NULL, 1), NVB_ERROR_INVALID_ARGUMENT, "NULL");

  CHECK_OK(nvb_memory_set_limit(memory, 80 * MIB));
  CHECK_OK(nvb_memory_allocate(memory, 30 * MIB, f->stream, &out));
  CHECK_EQUAL(statistics_of(memory).limit, 80 * MIB);
  CHECK_OK(nvb_memory_set_limit(memory, 10 * MIB));
  void* more = NULL;
  CHECK_FAILS(nvb_memory_allocate(memory, 8 * MIB, f->stream, &more), NVB_ERROR_OUT_OF_MEMORY, "limit is 10485760");
  CHECK_OK(nvb_memory_free(memory, out, f->stream));
  CHECK_OK(nvb_memory_free(memory, block, f->stream));
  CHECK_OK(nvb_memory_trim(memory, 0, NULL));
  CHECK_OK(nvb_memory_allocate(memory, 8 * MIB, f->stream, &more));
  CHECK_EQUAL(statistics_of(memory).reserved, 8 * MIB);
  CHECK_OK(nvb_memory_free(memory, more, f->stream));
  CHECK_FAILS(nvb_memory_set_limit(NULL, 1), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

// A cache that gives up its blocks one by one when it is asked.
typedef struct {
  nvb_memory_manager* memory;
  nvb_stream* stream;
  void* blocks[4];
  int count, calls, order, errors;
  uint64_t asked, id;
} cache;

static _Atomic int sequence;

static uint64_t give_one(uint64_t bytes, void* user_data) {
  cache* self = user_data;
  ++self->calls;
  self->asked = bytes;
  self->order = ++sequence;
  if (self->count == 0) return 0;
  if (nvb_memory_free(self->memory, self->blocks[--self->count], self->stream) != NVB_OK) ++self->errors;
  return 10 * MIB;
}

static uint64_t claim_without_freeing(uint64_t bytes, void* user_data) {
  cache* self = user_data;
  ++self->calls;
  // An allocation in here that finds no memory asks no callback.
  void* out = NULL;
  if (nvb_memory_allocate(self->memory, 1000 * MIB, self->stream, &out) != NVB_ERROR_OUT_OF_MEMORY) ++self->errors;
  return bytes;
}

static uint64_t remove_itself(uint64_t bytes, void* user_data) {
  (void)bytes;
  cache* self = user_data;
  ++self->calls;
  if (nvb_memory_remove_reclaim_callback(self->memory, self->id) != NVB_OK) ++self->errors;
  return 0;
}

static void test_reclaim(fixture* f) {
  nvb_memory_manager* memory = limited(f, 64 * MIB);
  cache first = {memory, f->stream, {NULL}, 0, 0, 0, 0, 0, 0}, last = first, liar = first, once = first;
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(nvb_memory_allocate(memory, 10 * MIB, f->stream, &first.blocks[first.count++]));
    CHECK_OK(nvb_memory_allocate(memory, 10 * MIB, f->stream, &last.blocks[last.count++]));
  }
  CHECK_OK(nvb_memory_add_reclaim_callback(memory, give_one, &last, 10, &last.id));
  CHECK_OK(nvb_memory_add_reclaim_callback(memory, give_one, &first, -10, &first.id));
  CHECK(first.id != last.id);
  void *block = NULL, *other = NULL;
  CHECK_OK(nvb_memory_allocate(memory, 20 * MIB, f->stream, &block));
  CHECK(first.calls == 0 && last.calls == 0);
  // 60 of 64 MiB are live; 24 more need both blocks of the first and none of the last.
  CHECK_OK(nvb_memory_allocate(memory, 24 * MIB, f->stream, &other));
  CHECK(first.count == 0 && last.count == 2 && first.asked >= 24 * MIB);
  nvb_memory_recovery_step_statistics step;
  nvb_memory_recovery_step_statistics_init(&step);
  CHECK_OK(nvb_memory_get_recovery_step_statistics(memory, NVB_RECOVERY_STEP_CALLBACKS, &step));
  CHECK(step.tried == 1 && step.helped == 1 && strcmp(step.name, "callbacks") == 0);
  // When all have given all, the error comes.
  void* out = foreign_handle();
  CHECK_FAILS(nvb_memory_allocate(memory, 50 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "callbacks");
  CHECK(first.count == 0 && last.count == 0 && first.order < last.order);
  CHECK_OK(nvb_memory_remove_reclaim_callback(memory, first.id));
  CHECK_OK(nvb_memory_remove_reclaim_callback(memory, last.id));
  CHECK_FAILS(nvb_memory_remove_reclaim_callback(memory, last.id), NVB_ERROR_INVALID_ARGUMENT, "reclaim callback");

  CHECK_OK(nvb_memory_add_reclaim_callback(memory, claim_without_freeing, &liar, 0, &liar.id));
  CHECK_OK(nvb_memory_add_reclaim_callback(memory, remove_itself, &once, 1, &once.id));
  CHECK_FAILS(nvb_memory_allocate(memory, 50 * MIB, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "52428800");
  CHECK(liar.calls == 4 && liar.errors == 0 && once.calls == 1 && once.errors == 0);
  CHECK_FAILS(nvb_memory_remove_reclaim_callback(memory, once.id), NVB_ERROR_INVALID_ARGUMENT, "reclaim callback");
  CHECK_OK(nvb_memory_remove_reclaim_callback(memory, liar.id));
  CHECK(first.errors == 0 && last.errors == 0 && out == foreign_handle());
  CHECK_FAILS(nvb_memory_add_reclaim_callback(memory, NULL, NULL, 0, &liar.id), NVB_ERROR_INVALID_ARGUMENT, "callback");
  CHECK_FAILS(nvb_memory_add_reclaim_callback(memory, give_one, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "id");
  CHECK_FAILS(nvb_memory_add_reclaim_callback(NULL, give_one, NULL, 0, &liar.id), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_memory_remove_reclaim_callback(NULL, 1), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_free(memory, block, f->stream));
  CHECK_OK(nvb_memory_free(memory, other, f->stream));
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

// Removing waits for a call that another thread is in.
typedef struct {
  nvb_memory_manager* memory;
  nvb_stream* stream;
  _Atomic int inside, done;
} slow;

static uint64_t slow_callback(uint64_t bytes, void* user_data) {
  (void)bytes;
  slow* self = user_data;
  atomic_store(&self->inside, 1);
  nanosleep(&(struct timespec){0, 20 * 1000 * 1000}, NULL);
  atomic_store(&self->done, 1);
  return 0;
}

static void* run_short_of_memory(void* argument) {
  slow* self = argument;
  check_thread = 1;
  void* out = NULL;
  CHECK_FAILS(nvb_memory_allocate(self->memory, 100 * MIB, self->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "limit");
  atomic_store(&self->inside, 1);  // also where the call failed before it asked anybody
  return NULL;
}

static void test_removal(fixture* f) {
  slow state = {limited(f, 64 * MIB), f->stream, 0, 0};
  uint64_t id = 0;
  CHECK_OK(nvb_memory_add_reclaim_callback(state.memory, slow_callback, &state, 0, &id));
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, run_short_of_memory, &state), 0);
  while (atomic_load(&state.inside) == 0) nanosleep(&(struct timespec){0, 1000}, NULL);
  CHECK_OK(nvb_memory_remove_reclaim_callback(state.memory, id));
  CHECK_EQUAL(atomic_load(&state.done), 1);
  pthread_join(thread, NULL);
  CHECK_OK(nvb_memory_manager_destroy(state.memory));
}

static void test_trim(fixture* f) {
  nvb_memory_manager* memory = limited(f, 256 * MIB);
  void* blocks[20];
  for (int i = 0; i < 20; ++i) CHECK_OK(nvb_memory_allocate(memory, 5 * MIB, f->stream, &blocks[i]));
  for (int i = 1; i < 20; ++i) CHECK_OK(nvb_memory_free(memory, blocks[i], f->stream));
  uint64_t released = 0;
  CHECK_OK(nvb_memory_trim(memory, 50 * MIB, &released));
  uint64_t held = statistics_of(memory).reserved;
  CHECK(released > 0 && held <= 50 * MIB && held >= 5 * MIB);
  CHECK_OK(nvb_memory_trim(memory, 0, NULL));
  CHECK(statistics_of(memory).reserved <= 32 * MIB);
  CHECK_EQUAL(statistics_of(memory).allocated, 5 * MIB);
  CHECK_OK(nvb_memory_trim(memory, 0, &released));
  CHECK_EQUAL(released, 0);
  CHECK_OK(nvb_memory_free(memory, blocks[0], f->stream));
  CHECK_OK(nvb_memory_trim(memory, 0, &released));
  CHECK_EQUAL(statistics_of(memory).reserved, 0);
  CHECK_FAILS(nvb_memory_trim(NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

static void test_sleep(fixture* f) {
  nvb_memory_manager* memory = limited(f, 256 * MIB);
  unsigned char values[1000], back[1000];
  for (int i = 0; i < 1000; ++i) values[i] = (unsigned char)(i * 13);
  void *small = NULL, *large = NULL, *out = foreign_handle();
  CHECK_OK(nvb_memory_allocate(memory, 1000, f->stream, &small));
  CHECK_OK(nvb_memory_allocate(memory, 20 * MIB, f->stream, &large));
  CHECK_OK(nvb_memory_copy(memory, small, values, 1000, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_memory_copy(memory, (char*)large + 19 * MIB, values, 1000, NVB_COPY_HOST_TO_DEVICE, f->stream));
  uint64_t held = statistics_of(memory).reserved, released = 0, taken = 0;
  CHECK_OK(nvb_memory_sleep(memory, 1, &released));
  CHECK(released > 0 && released <= held);
  CHECK_EQUAL(statistics_of(memory).reserved, 0);
  CHECK_EQUAL(statistics_of(memory).allocated, 1000 + 20 * MIB);
  CHECK_FAILS(nvb_memory_allocate(memory, 64, f->stream, &out), NVB_ERROR_MEMORY_ALLOCATION, "asleep");
  CHECK_FAILS(nvb_memory_sleep(memory, 1, &released), NVB_ERROR_INVALID_ARGUMENT, "asleep already");
  CHECK_FAILS(nvb_memory_check_available(memory, 64), NVB_ERROR_MEMORY_ALLOCATION, "asleep");
  // Work on what is away is refused, from either end.
  CHECK_FAILS(nvb_memory_fill(memory, small, 1, 1000, f->stream), NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_FAILS(nvb_memory_copy(memory, back, small, 1000, NVB_COPY_DEVICE_TO_HOST, f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "asleep", "nvb_memory_wake");
  CHECK_FAILS(nvb_memory_copy(memory, large, values, 1000, NVB_COPY_HOST_TO_DEVICE, f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_OK(nvb_memory_wake(memory, &taken));
  CHECK_EQUAL(taken, released);
  CHECK_FAILS(nvb_memory_wake(memory, &taken), NVB_ERROR_INVALID_ARGUMENT, "not asleep");
  CHECK_OK(nvb_memory_copy(memory, back, small, 1000, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK(memcmp(values, back, 1000) == 0);
  CHECK_OK(nvb_memory_copy(memory, back, (char*)large + 19 * MIB, 1000, NVB_COPY_DEVICE_TO_HOST, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK(memcmp(values, back, 1000) == 0);

  // Without the content it costs no main memory, and a limit that was lowered meanwhile keeps it asleep.
  CHECK_OK(nvb_memory_sleep(memory, 0, NULL));
  CHECK_OK(nvb_memory_set_limit(memory, MIB));
  CHECK_FAILS(nvb_memory_wake(memory, NULL), NVB_ERROR_OUT_OF_MEMORY, "waking");
  CHECK_OK(nvb_memory_set_limit(memory, 0));
  CHECK_OK(nvb_memory_wake(memory, NULL));
  CHECK_OK(nvb_memory_fill(memory, large, 1, 20 * MIB, f->stream));
  CHECK_OK(nvb_memory_free(memory, small, f->stream));
  CHECK_OK(nvb_memory_free(memory, large, f->stream));
  CHECK_FAILS(nvb_memory_sleep(memory, 2, NULL), NVB_ERROR_INVALID_ARGUMENT, "keep_content is 2");
  CHECK_FAILS(nvb_memory_sleep(NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_memory_wake(NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_OK(nvb_memory_manager_destroy(memory));

  // A manager may be destroyed in its sleep.
  memory = limited(f, 256 * MIB);
  CHECK_OK(nvb_memory_allocate(memory, 3 * MIB, f->stream, &large));
  CHECK_OK(nvb_memory_sleep(memory, 1, NULL));
  CHECK_OK(nvb_memory_manager_destroy(memory));
}

int main(void) {
  fixture f = open_fixture();
  test_error(&f);
  test_reclaim(&f);
  test_removal(&f);
  test_trim(&f);
  test_sleep(&f);
  close_fixture(&f);
  return test_result();
}
