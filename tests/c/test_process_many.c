// Many objects at once, where the process gets no more than 64 KiB at a time: whatever grows with the number of objects
// either grows in small steps or refuses the next one, and all of them can be given back.
#define _GNU_SOURCE
#include <pthread.h>

#include "check.h"
#include "failing_malloc.h"

#ifndef NVB_FAILING_MALLOC

int main(void) {
  printf("Nothing is tested: the program cannot take malloc's place beside AddressSanitizer, or without glibc\n");
  return 0;
}

#else

enum { MOST = 20000 };

typedef nvb_status (*make_object)(fixture*, void**);
typedef nvb_status (*end_object)(fixture*, void*);

static nvb_status make_event(fixture* f, void** object) {
  return nvb_event_create(f->backend, (nvb_event**)object);
}
static nvb_status end_event(fixture* f, void* object) {
  (void)f;
  return nvb_event_destroy(object);
}
static nvb_status make_stream(fixture* f, void** object) {
  return nvb_stream_create(f->backend, 0, (nvb_stream**)object);
}
static nvb_status end_stream(fixture* f, void* object) {
  (void)f;
  return nvb_stream_destroy(object);
}
static nvb_status make_pool(fixture* f, void** object) {
  return nvb_pool_create(f->memory, "many", (nvb_pool**)object);
}
static nvb_status end_pool(fixture* f, void* object) {
  (void)f;
  return nvb_pool_destroy(object);
}
static nvb_status make_block(fixture* f, void** object) {
  return nvb_memory_allocate(f->memory, 1000, f->stream, object);
}
static nvb_status make_large_block(fixture* f, void** object) {
  return nvb_memory_allocate(f->memory, 2 << 20, f->stream, object);
}
static nvb_status make_pinned_block(fixture* f, void** object) {
  return nvb_memory_allocate_pinned(f->memory, 100, object);
}
static nvb_status end_block(fixture* f, void* object) {
  return nvb_memory_free(f->memory, object, f->stream);
}
static nvb_status make_configuration(fixture* f, void** object) {
  (void)f;
  return nvb_configuration_create(NVB_PRESET_INFERENCE, (nvb_configuration**)object);
}
static nvb_status end_configuration(fixture* f, void* object) {
  (void)f;
  return nvb_configuration_destroy(object);
}

// Makes as many as are to be had, up to `most`, and ends them all.
static void check_many(fixture* f, const char* what, int most, make_object make, end_object end) {
  static void* objects[MOST];
  int count = 0;
  nvb_status status = NVB_OK;
  while (count < most && (status = make(f, &objects[count])) == NVB_OK) ++count;
  printf("%d %s", count, what);
  if (status != NVB_OK) {
    char text[256];
    nvb_last_error_message(text, sizeof text);
    printf(": %s", text);
    CHECK_EQUAL(status, NVB_ERROR_OUT_OF_MEMORY);
  }
  printf("\n");
  CHECK(count >= 60);
  while (count > 0) CHECK_OK(end(f, objects[--count]));
  // Room for one again.
  if (CHECK_OK(make(f, &objects[0]))) CHECK_OK(end(f, objects[0]));
}

static void* use(void* argument) {
  fixture* f = argument;
  check_thread = 1;
  void* blocks[100];
  for (int i = 0; i < 100; ++i) CHECK_OK(nvb_memory_allocate(f->memory, 100 + 50 * i, f->stream, &blocks[i]));
  for (int i = 0; i < 100; ++i) CHECK_OK(nvb_memory_free(f->memory, blocks[i], f->stream));
  return NULL;
}

// Each thread has a cache of its own, and leaves it to the next.
static void check_threads(fixture* f) {
  for (int round = 0; round < 20; ++round) {
    pthread_t threads[20];
    for (int i = 0; i < 20; ++i) CHECK_EQUAL(pthread_create(&threads[i], NULL, use, f), 0);
    for (int i = 0; i < 20; ++i) CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
  }
}

int main(void) {
  if (!find_library()) return fprintf(stderr, "the library is not among the objects of this process\n"), 1;
  nvb_backend_options options = device_options();
  options.device = "cpu";
  fixture f = {NULL, NULL, NULL};
  nvb_memory_options memory;
  nvb_memory_options_init(&memory);
  memory.margin = NVB_MEMORY_NONE;
  if (!CHECK_OK(nvb_backend_create(&options, &f.backend)) || !CHECK_OK(nvb_stream_create(f.backend, 0, &f.stream)) ||
      !CHECK_OK(nvb_memory_manager_create(f.backend, &memory, &f.memory))) {
    return 1;
  }
  // The first of each, whose tables are larger.
  void* made = NULL;
  CHECK_OK(make_event(&f, &made));
  CHECK_OK(end_event(&f, made));
  CHECK_OK(make_pool(&f, &made));
  CHECK_OK(end_pool(&f, made));
  CHECK_OK(make_configuration(&f, &made));
  CHECK_OK(end_configuration(&f, made));
  smallest = 65537;
  last = 1L << 60;
  first = 0;
  check_many(&f, "events", MOST, make_event, end_event);
  check_many(&f, "streams", MOST, make_stream, end_stream);
  check_many(&f, "configurations", MOST, make_configuration, end_configuration);
  check_many(&f, "pools", 500, make_pool, end_pool);
  check_many(&f, "blocks", MOST, make_block, end_block);
  // Before the large blocks: with them the list of slabs, which never gets shorter, is as long as 64 KiB allow, and a
  // size of blocks that has none yet is refused from then on.
  check_threads(&f);
  check_many(&f, "large blocks", 10000, make_large_block, end_block);
  check_many(&f, "blocks of the host", MOST, make_pinned_block, end_block);
  CHECK_EQUAL(statistics_of(f.memory).blocks, 0);
  CHECK_OK(nvb_memory_trim(f.memory, 0, NULL));
  first = -1;
  last = -1;
  close_fixture(&f);
  return test_result();
}

#endif
