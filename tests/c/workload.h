// A small engine's calls, for programs that take something away from the process meanwhile: memory, threads,
// descriptors.
//
// A call may succeed, or fail with an error of which the library knows the cause; it never reports a bug, and what was
// made is given back at the end.
#ifndef NVBACKEND_TESTS_WORKLOAD_H
#define NVBACKEND_TESTS_WORKLOAD_H

#include "check.h"

enum { WORKLOAD_WIDTH = 512, WORKLOAD_ROWS = 640, WORKLOAD_TOKENS = 3, WORKLOAD_HEADS = 2, WORKLOAD_HEAD_DIM = 64 };

typedef struct {
  int calls;
  int failed;
  // Calls that reported a bug of the library.
  int broken;
  // Calls that failed otherwise than for want of what was taken away; only `broken` is an error of every program.
  char first[768];
} workload_result;

typedef struct {
  workload_result result;
  nvb_backend* backend;
  nvb_memory_manager* memory;
  nvb_stream* stream;
} workload_state;

// Whether the call succeeded.
static inline int workload_try(workload_state* state, const char* what, nvb_status status) {
  ++state->result.calls;
  if (status == NVB_OK) return 1;
  ++state->result.failed;
  char text[512];
  nvb_last_error_message(text, sizeof text);
  if (status == NVB_ERROR_INTERNAL || text[0] == '\0') {
    ++state->result.broken;
    fprintf(stderr, "%s: %s: %s\n", what, nvb_status_name(status), text);
  }
  if (state->result.first[0] == '\0') {
    snprintf(state->result.first, sizeof state->result.first, "%s: %s", nvb_status_name(status), text);
  }
  return 0;
}
#define TRY(call) workload_try(state, #call, (call))

// What an engine must be able to rely on: giving back.
#define GIVE_BACK(call)                                      \
  do {                                                       \
    if ((call) != NVB_OK) {                                  \
      char given_text[512];                                  \
      nvb_last_error_message(given_text, sizeof given_text); \
      fprintf(stderr, "%s fails: %s\n", #call, given_text);  \
      ++state->result.broken;                                \
    }                                                        \
  } while (0)

static float workload_floats[WORKLOAD_ROWS * WORKLOAD_WIDTH];
static float workload_out[WORKLOAD_TOKENS * WORKLOAD_ROWS];

static inline void workload_product(workload_state* state, const nvb_weight* weight) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(workload_floats, NVB_DTYPE_F32, WORKLOAD_TOKENS, WORKLOAD_WIDTH);
  args.output = nvb_tensor_2d(workload_out, NVB_DTYPE_F32, WORKLOAD_TOKENS, WORKLOAD_ROWS);
  args.weight = weight;
  TRY(nvb_linear(state->backend, &args, state->stream));
}

