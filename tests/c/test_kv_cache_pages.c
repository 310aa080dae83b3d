// Caches with pages, rings, and caches over the engine's memory: what sequences hold, share and give back, and what is
// refused.
#include "check.h"

enum { KV_HEADS = 2, DIM = 16, ROW = KV_HEADS * DIM, CAPACITY = 20, SEQUENCES = 4, PAGE = 4, PAGES = 8, LAYERS = 2 };

static nvb_kv_cache_options with_pages(void) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = LAYERS;
  options.sequences = SEQUENCES;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = CAPACITY;
  options.dtype = NVB_DTYPE_F32;
  options.page_tokens = PAGE;
  options.pages = PAGES;
  return options;
}

static nvb_kv_cache* create(fixture* f, nvb_kv_cache_options options) {
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  return cache;
}

static nvb_kv_cache_usage usage_of(nvb_kv_cache* cache) {
  nvb_kv_cache_usage usage;
  nvb_kv_cache_usage_init(&usage);
  CHECK_OK(nvb_kv_cache_get_usage(cache, &usage));
  return usage;
}

static uint32_t length_of(nvb_kv_cache* cache, uint32_t sequence) {
  uint32_t tokens = 77;
  CHECK_OK(nvb_kv_cache_get_length(cache, sequence, &tokens));
  return tokens;
}

// What token `position` of text `text` has as key; its value is the negative.
static float number(int text, int position, int column) {
  return (float)(text * 1000 + position * 10) + column * 0.01f;
}

// Appends the tokens [from, to) of a text to a sequence's layer.
static nvb_status append(fixture* f, nvb_kv_cache* cache, int32_t sequence, int text, int from, int to,
                         nvb_tensor table) {
  enum { MOST = CAPACITY };
  float keys[MOST * ROW], values[MOST * ROW];
  int32_t positions[MOST], sequences[MOST];
  int count = to - from;
  for (int i = 0; i < count; ++i) {
    positions[i] = from + i;
    sequences[i] = sequence;
    for (int column = 0; column < ROW; ++column) {
      keys[i * ROW + column] = number(text, from + i, column);
      values[i * ROW + column] = -keys[i * ROW + column];
    }
  }
  void* blocks[4] = {upload(f, keys, (size_t)count * ROW * 4), upload(f, values, (size_t)count * ROW * 4),
                     upload(f, positions, (size_t)count * 4), upload(f, sequences, (size_t)count * 4)};
  nvb_kv_cache_append_args args;
  nvb_kv_cache_append_args_init(&args);
  args.key = nvb_tensor_3d(blocks[0], NVB_DTYPE_F32, count, KV_HEADS, DIM);
  args.value = nvb_tensor_3d(blocks[1], NVB_DTYPE_F32, count, KV_HEADS, DIM);
  args.positions = nvb_tensor_1d(blocks[2], NVB_DTYPE_I32, count);
  args.sequences = nvb_tensor_1d(blocks[3], NVB_DTYPE_I32, count);
  args.cache = cache;
  args.layer = LAYERS - 1;
  args.page_table = table;
  nvb_status status = nvb_kv_cache_append(f->backend, &args, f->stream);
  CHECK_OK(nvb_stream_synchronize(f->stream));
  for (int i = 0; i < 4; ++i) release(f, blocks[i]);
  return status;
}

static const nvb_tensor no_table;

