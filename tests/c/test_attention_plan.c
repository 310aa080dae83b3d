// Questions about attention: its plan, whether it is supported, its memory before there is any, and its kernels' times.
#include "check.h"

enum { HEADS = 8, KV_HEADS = 2, DIM = 64, SEQUENCES = 3, CAPACITY = 300, ROWS = 2 };

static nvb_attention_options eight_heads(void) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  return options;
}

static nvb_kv_cache_options small_cache(void) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = 2;
  options.sequences = SEQUENCES;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = CAPACITY;
  options.dtype = NVB_DTYPE_F32;
  return options;
}

static nvb_attention_shape small_shape(void) {
  nvb_attention_shape shape;
  nvb_attention_shape_init(&shape);
  shape.sequences = SEQUENCES;
  shape.rows_per_sequence = ROWS;
  return shape;
}

typedef struct {
  fixture* f;
  nvb_attention* attention;
  nvb_kv_cache* cache;
  void *query, *output, *positions;
  nvb_attention_decode_args decode;
  nvb_attention_prefill_args prefill;
} bench;

static const int32_t kStarts[] = {0, 3, 6}, kLengths[] = {5, 9};

static bench set_up(fixture* f) {
  bench b = {.f = f};
  nvb_attention_options options = eight_heads();
  CHECK_OK(nvb_attention_create(f->backend, &options, &b.attention));
  nvb_kv_cache_options cache = small_cache();
  CHECK_OK(nvb_kv_cache_create(f->backend, &cache, &b.cache));
  // The content is not looked at; what is there must be no poison that a kernel could trip over.
  static float zeros[SEQUENCES * ROWS * HEADS * DIM];
  int32_t positions[SEQUENCES * ROWS];
  for (int i = 0; i < SEQUENCES * ROWS; ++i) positions[i] = CAPACITY - ROWS + i % ROWS;
  b.query = upload(f, zeros, sizeof zeros);
  b.output = upload(f, zeros, sizeof zeros);
  b.positions = upload(f, positions, sizeof positions);
  nvb_attention_decode_args_init(&b.decode);
  b.decode.query = nvb_tensor_3d(b.query, NVB_DTYPE_F32, SEQUENCES * ROWS, HEADS, DIM);
  b.decode.output = nvb_tensor_3d(b.output, NVB_DTYPE_F32, SEQUENCES * ROWS, HEADS, DIM);
  b.decode.cache = b.cache;
  b.decode.positions = nvb_tensor_1d(b.positions, NVB_DTYPE_I32, SEQUENCES * ROWS);
  b.decode.rows_per_sequence = ROWS;
  nvb_attention_prefill_args_init(&b.prefill);
  b.prefill.query = nvb_tensor_3d(b.query, NVB_DTYPE_F32, 6, HEADS, DIM);
  b.prefill.output = nvb_tensor_3d(b.output, NVB_DTYPE_F32, 6, HEADS, DIM);
  b.prefill.query_starts = kStarts;
  b.prefill.sequence_count = 2;
  b.prefill.cache = b.cache;
  b.prefill.kv_lengths = kLengths;
  return b;
}

static void tear_down(bench* b) {
  release(b->f, b->query);
  release(b->f, b->output);
  release(b->f, b->positions);
  CHECK_OK(nvb_attention_destroy(b->attention));
  CHECK_OK(nvb_kv_cache_destroy(b->cache));
}

