// graph_transformer: a decode step of a transformer layer, written as models have it (sums, norms and activations are
// operations of their own), recorded, validated, optimised, converted to FP8, and profiled.
//
//   graph_transformer [DEVICE [FILE]]     "auto" (the default), "cpu", "cuda:N"; FILE receives the optimised layer as
//   DOT
#include <math.h>
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  SEQUENCES = 2,
  WIDTH = 256,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD_DIM = 64,
  KV_WIDTH = KV_HEADS * HEAD_DIM,
  HIDDEN = 512
};
enum { STEPS = 4, CAPACITY = 16, LONGEST = HIDDEN };

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "graph_transformer: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

typedef struct {
  nvb_backend* backend;
  nvb_memory_manager* memory;
  nvb_stream* stream;
  nvb_weight *query, *key, *value, *output, *gate, *up, *down;
  nvb_kv_cache* cache;
  nvb_attention* attention;
  // Rows of activations; `x` is the residual stream.
  float *x, *normed, *q, *k, *v, *attended, *branch, *gated, *upped, *norm;
  int32_t *positions, *sequences;
} layer;

static nvb_weight* create_weight(const layer* l, int64_t rows, int64_t columns) {
  static float values[HIDDEN * WIDTH];
  for (int64_t i = 0; i < rows * columns; ++i) values[i] = (float)((i * 37 + rows) % 101 - 50) / 1500;
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, rows, columns);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  MUST(nvb_weight_create(l->backend, &desc, l->stream, &weight));
  return weight;
}

static void* allocate(const layer* l, size_t bytes) {
  void* memory = NULL;
  MUST(nvb_memory_allocate(l->memory, bytes, l->stream, &memory));
  return memory;
}

static void create(layer* l, const char* device) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = device;
  MUST(nvb_backend_create(&options, &l->backend));
  MUST(nvb_backend_get_memory_manager(l->backend, 0, &l->memory));
  MUST(nvb_stream_create(l->backend, 0, &l->stream));
  l->query = create_weight(l, WIDTH, WIDTH);
  l->key = create_weight(l, KV_WIDTH, WIDTH);
  l->value = create_weight(l, KV_WIDTH, WIDTH);
  l->output = create_weight(l, WIDTH, WIDTH);
  l->gate = create_weight(l, HIDDEN, WIDTH);
  l->up = create_weight(l, HIDDEN, WIDTH);
  l->down = create_weight(l, WIDTH, HIDDEN);
  nvb_kv_cache_options cache;
  nvb_kv_cache_options_init(&cache);
  cache.layers = 1;
  cache.sequences = SEQUENCES;
  cache.kv_heads = KV_HEADS;
  cache.head_dim = HEAD_DIM;
  cache.capacity = CAPACITY;
  cache.dtype = NVB_DTYPE_F32;
  MUST(nvb_kv_cache_create(l->backend, &cache, &l->cache));
  nvb_attention_options attention;
  nvb_attention_options_init(&attention);
  attention.query_heads = HEADS;
  attention.kv_heads = KV_HEADS;
  attention.head_dim = HEAD_DIM;
  MUST(nvb_attention_create(l->backend, &attention, &l->attention));
  float** const activations[] = {&l->x,        &l->normed, &l->q,     &l->k,     &l->v,
                                 &l->attended, &l->branch, &l->gated, &l->upped, &l->norm};
  for (size_t i = 0; i < sizeof activations / sizeof *activations; ++i) {
    *activations[i] = allocate(l, SEQUENCES * LONGEST * sizeof(float));
  }
  l->positions = allocate(l, SEQUENCES * sizeof(int32_t));
  l->sequences = allocate(l, SEQUENCES * sizeof(int32_t));
  float ones[WIDTH];
  for (int i = 0; i < WIDTH; ++i) ones[i] = 1;
  MUST(nvb_memory_copy(l->memory, l->norm, ones, sizeof ones, NVB_COPY_HOST_TO_DEVICE, l->stream));
  int32_t sequences[SEQUENCES];
  for (int i = 0; i < SEQUENCES; ++i) sequences[i] = i;
  MUST(nvb_memory_copy(l->memory, l->sequences, sequences, sizeof sequences, NVB_COPY_HOST_TO_DEVICE, l->stream));
  MUST(nvb_stream_synchronize(l->stream));
}

static void destroy(layer* l) {
  nvb_weight* const weights[] = {l->query, l->key, l->value, l->output, l->gate, l->up, l->down};
  for (size_t i = 0; i < sizeof weights / sizeof *weights; ++i) MUST(nvb_weight_destroy(weights[i]));
  MUST(nvb_kv_cache_destroy(l->cache));
  MUST(nvb_attention_destroy(l->attention));
  void* const memory[] = {l->x,      l->normed, l->q,     l->k,    l->v,         l->attended,
                          l->branch, l->gated,  l->upped, l->norm, l->positions, l->sequences};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; ++i) MUST(nvb_memory_free(l->memory, memory[i], l->stream));
  MUST(nvb_stream_destroy(l->stream));
  MUST(nvb_memory_manager_destroy(l->memory));
  MUST(nvb_backend_destroy(l->backend));
}