// Reads what a query at `position` sees through a window of 1, which is the value of that token.
static int holds(fixture* f, nvb_kv_cache* cache, int32_t sequence, int text, int position, nvb_tensor table) {
  static nvb_attention* attention;
  if (cache == NULL) {
    CHECK_OK(nvb_attention_destroy(attention));
    attention = NULL;
    return 1;
  }
  if (attention == NULL) {
    nvb_attention_options options;
    nvb_attention_options_init(&options);
    options.query_heads = options.kv_heads = KV_HEADS;
    options.head_dim = DIM;
    options.window = 1;
    CHECK_OK(nvb_attention_create(f->backend, &options, &attention));
  }
  float row[ROW] = {0};
  int32_t at = position;
  void *query = upload(f, row, sizeof row), *output = upload(f, row, sizeof row);
  void *where = upload(f, &at, sizeof at), *whose = upload(f, &sequence, sizeof sequence);
  nvb_attention_decode_args args;
  nvb_attention_decode_args_init(&args);
  args.query = nvb_tensor_3d(query, NVB_DTYPE_F32, 1, KV_HEADS, DIM);
  args.output = nvb_tensor_3d(output, NVB_DTYPE_F32, 1, KV_HEADS, DIM);
  args.cache = cache;
  args.positions = nvb_tensor_1d(where, NVB_DTYPE_I32, 1);
  args.sequences = nvb_tensor_1d(whose, NVB_DTYPE_I32, 1);
  args.layer = LAYERS - 1;
  args.page_table = table;
  nvb_status status = nvb_attention_decode(attention, &args, f->stream);
  CHECK_OK(nvb_stream_synchronize(f->stream));
  download(f, row, output, sizeof row);
  int same = status == NVB_OK;
  for (int column = 0; column < ROW; ++column) {
    double expected = -number(text, position, column);
    same = same && row[column] >= expected - 0.01 && row[column] <= expected + 0.01;
  }
  release(f, query);
  release(f, output);
  release(f, where);
  release(f, whose);
  return same;
}

static int holds_all(fixture* f, nvb_kv_cache* cache, int32_t sequence, int text, int from, int to) {
  int same = 1;
  for (int position = from; position < to; ++position) same &= holds(f, cache, sequence, text, position, no_table);
  return same;
}

static void test_options(fixture* f) {
  nvb_kv_cache* cache = foreign_handle();
  nvb_kv_cache_options options;
#define REFUSED(...) \
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, &cache), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define FIELD_REFUSED(field, number, ...) \
  options = with_pages();                 \
  options.field = (number);               \
  REFUSED(__VA_ARGS__)
  FIELD_REFUSED(page_tokens, 257, "page_tokens is 257", "256");
  FIELD_REFUSED(page_tokens, 0, "pages are given without page_tokens");
  FIELD_REFUSED(pages, UINT32_MAX, "pages is 4294967295", "8388608");
  FIELD_REFUSED(window, 8, "window and page_tokens");
  FIELD_REFUSED(max_append, 8, "max_append is given without a window");
  FIELD_REFUSED(sequences, 0, "sequences is 0");
  options = with_pages();
  options.pages = 0;
  options.capacity = options.sequences = INT32_MAX;
  REFUSED("pages; at most 8388608");
  options = with_pages();
  options.pages = 1 << 23;
  options.kv_heads = INT32_MAX;
  options.layers = INT32_MAX;
  REFUSED("overflow");
  options = with_pages();
  options.pages = 1 << 23;
  options.layers = 4096;
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, &cache), NVB_ERROR_OUT_OF_MEMORY, "KV cache", "8388608 pages");
  CHECK(cache == foreign_handle());

  // Bytes: pages and table, or what a ring keeps.
  nvb_memory_statistics before = statistics_of(f->memory);
  options = with_pages();
  cache = create(f, options);
  nvb_kv_cache_usage usage = usage_of(cache);
  CHECK_EQUAL(usage.page_bytes, 2ull * LAYERS * ROW * PAGE * 4);
  CHECK_EQUAL(usage.bytes, usage.page_bytes * PAGES + SEQUENCES * (CAPACITY / PAGE) * 4);
  CHECK_EQUAL(usage.pages, PAGES);
  CHECK_EQUAL(usage.free_pages, PAGES);
  CHECK(usage.tokens == 0 && usage.sequences == 0 && usage.shared_pages == 0);
  uint64_t bytes = 0;
  CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
  CHECK_EQUAL(bytes, usage.bytes);
  CHECK_EQUAL(statistics_of(f->memory).allocated - before.allocated, bytes);
  CHECK_OK(nvb_kv_cache_destroy(cache));
  options.pages = 0;
  options.capacity = 17;  // of which the last page has one token
  cache = create(f, options);
  CHECK_EQUAL(usage_of(cache).pages, SEQUENCES * 5);
  CHECK_OK(nvb_kv_cache_destroy(cache));
  options = with_pages();
  options.page_tokens = options.pages = 0;
  options.capacity = 1000;
  options.window = 8;
  options.max_append = 3;
  cache = create(f, options);
  usage = usage_of(cache);
  CHECK(usage.bytes >= 2ull * LAYERS * SEQUENCES * ROW * 10 * 4 &&
        usage.bytes < 2ull * LAYERS * SEQUENCES * ROW * 11 * 4);
  CHECK(usage.pages == 0 && usage.page_bytes == 0);
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
}

