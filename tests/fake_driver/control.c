// Which call fails, the books, and the lock around every call.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

fake_state fake = {.settings = {[FAKE_DRIVER_VERSION] = 13000,
                                [FAKE_DEVICES] = 1,
                                [FAKE_CAPABILITY] = 90,
                                [FAKE_POOLS] = 1,
                                [FAKE_MEMORY_BYTES] = INT64_C(1) << 34,
                                [FAKE_PEERS] = 1,
                                [FAKE_VIRTUAL] = 1,
                                [FAKE_RANGE_BYTES] = INT64_MAX,
                                [FAKE_UNMAPS] = 1}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
  int64_t left;  // calls until the fault fires; 0: disarmed
  int status;
  int mode;
  bool firing;  // for ever
} plan;

enum { MAX_FUNCTIONS = 128 };
static const char* functions[MAX_FUNCTIONS];
static char first_violation[256];
static char first_fault[64];
static char function_names[64 * MAX_FUNCTIONS];

static void count(const char* function) {
  unsigned i = 0;
  while (i < MAX_FUNCTIONS - 1 && functions[i] != NULL && strcmp(functions[i], function) != 0) ++i;
  functions[i] = function;
  ++fake.books.calls;
}

// The status that the plan has for this call.
static int planned_fault(const char* function) {
  if (!plan.firing) {
    if (plan.left == 0 || --plan.left != 0) return SUCCESS;
    plan.firing = plan.mode != FAKE_ONCE;
  } else if (plan.mode == FAKE_STICKY) {
    ++fake.books.calls_after_sticky;
  }
  if (fake.books.faults++ == 0) snprintf(first_fault, sizeof first_fault, "%s", function);
  return plan.status;
}

call begin(const char* function, unsigned flags) {
  pthread_mutex_lock(&lock);
  if (fake.gone) {
    fprintf(stderr, "fake driver: %s was called after exit had taken the driver down\n", function);
    abort();
  }
  count(function);
  call c = {.function = function, .fault = planned_fault(function)};
  const bool releases = (flags & RELEASES) || ((flags & UNMAPS) && fake.settings[FAKE_UNMAPS]);
  c.runs = c.fault == SUCCESS || (releases && plan.mode != FAKE_STICKY);
  if (c.fault != SUCCESS) return c;
  if ((flags & NEEDS_INIT) && !fake.initialized) {
    c.runs = false;
    c.status = violation(function, NOT_INITIALIZED, "called before cuInit");
  } else if ((flags & NEEDS_CONTEXT & ~NEEDS_INIT) && current_context == NULL) {
    c.runs = false;
    c.status = violation(function, INVALID_CONTEXT, "no context is current");
  }
  return c;
}

int finish(call c) {
  pthread_mutex_unlock(&lock);
  return c.fault != SUCCESS ? c.fault : c.status;
}

int violation(const char* function, int status, const char* what) {
  if (fake.books.violations++ == 0) snprintf(first_violation, sizeof first_violation, "%s: %s", function, what);
  return status;
}

void fake_get_books(fake_books* books) {
  pthread_mutex_lock(&lock);
  *books = fake.books;
  pthread_mutex_unlock(&lock);
}

const char* fake_violation(void) {
  return first_violation;
}

const char* fake_fault_function(void) {
  return first_fault;
}

const void* fake_current_context(void) {
  return current_context;
}

const char* fake_functions_called(void) {
  size_t length = 0;
  function_names[0] = '\0';
  for (unsigned i = 0; i < MAX_FUNCTIONS && functions[i] != NULL; ++i) {
    length += (size_t)snprintf(function_names + length, sizeof function_names - length, "%s\n", functions[i]);
  }
  return function_names;
}

void fake_fail(int64_t call, int status, int mode) {
  pthread_mutex_lock(&lock);
  plan.left = call;
  plan.status = status;
  plan.mode = mode;
  plan.firing = false;
  pthread_mutex_unlock(&lock);
}

void fake_set(int setting, int64_t value) {
  pthread_mutex_lock(&lock);
  fake.settings[setting] = value;
  pthread_mutex_unlock(&lock);
}

// The environment's plan, for programs that know nothing of the fake driver.
__attribute__((constructor)) static void read_plan(void) {
  const char* memory = getenv("NVB_FAKE_MEMORY");
  if (memory != NULL) fake.settings[FAKE_MEMORY_BYTES] = strtoll(memory, NULL, 0);
  const char* text = getenv("NVB_FAKE_FAULT");
  if (text == NULL) return;
  long long at;
  if (sscanf(text, "%lld,%d,%d", &at, &plan.status, &plan.mode) != 3) {
    fprintf(stderr, "fake driver: NVB_FAKE_FAULT is \"%s\"; a call, a status and a mode are needed\n", text);
    abort();
  }
  plan.left = at;
}

// Runs after all handlers of atexit: what the library gives back while the process exits is in the books.
__attribute__((destructor)) static void write_books(void) {
  const char* path = getenv("NVB_FAKE_BOOKS");
  FILE* file = path == NULL ? NULL : fopen(path, "w");
  if (file == NULL) return;
  const fake_books* b = &fake.books;
  const struct {
    const char* name;
    int64_t value;
  } lines[] = {{"contexts", b->contexts},
               {"blocks", b->blocks},
               {"host_blocks", b->host_blocks},
               {"ranges", b->ranges},
               {"mappings", b->mappings},
               {"physicals", b->physicals},
               {"pools", b->pools},
               {"streams", b->streams},
               {"events", b->events},
               {"graphs", b->graphs},
               {"calls", b->calls},
               {"faults", b->faults},
               {"calls_after_sticky", b->calls_after_sticky},
               {"launches", b->launches},
               {"violations", b->violations}};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; ++i) {
    fprintf(file, "%s %lld\n", lines[i].name, (long long)lines[i].value);
  }
  fprintf(file, "fault %s\nviolation %s\n", first_fault, first_violation);
  fclose(file);
}
