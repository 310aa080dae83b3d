// What the fake driver's files share. Every entry point is written as
//
//   int cuX(...) {
//     call c = begin(__func__, flags);
//     if (c.runs) c.status = ...;
//     return finish(c);
//   }
//
// `begin` takes the one lock, counts the call and decides whether it fails; `finish` gives the lock back.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fake_driver.h"

#pragma GCC visibility push(hidden)

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_ISOLATION = 905,
};

enum {
  NEEDS_INIT = 1,
  NEEDS_CONTEXT = 2 | NEEDS_INIT,  // a context must be current in this thread
  RELEASES = 4,                    // does its work also when it reports a fault
  UNMAPS = 8,                      // so does this one if FAKE_UNMAPS says so
};

// What a call on a stream needs: the default stream is that of the current context.
static inline unsigned stream_flags(const void* handle) {
  return handle == NULL ? NEEDS_CONTEXT : NEEDS_INIT;
}

typedef struct {
  const char* function;
  int fault;   // injected status, 0 for none
  bool runs;   // whether the body is to do its work
  int status;  // the body's
} call;

call begin(const char* function, unsigned flags);
int finish(call c);

// Notes a misuse of the driver and returns `status`.
int violation(const char* function, int status, const char* what);

typedef struct {
  int64_t settings[12];
  fake_books books;
  bool initialized;
  bool gone;  // taken down by exit
} fake_state;

extern fake_state fake;

enum { MAX_DEVICES = 8 };

typedef struct {
  int device;
  int64_t retained;
  int64_t used;        // bytes of its device's memory
  unsigned peers;      // bit N: may reach device N's memory
  atomic_int waiting;  // threads in cuCtxSynchronize
} context;

extern context contexts[MAX_DEVICES];
extern _Thread_local context* current_context;

enum { READ_AND_WRITE = 3 };

// CUmemLocation, and CUmemAccessDesc: who may reach memory.
typedef struct {
  int type;
  int device;
} access_location;
typedef struct {
  access_location location;
  int flags;
} access_description;

// Adds the devices that the descriptions name to `devices` (bit N: device N); a status.
int open_memory(const char* function, const access_description* descriptions, size_t count, unsigned* devices);

typedef struct stream stream;

typedef struct graph graph;

typedef enum { WORK_LAUNCH, WORK_COPY_TO_DEVICE, WORK_COPY_TO_HOST, WORK_COPY, WORK_FILL } work_kind;

// What a stream does.
typedef struct {
  work_kind kind;
  uint64_t to, from;  // addresses, of the host where the kind says so
  size_t bytes;
  unsigned char value;
} work;

// Does it now; a status.
int run_work(call* c, const work* done);
// Adds it to the capture that the stream is in; false: it is in none.
bool capture_work(stream* queue, work captured);
// The list of the capture that the stream is in.
graph** capture_of(stream* queue);
// A capture that nobody will end.
void end_capture(stream* queue);

// The stream behind a handle (NULL: the default stream); for a handle that was destroyed NULL, after noting it.
stream* live_stream(const char* function, void* handle);
// Waits for the functions of the host's that any stream runs. Not under the lock.
void wait_for_host_functions(void);
// Counts work queued on the stream.
void enqueue(stream* queue);

// One more element at the end of an array that doubles.
void* grow(void* array, size_t count, size_t size);

// Whether an address lies in a range that was reserved, and the device that has memory mapped there, or -1.
bool is_reserved(uint64_t address);
int mapped_on(uint64_t address);
// The host memory behind a part of such a range; NULL and what is wrong where the current device cannot reach all of
// it.
unsigned char* mapped_storage(uint64_t address, size_t bytes, const char** wrong);

#pragma GCC visibility pop
