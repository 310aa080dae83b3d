// Status codes, the calling thread's last error, versions, and the library opened by name.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "check.h"

static void test_names_and_tree(void) {
  static const struct {
    nvb_status status, parent;
    const char* name;
  } codes[] = {
      {NVB_OK, NVB_OK, "NVB_OK"},
      {NVB_ERROR, NVB_ERROR, "NVB_ERROR"},
      {NVB_ERROR_INVALID_ARGUMENT, NVB_ERROR, "NVB_ERROR_INVALID_ARGUMENT"},
      {NVB_ERROR_CONFIGURATION, NVB_ERROR, "NVB_ERROR_CONFIGURATION"},
      {NVB_ERROR_UNSUPPORTED, NVB_ERROR, "NVB_ERROR_UNSUPPORTED"},
      {NVB_ERROR_DEVICE, NVB_ERROR, "NVB_ERROR_DEVICE"},
      {NVB_ERROR_CUDA_NOT_AVAILABLE, NVB_ERROR_DEVICE, "NVB_ERROR_CUDA_NOT_AVAILABLE"},
      {NVB_ERROR_DEVICE_LOST, NVB_ERROR_DEVICE, "NVB_ERROR_DEVICE_LOST"},
      {NVB_ERROR_INVALID_COMPUTE_CAPABILITY, NVB_ERROR_DEVICE, "NVB_ERROR_INVALID_COMPUTE_CAPABILITY"},
      {NVB_ERROR_INVALID_ARCHITECTURE, NVB_ERROR_DEVICE, "NVB_ERROR_INVALID_ARCHITECTURE"},
      {NVB_ERROR_MEMORY_ALLOCATION, NVB_ERROR, "NVB_ERROR_MEMORY_ALLOCATION"},
      {NVB_ERROR_OUT_OF_MEMORY, NVB_ERROR_MEMORY_ALLOCATION, "NVB_ERROR_OUT_OF_MEMORY"},
      {NVB_ERROR_KERNEL_LAUNCH, NVB_ERROR, "NVB_ERROR_KERNEL_LAUNCH"},
      {NVB_ERROR_KERNEL_BUILD, NVB_ERROR_KERNEL_LAUNCH, "NVB_ERROR_KERNEL_BUILD"},
      {NVB_ERROR_ATTENTION, NVB_ERROR, "NVB_ERROR_ATTENTION"},
      {NVB_ERROR_FP8, NVB_ERROR, "NVB_ERROR_FP8"},
      {NVB_ERROR_OPTIMIZATION, NVB_ERROR, "NVB_ERROR_OPTIMIZATION"},
      {NVB_ERROR_COMMUNICATION, NVB_ERROR, "NVB_ERROR_COMMUNICATION"},
      {NVB_ERROR_ABI_MISMATCH, NVB_ERROR_INVALID_ARGUMENT, "NVB_ERROR_ABI_MISMATCH"},
      {NVB_ERROR_IO, NVB_ERROR, "NVB_ERROR_IO"},
      {NVB_ERROR_INTERNAL, NVB_ERROR, "NVB_ERROR_INTERNAL"},
  };
  for (size_t i = 0; i < sizeof codes / sizeof *codes; ++i) {
    CHECK(strcmp(nvb_status_name(codes[i].status), codes[i].name) == 0);
    CHECK_EQUAL(nvb_status_parent(codes[i].status), codes[i].parent);
  }
  const nvb_status unknown[] = {-1, 2, 99, 101, 1301, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; ++i) {
    CHECK(strcmp(nvb_status_name(unknown[i]), "unknown status") == 0);
    CHECK_EQUAL(nvb_status_parent(unknown[i]), NVB_ERROR);
  }
}

// Fails on purpose: "… the backend handle is NULL".
static nvb_status fail(void) {
  nvb_device_info info;
  nvb_device_info_init(&info);
  return nvb_backend_get_device_info(NULL, &info);
}

static void* no_error_yet(void* unused) {
  char text[8] = "before";
  CHECK_EQUAL(nvb_last_error_message(text, sizeof text), 1);
  CHECK(text[0] == '\0');
  nvb_error_detail detail;
  nvb_error_detail_init(&detail);
  CHECK_OK(nvb_last_error_get(&detail));
  CHECK_EQUAL(detail.status, NVB_OK);
  CHECK_EQUAL(detail.requested, 0);
  return unused;
}

static void* own_error(void* unused) {
  check_thread = 1;
  CHECK_FAILS(nvb_stream_synchronize(NULL), NVB_ERROR_INVALID_ARGUMENT, "stream", "NULL");
  return unused;
}

static void run_thread(void* (*body)(void*)) {
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, body, NULL), 0);
  CHECK_EQUAL(pthread_join(thread, NULL), 0);
}

