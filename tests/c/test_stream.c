// Streams: creation, wrapping, order, queries.
#include "check.h"

static void test_work(fixture* f) {
  enum { BYTES = 1 << 20 };
  nvb_stream* other = NULL;
  nvb_event* event = NULL;
  void *a = NULL, *b = NULL;
  static unsigned char back[BYTES];
  CHECK_OK(nvb_stream_create(f->backend, -1000, &other));
  CHECK_OK(nvb_event_create(f->backend, &event));
  CHECK_OK(nvb_memory_allocate(f->memory, BYTES, f->stream, &a));
  CHECK_OK(nvb_memory_allocate(f->memory, BYTES, other, &b));
  for (uint32_t round = 1; round <= 10; ++round) {
    CHECK_OK(nvb_memory_fill(f->memory, a, round, BYTES, f->stream));
    CHECK_OK(nvb_event_record(event, f->stream));
    CHECK_OK(nvb_stream_wait_event(other, event));
    CHECK_OK(nvb_memory_copy(f->memory, b, a, BYTES, NVB_COPY_DEVICE_TO_DEVICE, other));
    CHECK_OK(nvb_memory_copy(f->memory, back, b, BYTES, NVB_COPY_DEVICE_TO_HOST, other));
    CHECK_OK(nvb_stream_synchronize(other));
    CHECK(back[0] == round && back[BYTES / 2] == round && back[BYTES - 1] == round);
  }
  uint32_t finished = 7;
  CHECK_OK(nvb_stream_query(other, &finished));
  CHECK_EQUAL(finished, 1);
  release(f, a);
  CHECK_OK(nvb_memory_free(f->memory, b, NULL));
  CHECK_OK(nvb_event_destroy(event));
  CHECK_OK(nvb_stream_destroy(other));
}

static void test_wrapping(fixture* f) {
  void* native = foreign_handle();
  CHECK_OK(nvb_stream_get_native(f->stream, &native));
  CHECK_EQUAL(native == NULL, test_on_cpu());
  nvb_stream *wrapped = NULL, *legacy = NULL;
  CHECK_OK(nvb_stream_wrap(f->backend, native, &wrapped));
  CHECK_OK(nvb_stream_wrap(f->backend, NULL, &legacy));
  const float values[3] = {1, 2, 3};
  float back[3] = {0};
  void* block = upload(f, values, sizeof values);
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = nvb_tensor_2d(block, NVB_DTYPE_F32, 1, 3);
  args.factor = 2;
  CHECK_OK(nvb_scale(f->backend, &args, wrapped));
  CHECK_OK(nvb_stream_synchronize(wrapped));
  CHECK_OK(nvb_scale(f->backend, &args, legacy));
  CHECK_OK(nvb_stream_synchronize(legacy));
  // The stream itself outlives its second handle.
  CHECK_OK(nvb_stream_destroy(wrapped));
  CHECK_OK(nvb_scale(f->backend, &args, f->stream));
  download(f, back, block, sizeof back);
  CHECK(back[0] == 8 && back[1] == 16 && back[2] == 24);
  CHECK_OK(nvb_stream_destroy(legacy));
  release(f, block);
}

static void test_errors(fixture* f) {
  nvb_stream* stream = foreign_handle();
  nvb_event* event = NULL;
  uint32_t finished = 7;
  void* native = foreign_handle();
  CHECK_FAILS(nvb_stream_create(NULL, 0, &stream), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_stream_create(f->backend, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_stream_wrap(NULL, NULL, &stream), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_stream_wrap(f->backend, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_stream_synchronize(NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL", "nvb_backend_synchronize");
  CHECK_FAILS(nvb_stream_query(NULL, &finished), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_stream_query(f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "finished", "NULL");
  CHECK_FAILS(nvb_stream_get_native(NULL, &native), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_stream_get_native(f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "cuda_stream", "NULL");
  CHECK_OK(nvb_event_create(f->backend, &event));
  CHECK_FAILS(nvb_stream_wait_event(NULL, event), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  CHECK_FAILS(nvb_stream_wait_event(f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "event", "NULL");
  CHECK_FAILS(nvb_stream_wait_event((nvb_stream*)event, event), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  CHECK(stream == foreign_handle() && finished == 7 && native == foreign_handle());

  fixture other = open_fixture();
  CHECK_OK(nvb_stream_wait_event(other.stream, event));
  if (!test_on_cpu()) {
    fixture cpu = open_fixture_on("cpu");
    CHECK_FAILS(nvb_stream_wait_event(cpu.stream, event), NVB_ERROR_INVALID_ARGUMENT, "the other the CPU's");
    close_fixture(&cpu);
  }
  const float value = 1;
  void* block = upload(f, &value, sizeof value);
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = nvb_tensor_2d(block, NVB_DTYPE_F32, 1, 1);
  CHECK_FAILS(nvb_convert(f->backend, &args, other.stream), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  close_fixture(&other);
  release(f, block);
  CHECK_OK(nvb_event_destroy(event));

  CHECK_OK(nvb_stream_create(f->backend, 0, &stream));
  CHECK_OK(nvb_stream_destroy(stream));
  CHECK_FAILS(nvb_stream_destroy(stream), NVB_ERROR_INVALID_ARGUMENT, "stream", "destroyed");
  CHECK_FAILS(nvb_stream_synchronize(stream), NVB_ERROR_INVALID_ARGUMENT, "stream", "destroyed");
  CHECK_FAILS(nvb_stream_destroy(foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  CHECK_OK(nvb_stream_destroy(NULL));
}

static void test_growth(fixture* f) {
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    nvb_stream *stream = NULL, *wrapped = NULL;
    CHECK_OK(nvb_stream_create(f->backend, 0, &stream));
    CHECK_OK(nvb_stream_wrap(f->backend, NULL, &wrapped));
    CHECK_OK(nvb_stream_destroy(stream));
    CHECK_OK(nvb_stream_destroy(wrapped));
  }
  CHECK_GROWTH(kilobytes);
}

int main(void) {
  fixture f = open_fixture();
  test_work(&f);
  test_wrapping(&f);
  test_errors(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
