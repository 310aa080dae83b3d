// Backends: choice of device, options, information, logging, panics, threads, and order of destruction.
#include <pthread.h>

#include "check.h"

static nvb_status create(void* value, void* context) {
  (void)context;
  nvb_backend* backend = NULL;
  nvb_status status = nvb_backend_create(value, &backend);
  CHECK((status == NVB_OK) == (backend != NULL));
  CHECK_OK(nvb_backend_destroy(backend));
  // NULL options are the defaults; `CHECK_STRUCT` looks for an error there.
  return value == NULL ? nvb_backend_create(NULL, NULL) : status;
}

static nvb_status get_info(void* value, void* context) {
  return nvb_backend_get_device_info(context, value);
}

static void test_options_and_errors(void) {
  nvb_backend* backend = NULL;
  CHECK_OK(nvb_backend_create(NULL, &backend));
  CHECK_OK(nvb_backend_destroy(backend));

  nvb_backend_options options = device_options();
  CHECK_STRUCT(options, create, NULL);
  CHECK_FAILS(nvb_backend_create(&options, NULL), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");

  const char* const wrong[] = {"gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:0,", " cpu"};
  backend = foreign_handle();
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    options.device = wrong[i];
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, wrong[i], "cuda:N");
    CHECK(backend == foreign_handle());
  }
  options.device = "\xff\xfe";
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_INVALID_ARGUMENT, "device", "UTF-8");

  // A device that is not there: no driver at all, or fewer devices.
  int32_t count = -7;
  nvb_status status = nvb_cuda_get_device_count(&count);
  nvb_device_info info;
  nvb_device_info_init(&info);
  options = device_options();
  options.device = "cuda:4321";
  if (status == NVB_OK) {
    CHECK(count > 0);
    CHECK_OK(nvb_cuda_get_device_info(0, &info));
    CHECK(info.kind == NVB_DEVICE_CUDA && info.total_memory > 0 && info.name[0] != '\0');
    CHECK_FAILS(nvb_cuda_get_device_info(count, &info), NVB_ERROR_DEVICE, "device");
    CHECK_FAILS(nvb_cuda_get_device_info(-1, &info), NVB_ERROR_DEVICE, "-1");
    CHECK_INVALID(nvb_cuda_get_device_info(0, NULL));
    CHECK_INVALID(nvb_cuda_get_device_count(NULL));
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_DEVICE, "4321");
  } else {
    CHECK_EQUAL(status, NVB_ERROR_CUDA_NOT_AVAILABLE);
    CHECK_EQUAL(count, -7);
    CHECK(nvb_last_error_message(NULL, 0) > 20);
    CHECK_FAILS(nvb_cuda_get_device_info(0, &info), NVB_ERROR_CUDA_NOT_AVAILABLE, "nvb_cuda_get_device_info");
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CUDA_NOT_AVAILABLE, "nvb_backend_create");
  }
  CHECK(backend == foreign_handle());
}

