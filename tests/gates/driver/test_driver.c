// The trampolines of csrc/driver against a fake driver (argument 1 "fake", with NVB_LIBCUDA naming it) or against a
// driver that cannot be opened (argument 1 "missing").
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

typedef struct {
  unsigned char bytes[64];
} memory_handle;

int cuInit(unsigned flags);
int cuCtxSynchronize(void);
int cuGetErrorName(int status, const char** text);
int cuGetErrorString(int status, const char** text);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int cuTexRefSetMipmapLevelClamp(void* reference, float minimum, float maximum);
int cuIpcOpenMemHandle_v2(uint64_t* address, memory_handle handle, unsigned flags);
int cuStreamQuery(void* stream);

static int failures;

static void expect(const char* what, int seen, int wanted) {
  if (seen == wanted) return;
  fprintf(stderr, "%s: %d, not %d\n", what, seen, wanted);
  ++failures;
}

// Every argument position, in registers and on the stack; called twice, as the first call takes the resolver's path.
static int call_all(void) {
  uint64_t address = 0;
  memory_handle handle;
  for (unsigned i = 0; i < 64; ++i) handle.bytes[i] = (unsigned char)(200 - i);
  int status = cuLaunchKernel((void*)1, 2, 3, 4, 5, 6, 7, 8, (void*)9, (void**)10, (void**)11);
  status |= cuTexRefSetMipmapLevelClamp((void*)9, 0.25f, -3.5f);
  status |= cuIpcOpenMemHandle_v2(&address, handle, 5);
  status |= cuInit(7);
  return status | (address != 11);
}

static void* first_calls(void* barrier) {
  pthread_barrier_wait(barrier);
  return (void*)(intptr_t)call_all();
}

static void with_fake_driver(void) {
  const char* text = "";
  enum { THREADS = 8 };
  pthread_barrier_t barrier;
  pthread_t threads[THREADS];
  pthread_barrier_init(&barrier, NULL, THREADS);
  for (int i = 0; i < THREADS; ++i) pthread_create(&threads[i], NULL, first_calls, &barrier);
  for (int i = 0; i < THREADS; ++i) {
    void* status;
    pthread_join(threads[i], &status);
    expect("first calls from eight threads", (int)(intptr_t)status, 0);
  }
  expect("second calls", call_all(), 0);
  expect("an argument that is wrong", cuInit(8), 1);
  expect("a status newer than cust", cuStreamQuery(NULL), 999);
  expect("the number behind it", nvb_driver_unnamed_status(), 721);
  expect("a function that it has", nvb_driver_has("cuStreamQuery"), 1);
  expect("a function that it has not", nvb_driver_has("cuCtxSynchronize"), 0);
  expect("a function that the driver lacks", cuCtxSynchronize(), 500);
  expect("cuGetErrorName, which it lacks too", cuGetErrorName(1, &text), 0);
  expect("its text is not empty", text[0] != '\0', 1);
  expect("nvb_driver_loaded", nvb_driver_loaded(), 1);
  expect("length of nvb_driver_error", (int)strlen(nvb_driver_error()), 0);
}

static void with_missing_driver(void) {
  const char* text = "";
  expect("cuInit", cuInit(0), 100);
  expect("cuCtxSynchronize", cuCtxSynchronize(), 100);
  expect("cuGetErrorString", cuGetErrorString(100, &text), 0);
  expect("its text", strcmp(text, "no CUDA driver is installed"), 0);
  expect("nvb_driver_loaded", nvb_driver_loaded(), 0);
  expect("nvb_driver_has", nvb_driver_has("cuInit"), 0);
  expect("nvb_driver_error names the file", strstr(nvb_driver_error(), "no_such_driver.so") != NULL, 1);
}

int main(int count, char** arguments) {
  if (count == 2 && strcmp(arguments[1], "fake") == 0) {
    with_fake_driver();
  } else if (count == 2 && strcmp(arguments[1], "missing") == 0) {
    with_missing_driver();
  } else {
    fprintf(stderr, "usage: %s fake|missing\n", arguments[0]);
    return 2;
  }
  return failures != 0;
}
