// What the host pays for calls that start no work: creating a backend, options, detection, statistics.
//
//   bench_latency [--check] [DEVICE]
//
// Prints medians in microseconds of a warm process, beside the bound that each is held to: for people on standard
// error, for benches/record.py as JSON on standard output. DEVICE is "auto" without the argument; with --check a row
// whose fastest sample takes more than twice its bound ends the program with status 1. The bounds are those of a server
// with nothing else to do; what the check is for, such as detection that is cached no more, takes a hundred times as
// long.
#define _POSIX_C_SOURCE 200809L
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "row.h"

static const char* device = "auto";
static nvb_backend* backend;
static nvb_memory_manager* memory;
static nvb_configuration* configuration;

static void expect(nvb_status status) {
  if (status == NVB_OK) return;
  char text[512];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "latency: %s\n", text);
  exit(1);
}

static void create_backend(void) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = device;
  nvb_backend* created = NULL;
  expect(nvb_backend_create(&options, &created));
  expect(nvb_backend_destroy(created));
}

static void make_configuration(void) {
  nvb_configuration* created = NULL;
  expect(nvb_configuration_create(NVB_PRESET_THROUGHPUT, &created));
  expect(nvb_configuration_set(created, "memory.margin", "1073741824"));
  expect(nvb_configuration_validate(created));
  expect(nvb_configuration_destroy(created));
}

static void read_json(void) {
  expect(nvb_configuration_apply_json(configuration, "{\"preset\": \"throughput\", \"memory\": {\"margin\": 1}}"));
}

static void detect(void) {
  uint32_t count = 0;
  nvb_device_info info;
  nvb_device_info_init(&info);
  expect(nvb_hardware_get_device_count(&count));
  expect(nvb_hardware_get_device_info(count - 1, &info));
}

static void recommend(void) {
  nvb_recommendation place;
  nvb_recommendation_init(&place);
  expect(nvb_hardware_recommend(NVB_WORKLOAD_DECODE, 0, &place));
}

static void read_environment(void) {
  nvb_environment environment;
  nvb_environment_init(&environment);
  expect(nvb_hardware_get_environment(&environment));
}

static void read_memory_statistics(void) {
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  expect(nvb_memory_get_statistics(memory, &statistics));
}

static void read_metrics(void) {
  nvb_operation_metrics metrics;
  nvb_operation_metrics_init(&metrics);
  expect(nvb_backend_get_metrics(backend, NVB_OPERATION_LINEAR, &metrics));
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

enum { SAMPLES = 51, LENIENCE = 2 };

// Median over samples of `calls` calls each, after one sample that is thrown away. Prints a row; 1 if it is far too
// slow. Where the median misses the bound the fastest sample decides: other work on the machine makes calls slow,
// nothing makes them fast.
static int measure(const char* what, double bound, int calls, void (*call)(void)) {
  double samples[SAMPLES];
  for (int i = -1; i < SAMPLES; ++i) {
    double start = now();
    for (int k = 0; k < calls; ++k) call();
    if (i >= 0) samples[i] = (now() - start) / calls;
  }
  qsort(samples, SAMPLES, sizeof *samples, ascending);
  double median = samples[SAMPLES / 2];
  printf(
      "{\"operation\": \"latency\", \"case\": \"%s\", \"ours\": %.4g, \"peer\": %.4g, \"peer_name\": \"upper bound\", "
      "\"unit\": \"µs\"}\n",
      what, median, bound);
  fprintf(stderr, "%-28s %10.3f us   bound %7.1f us   ", what, median, bound);
  if (median < bound) {
    fprintf(stderr, "ok\n");
    return 0;
  }
  fprintf(stderr, "%s, fastest %.3f us\n", samples[0] < bound ? "disturbed" : "MISSED", samples[0]);
  return samples[0] >= LENIENCE * bound;
}

int main(int count, char** arguments) {
  int check = count > 1 && strcmp(arguments[1], "--check") == 0;
  if (count > check + 2) {
    fprintf(stderr, "usage: bench_latency [--check] [DEVICE]\n");
    return 2;
  }
  if (count == check + 2) device = arguments[check + 1];
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = device;
  expect(nvb_backend_create(&options, &backend));
  expect(nvb_backend_get_memory_manager(backend, 0, &memory));
  expect(nvb_configuration_create(NVB_PRESET_INFERENCE, &configuration));
  read_environment();
  nvb_device_info info;
  nvb_device_info_init(&info);
  expect(nvb_backend_get_device_info(backend, &info));
  fprintf(stderr, "nvbackend %s on %s\n", nvb_version_string(), info.name);
  print_run(&info);
  int missed = measure("backend, created and gone", 150, 20, create_backend);
  missed += measure("configuration, checked", 10, 200, make_configuration);
  missed += measure("configuration from JSON", 10, 200, read_json);
  missed += measure("detection, cached", 10, 1000, detect);
  missed += measure("recommendation", 10, 1000, recommend);
  missed += measure("environment, cached", 10, 1000, read_environment);
  missed += measure("memory statistics", 1, 1000, read_memory_statistics);
  missed += measure("metrics of an operation", 1, 1000, read_metrics);
  expect(nvb_configuration_destroy(configuration));
  expect(nvb_memory_manager_destroy(memory));
  expect(nvb_backend_destroy(backend));
  return check && missed != 0;
}