static void test_sequences(fixture* f) {
  nvb_kv_cache* cache = create(f, with_pages());
  // A sequence that reserved nothing has no place.
  if (test_on_cpu())
    CHECK_FAILS(append(f, cache, 1, 1, 0, 3, no_table), NVB_ERROR_INVALID_ARGUMENT, "page -1", "position 0",
                "sequence 1");
  CHECK_OK(nvb_kv_cache_reserve(cache, 1, 6, f->stream));
  CHECK_OK(append(f, cache, 1, 1, 0, 6, no_table));
  CHECK_EQUAL(length_of(cache, 1), 6);
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES - 2);
  CHECK_OK(nvb_kv_cache_reserve(cache, 1, 3, f->stream));  // less than it holds
  CHECK_OK(nvb_kv_cache_reserve(cache, 1, 8, f->stream));  // within its last page
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES - 2);
  CHECK_OK(append(f, cache, 1, 1, 6, 8, no_table));
  CHECK(holds_all(f, cache, 1, 1, 0, 8));
  if (test_on_cpu()) CHECK_FAILS(append(f, cache, 1, 1, 8, 9, no_table), NVB_ERROR_INVALID_ARGUMENT, "position 8");

  // A fork shares whole pages, and copies what the last one has.
  CHECK_OK(nvb_kv_cache_fork(cache, 1, 3, 7, f->stream));
  nvb_kv_cache_usage usage = usage_of(cache);
  CHECK(usage.free_pages == PAGES - 3 && usage.shared_pages == 1 && usage.sequences == 2 && usage.tokens == 15);
  CHECK(holds_all(f, cache, 3, 1, 0, 7));
  CHECK_OK(nvb_kv_cache_reserve(cache, 3, 9, f->stream));
  CHECK_OK(append(f, cache, 3, 3, 7, 9, no_table));
  CHECK(holds_all(f, cache, 3, 1, 0, 7) && holds_all(f, cache, 3, 3, 7, 9) && holds_all(f, cache, 1, 1, 0, 8));

  // What truncation leaves of a shared page is copied before it is appended to.
  CHECK_OK(nvb_kv_cache_truncate(cache, 3, 2, f->stream));
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES - 2);
  CHECK_OK(nvb_kv_cache_reserve(cache, 3, 3, f->stream));
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES - 3);
  CHECK_OK(append(f, cache, 3, 2, 2, 3, no_table));
  CHECK(holds_all(f, cache, 3, 1, 0, 2) && holds_all(f, cache, 3, 2, 2, 3) && holds_all(f, cache, 1, 1, 0, 8));

  // The parent may go first.
  CHECK_OK(nvb_kv_cache_fork(cache, 1, 0, 8, f->stream));
  CHECK_EQUAL(usage_of(cache).shared_pages, 2);
  CHECK_OK(nvb_kv_cache_release(cache, 1, f->stream));
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES - 3);
  CHECK(holds_all(f, cache, 0, 1, 0, 8));
  CHECK_OK(nvb_kv_cache_copy(cache, 0, 1, 5, f->stream));
  CHECK(holds_all(f, cache, 1, 1, 0, 5) && usage_of(cache).shared_pages == 0);

  // A full cache names the sequence, the pages that it needs and those that are free.
  CHECK_EQUAL(usage_of(cache).free_pages, 3);
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 2, 13, f->stream), NVB_ERROR_OUT_OF_MEMORY, "KV cache is full",
              "sequence 2 needs 4 more pages for 13 tokens", "3 of 8 are free");
  CHECK_FAILS(
      nvb_kv_cache_copy(cache, 0, 2, 0, f->stream) == NVB_OK ? nvb_kv_cache_reserve(cache, 2, 20, f->stream) : 0,
      NVB_ERROR_OUT_OF_MEMORY, "sequence 2 needs 5");
  CHECK_EQUAL(length_of(cache, 2), 0);
  CHECK_EQUAL(usage_of(cache).free_pages, 3);
  CHECK_OK(nvb_kv_cache_reserve(cache, 2, 12, f->stream));
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 3, 5, f->stream), NVB_ERROR_OUT_OF_MEMORY, "sequence 3 needs 1 more",
              "0 of 8");
  for (uint32_t sequence = 0; sequence < SEQUENCES; ++sequence)
    CHECK_OK(nvb_kv_cache_release(cache, sequence, f->stream));
  usage = usage_of(cache);
  CHECK(usage.free_pages == PAGES && usage.tokens == 0 && usage.sequences == 0);
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