static inline void workload_weights(workload_state* state) {
  static const struct {
    uint32_t format, granularity, group_size, zero_points, clipping;
  } kinds[] = {{NVB_WEIGHT_FORMAT_AS_IS, 0, 0, 0, 0},
               {NVB_WEIGHT_FORMAT_BF16, 0, 0, 0, 0},
               {NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_GRANULARITY_TENSOR, 0, 0, 0},
               {NVB_WEIGHT_FORMAT_INT8, NVB_GRANULARITY_ROWS, 0, 0, 0},
               {NVB_WEIGHT_FORMAT_INT4, NVB_GRANULARITY_GROUPS, 32, 1, 1}};
  nvb_tensor part = nvb_tensor_2d(workload_floats, NVB_DTYPE_F32, WORKLOAD_ROWS, WORKLOAD_WIDTH);
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i) {
    nvb_weight_desc desc;
    nvb_weight_desc_init(&desc);
    desc.parts = &part;
    desc.part_count = 1;
    desc.format = kinds[i].format;
    desc.granularity = kinds[i].granularity;
    desc.group_size = kinds[i].group_size;
    desc.zero_points = kinds[i].zero_points;
    desc.clipping = kinds[i].clipping;
    nvb_weight* weight = NULL;
    if (!TRY(nvb_weight_create(state->backend, &desc, state->stream, &weight))) continue;
    workload_product(state, weight);
    nvb_tensor values = nvb_tensor_2d(NULL, NVB_DTYPE_BF16, WORKLOAD_ROWS, WORKLOAD_WIDTH);
    if (TRY(nvb_memory_allocate(state->memory, WORKLOAD_ROWS * WORKLOAD_WIDTH * 2, state->stream, &values.data))) {
      TRY(nvb_weight_dequantize(weight, &values, state->stream));
      GIVE_BACK(nvb_memory_free(state->memory, values.data, state->stream));
    }
    GIVE_BACK(nvb_weight_destroy(weight));
  }
  // Codes of a file, GGUF's Q8_0: 34 bytes for 32 values.
  static unsigned char codes[WORKLOAD_ROWS * WORKLOAD_WIDTH / 32 * 34];
  nvb_weight_blocks blocks;
  memset(&blocks, 0, sizeof blocks);
  blocks.data = codes;
  blocks.bytes = sizeof codes;
  blocks.rows = WORKLOAD_ROWS;
  blocks.columns = WORKLOAD_WIDTH;
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.blocks = &blocks;
  desc.part_count = 1;
  desc.source_format = NVB_SOURCE_FORMAT_GGUF_Q8_0;
  nvb_weight* weight = NULL;
  if (TRY(nvb_weight_create(state->backend, &desc, state->stream, &weight))) {
    workload_product(state, weight);
    GIVE_BACK(nvb_weight_destroy(weight));
  }
}

static inline void workload_attention(workload_state* state) {
  enum { CAPACITY = 256, SEQUENCES = 2 };
  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = 2;
  cache_options.sequences = SEQUENCES;
  cache_options.kv_heads = 1;
  cache_options.head_dim = WORKLOAD_HEAD_DIM;
  cache_options.capacity = CAPACITY;
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = WORKLOAD_HEADS;
  options.kv_heads = 1;
  options.head_dim = WORKLOAD_HEAD_DIM;
  options.soft_cap = 50;
  nvb_kv_cache* cache = NULL;
  nvb_attention* attention = NULL;
  int made = TRY(nvb_kv_cache_create(state->backend, &cache_options, &cache));
  if (TRY(nvb_attention_create(state->backend, &options, &attention)) && made) {
    static int32_t positions[CAPACITY];
    for (int i = 0; i < CAPACITY; ++i) positions[i] = i;
    nvb_kv_cache_append_args append;
    nvb_kv_cache_append_args_init(&append);
    append.key = nvb_tensor_make(workload_floats, NVB_DTYPE_F32, 3, CAPACITY, 1, WORKLOAD_HEAD_DIM, 0);
    append.value = append.key;
    append.positions = nvb_tensor_make(positions, NVB_DTYPE_I32, 1, CAPACITY, 0, 0, 0);
    append.cache = cache;
    TRY(nvb_kv_cache_append(state->backend, &append, state->stream));
    const int32_t starts[2] = {0, CAPACITY}, lengths[1] = {CAPACITY};
    nvb_attention_prefill_args prefill;
    nvb_attention_prefill_args_init(&prefill);
    static float query[CAPACITY * WORKLOAD_HEADS * WORKLOAD_HEAD_DIM], output[sizeof query / sizeof *query];
    prefill.query = nvb_tensor_make(query, NVB_DTYPE_F32, 3, CAPACITY, WORKLOAD_HEADS, WORKLOAD_HEAD_DIM, 0);
    prefill.output = nvb_tensor_make(output, NVB_DTYPE_F32, 3, CAPACITY, WORKLOAD_HEADS, WORKLOAD_HEAD_DIM, 0);
    prefill.query_starts = starts;
    prefill.sequence_count = 1;
    prefill.cache = cache;
    prefill.kv_lengths = lengths;
    TRY(nvb_attention_prefill(attention, &prefill, state->stream));
    const int32_t last[1] = {CAPACITY - 1};
    int32_t row = last[0];
    nvb_attention_decode_args decode;
    nvb_attention_decode_args_init(&decode);
    decode.query = nvb_tensor_make(query, NVB_DTYPE_F32, 3, 1, WORKLOAD_HEADS, WORKLOAD_HEAD_DIM, 0);
    decode.output = nvb_tensor_make(output, NVB_DTYPE_F32, 3, 1, WORKLOAD_HEADS, WORKLOAD_HEAD_DIM, 0);
    decode.cache = cache;
    decode.positions = nvb_tensor_make(&row, NVB_DTYPE_I32, 1, 1, 0, 0, 0);
    TRY(nvb_attention_decode(attention, &decode, state->stream));
  }
  GIVE_BACK(nvb_attention_destroy(attention));
  GIVE_BACK(nvb_kv_cache_destroy(cache));
}

