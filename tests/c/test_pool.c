// Pools: blocks that are counted by themselves, freed by themselves and freed all at once.
#include <pthread.h>

#include "check.h"

enum { MIB = 1 << 20 };

static nvb_pool_statistics usage_of(nvb_pool* pool) {
  nvb_pool_statistics statistics;
  nvb_pool_statistics_init(&statistics);
  CHECK_OK(nvb_pool_get_statistics(pool, &statistics));
  return statistics;
}

static nvb_pool* create(nvb_memory_manager* memory, const char* name) {
  nvb_pool* pool = NULL;
  if (!CHECK_OK(nvb_pool_create(memory, name, &pool))) exit(1);
  return pool;
}

static nvb_status get_statistics(void* value, void* context) {
  return nvb_pool_get_statistics(context, value);
}

static void test_blocks(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_pool *pool = create(f->memory, "requests"), *other = create(f->memory, "layers");
  char name[16], start[4];
  size_t needed = 0;
  CHECK_OK(nvb_pool_get_name(pool, name, sizeof name, &needed));
  CHECK(strcmp(name, "requests") == 0 && needed == 9);
  CHECK_OK(nvb_pool_get_name(pool, start, sizeof start, NULL));
  CHECK(strcmp(start, "req") == 0);

  void *a = NULL, *b = NULL, *c = NULL, *out = foreign_handle();
  CHECK_OK(nvb_pool_allocate(pool, 1, f->stream, &a));
  CHECK_OK(nvb_pool_allocate_aligned(pool, 5 * MIB, 1 << 16, NULL, &b));
  CHECK_OK(nvb_pool_allocate(other, 300, f->stream, &c));
  CHECK((uintptr_t)a % 256 == 0 && (uintptr_t)b % (1 << 16) == 0);
  nvb_pool_statistics usage = usage_of(pool);
  CHECK(usage.allocated == 5 * MIB + 1 && usage.blocks == 2 && usage.allocations == 2 && usage.frees == 0);
  CHECK_EQUAL(usage_of(other).allocated, 300);
  CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, 5 * MIB + 301);
  CHECK_OK(nvb_memory_fill(f->memory, b, 1, 5 * MIB, f->stream));

  CHECK_FAILS(nvb_pool_free(other, a, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a block of this pool");
  CHECK_FAILS(nvb_pool_free(pool, (char*)b + 256, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_pool_free(pool, a, f->stream));
  CHECK_FAILS(nvb_pool_free(pool, a, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_OK(nvb_pool_free(pool, NULL, f->stream));
  CHECK_OK(nvb_memory_free(f->memory, c, f->stream));
  CHECK_EQUAL(usage_of(other).blocks, 0);
  int local;
  CHECK_FAILS(nvb_pool_free(pool, &local, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
  void* main_block = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, 300, f->stream, &main_block));
  CHECK_FAILS(nvb_pool_free(pool, main_block, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a block of this pool");
  release(f, main_block);

  CHECK_FAILS(nvb_pool_allocate(pool, 0, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "bytes is 0");
  CHECK_FAILS(nvb_pool_allocate(pool, SIZE_MAX, f->stream, &out), NVB_ERROR_OUT_OF_MEMORY, "18446744073709551615");
  CHECK_FAILS(nvb_pool_allocate(pool, 8, f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer", "NULL");
  CHECK_FAILS(nvb_pool_allocate_aligned(pool, 8, 24, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "alignment is 24");
  CHECK_FAILS(nvb_pool_allocate_aligned(pool, 8, 256, f->stream, NULL), NVB_ERROR_INVALID_ARGUMENT, "pointer");
  CHECK_EQUAL(usage_of(pool).failures, 1);
  CHECK(out == foreign_handle());
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_OK(nvb_pool_destroy(other));
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
}

// A block of another owner among the pool's ends the call before it.
static void test_many(fixture* f) {
  nvb_pool* pool = NULL;
  CHECK_OK(nvb_pool_create(f->memory, "many", &pool));
  void* blocks[100];
  for (int i = 0; i < 100; ++i) CHECK_OK(nvb_pool_allocate(pool, 3000, f->stream, &blocks[i]));
  void *own = blocks[60], *other = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, 3000, f->stream, &other));
  blocks[60] = other;
  CHECK_FAILS(nvb_pool_free_many(pool, blocks, 100, f->stream), NVB_ERROR_INVALID_ARGUMENT, "pointers[60]");
  blocks[60] = own;
  CHECK_OK(nvb_pool_free_many(pool, blocks + 60, 40, f->stream));
  CHECK_OK(nvb_memory_free(f->memory, other, f->stream));
  CHECK_OK(nvb_pool_destroy(pool));
}

static void test_clear(fixture* f) {
  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_pool* pool = create(f->memory, "steps");
  uint64_t freed = 99;
  CHECK_OK(nvb_pool_clear(pool, &freed));
  CHECK_EQUAL(freed, 0);
  for (int round = 0; round < 20; ++round) {
    void* block = NULL;
    for (int i = 0; i < 100; ++i) {
      CHECK_OK(nvb_pool_allocate(pool, (size_t)i * 50000 + 1, f->stream, &block));
      CHECK_OK(nvb_memory_fill(f->memory, block, 1, (size_t)i * 50000 + 1, f->stream));
    }
    CHECK_EQUAL(usage_of(pool).blocks, 100);
    CHECK_OK(nvb_pool_clear(pool, round % 2 == 0 ? &freed : NULL));
    CHECK_EQUAL(freed, 100);
    CHECK_FAILS(nvb_pool_free(pool, block, f->stream), NVB_ERROR_INVALID_ARGUMENT, "live block");
    CHECK(usage_of(pool).allocated == 0 && usage_of(pool).frees == 100 * (uint64_t)(round + 1));
  }
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
  CHECK(usage_of(pool).peak >= 99 * 50000);
  CHECK_OK(nvb_pool_destroy(pool));
}

static void test_handles(fixture* f) {
  nvb_pool* pool = foreign_handle();
  nvb_pool_statistics statistics;
  nvb_pool_statistics_init(&statistics);
  CHECK_FAILS(nvb_pool_create(f->memory, "", &pool), NVB_ERROR_INVALID_ARGUMENT, "name is empty");
  CHECK_FAILS(nvb_pool_create(f->memory, NULL, &pool), NVB_ERROR_INVALID_ARGUMENT, "name is empty");
  CHECK_FAILS(nvb_pool_create(f->memory, "\xff", &pool), NVB_ERROR_INVALID_ARGUMENT, "UTF-8");
  CHECK_FAILS(nvb_pool_create(f->memory, "x", NULL), NVB_ERROR_INVALID_ARGUMENT, "pool", "NULL");
  CHECK_FAILS(nvb_pool_create(NULL, "x", &pool), NVB_ERROR_INVALID_ARGUMENT, "memory manager", "NULL");
  CHECK(pool == foreign_handle());
  void* out = NULL;
  uint64_t freed = 0;
  nvb_pool* const wrong[] = {NULL, foreign_handle(), (nvb_pool*)f->memory};
  for (int i = 0; i < 3; ++i) {
    CHECK_INVALID(nvb_pool_allocate(wrong[i], 8, f->stream, &out));
    CHECK_INVALID(nvb_pool_allocate_aligned(wrong[i], 8, 256, f->stream, &out));
    CHECK_INVALID(nvb_pool_free(wrong[i], out, f->stream));
    CHECK_INVALID(nvb_pool_clear(wrong[i], &freed));
    CHECK_INVALID(nvb_pool_get_statistics(wrong[i], &statistics));
    CHECK_INVALID(nvb_pool_get_name(wrong[i], NULL, 0, NULL));
    CHECK_INVALID(nvb_pool_begin_capture(wrong[i], f->stream));
    CHECK_INVALID(nvb_pool_end_capture(wrong[i], f->stream));
    if (wrong[i] != NULL) CHECK_INVALID(nvb_pool_destroy(wrong[i]));
  }
  CHECK_OK(nvb_pool_destroy(NULL));
  pool = create(f->memory, "x");
  CHECK_STRUCT(statistics, get_statistics, pool);
  CHECK_FAILS(nvb_pool_allocate(pool, 8, foreign_handle(), &out), NVB_ERROR_INVALID_ARGUMENT, "not a stream");
  fixture other = open_fixture();
  CHECK_FAILS(nvb_pool_allocate(pool, 8, other.stream, &out), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_FAILS(nvb_pool_allocate(pool, 8, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  CHECK_FAILS(nvb_pool_destroy(pool), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  // A pool outlives every other handle.
  pool = create(other.memory, "survivor");
  close_fixture(&other);
  CHECK_OK(nvb_pool_allocate(pool, 3 * MIB, NULL, &out));
  CHECK_OK(nvb_pool_destroy(pool));
}

// The allocations of a stream whose work is captured come from the pool, whatever the thread keeps of the manager's.
/* A thread remembers pairs of handles that it has used; a manager's pair must not answer for a pool's, nor the other
 * way round. */
static void test_foreign_handles(fixture* f) {
  nvb_pool* pool = create(f->memory, "foreign");
  nvb_pool* manager_as_pool = (nvb_pool*)f->memory;
  nvb_memory_manager* pool_as_manager = (nvb_memory_manager*)pool;
  void* of_manager = NULL;
  void* of_pool = NULL;
  void* out = NULL;
  for (int i = 0; i < 3; ++i) {
    CHECK_OK(nvb_memory_allocate(f->memory, 64, f->stream, &of_manager));
    CHECK_OK(nvb_pool_allocate(pool, 64, f->stream, &of_pool));
    CHECK_FAILS(nvb_pool_allocate(manager_as_pool, 64, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "not a pool");
    CHECK_FAILS(nvb_pool_free(manager_as_pool, of_manager, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a pool");
    CHECK_FAILS(nvb_pool_free_many(manager_as_pool, &of_manager, 1, f->stream), NVB_ERROR_INVALID_ARGUMENT,
                "not a pool");
    CHECK_FAILS(nvb_memory_allocate(pool_as_manager, 64, f->stream, &out), NVB_ERROR_INVALID_ARGUMENT, "not a memory");
    CHECK_FAILS(nvb_memory_free(pool_as_manager, of_pool, f->stream), NVB_ERROR_INVALID_ARGUMENT, "not a memory");
    CHECK_OK(nvb_memory_free(f->memory, of_manager, f->stream));
    CHECK_OK(nvb_pool_free(pool, of_pool, f->stream));
  }
  CHECK_OK(nvb_pool_destroy(pool));
}

static void test_capture(fixture* f) {
  nvb_stream* stream = NULL;
  CHECK_OK(nvb_stream_create(f->backend, 0, &stream));
  void *before = NULL, *inside = NULL, *large = NULL, *elsewhere = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, 5000, stream, &before));
  CHECK_OK(nvb_memory_free(f->memory, before, stream));
  nvb_pool *pool = create(f->memory, "graph"), *other = create(f->memory, "other");
  uint64_t captured = statistics_of(f->memory).captured;
  CHECK_FAILS(nvb_pool_end_capture(pool, stream), NVB_ERROR_INVALID_ARGUMENT, "not being captured");
  CHECK_OK(nvb_pool_begin_capture(pool, stream));
  CHECK_FAILS(nvb_pool_begin_capture(other, stream), NVB_ERROR_INVALID_ARGUMENT, "captured already");
  CHECK_OK(nvb_memory_allocate(f->memory, 5000, stream, &inside));
  CHECK_OK(nvb_memory_allocate(f->memory, 3 * MIB, stream, &large));
  CHECK_OK(nvb_memory_allocate(f->memory, 5000, f->stream, &elsewhere));
  CHECK_EQUAL(usage_of(pool).allocated, 5000 + 3 * MIB);
  CHECK_EQUAL(statistics_of(f->memory).captured - captured, 5000 + 3 * MIB);
  CHECK_OK(nvb_memory_free(f->memory, inside, stream));
  void* again = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, 5000, stream, &again));
  CHECK_EQUAL(usage_of(pool).blocks, 2);
  uint64_t released = 99;
  CHECK_OK(nvb_memory_trim(f->memory, 0, &released));
  CHECK_EQUAL(released, 0);
  CHECK_OK(nvb_pool_end_capture(pool, stream));
  CHECK_OK(nvb_memory_allocate(f->memory, 5000, stream, &before));
  CHECK_EQUAL(usage_of(pool).blocks, 2);
  CHECK_OK(nvb_memory_free(f->memory, before, stream));
  CHECK_OK(nvb_memory_free(f->memory, elsewhere, stream));
  // Destroying the pool ends a capture that was forgotten.
  CHECK_OK(nvb_pool_begin_capture(other, stream));
  CHECK_OK(nvb_pool_destroy(other));
  CHECK_FAILS(nvb_pool_end_capture(pool, stream), NVB_ERROR_INVALID_ARGUMENT, "not being captured");
  CHECK_OK(nvb_pool_destroy(pool));
  CHECK_EQUAL(statistics_of(f->memory).captured, captured);
  CHECK_OK(nvb_stream_destroy(stream));
}

// What the library makes for itself while a stream's allocations are captured lives on its own, so it lies outside the
// pool, which may be cleared and go.
static void test_objects_in_capture(fixture* f) {
  enum { N = 64, CAPACITY = 16 };
  float values[N * N], read[N * N];
  for (int i = 0; i < N * N; ++i) values[i] = (float)(i % 97);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, N, N);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = options.sequences = options.kv_heads = 1;
  options.head_dim = 8;
  options.capacity = CAPACITY;
  // The streams of the call and of the backend, where caches are made.
  nvb_stream* const streams[] = {f->stream, NULL};
  for (int i = 0; i < 2; ++i) {
    nvb_stream* stream = streams[i];
    nvb_pool* pool = create(f->memory, "graph");
    nvb_weight *weight = NULL, *converted = NULL;
    nvb_kv_cache* cache = NULL;
    void *inside = NULL, *output = NULL;
    uint64_t live = statistics_of(f->memory).blocks;
    CHECK_OK(nvb_pool_begin_capture(pool, stream));
    CHECK_OK(nvb_weight_create(f->backend, &desc, stream, &weight));
    desc.format = NVB_WEIGHT_FORMAT_INT8;
    CHECK_OK(nvb_weight_create(f->backend, &desc, stream, &converted));
    desc.format = NVB_WEIGHT_FORMAT_AS_IS;
    CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
    CHECK_EQUAL(usage_of(pool).blocks, 0);
    // The engine's own allocations still come from the pool, those of the weights' sizes too.
    CHECK_OK(nvb_memory_allocate(f->memory, sizeof values, stream, &inside));
    CHECK_EQUAL(usage_of(pool).blocks, 1);
    CHECK_OK(nvb_pool_end_capture(pool, stream));
    CHECK_OK(nvb_pool_clear(pool, NULL));
    CHECK_OK(nvb_pool_destroy(pool));
    CHECK_EQUAL(statistics_of(f->memory).blocks - live, 3);
    CHECK_OK(nvb_memory_trim(f->memory, 0, NULL));
    CHECK_OK(nvb_memory_allocate(f->memory, sizeof values, stream, &output));
    CHECK_OK(nvb_memory_fill(f->memory, output, 0xff, sizeof values, stream));
    nvb_tensor tensor = nvb_tensor_2d(output, NVB_DTYPE_F32, N, N);
    nvb_weight* const weights[] = {weight, converted};
    for (int k = 0; k < 2; ++k) {
      CHECK_OK(nvb_weight_dequantize(weights[k], &tensor, stream));
      CHECK_OK(nvb_memory_copy(f->memory, read, output, sizeof read, NVB_COPY_DEVICE_TO_HOST, f->stream));
      CHECK_OK(nvb_stream_synchronize(f->stream));
      for (int at = 0; at < N * N; at += 41) CHECK(fabsf(read[at] - values[at]) <= (k == 0 ? 0.0f : 96 / 127.0f));
      CHECK_OK(nvb_weight_destroy(weights[k]));
    }
    CHECK_OK(nvb_kv_cache_destroy(cache));
    CHECK_OK(nvb_memory_free(f->memory, output, stream));
    CHECK_EQUAL(statistics_of(f->memory).blocks, live);
  }
}

enum { THREADS = 2, ROUNDS = 2000 };

typedef struct {
  fixture* f;
  nvb_pool* pool;
  int number;
} work;

static void* allocate_and_free(void* argument) {
  work* self = argument;
  check_thread = self->number;
  nvb_stream* stream = NULL;
  CHECK_OK(nvb_stream_create(self->f->backend, 0, &stream));
  void* blocks[16] = {NULL};
  uint32_t state = (uint32_t)self->number + 1;
  for (int i = 0; i < ROUNDS; ++i) {
    size_t at = (size_t)i % 16;
    CHECK_OK(nvb_pool_free(self->pool, blocks[at], stream));
    state = state * 1664525U + 1013904223U;
    CHECK_OK(nvb_pool_allocate(self->pool, 1 + (state >> 8) % 400000, stream, &blocks[at]));
  }
  for (int i = 0; i < 8; ++i) CHECK_OK(nvb_pool_free(self->pool, blocks[i], stream));
  CHECK_OK(nvb_stream_destroy(stream));
  return NULL;
}

static void test_threads(fixture* f) {
  nvb_pool* pool = create(f->memory, "shared");
  pthread_t threads[THREADS];
  work works[THREADS];
  for (int i = 0; i < THREADS; ++i) {
    works[i] = (work){f, pool, i + 1};
    CHECK_EQUAL(pthread_create(&threads[i], NULL, allocate_and_free, &works[i]), 0);
  }
  for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
  nvb_pool_statistics usage = usage_of(pool);
  CHECK(usage.allocations == THREADS * ROUNDS && usage.blocks == 8 * THREADS);
  uint64_t freed = 0;
  CHECK_OK(nvb_pool_clear(pool, &freed));
  CHECK_EQUAL(freed, 8 * THREADS);
  CHECK_OK(nvb_pool_destroy(pool));
}

static void test_growth(fixture* f) {
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    void* block = NULL;
    nvb_pool* pool = create(f->memory, "short");
    CHECK_OK(nvb_pool_allocate(pool, 1000, f->stream, &block));
    CHECK_OK(nvb_pool_destroy(pool));
  }
  CHECK_GROWTH(kilobytes);
}

int main(void) {
  fixture f = open_fixture();
  test_blocks(&f);
  test_clear(&f);
  test_many(&f);
  test_handles(&f);
  test_foreign_handles(&f);
  test_capture(&f);
  test_objects_in_capture(&f);
  test_threads(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
