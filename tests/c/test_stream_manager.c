// Stream managers, host callbacks, and waiting with a limit.
#include "check.h"

static nvb_stream_statistics statistics(nvb_stream_manager* manager) {
  nvb_stream_statistics value;
  nvb_stream_statistics_init(&value);
  CHECK_OK(nvb_stream_manager_get_statistics(manager, &value));
  return value;
}

static nvb_status get_statistics(void* value, void* context) {
  return nvb_stream_manager_get_statistics(context, value);
}

// NULL options are fine and say nothing about structs, so NULL stands for a missing backend.
static nvb_status create_manager(void* value, void* context) {
  nvb_stream_manager* manager = NULL;
  nvb_status status = nvb_stream_manager_create(value != NULL ? context : NULL, value, &manager);
  CHECK_OK(nvb_stream_manager_destroy(manager));
  return status;
}

static void test_manager(fixture* f) {
  nvb_stream_manager* manager = NULL;
  nvb_stream_manager_options options;
  nvb_stream_manager_options_init(&options);
  options.streams_per_priority = 2;
  CHECK_OK(nvb_stream_manager_create(f->backend, &options, &manager));
  CHECK_EQUAL(statistics(manager).streams, 0);
  nvb_stream* streams[6];
  void* native[6];
  for (int i = 0; i < 6; ++i) {
    CHECK_OK(nvb_stream_manager_acquire(manager, i < 5 ? 0 : -1, &streams[i]));
    CHECK_OK(nvb_stream_get_native(streams[i], &native[i]));
  }
  // On the CPU there is nothing native.
  CHECK(test_on_cpu() || (native[0] != native[1] && native[5] != native[0] && native[5] != native[1]));
  CHECK_EQUAL(statistics(manager).streams, 3);
  CHECK_EQUAL(statistics(manager).users, 6);
  nvb_stream_statistics value = statistics(manager);
  CHECK_STRUCT(value, get_statistics, manager);
  const float one = 1;
  void* block = upload(f, &one, sizeof one);
  CHECK_OK(nvb_memory_fill(f->memory, block, 0, sizeof one, streams[0]));
  CHECK_OK(nvb_stream_manager_synchronize(manager));
  CHECK_EQUAL(statistics(manager).busy, 0);
  for (int i = 0; i < 5; ++i) CHECK_OK(nvb_stream_destroy(streams[i]));
  CHECK_EQUAL(statistics(manager).users, 1);
  // The manager may go before its streams.
  CHECK_OK(nvb_stream_manager_destroy(manager));
  CHECK_OK(nvb_memory_fill(f->memory, block, 0, sizeof one, streams[5]));
  CHECK_OK(nvb_stream_synchronize(streams[5]));
  CHECK_OK(nvb_stream_destroy(streams[5]));
  release(f, block);

  CHECK_STRUCT(options, create_manager, f->backend);
  options.streams_per_priority = 33;
  CHECK_FAILS(nvb_stream_manager_create(f->backend, &options, &manager), NVB_ERROR_INVALID_ARGUMENT, "33", "32");
  options.streams_per_priority = 0;
  options.reserved = 1;
  CHECK_FAILS(nvb_stream_manager_create(f->backend, &options, &manager), NVB_ERROR_INVALID_ARGUMENT, "reserved");
  CHECK_FAILS(nvb_stream_manager_create(NULL, NULL, &manager), NVB_ERROR_INVALID_ARGUMENT, "backend");
  CHECK_FAILS(nvb_stream_manager_create(f->backend, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "manager", "NULL");
  CHECK_FAILS(nvb_stream_manager_acquire(manager, 0, streams), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  CHECK_FAILS(nvb_stream_manager_synchronize(NULL), NVB_ERROR_INVALID_ARGUMENT, "stream manager", "NULL");
  CHECK_OK(nvb_stream_manager_create(f->backend, NULL, &manager));
  CHECK_FAILS(nvb_stream_manager_acquire(manager, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_OK(nvb_stream_manager_destroy(manager));
  CHECK_OK(nvb_stream_manager_destroy(NULL));
}

static void count(void* user_data) {
  ++*(_Atomic int*)user_data;
}

static void test_callback(fixture* f) {
  static _Atomic int called;
  for (int i = 0; i < 10; ++i) CHECK_OK(nvb_stream_add_callback(f->stream, count, &called));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_EQUAL(called, 10);
  CHECK_FAILS(nvb_stream_add_callback(f->stream, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "callback", "NULL");
  CHECK_FAILS(nvb_stream_add_callback(NULL, count, NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
}

// Holds the stream up until it is told to go on, for a second at most: a program that ends early waits for its streams.
static void hold(void* user_data) {
  for (int i = 0; i < 10000 && !*(_Atomic int*)user_data; ++i) usleep(100);
}

static void test_waiting(fixture* f) {
  uint32_t finished = 7;
  nvb_event* event = NULL;
  CHECK_OK(nvb_event_create(f->backend, &event));
  if (!test_on_cpu()) {
    static _Atomic int go_on;
    CHECK_OK(nvb_stream_add_callback(f->stream, hold, &go_on));
    CHECK_OK(nvb_event_record(event, f->stream));
    CHECK_OK(nvb_stream_synchronize_for(f->stream, 2000000, &finished));
    CHECK_EQUAL(finished, 0);
    CHECK_OK(nvb_event_synchronize_for(event, 0, &finished));
    CHECK_EQUAL(finished, 0);
    go_on = 1;
  }
  CHECK_OK(nvb_event_record(event, f->stream));
  CHECK_OK(nvb_stream_synchronize_for(f->stream, UINT64_MAX, &finished));
  CHECK_EQUAL(finished, 1);
  CHECK_OK(nvb_event_synchronize_for(event, 1000000000, &finished));
  CHECK_EQUAL(finished, 1);
  CHECK_OK(nvb_stream_synchronize_for(f->stream, 0, &finished));
  CHECK_EQUAL(finished, 1);
  CHECK_FAILS(nvb_stream_synchronize_for(f->stream, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "finished", "NULL");
  CHECK_FAILS(nvb_stream_synchronize_for(NULL, 0, &finished), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_event_synchronize_for(event, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "finished", "NULL");
  CHECK_FAILS(nvb_event_synchronize_for(NULL, 0, &finished), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_OK(nvb_event_destroy(event));
}

int main(void) {
  fixture f = open_fixture();
  test_manager(&f);
  test_callback(&f);
  test_waiting(&f);
  close_fixture(&f);
  return test_result();
}
