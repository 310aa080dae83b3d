// Workspace of the caller's: what a query says of arguments without memory, operations that run in exactly as much, and
// what is refused.
#include "check.h"

enum { ROWS = 40, WIDTH = 64, VOCABULARY = 5000, BLOCK = 4 << 20 };

typedef struct {
  fixture* f;
  nvb_weight* weight;        // INT4 [WIDTH, WIDTH]
  nvb_attention* attention;  // 2 heads of 32
  nvb_kv_cache* cache;
  void *data, *workspace;
  nvb_linear_args linear;
  nvb_grouped_linear_args grouped_linear;
  nvb_matmul_args matmul;
  nvb_attention_decode_args attention_decode;
  nvb_argmax_args argmax;
  nvb_sample_args sample;
  nvb_sort_rows_args sort_rows;
} bench;

static bench set_up(fixture* f) {
  bench b = {.f = f};
  static float values[WIDTH * WIDTH];
  uint32_t state = 3;
  for (int i = 0; i < WIDTH * WIDTH; ++i) values[i] = next_number(&state);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.format = NVB_WEIGHT_FORMAT_INT4;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.weight));
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = 2;
  options.kv_heads = 1;
  options.head_dim = 32;
  CHECK_OK(nvb_attention_create(f->backend, &options, &b.attention));
  nvb_kv_cache_options cache;
  nvb_kv_cache_options_init(&cache);
  cache.layers = cache.sequences = cache.kv_heads = 1;
  cache.head_dim = 32;
  cache.capacity = 16;
  cache.dtype = NVB_DTYPE_F32;
  CHECK_OK(nvb_kv_cache_create(f->backend, &cache, &b.cache));
  CHECK_OK(nvb_memory_allocate(f->memory, BLOCK, f->stream, &b.data));
  CHECK_OK(nvb_memory_fill(f->memory, b.data, 0, BLOCK, f->stream));

  // Shapes alone: nothing of it has memory yet.
  nvb_linear_args_init(&b.linear);
  b.linear.input = b.linear.output = nvb_tensor_2d(NULL, NVB_DTYPE_F32, ROWS, WIDTH);
  b.linear.weight = b.weight;
  nvb_grouped_linear_args_init(&b.grouped_linear);
  b.grouped_linear.input = b.linear.input;
  b.grouped_linear.expert_offsets = nvb_tensor_1d(NULL, NVB_DTYPE_I32, 3);
  b.grouped_linear.weight = b.weight;
  b.grouped_linear.output = nvb_tensor_2d(NULL, NVB_DTYPE_F32, ROWS, WIDTH / 2);
  nvb_matmul_args_init(&b.matmul);
  b.matmul.a = b.matmul.b = b.matmul.output = nvb_tensor_2d(NULL, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_attention_decode_args_init(&b.attention_decode);
  b.attention_decode.query = b.attention_decode.output = nvb_tensor_3d(NULL, NVB_DTYPE_F32, 1, 2, 32);
  b.attention_decode.positions = nvb_tensor_1d(NULL, NVB_DTYPE_I32, 1);
  b.attention_decode.cache = b.cache;
  nvb_argmax_args_init(&b.argmax);
  b.argmax.logits = nvb_tensor_2d(NULL, NVB_DTYPE_F32, 2, VOCABULARY);
  b.argmax.tokens = nvb_tensor_1d(NULL, NVB_DTYPE_I32, 2);
  nvb_sample_args_init(&b.sample);
  b.sample.logits = b.argmax.logits;
  b.sample.tokens = b.argmax.tokens;
  b.sample.temperature = 1;
  nvb_sort_rows_args_init(&b.sort_rows);
  b.sort_rows.input = b.argmax.logits;
  b.sort_rows.output = nvb_tensor_2d(NULL, NVB_DTYPE_I32, 2, 40);
  b.sort_rows.order = NVB_ORDER_DESCENDING;
  return b;
}

static void tear_down(bench* b) {
  CHECK_OK(nvb_weight_destroy(b->weight));
  CHECK_OK(nvb_attention_destroy(b->attention));
  CHECK_OK(nvb_kv_cache_destroy(b->cache));
  release(b->f, b->data);
  release(b->f, b->workspace);
}

// Room for every tensor of a call.
static void place(bench* b, nvb_tensor* tensor, size_t index) {
  tensor->data = (char*)b->data + index * (BLOCK / 4);
}