static inline void workload_sampling(workload_state* state) {
  int32_t tokens[WORKLOAD_TOKENS];
  nvb_argmax_args argmax;
  nvb_argmax_args_init(&argmax);
  argmax.logits = nvb_tensor_2d(workload_floats, NVB_DTYPE_F32, WORKLOAD_TOKENS, 50000);
  argmax.tokens = nvb_tensor_make(tokens, NVB_DTYPE_I32, 1, WORKLOAD_TOKENS, 0, 0, 0);
  TRY(nvb_argmax(state->backend, &argmax, state->stream));
  nvb_sample_args sample;
  nvb_sample_args_init(&sample);
  sample.logits = argmax.logits;
  sample.tokens = argmax.tokens;
  sample.temperature = 1;
  sample.top_k = 64;
  sample.top_p = 0.9f;
  TRY(nvb_sample(state->backend, &sample, state->stream));
}

typedef nvb_status (*workload_text)(nvb_memory_manager*, char*, size_t, size_t*);

static inline void workload_memory(workload_state* state) {
  enum { BLOCKS = 300 };
  nvb_memory_options options;
  nvb_memory_options_init(&options);
  options.leak_tracking = NVB_LEAK_TRACKING_FULL;
  options.trace_events = 4096;
  nvb_memory_manager* memory = NULL;
  if (!TRY(nvb_memory_manager_create(state->backend, &options, &memory))) return;
  nvb_pool* pool = NULL;
  void *blocks[BLOCKS] = {NULL}, *large[8] = {NULL}, *inside = NULL;
  int pooled = TRY(nvb_pool_create(memory, "workload", &pool));
  for (int i = 0; i < BLOCKS; ++i) {
    TRY(nvb_memory_allocate(memory, (size_t)(1 + i * 37 % 30000), state->stream, &blocks[i]));
  }
  for (int i = 0; i < 8; ++i) TRY(nvb_memory_allocate(memory, (size_t)(1 + i) << 20, state->stream, &large[i]));
  if (pooled) {
    for (int i = 0; i < 20; ++i) TRY(nvb_pool_allocate(pool, (size_t)(100 << i % 12), state->stream, &inside));
    TRY(nvb_pool_clear(pool, NULL));
  }
  const workload_text texts[] = {nvb_memory_get_snapshot, nvb_memory_get_leak_report};
  char text[256];
  for (int i = 0; i < 2; ++i) TRY(texts[i](memory, text, sizeof text, NULL));
  for (int i = 0; i < BLOCKS; ++i) GIVE_BACK(nvb_memory_free(memory, blocks[i], i % 2 ? state->stream : NULL));
  for (int i = 0; i < 8; ++i) GIVE_BACK(nvb_memory_free(memory, large[i], state->stream));
  TRY(nvb_memory_trim(memory, 0, NULL));
  GIVE_BACK(nvb_pool_destroy(pool));
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  if (TRY(nvb_memory_get_statistics(memory, &statistics)) && (statistics.allocated != 0 || statistics.blocks != 0)) {
    fprintf(stderr, "%llu bytes are left in %llu blocks\n", (unsigned long long)statistics.allocated,
            (unsigned long long)statistics.blocks);
    ++state->result.broken;
  }
  GIVE_BACK(nvb_memory_manager_destroy(memory));
}

