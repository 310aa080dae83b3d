// Ends the handles and page-locked blocks that a program leaves: one that stops at a failing check goes on to its end
// all the same, and then the driver's books must balance. Preloaded before the library, it notes what the library hands
// out, and destroys what is left when main returns or exit is called, in the reverse order. A handle that the program
// has destroyed is refused, which harms nothing.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "nvbackend.h"

typedef struct {
  void* handle;
  nvb_status (*destroy)(void*);
  const nvb_backend* backend;  // of a page-locked block
  size_t bytes;
} left;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static left* noted;
static size_t count;

// The next definition of a function. Through memory, as C has no conversion from an address to a function.
static void find(const char* name, void* function) {
  void* address = dlsym(RTLD_NEXT, name);
  if (address == NULL) abort();
  memcpy(function, &address, sizeof address);
}

static void note(left entry) {
  pthread_mutex_lock(&lock);
  if ((count & (count - 1)) == 0) noted = realloc(noted, (count ? 2 * count : 1) * sizeof *noted);
  if (noted == NULL) abort();
  noted[count++] = entry;
  pthread_mutex_unlock(&lock);
}

static void end_all(void) {
  while (count > 0) {
    const left last = noted[--count];
    if (last.destroy != NULL) {
      (void)last.destroy(last.handle);
    } else if (last.handle != NULL) {
      nvb_status (*release)(const nvb_backend*, void*, size_t);
      find("nvb_host_free", &release);
      (void)release(last.backend, last.handle, last.bytes);
    }
  }
}

#define MAKES(name, kind, parameters, ...)                                                    \
  nvb_status name parameters {                                                                \
    static nvb_status(*real) parameters;                                                      \
    if (real == NULL) find(#name, &real);                                                     \
    const nvb_status status = real(__VA_ARGS__);                                              \
    if (status == NVB_OK) note((left){*made, (nvb_status(*)(void*))kind##_destroy, NULL, 0}); \
    return status;                                                                            \
  }

MAKES(nvb_backend_create, nvb_backend, (const nvb_backend_options* options, nvb_backend** made), options, made)
MAKES(nvb_backend_get_memory_manager, nvb_memory_manager,
      (const nvb_backend* backend, uint32_t index, nvb_memory_manager** made), backend, index, made)
MAKES(nvb_memory_manager_create, nvb_memory_manager,
      (const nvb_backend* backend, const nvb_memory_options* options, nvb_memory_manager** made), backend, options,
      made)
MAKES(nvb_pool_create, nvb_pool, (nvb_memory_manager * memory, const char* name, nvb_pool** made), memory, name, made)
MAKES(nvb_stream_create, nvb_stream, (const nvb_backend* backend, int32_t priority, nvb_stream** made), backend,
      priority, made)
MAKES(nvb_stream_wrap, nvb_stream, (const nvb_backend* backend, void* native, nvb_stream** made), backend, native, made)
MAKES(nvb_event_create, nvb_event, (const nvb_backend* backend, nvb_event** made), backend, made)
MAKES(nvb_graph_create, nvb_graph, (const nvb_backend* backend, nvb_graph** made), backend, made)
MAKES(nvb_stream_manager_create, nvb_stream_manager,
      (const nvb_backend* backend, const nvb_stream_manager_options* options, nvb_stream_manager** made), backend,
      options, made)
MAKES(nvb_stream_manager_acquire, nvb_stream, (nvb_stream_manager * manager, int32_t priority, nvb_stream** made),
      manager, priority, made)
MAKES(nvb_weight_create, nvb_weight,
      (const nvb_backend* backend, const nvb_weight_desc* desc, nvb_stream* stream, nvb_weight** made), backend, desc,
      stream, made)
MAKES(nvb_kv_cache_create, nvb_kv_cache,
      (const nvb_backend* backend, const nvb_kv_cache_options* options, nvb_kv_cache** made), backend, options, made)
MAKES(nvb_kv_swap_create, nvb_kv_swap, (const nvb_kv_cache* cache, uint32_t tokens, nvb_kv_swap** made), cache, tokens,
      made)
MAKES(nvb_attention_create, nvb_attention,
      (const nvb_backend* backend, const nvb_attention_options* options, nvb_attention** made), backend, options, made)

nvb_status nvb_host_allocate(const nvb_backend* backend, size_t bytes, void** pointer) {
  nvb_status (*real)(const nvb_backend*, size_t, void**);
  find("nvb_host_allocate", &real);
  const nvb_status status = real(backend, bytes, pointer);
  if (status == NVB_OK) note((left){*pointer, NULL, backend, bytes});
  return status;
}

nvb_status nvb_host_free(const nvb_backend* backend, void* pointer, size_t bytes) {
  nvb_status (*real)(const nvb_backend*, void*, size_t);
  find("nvb_host_free", &real);
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; ++i) {
    if (noted[i].destroy == NULL && noted[i].handle == pointer) noted[i].handle = NULL;
  }
  pthread_mutex_unlock(&lock);
  return real(backend, pointer, bytes);
}

typedef int (*program)(int, char**, char**);
static program real_main;

static int main_and_end(int argument_count, char** arguments, char** environment) {
  const int code = real_main(argument_count, arguments, environment);
  end_all();
  return code;
}

// The C library's entry of every program: handlers of atexit would run beside the library's own, which end its calls.
int __libc_start_main(program main, int argument_count, char** arguments, void (*begin)(void), void (*end)(void),
                      void (*loader_end)(void), void* stack_end) {
  int (*real)(program, int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
  find("__libc_start_main", &real);
  real_main = main;
  return real(main_and_end, argument_count, arguments, begin, end, loader_end, stack_end);
}

void exit(int code) {
  void (*real)(int);
  find("exit", &real);
  end_all();
  real(code);
  abort();
}