static void test_refusals(fixture* f) {
  nvb_kv_cache* cache = create(f, with_pages());
  CHECK_OK(nvb_kv_cache_reserve(cache, 0, 5, f->stream));
  const nvb_status invalid = NVB_ERROR_INVALID_ARGUMENT;
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 4, 1, f->stream), invalid, "sequence is 4", "4 sequences");
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 0, CAPACITY + 1, f->stream), invalid, "tokens is 21", "20");
  CHECK_FAILS(nvb_kv_cache_truncate(cache, 0, 6, f->stream), invalid, "tokens is 6", "sequence 0 holds 5");
  CHECK_FAILS(nvb_kv_cache_truncate(cache, 9, 0, f->stream), invalid, "sequence is 9");
  CHECK_FAILS(nvb_kv_cache_release(cache, 9, f->stream), invalid, "sequence is 9");
  CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 0, 1, f->stream), invalid, "both 0");
  CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 4, 1, f->stream), invalid, "to is 4");
  CHECK_FAILS(nvb_kv_cache_fork(cache, 4, 0, 1, f->stream), invalid, "from is 4");
  CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 1, 6, f->stream), invalid, "tokens is 6", "sequence 0 holds 5");
  CHECK_OK(nvb_kv_cache_reserve(cache, 1, 1, f->stream));
  CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 1, 5, f->stream), invalid, "sequence 1 holds 1 tokens already");
  CHECK_FAILS(nvb_kv_cache_copy(cache, 0, 1, 5, f->stream), invalid, "sequence 1 holds 1 tokens already");
  uint32_t tokens = 9;
  CHECK_FAILS(nvb_kv_cache_get_length(cache, 4, &tokens), invalid, "sequence is 4");
  CHECK_FAILS(nvb_kv_cache_get_length(cache, 0, NULL), invalid, "tokens", "NULL");
  CHECK_FAILS(nvb_kv_cache_get_usage(cache, NULL), invalid, "NULL");
  CHECK_EQUAL(tokens, 9);
  // A table of the engine's for a cache that has its own.
  int32_t page = 0;
  void* block = upload(f, &page, sizeof page);
  CHECK_FAILS(append(f, cache, 0, 0, 0, 1, nvb_tensor_2d(block, NVB_DTYPE_I32, 1, 1)), invalid, "page_table");
  release(f, block);
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 0, 1, f->stream), invalid, "KV cache", "destroyed");
  CHECK_FAILS(nvb_kv_cache_release(NULL, 0, f->stream), invalid, "KV cache", "NULL");
}