static inline void workload_gguf(workload_state* state) {
  // Version 3 without tensors, and an array of texts as long as a vocabulary's.
  enum { TEXTS = 40000 };
  static unsigned char bytes[128 + TEXTS * 9];
  size_t size = 0;
#define PUT(type, ...)                                 \
  do {                                                 \
    const type put_value[] = {__VA_ARGS__};            \
    memcpy(bytes + size, put_value, sizeof put_value); \
    size += sizeof put_value;                          \
  } while (0)
  PUT(char, 'G', 'G', 'U', 'F');
  PUT(uint32_t, 3);
  PUT(uint64_t, 0, 1, 6);
  PUT(char, 't', 'o', 'k', 'e', 'n', 's');
  PUT(uint32_t, 9, 8);
  PUT(uint64_t, TEXTS);
  for (int i = 0; i < TEXTS; ++i) {
    PUT(uint64_t, 1);
    PUT(char, 'x');
  }
#undef PUT
  nvb_gguf* file = NULL;
  if (!TRY(nvb_gguf_open_memory(bytes, size, &file))) return;
  const char* text = NULL;
  size_t length = 0;
  TRY(nvb_gguf_get_text(file, "tokens", TEXTS - 1, &text, &length));
  GIVE_BACK(nvb_gguf_destroy(file));
}

static inline void workload_words(workload_state* state) {
  char text[512];
  nvb_linear_case product;
  nvb_linear_case_init(&product);
  product.rows = 1;
  product.columns = product.depth = 256;
  product.input_dtype = NVB_DTYPE_BF16;
  product.format = NVB_WEIGHT_FORMAT_INT8;
  TRY(nvb_kernel_explain(state->backend, &product, text, sizeof text, NULL));
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  options.rounds = 1;
  TRY(nvb_tune_linear(state->backend, &product, 1, &options, NULL, NULL, NULL));
  nvb_configuration* configuration = NULL;
  if (TRY(nvb_configuration_create(NVB_PRESET_INFERENCE, &configuration))) {
    TRY(nvb_configuration_apply_json(configuration, "{\"threads\": 2, \"memory\": {\"limit\": \"8GB\"}}"));
    TRY(nvb_configuration_get_json(configuration, text, sizeof text, NULL));
    GIVE_BACK(nvb_configuration_destroy(configuration));
  }
}

static inline workload_result workload(void) {
  workload_state zero = {{0, 0, 0, ""}, NULL, NULL, NULL};
  workload_state* state = &zero;
  for (int i = 0; i < WORKLOAD_ROWS * WORKLOAD_WIDTH; ++i) workload_floats[i] = (float)(i % 251 - 125) / 64;
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cpu";
  options.threads = 2;
  if (!TRY(nvb_backend_create(&options, &state->backend))) return state->result;
  if (TRY(nvb_backend_get_memory_manager(state->backend, 0, &state->memory))) {
    if (!TRY(nvb_stream_create(state->backend, 0, &state->stream))) state->stream = NULL;
    TRY(nvb_backend_set_profiling(state->backend, 1));
    workload_memory(state);
    workload_weights(state);
    workload_attention(state);
    workload_sampling(state);
    workload_gguf(state);
    workload_words(state);
    nvb_event* event = NULL;
    if (TRY(nvb_event_create(state->backend, &event))) {
      if (state->stream != NULL) TRY(nvb_event_record(event, state->stream));
      GIVE_BACK(nvb_event_destroy(event));
    }
  }
  GIVE_BACK(nvb_stream_destroy(state->stream));
  GIVE_BACK(nvb_memory_manager_destroy(state->memory));
  GIVE_BACK(nvb_backend_destroy(state->backend));
  return state->result;
}

#endif  // NVBACKEND_TESTS_WORKLOAD_H
