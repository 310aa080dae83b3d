// attention: a prompt and one more token through a KV cache, checked against the formula written as loops.
//
//   attention [DEVICE]     "auto" (the default), "cpu", "cuda:N"
//
// Eight query heads share two key/value heads; a token sees itself and the 63 before it. The cache has pages of 16
// tokens, and the prompt is the prefix of three sequences: two forks share its pages, and all three go on by
// themselves. Prints the largest errors, and what the pages of three copies would have taken.
#include <math.h>
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>

enum { QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 200, WINDOW = 64 };
enum { QUERY_ROW = QUERY_HEADS * HEAD_DIM, KV_ROW = KV_HEADS * HEAD_DIM, PAGE_TOKENS = 16 };
// Rows of queries, keys and values: the prompt, then one token for each sequence that continues it.
enum { PROMPT = TOKENS - 1, SEQUENCES = 3, ROWS = PROMPT + SEQUENCES };

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "attention: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

// Numbers from -1 to 1 that look random.
static void fill(float* values, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525U + 1013904223U;
    values[i] = (float)(seed >> 8) * (2.0F / 16777216.0F) - 1.0F;
  }
}

// A device copy of `bytes` of host memory, ready for work on `stream`; with NULL the contents are undefined.
static void* to_device(nvb_memory_manager* memory, nvb_stream* stream, const void* host, size_t bytes) {
  void* device = NULL;
  MUST(nvb_memory_allocate(memory, bytes, stream, &device));
  if (host != NULL) MUST(nvb_memory_copy(memory, device, host, bytes, NVB_COPY_HOST_TO_DEVICE, stream));
  return device;
}

// softmax(q·k / √d over the visible keys) · v, of one row and head.
static void reference(const float* query, const float* keys, const float* values, int row, int head, double* output) {
  const int kv_head = head / (QUERY_HEADS / KV_HEADS);
  const int token = row < PROMPT ? row : PROMPT;
  const float* q = query + (size_t)row * QUERY_ROW + head * HEAD_DIM;
  double sum = 0;
  for (int i = 0; i < HEAD_DIM; ++i) output[i] = 0;
  for (int key = token < WINDOW ? 0 : token - WINDOW + 1; key <= token; ++key) {
    const int from = key < PROMPT ? key : row;
    const float* k = keys + (size_t)from * KV_ROW + kv_head * HEAD_DIM;
    const float* v = values + (size_t)from * KV_ROW + kv_head * HEAD_DIM;
    double score = 0;
    for (int i = 0; i < HEAD_DIM; ++i) score += (double)q[i] * k[i];
    const double weight = exp(score / sqrt(HEAD_DIM));
    sum += weight;
    for (int i = 0; i < HEAD_DIM; ++i) output[i] += weight * v[i];
  }
  for (int i = 0; i < HEAD_DIM; ++i) output[i] /= sum;
}

