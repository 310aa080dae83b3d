// Events: recording, waiting, times.
#include <time.h>

#include "check.h"

static void test_times(fixture* f) {
  nvb_event *start = NULL, *end = NULL;
  uint32_t finished = 7;
  float milliseconds = -1;
  CHECK_OK(nvb_event_create(f->backend, &start));
  CHECK_OK(nvb_event_create(f->backend, &end));
  // Nothing recorded: nothing to wait for, and no time.
  CHECK_OK(nvb_event_query(start, &finished));
  CHECK_EQUAL(finished, 1);
  CHECK_OK(nvb_event_synchronize(start));
  CHECK_OK(nvb_stream_wait_event(f->stream, start));
  CHECK_FAILS(nvb_event_get_elapsed(start, end, &milliseconds), NVB_ERROR_INVALID_ARGUMENT, "record");
  CHECK_OK(nvb_event_record(start, f->stream));
  CHECK_OK(nvb_event_synchronize(start));
  CHECK_FAILS(nvb_event_get_elapsed(start, end, &milliseconds), NVB_ERROR_INVALID_ARGUMENT, "record");
  CHECK(milliseconds == -1);
  struct timespec pause = {0, 20 * 1000 * 1000};
  nanosleep(&pause, NULL);
  CHECK_OK(nvb_event_record(end, f->stream));
  CHECK_OK(nvb_event_synchronize(end));
  CHECK_OK(nvb_event_query(end, &finished));
  CHECK_EQUAL(finished, 1);
  CHECK_OK(nvb_event_get_elapsed(start, end, &milliseconds));
  CHECK(milliseconds > 10 && milliseconds < 60000);
  // An event may be recorded again.
  CHECK_OK(nvb_event_record(start, f->stream));
  CHECK_OK(nvb_event_record(end, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_OK(nvb_event_get_elapsed(start, end, &milliseconds));
  CHECK(milliseconds >= 0);
  CHECK_OK(nvb_event_destroy(start));
  CHECK_OK(nvb_event_destroy(end));
}

// NULL is the default stream of the event's backend, whose end `nvb_backend_synchronize` waits for.
static void test_default_stream(fixture* f) {
  enum { BYTES = 64 << 20, ROUNDS = 20 };
  nvb_event *start = NULL, *end = NULL;
  void* block = NULL;
  uint32_t finished = 7;
  float milliseconds = -1;
  CHECK_OK(nvb_event_create(f->backend, &start));
  CHECK_OK(nvb_event_create(f->backend, &end));
  CHECK_OK(nvb_memory_allocate(f->memory, BYTES, NULL, &block));
  CHECK_OK(nvb_event_record(start, NULL));
  for (int round = 0; round < ROUNDS; ++round) CHECK_OK(nvb_memory_fill(f->memory, block, 1, BYTES, NULL));
  CHECK_OK(nvb_event_record(end, NULL));
  CHECK_OK(nvb_backend_synchronize(f->backend));
  CHECK_OK(nvb_event_query(end, &finished));
  CHECK_EQUAL(finished, 1);
  // 1.3 GB were written between the two, which takes no machine less than this.
  CHECK_OK(nvb_event_get_elapsed(start, end, &milliseconds));
  CHECK(milliseconds > 0.05F);
  CHECK_OK(nvb_memory_free(f->memory, block, NULL));
  CHECK_OK(nvb_event_destroy(start));
  CHECK_OK(nvb_event_destroy(end));

  // The event keeps the stream of a backend whose handle is gone.
  fixture other = open_fixture();
  CHECK_OK(nvb_event_create(other.backend, &end));
  close_fixture(&other);
  CHECK_OK(nvb_event_record(end, NULL));
  CHECK_OK(nvb_event_synchronize(end));
  CHECK_OK(nvb_event_destroy(end));
}

static void test_errors(fixture* f) {
  nvb_event* event = foreign_handle();
  uint32_t finished = 7;
  float milliseconds = -1;
  CHECK_FAILS(nvb_event_create(NULL, &event), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_event_create(f->backend, NULL), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK(event == foreign_handle());
  CHECK_OK(nvb_event_create(f->backend, &event));
  CHECK_FAILS(nvb_event_record(NULL, f->stream), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_FAILS(nvb_event_record(event, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  CHECK_FAILS(nvb_event_record((nvb_event*)f->stream, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not an event");
  CHECK_FAILS(nvb_event_query(NULL, &finished), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_FAILS(nvb_event_query(event, NULL), NVB_ERROR_INVALID_ARGUMENT, "finished", "NULL");
  CHECK_FAILS(nvb_event_synchronize(NULL), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_OK(nvb_event_record(event, f->stream));
  CHECK_OK(nvb_event_synchronize(event));
  CHECK_FAILS(nvb_event_get_elapsed(NULL, event, &milliseconds), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_FAILS(nvb_event_get_elapsed(event, NULL, &milliseconds), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_FAILS(nvb_event_get_elapsed(event, event, NULL), NVB_ERROR_INVALID_ARGUMENT, "milliseconds", "NULL");
  CHECK(finished == 7 && milliseconds == -1);
  fixture other = open_fixture();
  nvb_event* theirs = NULL;
  CHECK_OK(nvb_event_create(other.backend, &theirs));
  CHECK_FAILS(nvb_event_record(event, other.stream), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_FAILS(nvb_event_get_elapsed(event, theirs, &milliseconds), NVB_ERROR_INVALID_ARGUMENT, "different backends");
  CHECK_OK(nvb_event_destroy(theirs));
  close_fixture(&other);
  CHECK_OK(nvb_event_destroy(event));
  CHECK_FAILS(nvb_event_destroy(event), NVB_ERROR_INVALID_ARGUMENT, "event", "destroyed");
  CHECK_FAILS(nvb_event_synchronize(event), NVB_ERROR_INVALID_ARGUMENT, "event", "destroyed");
  CHECK_OK(nvb_event_destroy(NULL));
}

static void test_growth(fixture* f) {
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    nvb_event* event = NULL;
    CHECK_OK(nvb_event_create(f->backend, &event));
    CHECK_OK(nvb_event_record(event, f->stream));
    CHECK_OK(nvb_event_destroy(event));
  }
  CHECK_GROWTH(kilobytes);
}

int main(void) {
  fixture f = open_fixture();
  test_times(&f);
  test_default_stream(&f);
  test_errors(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
