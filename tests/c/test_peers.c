// Two GPUs in one process: each works by itself, and reaches the other's memory once that was asked for and not before.
#include <dlfcn.h>

#include "check.h"

enum { SMALL = 1024, LARGE = 3 << 20 };  // floats

static void* allocate(nvb_memory_manager* memory, int floats) {
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(memory, (size_t)floats * sizeof(float), NULL, &block));
  return block;
}

// Lets work queued on `later` from now on wait for what `first` has been given.
static void order(const fixture* first, const fixture* later) {
  nvb_event* event = NULL;
  CHECK_OK(nvb_event_create(first->backend, &event));
  CHECK_OK(nvb_event_record(event, first->stream));
  CHECK_OK(nvb_stream_wait_event(later->stream, event));
  CHECK_OK(nvb_event_destroy(event));
}

static nvb_status scale(const fixture* f, void* from, void* to, int floats, float factor) {
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = nvb_tensor_1d(from, NVB_DTYPE_F32, floats);
  args.output = nvb_tensor_1d(to, NVB_DTYPE_F32, floats);
  args.factor = factor;
  return nvb_scale(f->backend, &args, f->stream);
}

static nvb_status copy(const fixture* f, void* from, void* to, int floats) {
  return nvb_memory_copy(f->memory, to, from, (size_t)floats * sizeof(float), NVB_COPY_DEVICE_TO_DEVICE, f->stream);
}

static void check_refused(const fixture* f, void* theirs) {
  void* mine = allocate(f->memory, SMALL);
  CHECK_FAILS(scale(f, theirs, mine, SMALL, 2), NVB_ERROR_INVALID_ARGUMENT, "`input`", "not memory of",
              "enable access");
  CHECK_FAILS(scale(f, mine, theirs, SMALL, 2), NVB_ERROR_INVALID_ARGUMENT, "`output`", "not memory of");
  CHECK_FAILS(copy(f, theirs, mine, SMALL), NVB_ERROR_INVALID_ARGUMENT, "source", "device memory");
  CHECK_FAILS(copy(f, mine, theirs, SMALL), NVB_ERROR_INVALID_ARGUMENT, "destination", "device memory");
  CHECK_OK(nvb_memory_free(f->memory, mine, NULL));
}

// The block of `two`, which it writes, is read, written and copied by work of `one`, each ordered by events alone.
static void check_reached(fixture* one, fixture* two, void* theirs, int floats) {
  float* values = malloc((size_t)floats * sizeof *values);
  uint32_t state = 9;
  for (int i = 0; i < floats; ++i) values[i] = next_number(&state);
  const size_t bytes = (size_t)floats * sizeof *values;
  void* mine = allocate(one->memory, floats);
  CHECK_OK(nvb_memory_copy(two->memory, theirs, values, bytes, NVB_COPY_HOST_TO_DEVICE, two->stream));
  order(two, one);
  CHECK_OK(scale(one, theirs, mine, floats, 2));
  CHECK_OK(scale(one, mine, theirs, floats, 2));
  order(one, two);
  CHECK_OK(scale(two, theirs, theirs, floats, 2));
  order(two, one);
  CHECK_OK(copy(one, theirs, mine, floats));
  float* results = malloc(bytes);
  download(one, results, mine, bytes);
  int wrong = 0;
  for (int i = 0; i < floats; ++i) wrong += results[i] != 8 * values[i];
  CHECK_EQUAL(wrong, 0);
  CHECK_OK(scale(one, mine, mine, floats, 0.125f));
  CHECK_OK(copy(one, mine, theirs, floats));
  order(one, two);
  download(two, results, theirs, bytes);
  CHECK(memcmp(results, values, bytes) == 0);
  CHECK_OK(nvb_memory_free(one->memory, mine, one->stream));
  free(results);
  free(values);
}

// Memory of the device that is none of the library's, as an engine may bring it; it goes with the process.
static void* driver_allocate(int device, size_t bytes) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*retain)(void**, int) = NULL;
  int (*set)(void*) = NULL;
  int (*allocate_plain)(uint64_t*, size_t) = NULL;
  *(void**)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void**)&set = dlsym(driver, "cuCtxSetCurrent");
  *(void**)&allocate_plain = dlsym(driver, "cuMemAlloc_v2");
  void* context = NULL;
  uint64_t block = 0;
  CHECK(retain(&context, device) == 0 && set(context) == 0 && allocate_plain(&block, bytes) == 0 && set(NULL) == 0);
  return (void*)(uintptr_t)block;
}