int main(int count, char** arguments) {
  static float query[ROWS * QUERY_ROW], key[ROWS * KV_ROW], value[ROWS * KV_ROW], output[ROWS * QUERY_ROW];
  static int32_t position[ROWS], sequence[ROWS];
  fill(query, ROWS * QUERY_ROW, 1);
  fill(key, ROWS * KV_ROW, 2);
  fill(value, ROWS * KV_ROW, 3);
  for (int i = 0; i < ROWS; ++i) {
    position[i] = i < PROMPT ? i : PROMPT;
    sequence[i] = i < PROMPT ? 0 : i - PROMPT;
  }

  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = count > 1 ? arguments[1] : "auto";
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  nvb_memory_manager* memory = NULL;
  MUST(nvb_backend_get_memory_manager(backend, 0, &memory));
  nvb_stream* stream = NULL;
  MUST(nvb_stream_create(backend, 0, &stream));

  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = 1;
  cache_options.sequences = SEQUENCES;
  cache_options.kv_heads = KV_HEADS;
  cache_options.head_dim = HEAD_DIM;
  cache_options.capacity = TOKENS;
  cache_options.dtype = NVB_DTYPE_F32;
  cache_options.page_tokens = PAGE_TOKENS;
  nvb_kv_cache* cache = NULL;
  MUST(nvb_kv_cache_create(backend, &cache_options, &cache));

  nvb_attention_options attention_options;
  nvb_attention_options_init(&attention_options);
  attention_options.query_heads = QUERY_HEADS;
  attention_options.kv_heads = KV_HEADS;
  attention_options.head_dim = HEAD_DIM;
  attention_options.window = WINDOW;
  nvb_attention* attention = NULL;
  MUST(nvb_attention_create(backend, &attention_options, &attention));

  float* device_query = to_device(memory, stream, query, sizeof query);
  float* device_key = to_device(memory, stream, key, sizeof key);
  float* device_value = to_device(memory, stream, value, sizeof value);
  float* device_output = to_device(memory, stream, NULL, sizeof output);
  int32_t* device_position = to_device(memory, stream, position, sizeof position);
  int32_t* device_sequence = to_device(memory, stream, sequence, sizeof sequence);

  // Keys and values of the prompt go to sequence 0, which needs pages for them first.
  MUST(nvb_kv_cache_reserve(cache, 0, PROMPT, stream));
  nvb_kv_cache_append_args append;
  nvb_kv_cache_append_args_init(&append);
  append.key = nvb_tensor_3d(device_key, NVB_DTYPE_F32, PROMPT, KV_HEADS, HEAD_DIM);
  append.value = nvb_tensor_3d(device_value, NVB_DTYPE_F32, PROMPT, KV_HEADS, HEAD_DIM);
  append.positions = nvb_tensor_1d(device_position, NVB_DTYPE_I32, PROMPT);
  append.cache = cache;
  MUST(nvb_kv_cache_append(backend, &append, stream));

  const int32_t query_starts[] = {0, PROMPT};
  const int32_t kv_lengths[] = {PROMPT};
  nvb_attention_prefill_args prefill;
  nvb_attention_prefill_args_init(&prefill);
  prefill.query = nvb_tensor_3d(device_query, NVB_DTYPE_F32, PROMPT, QUERY_HEADS, HEAD_DIM);
  prefill.output = nvb_tensor_3d(device_output, NVB_DTYPE_F32, PROMPT, QUERY_HEADS, HEAD_DIM);
  prefill.query_starts = query_starts;
  prefill.sequence_count = 1;
  prefill.cache = cache;
  prefill.kv_lengths = kv_lengths;
  MUST(nvb_attention_prefill(attention, &prefill, stream));

  // The other sequences begin with the same prompt: they share its whole pages, and copy what the last one has. Then
  // each gets room for a token of its own.
  for (uint32_t i = 1; i < SEQUENCES; ++i) MUST(nvb_kv_cache_fork(cache, 0, i, PROMPT, stream));
  for (uint32_t i = 0; i < SEQUENCES; ++i) MUST(nvb_kv_cache_reserve(cache, i, TOKENS, stream));
  append.key = nvb_tensor_3d(device_key + PROMPT * KV_ROW, NVB_DTYPE_F32, SEQUENCES, KV_HEADS, HEAD_DIM);
  append.value = nvb_tensor_3d(device_value + PROMPT * KV_ROW, NVB_DTYPE_F32, SEQUENCES, KV_HEADS, HEAD_DIM);
  append.positions = nvb_tensor_1d(device_position + PROMPT, NVB_DTYPE_I32, SEQUENCES);
  append.sequences = nvb_tensor_1d(device_sequence + PROMPT, NVB_DTYPE_I32, SEQUENCES);
  MUST(nvb_kv_cache_append(backend, &append, stream));

  nvb_attention_decode_args decode;
  nvb_attention_decode_args_init(&decode);
  decode.query = nvb_tensor_3d(device_query + PROMPT * QUERY_ROW, NVB_DTYPE_F32, SEQUENCES, QUERY_HEADS, HEAD_DIM);
  decode.output = nvb_tensor_3d(device_output + PROMPT * QUERY_ROW, NVB_DTYPE_F32, SEQUENCES, QUERY_HEADS, HEAD_DIM);
  decode.cache = cache;
  decode.positions = append.positions;
  decode.sequences = append.sequences;
  MUST(nvb_attention_decode(attention, &decode, stream));

  MUST(nvb_memory_copy(memory, output, device_output, sizeof output, NVB_COPY_DEVICE_TO_HOST, stream));
  MUST(nvb_stream_synchronize(stream));

  double error[2] = {0, 0};  // of prefill and decode
  for (int row = 0; row < ROWS; ++row) {
    for (int head = 0; head < QUERY_HEADS; ++head) {
      double expected[HEAD_DIM];
      reference(query, key, value, row, head, expected);
      for (int i = 0; i < HEAD_DIM; ++i) {
        const double difference = fabs(output[(size_t)row * QUERY_ROW + head * HEAD_DIM + i] - expected[i]);
        double* const largest = &error[row >= PROMPT];
        if (isnan(difference) || difference > *largest) *largest = isnan(difference) ? INFINITY : difference;
      }
    }
  }
  printf("largest error of prefill %.1e, of decode %.1e\n", error[0], error[1]);

  nvb_kv_cache_usage usage;
  nvb_kv_cache_usage_init(&usage);
  MUST(nvb_kv_cache_get_usage(cache, &usage));
  const uint32_t used = usage.pages - usage.free_pages, copies = SEQUENCES * ((TOKENS + PAGE_TOKENS - 1) / PAGE_TOKENS);
  printf("%u sequences have %u pages, of which they share %u; copies would have %u\n", usage.sequences, used,
         usage.shared_pages, copies);

  void* const blocks[] = {device_query, device_key, device_value, device_output, device_position, device_sequence};
  for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; ++i) MUST(nvb_memory_free(memory, blocks[i], stream));
  nvb_attention_destroy(attention);
  nvb_kv_cache_destroy(cache);
  nvb_stream_destroy(stream);
  nvb_memory_manager_destroy(memory);
  nvb_backend_destroy(backend);
  // Outputs are of the order of 1; F32 leaves errors near 1e-7.
  return error[0] < 1e-5 && error[1] < 1e-5 && used < copies ? 0 : 1;
}