static nvb_tensor rows(float* data, int64_t width) {
  return nvb_tensor_2d(data, NVB_DTYPE_F32, SEQUENCES, width);
}

static nvb_tensor heads(float* data, int64_t count) {
  return nvb_tensor_make(data, NVB_DTYPE_F32, 3, SEQUENCES, count, HEAD_DIM, 0);
}

static void normalize(const layer* l) {
  nvb_rms_norm_args args;
  nvb_rms_norm_args_init(&args);
  args.input = rows(l->x, WIDTH);
  args.weight = nvb_tensor_1d(l->norm, NVB_DTYPE_F32, WIDTH);
  args.output = rows(l->normed, WIDTH);
  MUST(nvb_rms_norm(l->backend, &args, l->stream));
}

static void product(const layer* l, const nvb_weight* weight, nvb_tensor input, nvb_tensor output) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = input;
  args.weight = weight;
  args.output = output;
  MUST(nvb_linear(l->backend, &args, l->stream));
}

// x += branch.
static void add_branch(const layer* l) {
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = rows(l->x, WIDTH);
  args.second = rows(l->branch, WIDTH);
  MUST(nvb_add(l->backend, &args, l->stream));
}

static void forward(const layer* l) {
  const nvb_tensor positions = nvb_tensor_1d(l->positions, NVB_DTYPE_I32, SEQUENCES);
  normalize(l);
  product(l, l->query, rows(l->normed, WIDTH), rows(l->q, WIDTH));
  product(l, l->key, rows(l->normed, WIDTH), rows(l->k, KV_WIDTH));
  product(l, l->value, rows(l->normed, WIDTH), rows(l->v, KV_WIDTH));
  nvb_rope_args rope;
  nvb_rope_args_init(&rope);
  rope.query = rope.query_output = heads(l->q, HEADS);
  rope.key = heads(l->k, KV_HEADS);
  rope.value = heads(l->v, KV_HEADS);
  rope.positions = positions;
  rope.sequences = nvb_tensor_1d(l->sequences, NVB_DTYPE_I32, SEQUENCES);
  rope.cache = l->cache;
  MUST(nvb_rope(l->backend, &rope, l->stream));
  nvb_attention_decode_args decode;
  nvb_attention_decode_args_init(&decode);
  decode.query = heads(l->q, HEADS);
  decode.output = heads(l->attended, HEADS);
  decode.cache = l->cache;
  decode.positions = positions;
  MUST(nvb_attention_decode(l->attention, &decode, l->stream));
  product(l, l->output, rows(l->attended, WIDTH), rows(l->branch, WIDTH));
  add_branch(l);

  normalize(l);
  product(l, l->gate, rows(l->normed, WIDTH), rows(l->gated, HIDDEN));
  product(l, l->up, rows(l->normed, WIDTH), rows(l->upped, HIDDEN));
  nvb_gated_activation_args activation;
  nvb_gated_activation_args_init(&activation);
  activation.gate = activation.output = rows(l->gated, HIDDEN);
  activation.up = rows(l->upped, HIDDEN);
  activation.activation = NVB_ACTIVATION_SILU;
  MUST(nvb_gated_activation(l->backend, &activation, l->stream));
  product(l, l->down, rows(l->gated, HIDDEN), rows(l->branch, WIDTH));
  add_branch(l);
}

// What STEPS steps leave in the residual stream: by calls, or by launches of a graph.
static void run(const layer* l, nvb_graph* graph, float result[SEQUENCES * WIDTH]) {
  const size_t bytes = SEQUENCES * WIDTH * sizeof(float);
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) result[i] = (float)(i % 23 - 11) / 11;
  MUST(nvb_memory_copy(l->memory, l->x, result, bytes, NVB_COPY_HOST_TO_DEVICE, l->stream));
  for (int32_t step = 0; step < STEPS; ++step) {
    const int32_t positions[SEQUENCES] = {step, step};
    MUST(nvb_memory_copy(l->memory, l->positions, positions, sizeof positions, NVB_COPY_HOST_TO_DEVICE, l->stream));
    MUST(nvb_stream_synchronize(l->stream));
    if (graph != NULL) {
      MUST(nvb_graph_launch(graph, l->stream));
    } else {
      forward(l);
    }
  }
  MUST(nvb_memory_copy(l->memory, result, l->x, bytes, NVB_COPY_DEVICE_TO_HOST, l->stream));
  MUST(nvb_stream_synchronize(l->stream));
}

typedef nvb_status (*text_of_graph)(const nvb_graph*, uint32_t, char*, size_t, size_t*);

static void write_text(FILE* file, text_of_graph get, const nvb_graph* graph, uint32_t format) {
  size_t needed = 0;
  MUST(get(graph, format, NULL, 0, &needed));
  char* text = malloc(needed);
  if (text == NULL || file == NULL) exit(1);
  MUST(get(graph, format, text, needed, NULL));
  fputs(text, file);
  free(text);
}