static void test_contiguous(fixture* f) {
  nvb_kv_cache_options options = with_pages();
  options.page_tokens = options.pages = 0;
  nvb_kv_cache* cache = create(f, options);
  CHECK_OK(append(f, cache, 2, 5, 0, 9, no_table));
  CHECK_EQUAL(length_of(cache, 2), 0);  // nobody said
  CHECK_OK(nvb_kv_cache_copy(cache, 2, 1, 9, f->stream));
  CHECK_OK(append(f, cache, 2, 6, 0, 9, no_table));
  CHECK(holds_all(f, cache, 1, 5, 0, 9) && holds_all(f, cache, 2, 6, 0, 9));
  CHECK_EQUAL(length_of(cache, 1), 9);
  CHECK_OK(nvb_kv_cache_truncate(cache, 1, 4, f->stream));
  CHECK_EQUAL(length_of(cache, 1), 4);
  CHECK_FAILS(nvb_kv_cache_fork(cache, 2, 0, 3, f->stream), NVB_ERROR_UNSUPPORTED, "shares pages");
  CHECK_FAILS(nvb_kv_cache_copy(cache, 2, 0, CAPACITY + 1, f->stream), NVB_ERROR_INVALID_ARGUMENT, "tokens is 21");
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

static void test_ring(fixture* f) {
  nvb_kv_cache_options options = with_pages();
  options.page_tokens = options.pages = 0;
  options.capacity = 1000;
  options.window = 3;
  options.max_append = 4;  // so the ring keeps 6 tokens
  nvb_kv_cache* cache = create(f, options);
  for (int at = 0; at < 50; at += 2) {
    CHECK_OK(nvb_kv_cache_reserve(cache, 1, (uint32_t)at + 2, f->stream));
    CHECK_OK(append(f, cache, 1, 1, at, at + 2, no_table));
  }
  CHECK(holds_all(f, cache, 1, 1, 44, 50));
  // Tokens before 44 are gone, so a window of 3 can begin there at the earliest.
  CHECK_FAILS(nvb_kv_cache_truncate(cache, 1, 45, f->stream), NVB_ERROR_INVALID_ARGUMENT, "cannot begin again at 45",
              "before 44");
  CHECK_OK(nvb_kv_cache_copy(cache, 1, 2, 47, f->stream));
  CHECK_OK(nvb_kv_cache_truncate(cache, 1, 46, f->stream));
  CHECK_FAILS(nvb_kv_cache_truncate(cache, 2, 45, f->stream), NVB_ERROR_INVALID_ARGUMENT, "cannot begin again at 45");
  CHECK_FAILS(nvb_kv_cache_copy(cache, 1, 3, 45, f->stream), NVB_ERROR_INVALID_ARGUMENT, "cannot begin again at 45");
  CHECK_OK(append(f, cache, 1, 2, 46, 48, no_table));
  CHECK(holds_all(f, cache, 1, 1, 44, 46) && holds_all(f, cache, 1, 2, 46, 48) && holds_all(f, cache, 2, 1, 44, 47));
  CHECK_OK(nvb_kv_cache_release(cache, 1, f->stream));
  CHECK_OK(nvb_kv_cache_reserve(cache, 1, 2, f->stream));
  CHECK_OK(nvb_kv_cache_truncate(cache, 1, 1, f->stream));
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

static void test_engine_memory(fixture* f) {
  enum { BLOCKS = 6, BLOCK_FLOATS = BLOCKS * ROW * PAGE };
  static float nothing[2 * LAYERS * BLOCK_FLOATS];
  memset(nothing, 0xff, sizeof nothing);
  float* block = upload(f, nothing, sizeof nothing);
  nvb_tensor memory[2 * LAYERS];
  for (int i = 0; i < 2 * LAYERS; ++i) {
    memory[i] = nvb_tensor_make(block + i * BLOCK_FLOATS, NVB_DTYPE_F32, 4, BLOCKS, KV_HEADS, PAGE, DIM);
  }
  nvb_kv_cache_options options = with_pages();
  options.sequences = options.pages = 0;
  options.memory = memory;
  options.memory_count = 2 * LAYERS;
  nvb_memory_statistics before = statistics_of(f->memory);
  nvb_kv_cache* cache = create(f, options);
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
  const int32_t entries[2][3] = {{5, 0, 3}, {1, 4, -1}};
  void* table_block = upload(f, entries, sizeof entries);
  nvb_tensor table = nvb_tensor_2d(table_block, NVB_DTYPE_I32, 2, 3);
  CHECK_OK(append(f, cache, 0, 1, 0, 11, table));
  CHECK_OK(append(f, cache, 1, 2, 0, 8, table));
  for (int position = 0; position < 11; ++position) CHECK(holds(f, cache, 0, 1, position, table));
  for (int position = 0; position < 8; ++position) CHECK(holds(f, cache, 1, 2, position, table));
  static float keys[BLOCK_FLOATS];
  download(f, keys, memory[2 * LAYERS - 2].data, sizeof keys);
  CHECK_NEAR(keys[(0 * KV_HEADS + 1) * PAGE * DIM + 2 * DIM + 3], number(1, 6, DIM + 3), 1e-3);
  CHECK(keys[2 * PAGE * ROW] != keys[2 * PAGE * ROW]);  // page 2 is nobody's

  const nvb_status invalid = NVB_ERROR_INVALID_ARGUMENT;
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, no_table), invalid, "page_table", "missing");
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, nvb_tensor_1d(table_block, NVB_DTYPE_I32, 6)), invalid, "page_table",
              "rank 1");
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, nvb_tensor_2d(table_block, NVB_DTYPE_F32, 2, 3)), invalid, "page_table",
              "f32");
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, nvb_tensor_2d(table_block, NVB_DTYPE_I32, 0, 3)), invalid, "page_table");
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, nvb_tensor_2d(table_block, NVB_DTYPE_I32, 9, 9)), invalid, "page_table",
              "past the end");
  // A table that an append would write over.
  CHECK_FAILS(append(f, cache, 0, 1, 0, 1, nvb_tensor_2d(memory[2].data, NVB_DTYPE_I32, 2, 3)), invalid, "page_table",
              "overlaps");
  if (test_on_cpu()) {
    CHECK_FAILS(append(f, cache, 1, 2, 8, 9, table), invalid, "page -1", "position 8", "sequence 1", "6 pages");
    CHECK_FAILS(append(f, cache, 2, 2, 0, 1, table), invalid, "sequence 2", "2 sequences");
    CHECK_FAILS(append(f, cache, 0, 2, 12, 13, table), invalid, "position 12", "12 tokens");
  }
  CHECK_FAILS(nvb_kv_cache_reserve(cache, 0, 1, f->stream), NVB_ERROR_UNSUPPORTED, "the engine owns");
  CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 1, 1, f->stream), NVB_ERROR_UNSUPPORTED, "the engine owns");
  uint32_t tokens = 0;
  CHECK_FAILS(nvb_kv_cache_get_length(cache, 0, &tokens), NVB_ERROR_UNSUPPORTED, "the engine owns");
  CHECK_EQUAL(usage_of(cache).bytes, 0);
  CHECK_OK(nvb_kv_cache_destroy(cache));

