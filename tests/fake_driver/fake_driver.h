// A CUDA driver for tests: libcuda.so.1 without a GPU. It keeps books of everything that it hands out, and a test tells
// it which call is to fail, and how.
//
// The library opens it where NVB_LIBCUDA names it; the test opens the same file and finds these functions with dlsym.
// Device memory is host memory behind addresses that nobody may touch: copies really copy, and a host access to device
// memory ends the program as it would with a GPU. Kernels are counted and not run.
//
// Programs that know nothing of it are told through the environment: NVB_FAKE_FAULT=CALL,STATUS,MODE plans a fault as
// fake_fail does, NVB_FAKE_BOOKS names a file that the books are written to when the process has exited, and
// NVB_FAKE_MEMORY is the bytes of the device's memory, 2^34 otherwise.
//
// Faults: a call that fails has no effect, except that a call which releases or waits does its work and reports the
// status nevertheless: the driver documents that such calls return errors of earlier asynchronous work.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What is alive now, and what has happened so far.
typedef struct {
  int64_t contexts;  // retained and not released
  int64_t blocks;    // of device memory
  int64_t bytes;     // in those blocks
  int64_t host_blocks;
  int64_t ranges;     // of addresses that are reserved
  int64_t mappings;   // of physical memory in them
  int64_t physicals;  // memory that was created and neither released nor unmapped everywhere
  int64_t pools;
  int64_t streams;
  int64_t events;
  int64_t graphs;              // captured or instantiated, and not destroyed
  int64_t calls;               // all but those that describe an error
  int64_t calls_after_sticky;  // of these, since a sticky fault fired
  int64_t faults;              // injected
  int64_t launches;
  int64_t violations;  // calls that misuse the driver, as a copy past the end of a block does, or meet its faults
  int64_t waits;       // of a stream for an event that another stream has recorded
} fake_books;

void fake_get_books(fake_books* books);

// The first violation in words, or an empty string.
const char* fake_violation(void);

// The function in which the first fault fired, or an empty string.
const char* fake_fault_function(void);

// The context that is current in this thread. No call, so no fault fires in it.
const void* fake_current_context(void);

// How this thread's calls are taken while a stream captures: 0 (global), unless somebody changed it. No call either.
int fake_capture_mode(void);

// The NUMA node that the thread's memory policy preferred when page-locked memory was last asked for; -1: none.
int fake_host_node(void);

// The names of all functions that were called, one a line.
const char* fake_functions_called(void);

enum { FAKE_ONCE = 0, FAKE_FOREVER = 1, FAKE_STICKY = 2 };

// The `call`-th call from now on (1: the next) returns `status`; with FAKE_FOREVER every later one too. FAKE_STICKY is
// what an illegal address does to a context: as FAKE_FOREVER, and nothing is released any more. 0 disarms.
void fake_fail(int64_t call, int status, int mode);

enum {
  FAKE_DRIVER_VERSION = 0,  // 1000 · major + 10 · minor
  FAKE_DEVICES = 1,
  FAKE_CAPABILITY = 2,     // 10 · major + minor
  FAKE_POOLS = 3,          // 0: the device has no memory pools
  FAKE_MEMORY_BYTES = 4,   // of each device; allocations beyond it fail with out of memory
  FAKE_POLLS = 5,          // how often an event or stream is asked before its work has finished
  FAKE_INIT_STATUS = 6,    // of cuInit
  FAKE_RETAIN_STATUS = 7,  // of cuDevicePrimaryCtxRetain
  FAKE_PEERS = 8,          // 0: no device reaches another's memory
  FAKE_VIRTUAL = 9,        // 0: the devices cannot map memory behind reserved addresses
  FAKE_RANGE_BYTES = 10,   // of the longest range that can be reserved
  FAKE_UNMAPS = 11,        // 0: a call that unmaps or releases mapped memory and reports a fault has done nothing
};

void fake_set(int setting, int64_t value);

#ifdef __cplusplus
}
#endif