// ‖one − other‖ / ‖other‖
static double distance(const float* one, const float* other) {
  double squares = 0, reference = 0;
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) {
    squares += ((double)one[i] - other[i]) * ((double)one[i] - other[i]);
    reference += (double)other[i] * other[i];
  }
  return sqrt(squares / reference);
}

// Compile for FP8: as many products as stay within 2 % of the recorded layer's output, on what lies in memory now.
// Devices without FP8 arithmetic keep weights in FP8 for their bytes alone.
static void compile_fp8(const layer* l, nvb_graph* graph, const float* expected) {
  nvb_graph_fp8_options options;
  nvb_graph_fp8_options_init(&options);
  options.maximum_error = 0.02;
  options.measure_times = 1;
  nvb_status status = nvb_graph_convert_fp8(graph, &options);
  if (status == NVB_ERROR_FP8) {
    char text[256];
    nvb_last_error_message(text, sizeof text);
    printf("%s\n", text);
    options.storage_only = 1;
    status = nvb_graph_convert_fp8(graph, &options);
  }
  must(status, "nvb_graph_convert_fp8");
  nvb_graph_fp8_info info;
  nvb_graph_fp8_info_init(&info);
  MUST(nvb_graph_get_fp8_info(graph, &info));
  printf(
      "FP8: %u of %u products with %.0f %% of their operations, weights of %llu instead of %llu bytes, error %.4f, "
      "%.1f us a launch "
      "instead of %.1f\n",
      info.converted, info.products, 100 * info.converted_operations / info.operations,
      (unsigned long long)info.weight_bytes_after, (unsigned long long)info.weight_bytes_before, info.error,
      info.seconds_after * 1e6, info.seconds_before * 1e6);
  for (uint32_t i = 0; i < info.products; ++i) {
    nvb_graph_fp8_product product;
    nvb_graph_fp8_product_init(&product);
    MUST(nvb_graph_get_fp8_product(graph, i, &product));
    printf("  node %u, %llu x %llu: error %.4f alone; %s\n", product.node, (unsigned long long)product.rows,
           (unsigned long long)product.columns, product.error, product.reason);
  }
  float found[SEQUENCES * WIDTH];
  run(l, graph, found);
  printf("after %d steps in FP8 the residual stream is off by %.4f\n", STEPS, distance(found, expected));
}

int main(int argc, char** argv) {
  layer l = {0};
  create(&l, argc > 1 ? argv[1] : "auto");
  static float expected[SEQUENCES * WIDTH], found[SEQUENCES * WIDTH];
  run(&l, NULL, expected);

  // Prepare: the very same calls, which are noted instead of run.
  nvb_graph* graph = NULL;
  MUST(nvb_graph_create(l.backend, &graph));
  MUST(nvb_graph_begin(graph, l.stream));
  forward(&l);
  MUST(nvb_graph_end(graph, l.stream));

  // Validate: what a device lacks, here and elsewhere.
  const char* const devices[] = {NULL, "RTX 3090", "H200"};
  for (int i = 0; i < 3; ++i) {
    nvb_graph_validation validation;
    nvb_graph_validation_init(&validation);
    MUST(nvb_graph_validate(graph, devices[i], &validation));
    printf("%s: %u errors, %u warnings\n", validation.device, validation.errors, validation.warnings);
  }

  // Optimise at a level. Between launches nobody reads these.
  float* const hidden[] = {l.normed, l.q, l.k, l.v, l.attended, l.branch, l.gated, l.upped};
  for (size_t i = 0; i < sizeof hidden / sizeof *hidden; ++i) {
    const nvb_tensor tensor = rows(hidden[i], LONGEST);
    MUST(nvb_graph_mark_internal(graph, &tensor));
  }
  MUST(nvb_graph_optimize(graph, NVB_OPTIMIZE_O2, NULL));
  write_text(stdout, nvb_graph_get_report, graph, NVB_GRAPH_FORMAT_TEXT);
  run(&l, graph, found);
  // Level 2 may leave out a rounding and add in another order: 1e-5 of the norm is far more than that in F32.
  if (!(distance(found, expected) <= 1e-5)) {
    fprintf(stderr, "graph_transformer: the optimised layer is off by %g\n", distance(found, expected));
    return 1;
  }
  compile_fp8(&l, graph, expected);

  // Statistics: where the time goes.
  MUST(nvb_graph_profile(graph, NULL));
  write_text(stdout, nvb_graph_get_profile, graph, NVB_GRAPH_FORMAT_TEXT);
  if (argc > 2) {
    FILE* file = fopen(argv[2], "w");
    write_text(file, nvb_graph_describe, graph, NVB_GRAPH_FORMAT_GRAPHVIZ);
    if (fclose(file) != 0) return 1;
  }
  MUST(nvb_graph_destroy(graph));
  destroy(&l);
  return 0;
}
