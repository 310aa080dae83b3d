// Outputs lie apart from what the work reads, except where the header says that they may be the same memory. What it
// reads addresses from (tokens, positions, sequences, offsets) is checked before the work runs, and rows written over
// it would send the work outside of its tables.
#include "operation.h"

enum { TOKENS = 4, WIDTH = 16, BYTES = 1 << 12 };

typedef struct {
  fixture* f;
  void *memory, *other;
  nvb_weight* weight;  // [16, 16]
} bench;

static bench set_up(fixture* f) {
  static float values[BYTES / sizeof(float)];
  bench b = {.f = f};
  b.memory = upload(f, values, BYTES);
  b.other = upload(f, values, BYTES);
  for (int i = 0; i < WIDTH * WIDTH; ++i) values[i] = 3e9f;
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &b.weight));
  return b;
}

static void tear_down(bench* b) {
  release(b->f, b->memory);
  release(b->f, b->other);
  CHECK_OK(nvb_weight_destroy(b->weight));
}

static void test_embedding(bench* b) {
  nvb_embedding_args good;
  nvb_embedding_args_init(&good);
  good.table = b->weight;
  good.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.tokens = nvb_tensor_1d((char*)b->memory + TOKENS * WIDTH * 4, NVB_DTYPE_I32, TOKENS);
  CHECK_OK(nvb_embedding(b->f->backend, &good, b->f->stream));
  nvb_embedding_args args = good;
  args.tokens.data = (char*)b->memory + WIDTH * 4;
  REFUSED(embedding, "tokens", "output", "overlap");
  args.tokens.data = (char*)b->memory + TOKENS * WIDTH * 4 - 4;
  REFUSED(embedding, "tokens", "output", "overlap");
}

