// What the host pays to queue an operation: one row through the operations of a layer, on one stream.
//
//   bench_queueing [DEVICE [OPERATION]]
//
// OPERATION is one of the names that it prints, which is measured alone: benches/queueing_instructions.py counts its
// instructions.
// Prints the median and the fastest sample in microseconds a call, for people on standard error, and the medians for
// benches/record.py as JSON on standard output. A sample is 200 calls behind a stream that has
// nothing to do, fewer than the driver lets wait, so the GPU's own time does not count. The driver's launch does. On
// the CPU calls do the work before they return, so there the figures only show that the program runs.
#define _POSIX_C_SOURCE 200809L
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "row.h"

enum { WIDTH = 2048, HEADS = 8, KV_HEADS = 4, HEAD_DIM = 256, CAPACITY = 1024, CALLS = 200, SAMPLES = 31 };

static nvb_backend* backend;
static nvb_memory_manager* memory;
static nvb_stream* stream;
static nvb_rms_norm_args norm;
static nvb_linear_args floats, int4;
static nvb_rope_args rope;
static nvb_attention* attention;
static nvb_attention_decode_args decode;
static const char* only;

static void expect(nvb_status status) {
  if (status == NVB_OK) return;
  char text[512];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "queueing: %s\n", text);
  exit(1);
}