// The chain ends with what failed first: here the error without the call's name, then nothing.
static void test_causes(void) {
  char whole[256], cause[256];
  CHECK_FAILS(fail(), NVB_ERROR_INVALID_ARGUMENT, "nvb_backend_get_device_info: ");
  nvb_last_error_message(whole, sizeof whole);
  CHECK_EQUAL(nvb_last_error_cause(0, cause, sizeof cause), strlen(whole) + 1);
  CHECK(strcmp(whole, cause) == 0);
  CHECK_EQUAL(nvb_last_error_cause(1, cause, sizeof cause), strlen("the backend handle is NULL") + 1);
  CHECK(strcmp(cause, "the backend handle is NULL") == 0);
  CHECK_EQUAL(nvb_last_error_cause(2, cause, sizeof cause), 1);
  CHECK(cause[0] == '\0');
  CHECK_EQUAL(nvb_last_error_cause(1, NULL, 0), strlen("the backend handle is NULL") + 1);
}

static void test_last_error(void) {
  no_error_yet(NULL);
  CHECK_FAILS(fail(), NVB_ERROR_INVALID_ARGUMENT, "nvb_backend_get_device_info", "backend", "NULL");
  char whole[256], part[256];
  size_t size = nvb_last_error_message(NULL, 0);
  CHECK(size > 10 && size < sizeof whole);
  CHECK_EQUAL(nvb_last_error_message(whole, sizeof whole), size);
  CHECK_EQUAL(strlen(whole) + 1, size);
  for (size_t capacity = 1; capacity <= size; ++capacity) {
    memset(part, 'x', sizeof part);
    CHECK_EQUAL(nvb_last_error_message(part, capacity), size);
    CHECK_EQUAL(strlen(part), capacity - 1);
    CHECK(memcmp(part, whole, capacity - 1) == 0 && part[capacity] == 'x');
  }
  part[0] = 'x';
  CHECK_EQUAL(nvb_last_error_message(part, 0), size);
  CHECK(part[0] == 'x');

  // Other threads have errors of their own, and success leaves the text alone.
  run_thread(no_error_yet);
  run_thread(own_error);
  CHECK_OK(nvb_backend_destroy(NULL));
  CHECK_EQUAL(nvb_last_error_message(part, sizeof part), size);
  CHECK(strcmp(part, whole) == 0);

  nvb_error_detail detail;
  nvb_error_detail_init(&detail);
  CHECK_OK(nvb_last_error_get(&detail));
  CHECK_EQUAL(detail.status, NVB_ERROR_INVALID_ARGUMENT);
  CHECK_EQUAL(detail.cuda_code, 0);
}

static nvb_status get_error(void* value, void* context) {
  (void)context;
  return nvb_last_error_get(value);
}

static nvb_status get_build(void* value, void* context) {
  (void)context;
  return nvb_get_build_info(value);
}

static void test_versions(void) {
  CHECK_EQUAL(nvb_version_number(), NVB_VERSION_NUMBER);
  CHECK(strcmp(nvb_version_string(), NVB_VERSION_STRING) == 0);
  CHECK_EQUAL(nvb_abi_version(), NVB_ABI_VERSION);
  nvb_build_info build;
  nvb_build_info_init(&build);
  CHECK_OK(nvb_get_build_info(&build));
  CHECK_EQUAL(build.struct_size, sizeof build);
  CHECK(build.cuda <= 1);
  CHECK((build.cuda_toolkit_version >= 11000) == (build.cuda == 1));
  CHECK((build.architectures[0] != '\0') == (build.cuda == 1));
  // A smaller struct is filled as far as it goes.
  nvb_build_info older;
  memset(&older, 0x5a, sizeof older);
  older.struct_size = offsetof(nvb_build_info, cuda_toolkit_version);
  CHECK_OK(nvb_get_build_info(&older));
  CHECK_EQUAL(older.cuda, build.cuda);
  CHECK_EQUAL(older.cuda_toolkit_version, 0x5a5a5a5a);
}

// An engine may open the library by itself, close it, and go on.
static void test_dlopen(void) {
  const char* (*version)(void) = nvb_version_string;
  void* address;
  memcpy(&address, &version, sizeof address);
  Dl_info info;
  CHECK(dladdr(address, &info) != 0);
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != NULL);
  if (library == NULL) return;
  void* symbol = dlsym(library, "nvb_abi_version");
  CHECK(symbol != NULL);
  uint32_t (*abi_version)(void);
  memcpy(&abi_version, &symbol, sizeof abi_version);
  CHECK_EQUAL(abi_version(), NVB_ABI_VERSION);
  CHECK_EQUAL(dlclose(library), 0);
  CHECK_EQUAL(abi_version(), NVB_ABI_VERSION);
}

int main(void) {
  test_names_and_tree();
  test_last_error();
  test_causes();
  nvb_error_detail detail;
  nvb_error_detail_init(&detail);
  CHECK_STRUCT(detail, get_error, NULL);
  nvb_build_info build;
  nvb_build_info_init(&build);
  CHECK_STRUCT(build, get_build, NULL);
  test_versions();
  test_dlopen();
  return test_result();
}