static void test_handles(void) {
  fixture f = open_fixture();
  nvb_device_info info;
  nvb_device_info_init(&info);
  CHECK_STRUCT(info, get_info, f.backend);
  CHECK_OK(nvb_backend_get_device_info(f.backend, &info));
  CHECK_EQUAL(info.kind, test_on_cpu() ? NVB_DEVICE_CPU : NVB_DEVICE_CUDA);
  CHECK(info.multiprocessors > 0 && info.total_memory > 0 && info.name[0] != '\0');
  if (test_on_cpu()) CHECK_EQUAL(info.multiprocessors, 2);

  CHECK_FAILS(nvb_backend_get_device_info(NULL, &info), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_backend_get_device_info(foreign_handle(), &info), NVB_ERROR_INVALID_ARGUMENT, "not a backend");
  CHECK_FAILS(nvb_backend_get_device_info((nvb_backend*)f.stream, &info), NVB_ERROR_INVALID_ARGUMENT, "not a backend");
  CHECK_OK(nvb_backend_synchronize(f.backend));
  CHECK_FAILS(nvb_backend_synchronize(NULL), NVB_ERROR_INVALID_ARGUMENT, "nvb_backend_synchronize", "NULL");
  CHECK_FAILS(nvb_backend_synchronize((nvb_backend*)f.stream), NVB_ERROR_INVALID_ARGUMENT, "not a backend");
  nvb_memory_manager* memory = foreign_handle();
  CHECK_FAILS(nvb_backend_get_memory_manager(f.backend, 1, &memory), NVB_ERROR_INVALID_ARGUMENT, "index 1", "1 device");
  CHECK_FAILS(nvb_backend_get_memory_manager(f.backend, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "memory", "NULL");
  CHECK_FAILS(nvb_backend_get_memory_manager(NULL, 0, &memory), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK(memory == foreign_handle());

  nvb_backend* backend = f.backend;
  close_fixture(&f);
  CHECK_FAILS(nvb_backend_destroy(backend), NVB_ERROR_INVALID_ARGUMENT, "backend", "destroyed");
  CHECK_FAILS(nvb_backend_get_device_info(backend, &info), NVB_ERROR_INVALID_ARGUMENT, "backend", "destroyed");
  CHECK_FAILS(nvb_backend_destroy(foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a backend");
  CHECK_OK(nvb_backend_destroy(NULL));
}

// Logging ----------------------------------------------------------------------------------------------------------

typedef struct {
  pthread_mutex_t lock;
  int records[NVB_LOG_TRACE + 1];
  char last[256];
} log_book;

static void keep_record(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  log_book* book = user_data;
  pthread_mutex_lock(&book->lock);
  CHECK(level >= NVB_LOG_ERROR && level <= NVB_LOG_TRACE);
  CHECK(strncmp(target, "nvbackend", 9) == 0);
  CHECK_EQUAL(strlen(message), length);
  ++book->records[level <= NVB_LOG_TRACE ? level : 0];
  snprintf(book->last, sizeof book->last, "%s", message);
  pthread_mutex_unlock(&book->lock);
}

// A backend whose records up to `level` go into the book.
static nvb_backend* open_logged(log_book* book, uint32_t level) {
  nvb_backend_options options = device_options();
  options.log_level = level;
  options.log_callback = keep_record;
  options.log_user_data = book;
  nvb_backend* backend = NULL;
  if (!CHECK_OK(nvb_backend_create(&options, &backend))) exit(1);
  return backend;
}

static void test_logging(void) {
  for (uint32_t level = 0; level <= NVB_LOG_TRACE; ++level) {
    log_book book = {.lock = PTHREAD_MUTEX_INITIALIZER};
    nvb_backend* backend = open_logged(&book, level == 0 ? NVB_LOG_OFF : level);
    nvb_memory_manager* memory = NULL;
    void* block = NULL;
    CHECK_OK(nvb_backend_get_memory_manager(backend, 0, &memory));
    CHECK_INVALID(nvb_memory_allocate(memory, 0, NULL, &block));
    if (level >= NVB_LOG_DEBUG) CHECK(strstr(book.last, "bytes is 0") != NULL);
    CHECK_OK(nvb_memory_allocate(memory, 12345, NULL, &block));
    if (level >= NVB_LOG_TRACE) CHECK(strstr(book.last, "12345") != NULL);
    CHECK_OK(nvb_memory_free(memory, block, NULL));
    CHECK((book.records[NVB_LOG_INFO] > 0) == (level >= NVB_LOG_INFO));
    CHECK((book.records[NVB_LOG_DEBUG] > 0) == (level >= NVB_LOG_DEBUG));
    CHECK((book.records[NVB_LOG_TRACE] > 0) == (level >= NVB_LOG_TRACE));

    // None come once the handle is destroyed, though the memory manager lives on and other calls fail.
    CHECK_OK(nvb_backend_destroy(backend));
    log_book after = book;
    CHECK_INVALID(nvb_backend_destroy(backend));
    CHECK_INVALID(nvb_memory_allocate(memory, 0, NULL, &block));
    CHECK(memcmp(after.records, book.records, sizeof after.records) == 0);
    CHECK_OK(nvb_memory_manager_destroy(memory));
  }
}

static void test_two_callbacks(void) {
  log_book first = {.lock = PTHREAD_MUTEX_INITIALIZER}, second = {.lock = PTHREAD_MUTEX_INITIALIZER};
  nvb_backend* a = open_logged(&first, NVB_LOG_DEBUG);
  nvb_backend* b = open_logged(&second, NVB_LOG_ERROR);
  CHECK_INVALID(nvb_stream_synchronize(NULL));
  CHECK(first.records[NVB_LOG_DEBUG] > 0);
  CHECK_EQUAL(second.records[NVB_LOG_DEBUG], 0);
  CHECK_OK(nvb_backend_destroy(a));
  CHECK_OK(nvb_backend_destroy(b));
}

// Threads that keep blocks of a manager log them too, once somebody wants to hear of them.
static void test_trace_switched_on_late(void) {
  fixture f = open_fixture();
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f.memory, 4096, f.stream, &block));
  CHECK_OK(nvb_memory_free(f.memory, block, f.stream));
  log_book book = {.lock = PTHREAD_MUTEX_INITIALIZER};
  nvb_backend* logged = open_logged(&book, NVB_LOG_TRACE);
  const int before = book.records[NVB_LOG_TRACE];
  for (int i = 0; i < 100; ++i) {
    CHECK_OK(nvb_memory_allocate(f.memory, 4096, f.stream, &block));
    CHECK_OK(nvb_memory_free(f.memory, block, f.stream));
  }
  CHECK(book.records[NVB_LOG_TRACE] >= before + 200);
  CHECK_OK(nvb_backend_destroy(logged));
  close_fixture(&f);
}

// Panics -----------------------------------------------------------------------------------------------------------

static void test_panic(void) {
  fixture f = open_fixture(), other = open_fixture();
  log_book book = {.lock = PTHREAD_MUTEX_INITIALIZER};
  nvb_backend* logged = open_logged(&book, NVB_LOG_ERROR);

  CHECK_FAILS(nvb_test_inject_panic(f.backend), NVB_ERROR_INTERNAL, "nvb_test_inject_panic", "bug", "injected");
  // The place of a panic is in the log, not on stderr.
  CHECK_EQUAL(book.records[NVB_LOG_ERROR], 1);
  nvb_device_info info;
  nvb_device_info_init(&info);
  nvb_stream* stream = NULL;
  CHECK_FAILS(nvb_backend_get_device_info(f.backend, &info), NVB_ERROR_INTERNAL, "internal error", "destroy");
  CHECK_FAILS(nvb_stream_create(f.backend, 0, &stream), NVB_ERROR_INTERNAL, "destroy");
  CHECK_FAILS(nvb_test_inject_panic(f.backend), NVB_ERROR_INTERNAL, "destroy");
  // Its children and other backends work on.
  CHECK_OK(nvb_stream_synchronize(f.stream));
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f.memory, 64, f.stream, &block));
  CHECK_OK(nvb_memory_free(f.memory, block, f.stream));
  CHECK_OK(nvb_backend_get_device_info(other.backend, &info));
  CHECK_FAILS(nvb_test_inject_panic(NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  close_fixture(&f);
  close_fixture(&other);
  CHECK_OK(nvb_backend_destroy(logged));
}

// Threads ----------------------------------------------------------------------------------------------------------

enum { ROWS = 16, COLUMNS = 300, ROUNDS = 20 };

typedef struct {
  const nvb_backend* backend;
  int number;
} worker;

// Softmax of rows that are different in each thread, on a stream of its own, with failing calls in between.
static void* work(void* argument) {
  const worker* self = argument;
  check_thread = self->number;
  fixture f = {(nvb_backend*)self->backend, NULL, NULL};
  CHECK_OK(nvb_backend_get_memory_manager(f.backend, 0, &f.memory));
  CHECK_OK(nvb_stream_create(f.backend, 0, &f.stream));
  uint32_t state = (uint32_t)self->number;
  static _Thread_local float input[ROWS * COLUMNS], output[ROWS * COLUMNS];
  for (int round = 0; round < ROUNDS; ++round) {
    for (int i = 0; i < ROWS * COLUMNS; ++i) input[i] = 4 * next_number(&state);
    void* block = upload(&f, input, sizeof input);
    nvb_softmax_args args;
    nvb_softmax_args_init(&args);
    args.input = args.output = nvb_tensor_2d(block, NVB_DTYPE_F32, ROWS, COLUMNS);
    CHECK_OK(nvb_softmax(self->backend, &args, f.stream));
    download(&f, output, block, sizeof output);
    args.output = nvb_tensor_2d(block, NVB_DTYPE_F32, self->number + 2, self->number + 3);
    CHECK_FAILS(nvb_softmax(self->backend, &args, f.stream), NVB_ERROR_INVALID_ARGUMENT, "output", "300");
    for (int row = 0; row < ROWS; ++row) {
      double sum = 0;
      for (int i = 0; i < COLUMNS; ++i) sum += exp(input[row * COLUMNS + i]);
      for (int i = 0; i < COLUMNS; i += 37) {
        CHECK_NEAR(output[row * COLUMNS + i], exp(input[row * COLUMNS + i]) / sum, 1e-5);
      }
    }
    release(&f, block);
  }
  CHECK_OK(nvb_stream_destroy(f.stream));
  CHECK_OK(nvb_memory_manager_destroy(f.memory));
  return NULL;
}

static void test_threads(int count) {
  fixture f = open_fixture();
  pthread_t threads[8];
  worker workers[8];
  for (int i = 0; i < count; ++i) {
    workers[i] = (worker){f.backend, i + 1};
    CHECK_EQUAL(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  }
  for (int i = 0; i < count; ++i) CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  close_fixture(&f);
}

// Lifetimes --------------------------------------------------------------------------------------------------------

enum { OBJECTS = 7 };

// One of each object, destroyed in a random order; whatever is left works in the meantime.
static void destroy_in_any_order(uint32_t* state) {
  fixture f = open_fixture();
  nvb_event* event = NULL;
  nvb_weight* weight = NULL;
  nvb_kv_cache* cache = NULL;
  nvb_attention* attention = NULL;
  float values[6] = {1, 2, 3, 4, 5, 6};
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 2, 3);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = cache_options.sequences = cache_options.kv_heads = 1;
  cache_options.head_dim = cache_options.capacity = 8;
  nvb_attention_options attention_options;
  nvb_attention_options_init(&attention_options);
  attention_options.query_heads = attention_options.kv_heads = 1;
  attention_options.head_dim = 8;
  CHECK_OK(nvb_event_create(f.backend, &event));
  CHECK_OK(nvb_weight_create(f.backend, &desc, f.stream, &weight));
  CHECK_OK(nvb_kv_cache_create(f.backend, &cache_options, &cache));
  CHECK_OK(nvb_attention_create(f.backend, &attention_options, &attention));
  int order[OBJECTS] = {0, 1, 2, 3, 4, 5, 6};
  for (int i = OBJECTS - 1; i > 0; --i) {
    int j = (int)((next_number(state) + 1) / 2 * (float)(i + 1));
    int swapped = order[i];
    order[i] = order[j];
    order[j] = swapped;
  }
  for (int i = 0; i < OBJECTS; ++i) {
    switch (order[i]) {
      case 0:
        CHECK_OK(nvb_backend_destroy(f.backend));
        f.backend = NULL;
        break;
      case 1:
        CHECK_OK(nvb_memory_manager_destroy(f.memory));
        f.memory = NULL;
        break;
      case 2:
        CHECK_OK(nvb_stream_destroy(f.stream));
        f.stream = NULL;
        break;
      case 3:
        CHECK_OK(nvb_event_destroy(event));
        event = NULL;
        break;
      case 4:
        CHECK_OK(nvb_weight_destroy(weight));
        weight = NULL;
        break;
      case 5:
        CHECK_OK(nvb_kv_cache_destroy(cache));
        cache = NULL;
        break;
      default:
        CHECK_OK(nvb_attention_destroy(attention));
        attention = NULL;
        break;
    }
    if (f.memory != NULL) CHECK_EQUAL(statistics_of(f.memory).blocks, (weight != NULL) + (cache != NULL));
    if (f.stream != NULL) CHECK_OK(nvb_stream_synchronize(f.stream));
    if (f.stream != NULL && event != NULL) CHECK_OK(nvb_event_record(event, f.stream));
    nvb_weight_info info;
    nvb_weight_info_init(&info);
    if (weight != NULL) CHECK_OK(nvb_weight_get_info(weight, &info));
    uint64_t bytes = 0;
    if (cache != NULL) CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
  }
}

static void test_lifetimes(void) {
  uint32_t state = 1;
  // A primary context that comes and goes with each backend would be all that this measures on CUDA.
  fixture keep = open_fixture();
  for (int i = 0; i < 10; ++i) destroy_in_any_order(&state);
  long before = resident_kilobytes();
  int rounds = test_on_cpu() ? 1000 : 100;
  for (int i = 0; i < rounds; ++i) {
    nvb_backend_options options = device_options();
    nvb_backend* backend = NULL;
    if (!CHECK_OK(nvb_backend_create(&options, &backend))) break;
    CHECK_OK(nvb_backend_destroy(backend));
  }
  for (int i = 0; i < 100; ++i) destroy_in_any_order(&state);
  CHECK_GROWTH(before);
  close_fixture(&keep);
}

int main(void) {
  test_options_and_errors();
  test_handles();
  test_logging();
  test_two_callbacks();
  test_trace_switched_on_late();
  test_panic();
  test_threads(2);
  test_threads(8);
  test_lifetimes();
  return test_result();
}