static void test_memory(fixture* one, fixture* two) {
  // Memory that the driver mapped before and after the question, for the manager and for one that does not pool.
  void* early = allocate(two->memory, SMALL);
  nvb_memory_options options;
  nvb_memory_options_init(&options);
  options.pooling = NVB_SWITCH_OFF;
  nvb_memory_manager* unpooled = NULL;
  CHECK_OK(nvb_memory_manager_create(two->backend, &options, &unpooled));
  void* early_unpooled = allocate(unpooled, SMALL);
  check_refused(one, early);
  check_refused(one, early_unpooled);

  CHECK_OK(nvb_backend_enable_peer_access(one->backend, two->backend));
  CHECK_OK(nvb_backend_enable_peer_access(one->backend, two->backend));
  void* late = allocate(two->memory, LARGE);
  void* late_unpooled = allocate(unpooled, LARGE);
  check_reached(one, two, early, SMALL);
  check_reached(one, two, early_unpooled, SMALL);
  check_reached(one, two, late, LARGE);
  check_reached(one, two, late_unpooled, LARGE);

  // Another backend of that GPU has opened nothing, and memory that is the driver's own is open as a whole.
  fixture third = open_fixture_on("cuda:1");
  void* closed = allocate(third.memory, SMALL);
  check_refused(one, closed);
  CHECK_OK(nvb_memory_free(third.memory, closed, NULL));
  close_fixture(&third);
  void* plain = driver_allocate(1, SMALL * sizeof(float));
  check_reached(one, two, plain, SMALL);

  // In one direction only.
  void* mine = allocate(one->memory, SMALL);
  check_refused(two, mine);
  CHECK_OK(nvb_backend_enable_peer_access(two->backend, one->backend));
  check_reached(two, one, mine, SMALL);

  CHECK_OK(nvb_memory_free(one->memory, mine, NULL));
  CHECK_OK(nvb_memory_free(two->memory, early, NULL));
  CHECK_OK(nvb_memory_free(two->memory, late, NULL));
  CHECK_OK(nvb_memory_free(unpooled, early_unpooled, NULL));
  CHECK_OK(nvb_memory_free(unpooled, late_unpooled, NULL));
  CHECK_OK(nvb_memory_manager_destroy(unpooled));
}

// One product in INT4, whose kernels need more shared memory than a device gives unasked.
static void product(fixture* f, int rows, float* results) {
  enum { N = 512, K = 1024 };
  float* values = malloc(sizeof(float) * N * K);
  uint32_t state = 3;
  for (int i = 0; i < N * K; ++i) values[i] = next_number(&state);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, N, K);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.format = NVB_WEIGHT_FORMAT_INT4;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  void* input = upload(f, values, sizeof(float) * (size_t)(rows * K));
  void* output = allocate(f->memory, rows * N);
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(input, NVB_DTYPE_F32, rows, K);
  args.weight = weight;
  args.output = nvb_tensor_2d(output, NVB_DTYPE_F32, rows, N);
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  download(f, results, output, sizeof(float) * (size_t)(rows * N));
  release(f, input);
  release(f, output);
  CHECK_OK(nvb_weight_destroy(weight));
  free(values);
}

static void test_products(fixture* one, fixture* two) {
  enum { MOST = 64, N = 512 };
  static float first[MOST * N], second[MOST * N];
  const int rows[] = {1, 16, 40, 64};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    product(one, rows[i], first);
    product(two, rows[i], second);
    CHECK(memcmp(first, second, sizeof(float) * (size_t)(rows[i] * N)) == 0);
    CHECK(first[0] != 0 && first[0] == first[0]);
  }
}

int main(void) {
  int32_t gpus = 0;
  if (nvb_cuda_get_device_count(&gpus) != NVB_OK) gpus = 0;
  if (gpus < 2 || test_on_cpu()) {
    printf("skipped: two GPUs are needed, there are %d, and NVB_TEST_DEVICE is %s\n", gpus, test_device());
    return 0;
  }
  fixture one = open_fixture_on("cuda:0"), two = open_fixture_on("cuda:1");
  test_products(&one, &two);
  nvb_peer_access access;
  nvb_peer_access_init(&access);
  CHECK_OK(nvb_hardware_get_peer_access(0, 1, &access));
  if (access.accessible) {
    test_memory(&one, &two);
  } else {
    printf("skipped: cuda:0 does not reach the memory of cuda:1\n");
    CHECK_FAILS(nvb_backend_enable_peer_access(one.backend, two.backend), NVB_ERROR_UNSUPPORTED, "copy through host");
  }
  close_fixture(&two);
  close_fixture(&one);
  return test_result();
}