static void place_all(bench* b) {
  place(b, &b->linear.input, 0);
  place(b, &b->linear.output, 1);
  place(b, &b->grouped_linear.input, 0);
  place(b, &b->grouped_linear.output, 1);
  place(b, &b->grouped_linear.expert_offsets, 2);
  place(b, &b->matmul.a, 0);
  place(b, &b->matmul.b, 1);
  place(b, &b->matmul.output, 2);
  place(b, &b->attention_decode.query, 0);
  place(b, &b->attention_decode.output, 1);
  place(b, &b->attention_decode.positions, 2);
  place(b, &b->argmax.logits, 0);
  place(b, &b->argmax.tokens, 1);
  place(b, &b->sample.logits, 0);
  place(b, &b->sample.tokens, 1);
  place(b, &b->sort_rows.input, 0);
  place(b, &b->sort_rows.output, 1);
}

#define QUERY(name, object) nvb_##name##_get_workspace_size(object, &b->name, &bytes)

// The query without memory, and the call in as many bytes.
#define CHECK_WORKSPACE(name, object)                                                                          \
  do {                                                                                                         \
    size_t bytes = 77;                                                                                         \
    CHECK_FAILS(nvb_##name##_get_workspace_size(NULL, &b->name, &bytes), NVB_ERROR_INVALID_ARGUMENT, "NULL");  \
    CHECK_FAILS(nvb_##name##_get_workspace_size(object, NULL, &bytes), NVB_ERROR_INVALID_ARGUMENT, "NULL");    \
    CHECK_FAILS(nvb_##name##_get_workspace_size(object, &b->name, NULL), NVB_ERROR_INVALID_ARGUMENT, "bytes"); \
    CHECK_EQUAL(bytes, 77);                                                                                    \
    CHECK_OK(QUERY(name, object));                                                                             \
    if (test_on_cpu()) CHECK_EQUAL(bytes, 0);                                                                  \
    nvb_##name##_args shape = b->name;                                                                         \
    place_all(b);                                                                                              \
    size_t same = bytes;                                                                                       \
    CHECK_OK(QUERY(name, object));                                                                             \
    CHECK_EQUAL(bytes, same);                                                                                  \
    CHECK_OK(nvb_memory_allocate(b->f->memory, bytes == 0 ? 1 : bytes, b->f->stream, &b->workspace));          \
    CHECK_OK(nvb_stream_set_workspace(b->f->stream, b->workspace, bytes == 0 ? 1 : bytes));                    \
    CHECK_OK(nvb_##name(object, &b->name, b->f->stream));                                                      \
    if (bytes > 1) {                                                                                           \
      CHECK_OK(nvb_stream_set_workspace(b->f->stream, b->workspace, bytes - 1));                               \
      CHECK_FAILS(nvb_##name(object, &b->name, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "workspace");        \
    }                                                                                                          \
    CHECK_OK(nvb_stream_set_workspace(b->f->stream, NULL, 0));                                                 \
    CHECK_OK(nvb_##name(object, &b->name, b->f->stream));                                                      \
    CHECK_OK(nvb_stream_synchronize(b->f->stream));                                                            \
    release(b->f, b->workspace);                                                                               \
    b->workspace = NULL;                                                                                       \
    b->name = shape;                                                                                           \
  } while (0)

static void test_operations(bench* b) {
  CHECK_WORKSPACE(linear, b->f->backend);
  CHECK_WORKSPACE(grouped_linear, b->f->backend);
  CHECK_WORKSPACE(matmul, b->f->backend);
  CHECK_WORKSPACE(attention_decode, b->attention);
  CHECK_WORKSPACE(argmax, b->f->backend);
  CHECK_WORKSPACE(sample, b->f->backend);
  CHECK_WORKSPACE(sort_rows, b->f->backend);
}

// A query refuses what the call would.
static void test_refused_queries(bench* b) {
  size_t bytes = 0;
  b->linear.input.shape[1] = WIDTH - 1;
  CHECK_FAILS(QUERY(linear, b->f->backend), NVB_ERROR_INVALID_ARGUMENT, "63 columns", "64");
  b->linear.input.shape[1] = WIDTH;
  b->linear.reserved = 1;
  CHECK_FAILS(QUERY(linear, b->f->backend), NVB_ERROR_INVALID_ARGUMENT, "reserved is 1");
  b->linear.reserved = 0;
  // Where all is nowhere, a residual of another dtype is not taken for the output.
  b->linear.residual = b->linear.output;
  b->linear.residual.dtype = b->linear.output.dtype == NVB_DTYPE_F32 ? NVB_DTYPE_BF16 : NVB_DTYPE_F32;
  b->linear.residual.data = b->linear.output.data = NULL;
  CHECK_OK(QUERY(linear, b->f->backend));
  memset(&b->linear.residual, 0, sizeof b->linear.residual);
  const nvb_tensor input = b->linear.input;
  memset(&b->linear.input, 0, sizeof input);
  CHECK_FAILS(QUERY(linear, b->f->backend), NVB_ERROR_INVALID_ARGUMENT, "input", "missing");
  // In 8 bits, likewise without memory.
  b->linear.quantized_input.rows = ROWS;
  b->linear.quantized_input.columns = WIDTH;
  b->linear.quantized_input.format = NVB_WEIGHT_FORMAT_INT8;
  CHECK_OK(QUERY(linear, b->f->backend));
  memset(&b->linear.quantized_input, 0, sizeof b->linear.quantized_input);
  b->linear.input = input;
  b->argmax.logits.dtype = NVB_DTYPE_I32;
  CHECK_FAILS(QUERY(argmax, b->f->backend), NVB_ERROR_INVALID_ARGUMENT, "logits", "i32");
  b->argmax.logits.dtype = NVB_DTYPE_F32;
  b->sort_rows.order = 2;
  CHECK_FAILS(QUERY(sort_rows, b->f->backend), NVB_ERROR_INVALID_ARGUMENT, "order is 2");
  b->sort_rows.order = NVB_ORDER_DESCENDING;
}

static void test_refused_workspaces(bench* b) {
  nvb_stream* const stream = b->f->stream;
  void* freed = NULL;
  CHECK_OK(nvb_memory_allocate(b->f->memory, 4096, stream, &freed));
  CHECK_OK(nvb_memory_free(b->f->memory, freed, stream));
  CHECK_FAILS(nvb_stream_set_workspace(stream, freed, 4096), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_FAILS(nvb_stream_set_workspace(stream, b->data, (size_t)1 << 40), NVB_ERROR_INVALID_ARGUMENT, "live block");
  CHECK_FAILS(nvb_stream_set_workspace(stream, (char*)b->data + 16, 4096), NVB_ERROR_INVALID_ARGUMENT, "256");
  CHECK_FAILS(nvb_stream_set_workspace(stream, NULL, 4096), NVB_ERROR_INVALID_ARGUMENT, "NULL", "4096");
  CHECK_FAILS(nvb_stream_set_workspace(stream, b->data, 0), NVB_ERROR_INVALID_ARGUMENT, "bytes is 0");
  CHECK_INVALID(nvb_stream_set_workspace(NULL, b->data, 4096));
  CHECK_INVALID(nvb_stream_set_workspace(foreign_handle(), b->data, 4096));
  if (!test_on_cpu()) {
    static _Alignas(256) char host[4096];
    CHECK_FAILS(nvb_stream_set_workspace(stream, host, sizeof host), NVB_ERROR_INVALID_ARGUMENT, "not memory of");
  }
  nvb_stream_manager* manager = NULL;
  nvb_stream* shared = NULL;
  CHECK_OK(nvb_stream_manager_create(b->f->backend, NULL, &manager));
  CHECK_OK(nvb_stream_manager_acquire(manager, 0, &shared));
  CHECK_FAILS(nvb_stream_set_workspace(shared, b->data, 4096), NVB_ERROR_INVALID_ARGUMENT, "stream manager");
  CHECK_OK(nvb_stream_destroy(shared));
  CHECK_OK(nvb_stream_manager_destroy(manager));
  // A stream that ends with a workspace leaves it to its owner.
  nvb_stream* other = NULL;
  CHECK_OK(nvb_stream_create(b->f->backend, 0, &other));
  CHECK_OK(nvb_stream_set_workspace(other, b->data, BLOCK));
  CHECK_OK(nvb_stream_destroy(other));
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_operations(&b);
  test_refused_queries(&b);
  test_refused_workspaces(&b);
  tear_down(&b);
  close_fixture(&f);
  return test_result();
}