static void test_linear(bench* b) {
  nvb_linear_args good;
  nvb_linear_args_init(&good);
  good.input = nvb_tensor_2d(b->other, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.weight = b->weight;
  good.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.residual = good.output;
  CHECK_OK(nvb_linear(b->f->backend, &good, b->f->stream));
  nvb_linear_args args = good;
  memset(&args.residual, 0, sizeof args.residual);
  args.output = args.input;
  REFUSED(linear, "output", "input", "overlap");
  args.output.data = (char*)b->other + TOKENS * WIDTH * 4 - 4;
  REFUSED(linear, "output", "input", "overlap");
  args.output.data = (char*)b->other + TOKENS * WIDTH * 4;
  CHECK_OK(nvb_linear(b->f->backend, &args, b->f->stream));
  args = good;
  args.residual.data = (char*)b->memory + WIDTH * 4;
  REFUSED(linear, "output", "residual", "overlap");
  // Columns of one matrix, as of queries, keys and values, share no byte.
  args = good;
  memset(&args.residual, 0, sizeof args.residual);
  args.input = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  args.output = nvb_tensor_2d((char*)b->memory + WIDTH * 4, NVB_DTYPE_F32, TOKENS, WIDTH);
  args.input.strides[0] = args.output.strides[0] = 2 * WIDTH;
  args.input.strides[1] = args.output.strides[1] = 1;
  CHECK_OK(nvb_linear(b->f->backend, &args, b->f->stream));
  args.output.data = (char*)b->memory + WIDTH * 4 - 4;
  REFUSED(linear, "output", "input", "overlap");
}

static void test_rms_norm(bench* b) {
  nvb_rms_norm_args good;
  nvb_rms_norm_args_init(&good);
  good.input = good.output = nvb_tensor_2d(b->other, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.residual = good.residual_output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  CHECK_OK(nvb_rms_norm(b->f->backend, &good, b->f->stream));
  nvb_rms_norm_args args = good;
  args.output.data = (char*)b->other + WIDTH * 4;
  REFUSED(rms_norm, "output", "input", "overlap");
  args = good;
  args.output = args.residual_output;
  args.residual.data = (char*)b->memory + BYTES / 2;
  REFUSED(rms_norm, "output", "residual_output", "overlap");
  args = good;
  args.weight = nvb_tensor_1d(b->other, NVB_DTYPE_F32, WIDTH);
  REFUSED(rms_norm, "output", "weight", "overlap");
}

static void test_gated_activation(bench* b) {
  nvb_gated_activation_args good;
  nvb_gated_activation_args_init(&good);
  good.activation = NVB_ACTIVATION_SILU;
  good.gate = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.up = nvb_tensor_2d((char*)b->memory + WIDTH * 4, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.gate.strides[0] = good.up.strides[0] = 2 * WIDTH;
  good.gate.strides[1] = good.up.strides[1] = 1;
  good.output = good.up;
  CHECK_OK(nvb_gated_activation(b->f->backend, &good, b->f->stream));
  nvb_gated_activation_args args = good;
  args.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH);
  REFUSED(gated_activation, "output", "gate", "overlap");
}

static void test_matmul(bench* b) {
  nvb_matmul_args good;
  nvb_matmul_args_init(&good);
  good.a = good.b = nvb_tensor_2d(b->other, NVB_DTYPE_F32, TOKENS, TOKENS);
  good.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, TOKENS);
  CHECK_OK(nvb_matmul(b->f->backend, &good, b->f->stream));
  nvb_matmul_args args = good;
  args.output = args.a;
  REFUSED(matmul, "output", "a", "overlap");
  args.output.data = (char*)b->other + 60;
  REFUSED(matmul, "output", "a", "overlap");
}

static void test_grouped_linear(bench* b) {
  nvb_grouped_linear_args good;
  nvb_grouped_linear_args_init(&good);
  good.input = nvb_tensor_2d(b->other, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.weight = b->weight;
  good.expert_offsets = nvb_tensor_1d((char*)b->memory + BYTES / 2, NVB_DTYPE_I32, 3);
  good.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH / 2);
  CHECK_OK(nvb_grouped_linear(b->f->backend, &good, b->f->stream));
  nvb_grouped_linear_args args = good;
  args.expert_offsets.data = b->memory;
  REFUSED(grouped_linear, "expert_offsets", "output", "overlap");
  // Asked for the workspace alone, tensors may have no memory yet.
  args.expert_offsets.data = args.output.data = NULL;
  size_t bytes = 0;
  CHECK_OK(nvb_grouped_linear_get_workspace_size(b->f->backend, &args, &bytes));
}

static void test_rope(bench* b) {
  nvb_rope_args good;
  nvb_rope_args_init(&good);
  good.query = nvb_tensor_3d(b->other, NVB_DTYPE_F32, TOKENS, 1, WIDTH);
  good.query_output = nvb_tensor_3d(b->memory, NVB_DTYPE_F32, TOKENS, 1, WIDTH);
  good.positions = nvb_tensor_1d((char*)b->memory + BYTES / 2, NVB_DTYPE_I32, TOKENS);
  CHECK_OK(nvb_rope(b->f->backend, &good, b->f->stream));
  nvb_rope_args args = good;
  args.positions.data = b->memory;
  REFUSED(rope, "positions", "query_output", "overlap");
}

static void test_decode(bench* b) {
  nvb_kv_cache_options cache_options;
  nvb_kv_cache_options_init(&cache_options);
  cache_options.layers = cache_options.kv_heads = 1;
  cache_options.sequences = TOKENS;
  cache_options.head_dim = WIDTH;
  cache_options.capacity = 4;
  cache_options.dtype = NVB_DTYPE_F32;
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = options.kv_heads = 1;
  options.head_dim = WIDTH;
  nvb_kv_cache* cache = NULL;
  nvb_attention* attention = NULL;
  CHECK_OK(nvb_kv_cache_create(b->f->backend, &cache_options, &cache));
  CHECK_OK(nvb_attention_create(b->f->backend, &options, &attention));
  nvb_attention_decode_args args;
  nvb_attention_decode_args_init(&args);
  args.query = nvb_tensor_3d(b->other, NVB_DTYPE_F32, TOKENS, 1, WIDTH);
  args.output = nvb_tensor_3d(b->memory, NVB_DTYPE_F32, TOKENS, 1, WIDTH);
  args.cache = cache;
  args.positions = nvb_tensor_1d((char*)b->memory + 64, NVB_DTYPE_I32, TOKENS);
  CHECK_FAILS(nvb_attention_decode(attention, &args, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "positions", "output",
              "overlap");
  args.positions.data = (char*)b->memory + BYTES / 2;
  args.sequences = args.positions;
  args.sequences.data = b->memory;
  CHECK_FAILS(nvb_attention_decode(attention, &args, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "sequences", "output",
              "overlap");
  CHECK_OK(nvb_attention_destroy(attention));
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

// A copy onto the same bytes changes nothing; one that overlaps would read what it has written.
static void test_copy(bench* b) {
  char* memory = b->memory;
  const uint32_t kind = NVB_COPY_DEVICE_TO_DEVICE;
  CHECK_OK(nvb_memory_copy(b->f->memory, memory, memory, BYTES / 2, kind, b->f->stream));
  CHECK_OK(nvb_memory_copy(b->f->memory, memory, memory + BYTES / 2, BYTES / 2, kind, b->f->stream));
  CHECK_FAILS(nvb_memory_copy(b->f->memory, memory + 1, memory, BYTES / 2, kind, b->f->stream),
              NVB_ERROR_INVALID_ARGUMENT, "source", "destination", "overlap");
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_embedding(&b);
  test_linear(&b);
  test_rms_norm(&b);
  test_gated_activation(&b);
  test_matmul(&b);
  test_grouped_linear(&b);
  test_rope(&b);
  test_decode(&b);
  test_copy(&b);
  tear_down(&b);
  return operation_test_result(&f);
}