static void test_plan(bench* b) {
  nvb_attention_plan plan;
  nvb_attention_plan_init(&plan);
  CHECK_OK(nvb_attention_get_plan(b->attention, NULL, &b->decode, &plan));
  CHECK(strncmp(plan.kernel, "attention_decode", 16) == 0);
  CHECK(plan.tile_rows > 0 && plan.tile_keys > 0 && plan.splits > 0 && plan.stages > 0);
  CHECK(plan.operations > 0 && plan.bytes > 0);
  size_t bytes = 1;
  CHECK_OK(nvb_attention_decode_get_workspace_size(b->attention, &b->decode, &bytes));
  CHECK_EQUAL(plan.workspace_bytes, bytes);

  // No memory is needed to ask.
  nvb_attention_decode_args shapes = b->decode;
  shapes.query.data = shapes.output.data = shapes.positions.data = NULL;
  nvb_attention_plan same;
  nvb_attention_plan_init(&same);
  CHECK_OK(nvb_attention_get_plan(b->attention, NULL, &shapes, &same));
  CHECK(strcmp(plan.kernel, same.kernel) == 0);
  CHECK_EQUAL(plan.workspace_bytes, same.workspace_bytes);

  CHECK_OK(nvb_attention_get_plan(b->attention, &b->prefill, NULL, &plan));
  CHECK(strncmp(plan.kernel, "attention_prefill", 17) == 0);
  CHECK_EQUAL(plan.workspace_bytes, 0);

  nvb_attention_decode_args none = b->decode;
  none.query.shape[0] = none.output.shape[0] = none.positions.shape[0] = 0;
  CHECK_OK(nvb_attention_get_plan(b->attention, NULL, &none, &plan));
  CHECK_EQUAL(plan.kernel[0] == '\0', !test_on_cpu());

  CHECK_FAILS(nvb_attention_get_plan(b->attention, NULL, NULL, &plan), NVB_ERROR_INVALID_ARGUMENT, "neither");
  CHECK_FAILS(nvb_attention_get_plan(b->attention, &b->prefill, &b->decode, &plan), NVB_ERROR_INVALID_ARGUMENT,
              "one of them");
  CHECK_FAILS(nvb_attention_get_plan(b->attention, NULL, &b->decode, NULL), NVB_ERROR_INVALID_ARGUMENT, "plan");
  CHECK_INVALID(nvb_attention_get_plan(foreign_handle(), NULL, &b->decode, &plan));
  nvb_attention_decode_args wrong = b->decode;
  wrong.rows_per_sequence = 17;
  CHECK_FAILS(nvb_attention_get_plan(b->attention, NULL, &wrong, &plan), NVB_ERROR_INVALID_ARGUMENT, "17", "16");
  plan.struct_size = 3;
  CHECK_FAILS(nvb_attention_get_plan(b->attention, NULL, &b->decode, &plan), NVB_ERROR_ABI_MISMATCH, "3");
}