#define MEMORY_REFUSED(...) \
  CHECK_FAILS(nvb_kv_cache_create(f->backend, &options, &cache), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  nvb_tensor good = memory[1];
  options.memory_count = 3;
  MEMORY_REFUSED("memory_count is 3", "4 are needed");
  options.memory_count = 2 * LAYERS;
  options.memory = NULL;
  MEMORY_REFUSED("memory", "NULL");
  options.memory = memory;
  memory[1].shape[2] = PAGE - 1;
  MEMORY_REFUSED("memory[1]", "[6, 2, 3, 16]", "[6, 2, 4, 16]");
  memory[1] = good;
  memory[1].dtype = NVB_DTYPE_F16;
  MEMORY_REFUSED("dtype");
  memory[1] = good;
  memory[1].strides[0] = 2 * PAGE * ROW, memory[1].strides[1] = PAGE * DIM, memory[1].strides[2] = DIM,
  memory[1].strides[3] = 1;
  memory[1].data = block;
  MEMORY_REFUSED("memory[1]", "strides");
  for (int i = 0; i < 2 * LAYERS; ++i) {
    memory[i] = good;
    memory[i].strides[0] = PAGE * ROW, memory[i].strides[1] = DIM, memory[i].strides[2] = DIM, memory[i].strides[3] = 1;
  }
  MEMORY_REFUSED("memory[0]", "overlap");
  memory[1] = good;
  memory[1].data = NULL;
  MEMORY_REFUSED("memory", "NULL");
  memory[0] = good;
  memory[0].data = nothing;
  if (!test_on_cpu()) MEMORY_REFUSED("memory", "which is not memory of");
  release(f, block);
  release(f, table_block);
}

