// streams: work on two streams, ordered by an event, timed, followed by a callback; and streams given out by load.
//
//   streams [DEVICE]     "auto" (the default), "cpu", "cuda:N"
//
// On the CPU each call has finished when it returns; the program is the same there.
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 256, COLUMNS = 1024, COUNT = ROWS * COLUMNS };

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "streams: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "streams: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

// Called by a thread of the driver's. It must not call the library: it tells the engine's own thread.
static void note_the_end(void* user_data) {
  *(volatile int*)user_data = 1;
}

// x is doubled on one stream; another one adds the result to itself once that is there.
static void order_two_streams(nvb_backend* backend, nvb_memory_manager* memory) {
  nvb_stream *first = NULL, *second = NULL;
  MUST(nvb_stream_create(backend, 0, &first));
  MUST(nvb_stream_create(backend, -1, &second));  // negative: more urgent
  nvb_event *start = NULL, *doubled = NULL, *end = NULL;
  MUST(nvb_event_create(backend, &start));
  MUST(nvb_event_create(backend, &doubled));
  MUST(nvb_event_create(backend, &end));

  static float values[COUNT];
  for (int i = 0; i < COUNT; ++i) values[i] = (float)(i % 1000);
  void *x = NULL, *sum = NULL;
  MUST(nvb_memory_allocate(memory, sizeof values, first, &x));
  MUST(nvb_memory_allocate(memory, sizeof values, second, &sum));
  MUST(nvb_memory_copy(memory, x, values, sizeof values, NVB_COPY_HOST_TO_DEVICE, first));

  nvb_elementwise_args scale;
  nvb_elementwise_args_init(&scale);
  scale.input = scale.output = nvb_tensor_2d(x, NVB_DTYPE_F32, ROWS, COLUMNS);
  scale.factor = 2;
  MUST(nvb_event_record(start, first));
  MUST(nvb_scale(backend, &scale, first));
  MUST(nvb_event_record(doubled, first));

  // The second stream waits on the device; the host goes on at once.
  MUST(nvb_stream_wait_event(second, doubled));
  nvb_elementwise_args add;
  nvb_elementwise_args_init(&add);
  add.input = add.second = nvb_tensor_2d(x, NVB_DTYPE_F32, ROWS, COLUMNS);
  add.output = nvb_tensor_2d(sum, NVB_DTYPE_F32, ROWS, COLUMNS);
  MUST(nvb_add(backend, &add, second));
  MUST(nvb_event_record(end, second));
  MUST(nvb_memory_copy(memory, values, sum, sizeof values, NVB_COPY_DEVICE_TO_HOST, second));
  static int finished;
  MUST(nvb_stream_add_callback(second, note_the_end, &finished));
  MUST(nvb_stream_synchronize(second));
  EXPECT(finished);

  int wrong = 0;
  for (int i = 0; i < COUNT; ++i) wrong += values[i] != 4.0F * (float)(i % 1000);
  EXPECT(wrong == 0);
  float milliseconds = 0;
  MUST(nvb_event_get_elapsed(start, end, &milliseconds));
  printf("two streams: %d values, %.3f ms from the first operation to the end of the second\n", COUNT, milliseconds);

  // A block is freed on the stream that used it last; x was used on both, and the second waited for the first.
  MUST(nvb_memory_free(memory, x, second));
  MUST(nvb_memory_free(memory, sum, second));
  nvb_event* const events[] = {start, doubled, end};
  for (int i = 0; i < 3; ++i) MUST(nvb_event_destroy(events[i]));
  MUST(nvb_stream_destroy(first));
  MUST(nvb_stream_destroy(second));
}

// An engine that serves requests takes a stream for each; the manager makes as many as are needed, and then shares
// them.
static void give_out_streams(nvb_backend* backend) {
  nvb_stream_manager_options options;
  nvb_stream_manager_options_init(&options);
  options.streams_per_priority = 2;
  nvb_stream_manager* manager = NULL;
  MUST(nvb_stream_manager_create(backend, &options, &manager));
  nvb_stream* requests[5];
  for (int i = 0; i < 5; ++i) MUST(nvb_stream_manager_acquire(manager, 0, &requests[i]));
  nvb_stream_statistics statistics;
  nvb_stream_statistics_init(&statistics);
  MUST(nvb_stream_manager_get_statistics(manager, &statistics));
  printf("stream manager: %u streams for %u users\n", statistics.streams, statistics.users);
  EXPECT(statistics.streams == 2 && statistics.users == 5);
  MUST(nvb_stream_manager_synchronize(manager));
  for (int i = 0; i < 5; ++i) MUST(nvb_stream_destroy(requests[i]));
  MUST(nvb_stream_manager_destroy(manager));
}

int main(int count, char** arguments) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = count > 1 ? arguments[1] : "auto";
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  nvb_memory_manager* memory = NULL;
  MUST(nvb_backend_get_memory_manager(backend, 0, &memory));

  order_two_streams(backend, memory);
  give_out_streams(backend);

  MUST(nvb_memory_manager_destroy(memory));
  MUST(nvb_backend_destroy(backend));
  return 0;
}