static void test_supported(fixture* f) {
  nvb_attention_options options = eight_heads();
  nvb_kv_cache_options cache = small_cache();
  nvb_attention_shape shape = small_shape();
#define SUPPORTED() nvb_attention_is_supported(f->backend, &options, &cache, &shape)
  const uint32_t dtypes[] = {0,
                             NVB_DTYPE_F32,
                             NVB_DTYPE_F16,
                             NVB_DTYPE_BF16,
                             NVB_DTYPE_FP8_E4M3,
                             NVB_DTYPE_FP8_E5M2,
                             NVB_DTYPE_KV_INT8,
                             NVB_DTYPE_KV_Q8_0,
                             NVB_DTYPE_KV_Q4_0};
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i) {
    cache.dtype = dtypes[i];
    for (shape.prefill = 0; shape.prefill < 2; ++shape.prefill) CHECK_OK(SUPPORTED());
    shape.prefill = 0;
  }
  cache = small_cache();
  shape.rows_per_sequence = 17;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "rows_per_sequence is 17", "16");
  shape.prefill = 1;
  CHECK_OK(SUPPORTED());
  shape.prefill = 2;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "prefill is 2");
  shape = small_shape();
  shape.sequences = SEQUENCES + 1;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "sequences is 4", "has 3");
  shape = small_shape();
  shape.kv_length = CAPACITY + 1;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "301", "300");
  shape = small_shape();
  shape.query_dtype = NVB_DTYPE_BF16;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "query", "bf16", "f32");
  shape.query_dtype = 9;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "query_dtype is 9");
  shape = small_shape();
  options.query_heads = 7;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_ATTENTION, "7 query heads");
  options = eight_heads();
  options.bidirectional = 1;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_ATTENTION, "bidirectional");
  options = eight_heads();
  cache.head_dim = 32;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "32", "64");
  cache = small_cache();
  cache.window = 20;
  CHECK_FAILS(SUPPORTED(), NVB_ERROR_INVALID_ARGUMENT, "window of 0", "keeps 20");
  cache = small_cache();
  CHECK_FAILS(nvb_attention_is_supported(NULL, &options, &cache, &shape), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_attention_is_supported(f->backend, NULL, &cache, &shape), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_attention_is_supported(f->backend, &options, NULL, &shape), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_attention_is_supported(f->backend, &options, &cache, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
}

// The estimate is what a cache then holds, and what a call then takes.
static void test_memory(bench* b) {
  fixture* f = b->f;
  nvb_attention_options options = eight_heads();
  nvb_attention_shape shape = small_shape();
  nvb_attention_memory memory;
  nvb_attention_memory_init(&memory);
  for (int kind = 0; kind < 6; ++kind) {
    nvb_kv_cache_options cache = small_cache();
    if (kind == 1) cache.page_tokens = 16;
    if (kind == 2) cache.page_tokens = 7, cache.pages = 11;
    if (kind == 3) cache.window = options.window = 20, cache.max_append = 8;
    if (kind == 4) cache.dtype = NVB_DTYPE_FP8_E4M3, cache.page_tokens = 1;
    if (kind == 5) cache.dtype = 0;
    CHECK_OK(nvb_attention_estimate_memory(f->backend, &options, &cache, &shape, &memory));
    options = eight_heads();
    nvb_kv_cache* created = NULL;
    uint64_t bytes = 0;
    CHECK_OK(nvb_kv_cache_create(f->backend, &cache, &created));
    CHECK_OK(nvb_kv_cache_get_bytes(created, &bytes));
    CHECK_EQUAL(memory.cache_bytes, bytes);
    CHECK_OK(nvb_kv_cache_destroy(created));
  }
  nvb_kv_cache_options cache = small_cache();
  CHECK_OK(nvb_attention_estimate_memory(f->backend, &options, &cache, &shape, &memory));
  size_t needed = 1;
  CHECK_OK(nvb_attention_decode_get_workspace_size(b->attention, &b->decode, &needed));
  CHECK_EQUAL(memory.workspace_bytes, needed);
  // So many bytes are enough, and on a GPU one less is too few.
  void* workspace = NULL;
  const size_t bytes = needed == 0 ? 256 : needed;
  CHECK_OK(nvb_memory_allocate(f->memory, bytes, f->stream, &workspace));
  CHECK_OK(nvb_stream_set_workspace(f->stream, workspace, bytes));
  CHECK_OK(nvb_attention_decode(b->attention, &b->decode, f->stream));
  if (needed > 0) {
    CHECK_OK(nvb_stream_set_workspace(f->stream, workspace, needed - 1));
    CHECK_FAILS(nvb_attention_decode(b->attention, &b->decode, f->stream), NVB_ERROR_INVALID_ARGUMENT, "workspace");
  }
  CHECK_OK(nvb_stream_set_workspace(f->stream, NULL, 0));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  release(f, workspace);
  shape.prefill = 1;
  CHECK_OK(nvb_attention_estimate_memory(f->backend, &options, &cache, &shape, &memory));
  CHECK_EQUAL(memory.workspace_bytes, 0);
  CHECK_FAILS(nvb_attention_estimate_memory(f->backend, &options, &cache, &shape, NULL), NVB_ERROR_INVALID_ARGUMENT,
              "memory");
  cache.capacity = 0;
  CHECK_FAILS(nvb_attention_estimate_memory(f->backend, &options, &cache, &shape, &memory), NVB_ERROR_INVALID_ARGUMENT,
              "capacity is 0");
}

static void test_benchmark(bench* b) {
  nvb_attention_measurement rows[8];
  for (int i = 0; i < 8; ++i) nvb_attention_measurement_init(&rows[i]);
  nvb_attention_plan plan;
  nvb_attention_plan_init(&plan);
  for (int decode = 0; decode < 2; ++decode) {
    const nvb_attention_decode_args* decode_args = decode ? &b->decode : NULL;
    const nvb_attention_prefill_args* prefill_args = decode ? NULL : &b->prefill;
    size_t count = 0, all = 0;
    CHECK_OK(nvb_attention_get_plan(b->attention, prefill_args, decode_args, &plan));
    CHECK_OK(nvb_attention_benchmark(b->attention, prefill_args, decode_args, 3, rows, 8, &count, b->f->stream));
    CHECK(count >= 1 && count <= 8);
    int chosen = 0;
    for (size_t i = 0; i < count && i < 8; ++i) {
      CHECK(rows[i].seconds > 0 && rows[i].seconds < 60);
      chosen += rows[i].chosen == 1 && strcmp(rows[i].kernel, plan.kernel) == 0;
    }
    CHECK_EQUAL(chosen, 1);
    CHECK_OK(nvb_attention_benchmark(b->attention, prefill_args, decode_args, 1, NULL, 0, &all, b->f->stream));
    CHECK_EQUAL(all, count);
  }
  size_t count = 0;
#define BENCHMARK(rounds, rows, capacity) \
  nvb_attention_benchmark(b->attention, NULL, &b->decode, rounds, rows, capacity, &count, b->f->stream)
  CHECK_FAILS(BENCHMARK(10001, rows, 8), NVB_ERROR_INVALID_ARGUMENT, "rounds is 10001");
  CHECK_FAILS(BENCHMARK(1, NULL, 8), NVB_ERROR_INVALID_ARGUMENT, "measurements");
  CHECK_FAILS(BENCHMARK(1, rows, SIZE_MAX), NVB_ERROR_INVALID_ARGUMENT, "measurement_count", "1024");
  CHECK_FAILS(nvb_attention_benchmark(b->attention, NULL, NULL, 1, rows, 8, &count, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "neither");
  CHECK_FAILS(nvb_attention_benchmark(b->attention, NULL, &b->decode, 1, rows, 8, NULL, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "count");
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(b->f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, b->f->stream));
  CHECK_FAILS(BENCHMARK(1, rows, 8), NVB_ERROR_INVALID_ARGUMENT, "measured");
  CHECK_OK(nvb_graph_end(graph, b->f->stream));
  CHECK_OK(nvb_graph_destroy(graph));
}

typedef struct {
  int calls, chosen, stop_at;
} told;

static uint32_t hear(const nvb_tune_progress* progress, void* data) {
  told* of = data;
  CHECK_EQUAL(progress->case_count, 1);
  CHECK(progress->candidate < progress->candidate_count);
  CHECK(strlen(progress->name) > 0);
  of->chosen += progress->outcome == NVB_TUNE_CHOSEN;
  return ++of->calls == of->stop_at;
}

// What tuning chose is what runs from then on; the CPU has nothing to choose.
static void test_tune(bench* b) {
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  options.rounds = 3;
  nvb_attention_plan plan;
  nvb_attention_plan_init(&plan);
  for (int decode = 0; decode < 2; ++decode) {
    const nvb_attention_decode_args* decode_args = decode ? &b->decode : NULL;
    const nvb_attention_prefill_args* prefill_args = decode ? NULL : &b->prefill;
    nvb_tune_report report;
    nvb_tune_report_init(&report);
    told stopped = {0, 0, 1}, all = {0, 0, 0};
    CHECK_OK(
        nvb_tune_attention(b->attention, prefill_args, decode_args, &options, hear, &stopped, &report, b->f->stream));
    CHECK_EQUAL(report.tuned, 0);
    CHECK_EQUAL(report.stopped, !test_on_cpu());
    CHECK_OK(nvb_tune_attention(b->attention, prefill_args, decode_args, &options, hear, &all, &report, b->f->stream));
    CHECK_EQUAL(report.stopped, 0);
    CHECK_EQUAL(report.wrong, 0);
    CHECK_EQUAL(report.failed, 0);
    CHECK_EQUAL(report.saved, 0);
    CHECK_OK(nvb_attention_get_plan(b->attention, prefill_args, decode_args, &plan));
    if (test_on_cpu()) {
      CHECK_EQUAL(report.tuned + report.measured + (uint64_t)all.calls, 0);
      CHECK_EQUAL(plan.reason, NVB_REASON_ONLY);
    } else {
      CHECK_EQUAL(report.tuned, 1);
      CHECK(report.measured >= 1);
      CHECK_EQUAL(all.chosen, 1);
      CHECK(report.chosen_seconds > 0 && report.chosen_seconds <= report.default_seconds);
      CHECK_EQUAL(plan.reason, NVB_REASON_TUNED);
    }
    CHECK_OK(nvb_tune_attention(b->attention, prefill_args, decode_args, NULL, NULL, NULL, NULL, b->f->stream));
  }
#define TUNE(options, report) \
  nvb_tune_attention(b->attention, NULL, &b->decode, options, NULL, NULL, report, b->f->stream)
  nvb_tune_report unset;
  memset(&unset, 0, sizeof unset);
  CHECK_FAILS(TUNE(NULL, &unset), NVB_ERROR_ABI_MISMATCH, "struct_size");
  options.clock = 2;
  CHECK_FAILS(TUNE(&options, NULL), NVB_ERROR_INVALID_ARGUMENT, "clock is 2");
  CHECK_FAILS(nvb_tune_attention(b->attention, NULL, NULL, NULL, NULL, NULL, NULL, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "neither");
  CHECK_FAILS(nvb_tune_attention(b->attention, &b->prefill, &b->decode, NULL, NULL, NULL, NULL, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "one of them");
  CHECK_FAILS(nvb_tune_attention(NULL, NULL, &b->decode, NULL, NULL, NULL, NULL, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "attention", "NULL");
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(b->f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, b->f->stream));
  CHECK_FAILS(TUNE(NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "measured");
  CHECK_OK(nvb_graph_end(graph, b->f->stream));
  CHECK_OK(nvb_graph_destroy(graph));
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_plan(&b);
  test_supported(&f);
  test_memory(&b);
  test_benchmark(&b);
  test_tune(&b);
  tear_down(&b);
  close_fixture(&f);
  return test_result();
}
