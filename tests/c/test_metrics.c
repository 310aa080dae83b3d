// Profiling: figures of each operation, on demand.
#include "check.h"

static nvb_operation_metrics metrics_of(nvb_backend* backend, uint32_t operation) {
  nvb_operation_metrics metrics;
  nvb_operation_metrics_init(&metrics);
  CHECK_OK(nvb_backend_get_metrics(backend, operation, &metrics));
  return metrics;
}

static nvb_status get_metrics(void* value, void* context) {
  return nvb_backend_get_metrics(context, NVB_OPERATION_SOFTMAX, value);
}

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, CAPACITY = 32768, SEQUENCES = 2 };

// Queries and outputs of `rows`, and the keys and values of `keys`.
static double attention_bytes(int rows, int keys) {
  return 4.0 * (2.0 * rows * HEADS * DIM + 2.0 * keys * KV_HEADS * DIM);
}

// Attention counts the keys and values that must be read, not what the cache could hold.
static void test_attention(fixture* f) {
  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = 1;
  cache_options.sequences = SEQUENCES;
  cache_options.kv_heads = KV_HEADS;
  cache_options.head_dim = DIM;
  cache_options.capacity = CAPACITY;
  cache_options.dtype = NVB_DTYPE_F32;
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &cache_options, &cache));
  static float queries[8 * HEADS * DIM];
  void *query = upload(f, queries, sizeof queries), *output = upload(f, queries, sizeof queries);
  CHECK_OK(nvb_backend_set_profiling(f->backend, 1));
  for (int window = 0; window <= 8; window += 8) {
    nvb_attention_options options;
    nvb_attention_options_init(&options);
    options.query_heads = HEADS;
    options.kv_heads = KV_HEADS;
    options.head_dim = DIM;
    options.window = (uint32_t)window;
    nvb_attention* attention = NULL;
    CHECK_OK(nvb_attention_create(f->backend, &options, &attention));

    const int32_t positions[][SEQUENCES] = {{0, 0}, {0, 99}, {CAPACITY - 1, 3}};
    for (size_t i = 0; i < sizeof positions / sizeof *positions; ++i) {
      int keys = 0;
      for (int row = 0; row < SEQUENCES; ++row) {
        const int visible = positions[i][row] + 1;
        keys += window != 0 && visible > window ? window : visible;
      }
      void* at = upload(f, positions[i], sizeof positions[i]);
      nvb_attention_decode_args args;
      nvb_attention_decode_args_init(&args);
      args.query = nvb_tensor_3d(query, NVB_DTYPE_F32, SEQUENCES, HEADS, DIM);
      args.output = nvb_tensor_3d(output, NVB_DTYPE_F32, SEQUENCES, HEADS, DIM);
      args.cache = cache;
      args.positions = nvb_tensor_make(at, NVB_DTYPE_I32, 1, SEQUENCES, 1, 1, 1);
      CHECK_OK(nvb_backend_reset_metrics(f->backend));
      for (int call = 0; call < 3; ++call) CHECK_OK(nvb_attention_decode(attention, &args, f->stream));
      CHECK_OK(nvb_stream_synchronize(f->stream));
      const nvb_operation_metrics metrics = metrics_of(f->backend, NVB_OPERATION_ATTENTION_DECODE);
      CHECK_EQUAL(metrics.timed_calls, 3);
      CHECK_NEAR(metrics.bytes, 3 * (attention_bytes(SEQUENCES, keys) + sizeof positions[i]), 1e-9);
      CHECK_NEAR(metrics.operations, 3.0 * 4 * keys * DIM * HEADS, 1e-9);
      release(f, at);
    }

    // Eight rows at positions 92 to 99: without a window they see 100 keys, with one of 8 the last 15.
    const int32_t query_starts[] = {0, 8}, kv_lengths[] = {100};
    nvb_attention_prefill_args args;
    nvb_attention_prefill_args_init(&args);
    args.query = nvb_tensor_3d(query, NVB_DTYPE_F32, 8, HEADS, DIM);
    args.output = nvb_tensor_3d(output, NVB_DTYPE_F32, 8, HEADS, DIM);
    args.query_starts = query_starts;
    args.sequence_count = 1;
    args.cache = cache;
    args.kv_lengths = kv_lengths;
    CHECK_OK(nvb_backend_reset_metrics(f->backend));
    CHECK_OK(nvb_attention_prefill(attention, &args, f->stream));
    CHECK_OK(nvb_stream_synchronize(f->stream));
    const nvb_operation_metrics metrics = metrics_of(f->backend, NVB_OPERATION_ATTENTION_PREFILL);
    const int pairs = window == 0 ? 8 * 92 + 36 : 8 * window;
    CHECK_NEAR(metrics.bytes, attention_bytes(8, window == 0 ? 100 : 15), 1e-9);
    CHECK_NEAR(metrics.operations, 4.0 * pairs * DIM * HEADS, 1e-9);
    CHECK_OK(nvb_attention_destroy(attention));
  }
  CHECK_OK(nvb_backend_set_profiling(f->backend, 0));
  CHECK_OK(nvb_backend_reset_metrics(f->backend));
  release(f, query);
  release(f, output);
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