// Pages go through many hands without any being lost, and without host memory growing.
static void test_growth(fixture* f) {
  nvb_kv_cache* cache = create(f, with_pages());
  uint32_t state = 3;
  long kilobytes = 0;
  for (int i = 0; i < 6000; ++i) {
    if (i == 1000) kilobytes = resident_kilobytes();
    uint32_t sequence = (uint32_t)(next_number(&state) * 2 + 2) % SEQUENCES, other = (sequence + 1) % SEQUENCES;
    uint32_t tokens = (uint32_t)(next_number(&state) * 10 + 10) % (CAPACITY + 1);
    uint32_t held = length_of(cache, sequence);
    if (tokens > held) {
      nvb_status status = nvb_kv_cache_reserve(cache, sequence, tokens, f->stream);
      CHECK(status == NVB_OK || status == NVB_ERROR_OUT_OF_MEMORY);
    } else if (length_of(cache, other) == 0) {
      nvb_status status = nvb_kv_cache_fork(cache, sequence, other, tokens, f->stream);
      CHECK(status == NVB_OK || status == NVB_ERROR_OUT_OF_MEMORY);
    } else {
      CHECK_OK(nvb_kv_cache_truncate(cache, sequence, i % 3 ? tokens : 0, f->stream));
    }
  }
  CHECK_GROWTH(kilobytes);
  for (uint32_t sequence = 0; sequence < SEQUENCES; ++sequence)
    CHECK_OK(nvb_kv_cache_release(cache, sequence, f->stream));
  CHECK_EQUAL(usage_of(cache).free_pages, PAGES);
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

static void ignore(const nvb_kernel_plan* plan, void* user_data) {
  (void)plan, (void)user_data;
}

// Nothing changes while the memory sleeps, nor on a stream whose operations do not run.
static void test_standing_still(fixture* f) {
  nvb_kv_cache* cache = create(f, with_pages());
  CHECK_OK(nvb_kv_cache_reserve(cache, 0, 6, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  for (int explained = 0; explained < 2; ++explained) {
    const char* word = explained ? "explained" : "asleep";
    if (explained) {
      CHECK_OK(nvb_stream_explain(f->backend, f->stream, ignore, NULL));
    } else {
      CHECK_OK(nvb_memory_sleep(f->memory, 1, NULL));
    }
    CHECK_FAILS(nvb_kv_cache_reserve(cache, 0, 9, f->stream), NVB_ERROR_INVALID_ARGUMENT, word);
    CHECK_FAILS(nvb_kv_cache_truncate(cache, 0, 1, f->stream), NVB_ERROR_INVALID_ARGUMENT, word);
    CHECK_FAILS(nvb_kv_cache_release(cache, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, word);
    CHECK_FAILS(nvb_kv_cache_fork(cache, 0, 1, 4, f->stream), NVB_ERROR_INVALID_ARGUMENT, word);
    CHECK_FAILS(nvb_kv_cache_copy(cache, 0, 1, 4, f->stream), NVB_ERROR_INVALID_ARGUMENT, word);
    if (explained) {
      CHECK_OK(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
    } else {
      CHECK_OK(nvb_memory_wake(f->memory, NULL));
    }
    CHECK_EQUAL(length_of(cache, 0), 6);
  }
  CHECK_OK(nvb_kv_cache_truncate(cache, 0, 1, f->stream));
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

int main(void) {
  fixture f = open_fixture();
  test_options(&f);
  test_sequences(&f);
  test_refusals(&f);
  test_contiguous(&f);
  test_ring(&f);
  test_engine_memory(&f);
  test_growth(&f);
  test_standing_still(&f);
  holds(&f, NULL, 0, 0, 0, no_table);
  close_fixture(&f);
  return test_result();
}
