// What the work reads addresses from (tokens, positions, slots, offsets) lies apart from what it writes: it is checked
// before the work runs, and rows written over it would send the work outside of its tables.
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

static void test_grouped_linear(bench* b) {
  nvb_grouped_linear_args good;
  nvb_grouped_linear_args_init(&good);
  good.input = nvb_tensor_2d(b->other, NVB_DTYPE_F32, TOKENS, WIDTH);
  good.weight = b->weight;
  good.offsets = nvb_tensor_1d((char*)b->memory + BYTES / 2, NVB_DTYPE_I32, 3);
  good.output = nvb_tensor_2d(b->memory, NVB_DTYPE_F32, TOKENS, WIDTH / 2);
  CHECK_OK(nvb_grouped_linear(b->f->backend, &good, b->f->stream));
  nvb_grouped_linear_args args = good;
  args.offsets.data = b->memory;
  REFUSED(grouped_linear, "offsets", "output", "overlap");
  // Asked for the workspace alone, tensors may have no memory yet.
  args.offsets.data = args.output.data = NULL;
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
  cache_options.slots = TOKENS;
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
  args.slots = args.positions;
  args.slots.data = b->memory;
  CHECK_FAILS(nvb_attention_decode(attention, &args, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, "slots", "output",
              "overlap");
  CHECK_OK(nvb_attention_destroy(attention));
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

int main(void) {
  fixture f = open_fixture();
  bench b = set_up(&f);
  test_embedding(&b);
  test_grouped_linear(&b);
  test_rope(&b);
  test_decode(&b);
  tear_down(&b);
  return operation_test_result(&f);
}
