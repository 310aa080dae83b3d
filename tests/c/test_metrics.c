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

  CHECK_OK(nvb_backend_reset_metrics(f.backend));
  CHECK_EQUAL(metrics_of(f.backend, NVB_OPERATION_SOFTMAX).calls, 0);
  CHECK_OK(nvb_backend_set_profiling(f.backend, 0));
  CHECK_FAILS(nvb_backend_set_profiling(f.backend, 2), NVB_ERROR_INVALID_ARGUMENT, "enabled is 2");
  CHECK_FAILS(nvb_backend_get_metrics(f.backend, 14, &metrics), NVB_ERROR_INVALID_ARGUMENT, "operation is 14",
              "0 to 13");
  CHECK_FAILS(nvb_backend_get_metrics(NULL, 0, &metrics), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_backend_reset_metrics(NULL), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  release(&f, block);
  close_fixture(&f);
  return test_result();
}