int main(void) {
  fixture f = open_fixture();
  enum { ROWS = 8, COLUMNS = 256, CALLS = 20 };
  static float values[ROWS * COLUMNS];
  nvb_softmax_args args;
  nvb_softmax_args_init(&args);
  void* block = upload(&f, values, sizeof values);
  args.input = args.output = nvb_tensor_2d(block, NVB_DTYPE_F32, ROWS, COLUMNS);
  CHECK_OK(nvb_softmax(f.backend, &args, f.stream));
  CHECK_EQUAL(metrics_of(f.backend, NVB_OPERATION_SOFTMAX).calls, 0);

  CHECK_OK(nvb_backend_set_profiling(f.backend, 1));
  for (int i = 0; i < CALLS; ++i) CHECK_OK(nvb_softmax(f.backend, &args, f.stream));
  CHECK_OK(nvb_stream_synchronize(f.stream));
  nvb_operation_metrics metrics = metrics_of(f.backend, NVB_OPERATION_SOFTMAX);
  CHECK_EQUAL(metrics.calls, CALLS);
  CHECK_EQUAL(metrics.timed_calls, CALLS);
  CHECK(strcmp(metrics.name, "softmax") == 0);
  CHECK(metrics.seconds > 0 && metrics.shortest_seconds > 0 && metrics.shortest_seconds <= metrics.longest_seconds);
  CHECK_NEAR(metrics.bytes, CALLS * 2.0 * sizeof values, 1e-9);
  CHECK_NEAR(metrics.bytes_per_second * metrics.seconds, metrics.bytes, 1e-9);
  CHECK_NEAR(metrics.operations_per_second * metrics.seconds, metrics.operations, 1e-9);
  // A call that fails is not counted.
  args.output.shape[0] = 1;
  CHECK_INVALID(nvb_softmax(f.backend, &args, f.stream));
  CHECK_EQUAL(metrics_of(f.backend, NVB_OPERATION_SOFTMAX).calls, CALLS);
  for (uint32_t operation = 0; operation < NVB_OPERATION_COUNT; ++operation) {
    CHECK_EQUAL(metrics_of(f.backend, operation).calls, operation == NVB_OPERATION_SOFTMAX ? CALLS : 0);
  }
  CHECK_STRUCT(metrics, get_metrics, f.backend);

  // Copies and fills are operations as well.
  CHECK_OK(nvb_memory_fill(f.memory, block, 0, sizeof values, f.stream));
  CHECK_OK(nvb_memory_copy(f.memory, block, values, sizeof values, NVB_COPY_HOST_TO_DEVICE, f.stream));
  CHECK_OK(nvb_stream_synchronize(f.stream));
  CHECK_NEAR(metrics_of(f.backend, NVB_OPERATION_MEMORY_FILL).bytes, sizeof values, 1e-9);
  CHECK_NEAR(metrics_of(f.backend, NVB_OPERATION_MEMORY_COPY).bytes, 2.0 * sizeof values, 1e-9);

  CHECK_OK(nvb_backend_reset_metrics(f.backend));
  CHECK_EQUAL(metrics_of(f.backend, NVB_OPERATION_SOFTMAX).calls, 0);
  CHECK_OK(nvb_backend_set_profiling(f.backend, 0));
  CHECK_FAILS(nvb_backend_set_profiling(f.backend, 2), NVB_ERROR_INVALID_ARGUMENT, "enabled is 2");
  CHECK_FAILS(nvb_backend_get_metrics(f.backend, NVB_OPERATION_COUNT, &metrics), NVB_ERROR_INVALID_ARGUMENT,
              "operation is", "NVB_OPERATION_");
  CHECK_FAILS(nvb_backend_get_metrics(NULL, 0, &metrics), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_backend_reset_metrics(NULL), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  release(&f, block);
  test_attention(&f);
  close_fixture(&f);
  return test_result();
}
