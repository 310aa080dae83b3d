// The library is opened at run time, used by threads that go on, closed under them, and called on: it stays loaded.
// Opened again, it is the same one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

enum { WORKERS = 4 };

typedef struct {
  nvb_status (*backend_create)(const nvb_backend_options*, nvb_backend**);
  nvb_status (*backend_destroy)(nvb_backend*);
  nvb_status (*get_memory_manager)(const nvb_backend*, uint32_t, nvb_memory_manager**);
  nvb_status (*memory_manager_destroy)(nvb_memory_manager*);
  nvb_status (*memory_allocate)(nvb_memory_manager*, size_t, nvb_stream*, void**);
  nvb_status (*memory_free)(nvb_memory_manager*, void*, nvb_stream*);
  nvb_status (*memory_fill)(nvb_memory_manager*, void*, uint32_t, size_t, nvb_stream*);
  nvb_status (*scale)(const nvb_backend*, const nvb_elementwise_args*, nvb_stream*);
  size_t (*last_error_message)(char*, size_t);
} functions;

static functions library;
static nvb_backend* backend;
static nvb_memory_manager* memory;
static atomic_int done;
static atomic_int rounds[WORKERS];

// POSIX keeps functions in object pointers, which ISO C does not know.
static void* handle_of(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
#define FIND(field, name)                             \
  do {                                                \
    void* address = dlsym(handle, name);              \
    CHECK(address != NULL);                           \
    memcpy(&library.field, &address, sizeof address); \
  } while (0)
  FIND(backend_create, "nvb_backend_create");
  FIND(backend_destroy, "nvb_backend_destroy");
  FIND(get_memory_manager, "nvb_backend_get_memory_manager");
  FIND(memory_manager_destroy, "nvb_memory_manager_destroy");
  FIND(memory_allocate, "nvb_memory_allocate");
  FIND(memory_free, "nvb_memory_free");
  FIND(memory_fill, "nvb_memory_fill");
  FIND(scale, "nvb_scale");
  FIND(last_error_message, "nvb_last_error_message");
#undef FIND
  return handle;
}

static void* work(void* argument) {
  const int number = (int)(intptr_t)argument;
  enum { VALUES = 1 << 16 };
  while (!done) {
    void* block = NULL;
    CHECK_EQUAL(library.memory_allocate(memory, VALUES * sizeof(float), NULL, &block), NVB_OK);
    CHECK_EQUAL(library.memory_fill(memory, block, 0, VALUES * sizeof(float), NULL), NVB_OK);
    nvb_elementwise_args args;
    nvb_elementwise_args_init(&args);
    args.input = args.output = nvb_tensor_1d(block, NVB_DTYPE_F32, VALUES);
    args.factor = 2;
    CHECK_EQUAL(library.scale(backend, &args, NULL), NVB_OK);
    CHECK_EQUAL(library.memory_free(memory, block, NULL), NVB_OK);
    CHECK_EQUAL(library.memory_free(memory, &args, NULL), NVB_ERROR_INVALID_ARGUMENT);
    char text[256];
    CHECK(library.last_error_message(text, sizeof text) > 1 && strstr(text, "nvb_memory_free") != NULL);
    atomic_fetch_add(&rounds[number], 1);
  }
  return NULL;
}

static void wait_for_a_round(void) {
  for (int i = 0; i < WORKERS; ++i) {
    const int before = rounds[i];
    while (rounds[i] < before + 3 && check_failures == 0) usleep(1000);
  }
}

int main(void) {
  // The file that this program is linked to.
  Dl_info info;
  nvb_status (*linked)(const nvb_backend_options*, nvb_backend**) = nvb_backend_create;
  void* address;
  memcpy(&address, &linked, sizeof address);
  CHECK(dladdr(address, &info) != 0 && info.dli_fname != NULL);
  // A copy of its own, which nothing but this program holds.
  char path[] = "/tmp/nvbackend_dlclose_XXXXXX";
  const int file = mkstemp(path);
  FILE* from = fopen(info.dli_fname, "rb");
  CHECK(file >= 0 && from != NULL);
  static char bytes[1 << 16];
  size_t count = 0;
  while (from != NULL && (count = fread(bytes, 1, sizeof bytes, from)) > 0) {
    CHECK_EQUAL(write(file, bytes, count), (ssize_t)count);
  }
  if (from != NULL) fclose(from);
  close(file);
  void* handle = handle_of(path);
  const functions first = library;
  CHECK(memcmp(&first.backend_create, &linked, sizeof linked) != 0);

  nvb_backend_options options = device_options();
  CHECK_EQUAL(library.backend_create(&options, &backend), NVB_OK);
  CHECK_EQUAL(library.get_memory_manager(backend, 0, &memory), NVB_OK);
  pthread_t threads[WORKERS];
  for (int i = 0; i < WORKERS; ++i) CHECK_EQUAL(pthread_create(&threads[i], NULL, work, (void*)(intptr_t)i), 0);
  wait_for_a_round();
  CHECK_EQUAL(dlclose(handle), 0);
  wait_for_a_round();
  handle = handle_of(path);
  CHECK(memcmp(&first, &library, sizeof library) == 0);
  wait_for_a_round();
  CHECK_EQUAL(dlclose(handle), 0);
  unlink(path);
  done = 1;
  // Threads end after the library was closed, with what they keep in it.
  for (int i = 0; i < WORKERS; ++i) pthread_join(threads[i], NULL);
  CHECK_EQUAL(library.memory_manager_destroy(memory), NVB_OK);
  CHECK_EQUAL(library.backend_destroy(backend), NVB_OK);
  CHECK_EQUAL(library.backend_create(&options, &backend), NVB_OK);
  CHECK_EQUAL(library.backend_destroy(backend), NVB_OK);
  return test_result();
}