static void queue_rms_norm(void) {
  expect(nvb_rms_norm(backend, &norm, stream));
}
static void queue_linear(void) {
  expect(nvb_linear(backend, &floats, stream));
}
static void queue_linear_int4(void) {
  expect(nvb_linear(backend, &int4, stream));
}
static void queue_rope(void) {
  expect(nvb_rope(backend, &rope, stream));
}
static void queue_decode(void) {
  expect(nvb_attention_decode(attention, &decode, stream));
}
static void allocate_and_free(void) {
  void* block = NULL;
  expect(nvb_memory_allocate(memory, 4096, stream, &block));
  expect(nvb_memory_free(memory, block, stream));
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

static void measure(const char* what, void (*call)(void)) {
  if (only != NULL && strcmp(only, what) != 0) return;
  double samples[SAMPLES];
  for (int i = -1; i < SAMPLES; ++i) {
    expect(nvb_stream_synchronize(stream));
    double start = now();
    for (int k = 0; k < CALLS; ++k) call();
    if (i >= 0) samples[i] = (now() - start) / CALLS;
  }
  expect(nvb_stream_synchronize(stream));
  qsort(samples, SAMPLES, sizeof *samples, ascending);
  printf(
      "{\"operation\": \"queueing\", \"case\": \"%s\", \"ours\": %.4g, \"peer\": null, \"peer_name\": null, "
      "\"unit\": \"µs\"}\n",
      what, samples[SAMPLES / 2]);
  fprintf(stderr, "%-24s %8.3f us   fastest %8.3f us\n", what, samples[SAMPLES / 2], samples[0]);
}

// Zeros: no time depends on values.
static nvb_tensor zeros(uint32_t dtype, int64_t rows, int64_t columns) {
  nvb_tensor tensor;
  const int64_t shape[2] = {rows, columns};
  expect(nvb_memory_allocate_tensor(memory, dtype, 2, shape, stream, &tensor));
  expect(nvb_memory_fill(memory, tensor.data, 0, (size_t)(rows * columns) * (dtype == NVB_DTYPE_BF16 ? 2 : 4), stream));
  return tensor;
}

static nvb_weight* weight(const nvb_tensor* part, uint32_t format) {
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = part;
  desc.part_count = 1;
  desc.source = NVB_SOURCE_DEVICE;
  desc.format = format;
  nvb_weight* made = NULL;
  expect(nvb_weight_create(backend, &desc, stream, &made));
  return made;
}

int main(int count, char** arguments) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = count > 1 ? arguments[1] : "auto";
  only = count > 2 ? arguments[2] : NULL;
  expect(nvb_backend_create(&options, &backend));
  expect(nvb_backend_get_memory_manager(backend, 0, &memory));
  expect(nvb_stream_create(backend, 0, &stream));
  nvb_device_info info;
  nvb_device_info_init(&info);
  expect(nvb_backend_get_device_info(backend, &info));

  nvb_rms_norm_args_init(&norm);
  norm.input = zeros(NVB_DTYPE_BF16, 1, WIDTH);
  norm.output = zeros(NVB_DTYPE_BF16, 1, WIDTH);
  norm.weight = zeros(NVB_DTYPE_BF16, 1, WIDTH);
  norm.weight.rank = 1;
  norm.weight.shape[0] = WIDTH;
  memset(norm.weight.strides, 0, sizeof norm.weight.strides);

  const nvb_tensor part = zeros(NVB_DTYPE_BF16, WIDTH, WIDTH);
  nvb_weight *float_weight = weight(&part, NVB_WEIGHT_FORMAT_AS_IS),
             *int4_weight = weight(&part, NVB_WEIGHT_FORMAT_INT4);
  nvb_linear_args_init(&floats);
  floats.input = norm.input;
  floats.output = norm.output;
  floats.weight = float_weight;
  int4 = floats;
  int4.weight = int4_weight;

  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = cache_options.sequences = 1;
  cache_options.kv_heads = KV_HEADS;
  cache_options.head_dim = HEAD_DIM;
  cache_options.capacity = CAPACITY;
  cache_options.dtype = NVB_DTYPE_BF16;
  nvb_kv_cache* cache = NULL;
  expect(nvb_kv_cache_create(backend, &cache_options, &cache));
  const nvb_tensor query = zeros(NVB_DTYPE_BF16, 1, HEADS * HEAD_DIM),
                   result = zeros(NVB_DTYPE_BF16, 1, HEADS * HEAD_DIM);
  const nvb_tensor key = zeros(NVB_DTYPE_BF16, 1, KV_HEADS * HEAD_DIM), position = zeros(NVB_DTYPE_I32, 1, 1);
  nvb_rope_args_init(&rope);
  rope.query = nvb_tensor_3d(query.data, NVB_DTYPE_BF16, 1, HEADS, HEAD_DIM);
  rope.query_output = rope.query;
  rope.key = nvb_tensor_3d(key.data, NVB_DTYPE_BF16, 1, KV_HEADS, HEAD_DIM);
  rope.value = rope.key;
  rope.positions = nvb_tensor_1d(position.data, NVB_DTYPE_I32, 1);
  rope.cache = cache;
  nvb_attention_options attention_options;
  nvb_attention_options_init(&attention_options);
  attention_options.query_heads = HEADS;
  attention_options.kv_heads = KV_HEADS;
  attention_options.head_dim = HEAD_DIM;
  expect(nvb_attention_create(backend, &attention_options, &attention));
  nvb_attention_decode_args_init(&decode);
  decode.query = rope.query;
  decode.output = nvb_tensor_3d(result.data, NVB_DTYPE_BF16, 1, HEADS, HEAD_DIM);
  decode.cache = cache;
  decode.positions = rope.positions;

  fprintf(stderr, "nvbackend %s on %s\n", nvb_version_string(), info.name);
  print_run(&info);
  measure("rms_norm", queue_rms_norm);
  measure("linear bf16", queue_linear);
  measure("linear int4", queue_linear_int4);
  measure("rope", queue_rope);
  measure("attention decode", queue_decode);
  measure("allocation and free", allocate_and_free);

  expect(nvb_attention_destroy(attention));
  expect(nvb_kv_cache_destroy(cache));
  expect(nvb_weight_destroy(float_weight));
  expect(nvb_weight_destroy(int4_weight));
  expect(nvb_stream_destroy(stream));
  expect(nvb_memory_manager_destroy(memory));
  expect(nvb_backend_destroy(backend));
  return 0;
}
