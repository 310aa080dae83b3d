// Opens the CUDA driver and fills the trampolines' table, one entry when it is first called (driver.h says why).
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "symbols.h"  // the number of functions; included again below for their names

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_NOT_FOUND = 500, CUDA_ERROR_UNKNOWN = 999 };

static const char* const names[NVB_DRIVER_SYMBOLS] = {
#define NVB_DRIVER_SYMBOL(index, name) [index] = #name,
#include "symbols.h"
#undef NVB_DRIVER_SYMBOL
};

// Read by the trampolines with an acquire load: whoever sees an address sees the library behind it initialised.
__attribute__((visibility("hidden"))) void* nvb_driver_table[NVB_DRIVER_SYMBOLS];

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void* library;
static char error[512];

static void open_library(void) {
  const char* path = secure_getenv("NVB_LIBCUDA");
  if (path == NULL || path[0] == '\0') path = "libcuda.so.1";
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library != NULL) return;
  const char* reason = dlerror();
  snprintf(error, sizeof error, "%s", reason != NULL ? reason : "the dynamic loader gave no reason");
}

int nvb_driver_loaded(void) {
  pthread_once(&once, open_library);
  return library != NULL;
}

const char* nvb_driver_error(void) {
  pthread_once(&once, open_library);
  return error;
}

void* nvb_driver_function(const char* name) {
  return nvb_driver_loaded() ? dlsym(library, name) : NULL;
}

int nvb_driver_has(const char* name) {
  return nvb_driver_function(name) != NULL;
}

static int no_library(void) {
  return CUDA_ERROR_NO_DEVICE;
}
static int no_function(void) {
  return CUDA_ERROR_NOT_FOUND;
}

// Stands in for cuGetErrorString and cuGetErrorName: cust panics when it formats an error that they do not describe.
static int describe(int status, const char** text) {
  *text = status == CUDA_ERROR_NO_DEVICE ? "no CUDA driver is installed" : "a CUDA error that no driver describes";
  return CUDA_SUCCESS;
}

static void* stand_in(const char* name) {
  if (strcmp(name, "cuGetErrorString") == 0 || strcmp(name, "cuGetErrorName") == 0) return (void*)describe;
  return library != NULL ? (void*)no_function : (void*)no_library;
}

// The address behind table entry `index`; called by the trampolines when that entry is null. Two threads may both get
// here and store the same address.
__attribute__((visibility("hidden"), used)) void* nvb_driver_resolve(uint32_t index) {
  void* function = nvb_driver_function(names[index]);
  if (function == NULL) function = stand_in(names[index]);
  __atomic_store_n(&nvb_driver_table[index], function, __ATOMIC_RELEASE);
  return function;
}

// The thread's last status that cust's enum does not name; 0 if CUDA_ERROR_UNKNOWN was the driver's own word.
static _Thread_local int unnamed;

int nvb_driver_unnamed_status(void) {
  return unnamed;
}

// The status that a trampoline returns for the driver's `status`.
__attribute__((visibility("hidden"), used)) int nvb_driver_status(int status) {
  switch (status) {
#define NVB_DRIVER_STATUS(number) case number:
#include "statuses.h"
    if (status == CUDA_ERROR_UNKNOWN) unnamed = 0;
    return status;
    default:
      unnamed = status;
      return CUDA_ERROR_UNKNOWN;
  }
}
