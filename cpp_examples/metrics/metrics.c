// metrics: how long each operation took, and what share of the device's rate it reached.
//
//   metrics [DEVICE]     "auto" (the default), "cpu", "cuda:N"
//
// The program runs a norm and a product a few times with profiling on, and prints what was measured.
#include <inttypes.h>
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 4, WIDTH = 1024, OUTPUTS = 2048, REPEATS = 20 };

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "metrics: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "metrics: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

static nvb_weight* make_weight(nvb_backend* backend) {
  static float numbers[OUTPUTS * WIDTH];
  for (size_t i = 0; i < OUTPUTS * WIDTH; ++i) numbers[i] = (float)(i % 17) / 17.0F - 0.5F;
  nvb_tensor part = nvb_tensor_2d(numbers, NVB_DTYPE_F32, OUTPUTS, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  MUST(nvb_weight_create(backend, &desc, NULL, &weight));
  return weight;
}

// A line for each operation that ran. Bandwidth counts the bytes that must be read and written at least.
static void print_metrics(nvb_backend* backend) {
  nvb_device_info device;
  nvb_device_info_init(&device);
  MUST(nvb_backend_get_device_info(backend, &device));
  printf("%-12s %6s %12s %10s %10s\n", "operation", "calls", "mean in us", "GB/s", "Gop/s");
  for (uint32_t operation = 0; operation < NVB_OPERATION_COUNT; ++operation) {
    nvb_operation_metrics metrics;
    nvb_operation_metrics_init(&metrics);
    MUST(nvb_backend_get_metrics(backend, operation, &metrics));
    if (metrics.timed_calls == 0) continue;
    printf("%-12s %6" PRIu64 " %12.2f %10.2f %10.2f", metrics.name, metrics.calls,
           metrics.seconds / (double)metrics.timed_calls * 1e6, metrics.bytes_per_second / 1e9,
           metrics.operations_per_second / 1e9);
    // The CPU does not tell its peak.
    if (device.peak_bandwidth != 0) {
      printf("  %.0f %% of the peak", 100 * metrics.bytes_per_second / (double)device.peak_bandwidth);
    }
    printf("\n");
  }
}

int main(int count, char** arguments) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = count > 1 ? arguments[1] : "auto";
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  nvb_memory_manager* memory = NULL;
  MUST(nvb_backend_get_memory_manager(backend, 0, &memory));
  nvb_weight* weight = make_weight(backend);
  static float input[ROWS * WIDTH];
  for (int i = 0; i < ROWS * WIDTH; ++i) input[i] = (float)(i % 7);
  void *x = NULL, *normed = NULL, *y = NULL;
  MUST(nvb_memory_allocate(memory, sizeof input, NULL, &x));
  MUST(nvb_memory_allocate(memory, sizeof input, NULL, &normed));
  MUST(nvb_memory_allocate(memory, ROWS * OUTPUTS * sizeof(float), NULL, &y));
  MUST(nvb_memory_copy(memory, x, input, sizeof input, NVB_COPY_HOST_TO_DEVICE, NULL));

  nvb_rms_norm_args norm;
  nvb_rms_norm_args_init(&norm);
  norm.input = nvb_tensor_2d(x, NVB_DTYPE_F32, ROWS, WIDTH);
  norm.output = nvb_tensor_2d(normed, NVB_DTYPE_F32, ROWS, WIDTH);
  nvb_linear_args linear;
  nvb_linear_args_init(&linear);
  linear.input = norm.output;
  linear.weight = weight;
  linear.output = nvb_tensor_2d(y, NVB_DTYPE_F32, ROWS, OUTPUTS);

  // The first calls load kernels and allocate workspace, which is no part of the figures.
  for (int i = 0; i <= REPEATS; ++i) {
    if (i == 1) {
      MUST(nvb_backend_synchronize(backend));
      MUST(nvb_backend_set_profiling(backend, 1));
    }
    MUST(nvb_rms_norm(backend, &norm, NULL));
    MUST(nvb_linear(backend, &linear, NULL));
  }
  MUST(nvb_backend_synchronize(backend));  // what has not finished is not in the figures
  print_metrics(backend);

  nvb_operation_metrics metrics;
  nvb_operation_metrics_init(&metrics);
  MUST(nvb_backend_get_metrics(backend, NVB_OPERATION_LINEAR, &metrics));
  EXPECT(metrics.calls == REPEATS && metrics.timed_calls == REPEATS && strcmp(metrics.name, "linear") == 0);
  EXPECT(metrics.operations == 2.0 * REPEATS * ROWS * OUTPUTS * WIDTH && metrics.seconds > 0);
  MUST(nvb_backend_set_profiling(backend, 0));
  MUST(nvb_backend_reset_metrics(backend));
  MUST(nvb_backend_get_metrics(backend, NVB_OPERATION_LINEAR, &metrics));
  EXPECT(metrics.calls == 0);

  void* const blocks[] = {x, normed, y};
  for (int i = 0; i < 3; ++i) MUST(nvb_memory_free(memory, blocks[i], NULL));
  MUST(nvb_weight_destroy(weight));
  MUST(nvb_memory_manager_destroy(memory));
  MUST(nvb_backend_destroy(backend));
  return 0;
}
