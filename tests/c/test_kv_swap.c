// Sequences in page-locked host memory and in files: what comes back attends as before, bit for bit; what does not fit,
// or was changed, is refused and changes nothing.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

enum { LAYERS = 2, KV_HEADS = 2, HEADS = 4, DIM = 16, TOKENS = 21, CAPACITY = 40, SEQUENCES = 3, WINDOW = 8 };

typedef struct {
  const char* name;
  uint32_t dtype, value_dtype, page_tokens, window;
} kind;

static const kind kKinds[] = {{"contiguous", NVB_DTYPE_F32, 0, 0, 0},
                              {"contiguous, INT8 and Q4_0", NVB_DTYPE_KV_INT8, NVB_DTYPE_KV_Q4_0, 0, 0},
                              {"pages", NVB_DTYPE_F32, 0, 4, 0},
                              {"pages of Q8_0", NVB_DTYPE_KV_Q8_0, 0, 16, 0},
                              {"a ring", NVB_DTYPE_F32, 0, 0, WINDOW}};

static nvb_kv_cache_options options_of(const kind* of) {
  nvb_kv_cache_options options;
  nvb_kv_cache_options_init(&options);
  options.layers = LAYERS;
  options.sequences = SEQUENCES;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.capacity = CAPACITY;
  options.dtype = of->dtype;
  options.value_dtype = of->value_dtype;
  options.page_tokens = of->page_tokens;
  options.window = of->window;
  return options;
}

// Appends `count` random tokens to all layers, one at a time.
static void append(fixture* f, nvb_kv_cache* cache, uint32_t sequence, int count, uint32_t seed) {
  for (int token = 0; token < count; ++token) {
    CHECK_OK(nvb_kv_cache_reserve(cache, sequence, (uint32_t)token + 1, f->stream));
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
      float key[KV_HEADS * DIM], value[KV_HEADS * DIM];
      uint32_t state = seed + 1000 * layer + (uint32_t)token;
      for (int i = 0; i < KV_HEADS * DIM; ++i) key[i] = next_number(&state), value[i] = next_number(&state);
      const int32_t place = token, of = (int32_t)sequence;
      void* owned[] = {upload(f, key, sizeof key), upload(f, value, sizeof value), upload(f, &place, sizeof place),
                       upload(f, &of, sizeof of)};
      nvb_kv_cache_append_args args;
      nvb_kv_cache_append_args_init(&args);
      args.key = nvb_tensor_3d(owned[0], NVB_DTYPE_F32, 1, KV_HEADS, DIM);
      args.value = nvb_tensor_3d(owned[1], NVB_DTYPE_F32, 1, KV_HEADS, DIM);
      args.positions = nvb_tensor_1d(owned[2], NVB_DTYPE_I32, 1);
      args.sequences = nvb_tensor_1d(owned[3], NVB_DTYPE_I32, 1);
      args.cache = cache;
      args.layer = layer;
      CHECK_OK(nvb_kv_cache_append(f->backend, &args, f->stream));
      CHECK_OK(nvb_stream_synchronize(f->stream));
      for (int i = 0; i < 4; ++i) release(f, owned[i]);
    }
  }
}

// What the last token of the sequence attends to, in all layers.
static void attend(fixture* f, const kind* of, nvb_kv_cache* cache, uint32_t sequence, int tokens,
                   float output[LAYERS][HEADS * DIM]) {
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = DIM;
  options.window = of->window;
  nvb_attention* attention = NULL;
  CHECK_OK(nvb_attention_create(f->backend, &options, &attention));
  float query[HEADS * DIM];
  uint32_t state = 5;
  for (int i = 0; i < HEADS * DIM; ++i) query[i] = next_number(&state);
  const int32_t position = tokens - 1, number = (int32_t)sequence;
  void* owned[] = {upload(f, query, sizeof query), upload(f, query, sizeof query),
                   upload(f, &position, sizeof position), upload(f, &number, sizeof number)};
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    nvb_attention_decode_args decode;
    nvb_attention_decode_args_init(&decode);
    decode.query = nvb_tensor_3d(owned[0], NVB_DTYPE_F32, 1, HEADS, DIM);
    decode.output = nvb_tensor_3d(owned[1], NVB_DTYPE_F32, 1, HEADS, DIM);
    decode.cache = cache;
    decode.layer = layer;
    decode.positions = nvb_tensor_1d(owned[2], NVB_DTYPE_I32, 1);
    decode.sequences = nvb_tensor_1d(owned[3], NVB_DTYPE_I32, 1);
    if (of->window > 0) decode.max_kv_length = (uint32_t)tokens;
    CHECK_OK(nvb_attention_decode(attention, &decode, f->stream));
    download(f, output[layer], owned[1], sizeof output[layer]);
  }
  for (int i = 0; i < 4; ++i) release(f, owned[i]);
  CHECK_OK(nvb_attention_destroy(attention));
}

static void expect_same(fixture* f, const kind* of, nvb_kv_cache* cache, uint32_t sequence,
                        float before[LAYERS][HEADS * DIM]) {
  uint32_t tokens = 0;
  CHECK_OK(nvb_kv_cache_get_length(cache, sequence, &tokens));
  CHECK_EQUAL(tokens, TOKENS);
  float after[LAYERS][HEADS * DIM];
  attend(f, of, cache, sequence, TOKENS, after);
  CHECK(memcmp(before, after, sizeof after) == 0);
}

static void test_swap(fixture* f, const kind* of) {
  nvb_kv_cache_options options = options_of(of);
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  nvb_kv_swap* swap = NULL;
  CHECK_OK(nvb_kv_swap_create(cache, TOKENS, &swap));
  uint32_t tokens = 99;
  uint64_t bytes = 0;
  CHECK_OK(nvb_kv_swap_get_size(swap, &tokens, &bytes));
  CHECK_EQUAL(tokens, 0);
  CHECK(bytes > 0);
  CHECK_FAILS(nvb_kv_swap_in(swap, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "holds no sequence");
  CHECK_FAILS(nvb_kv_swap_out(swap, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "sequence 0 holds no tokens");
  CHECK_FAILS(nvb_kv_swap_out(swap, SEQUENCES, f->stream), NVB_ERROR_INVALID_ARGUMENT, "sequence is 3");
  append(f, cache, 0, TOKENS + 1, 7);
  CHECK_FAILS(nvb_kv_swap_out(swap, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "22 tokens", "21");
  CHECK_OK(nvb_kv_cache_release(cache, 0, f->stream));
  append(f, cache, 0, TOKENS, 7);
  float before[LAYERS][HEADS * DIM];
  attend(f, of, cache, 0, TOKENS, before);

  CHECK_FAILS(nvb_kv_swap_get_size(swap, &tokens, NULL), NVB_ERROR_INVALID_ARGUMENT, "bytes", "NULL");

  // Out, and the place is another sequence's; then back to one that lies elsewhere, twice.
  CHECK_OK(nvb_kv_swap_out(swap, 0, f->stream));
  CHECK_OK(nvb_kv_swap_wait(swap, f->stream));
  CHECK_OK(nvb_kv_cache_release(cache, 0, f->stream));
  append(f, cache, 0, TOKENS, 1234);
  CHECK_FAILS(nvb_kv_swap_in(swap, 0, f->stream), NVB_ERROR_INVALID_ARGUMENT, "sequence 0 holds 21 tokens already");
  for (uint32_t sequence = 1; sequence < 3; ++sequence) {
    CHECK_OK(nvb_kv_swap_in(swap, sequence, f->stream));
    CHECK_OK(nvb_kv_swap_wait(swap, f->stream));
    expect_same(f, of, cache, sequence, before);
  }
  CHECK_OK(nvb_kv_swap_get_size(swap, &tokens, &bytes));
  CHECK_EQUAL(tokens, TOKENS);
  CHECK_OK(nvb_kv_swap_synchronize(swap));

  // A swap of another cache has other images, and outlives the handle of its own.
  nvb_kv_cache_options narrow = options;
  narrow.head_dim = 8;
  nvb_kv_cache* other = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &narrow, &other));
  CHECK_FAILS(nvb_kv_swap_create(cache, CAPACITY + 1, &swap), NVB_ERROR_INVALID_ARGUMENT, "tokens is 41");
  CHECK_FAILS(nvb_kv_swap_create(NULL, 1, &swap), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  CHECK_FAILS(nvb_kv_swap_create(cache, 1, NULL), NVB_ERROR_INVALID_ARGUMENT, "swap", "NULL");
  CHECK_OK(nvb_kv_cache_destroy(cache));
  CHECK_OK(nvb_kv_swap_synchronize(swap));
  CHECK_OK(nvb_kv_swap_destroy(swap));
  CHECK_FAILS(nvb_kv_swap_synchronize(swap), NVB_ERROR_INVALID_ARGUMENT, "destroyed");
  CHECK_OK(nvb_kv_swap_destroy(NULL));
  CHECK_OK(nvb_kv_cache_destroy(other));
}

// Pages that are not there are not taken, and nothing changes.
static void test_few_pages(fixture* f) {
  nvb_kv_cache_options options = options_of(&kKinds[2]);
  options.pages = 8;
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  nvb_kv_swap* swap = NULL;
  CHECK_OK(nvb_kv_swap_create(cache, CAPACITY, &swap));
  append(f, cache, 0, TOKENS, 7);
  CHECK_OK(nvb_kv_swap_out(swap, 0, f->stream));
  CHECK_FAILS(nvb_kv_swap_in(swap, 1, f->stream), NVB_ERROR_OUT_OF_MEMORY, "6 more pages");
  uint32_t tokens = 9;
  CHECK_OK(nvb_kv_cache_get_length(cache, 1, &tokens));
  CHECK_EQUAL(tokens, 0);
  CHECK_OK(nvb_kv_swap_destroy(swap));
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

static unsigned char* read_file(const char* path, size_t* bytes) {
  FILE* file = fopen(path, "rb");
  CHECK(file != NULL);
  fseek(file, 0, SEEK_END);
  *bytes = (size_t)ftell(file);
  rewind(file);
  unsigned char* content = malloc(*bytes);
  CHECK(fread(content, 1, *bytes, file) == *bytes);
  fclose(file);
  return content;
}

static void write_file(const char* path, const unsigned char* content, size_t bytes) {
  FILE* file = fopen(path, "wb");
  CHECK(file != NULL && fwrite(content, 1, bytes, file) == bytes);
  if (file != NULL) fclose(file);
}

static void test_file(fixture* f, const kind* of, const char* folder) {
  char path[256], changed[256], pipe[256];
  snprintf(path, sizeof path, "%s/sequence", folder);
  snprintf(changed, sizeof changed, "%s/changed", folder);
  snprintf(pipe, sizeof pipe, "%s/pipe", folder);
  nvb_kv_cache_options options = options_of(of);
  nvb_kv_cache* cache = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &cache));
  CHECK_FAILS(nvb_kv_cache_save(cache, 0, path, f->stream), NVB_ERROR_INVALID_ARGUMENT, "sequence 0 holds 0");
  append(f, cache, 0, TOKENS, 7);
  float before[LAYERS][HEADS * DIM];
  attend(f, of, cache, 0, TOKENS, before);
  CHECK_OK(nvb_kv_cache_save(cache, 0, path, f->stream));
  CHECK_FAILS(nvb_kv_cache_restore(cache, 0, path, f->stream), NVB_ERROR_INVALID_ARGUMENT, "holds 21 tokens already");

  // Into another cache like it.
  nvb_kv_cache* other = NULL;
  CHECK_OK(nvb_kv_cache_create(f->backend, &options, &other));
  append(f, other, 0, 3, 99);
  CHECK_OK(nvb_kv_cache_restore(other, 1, path, f->stream));
  expect_same(f, of, other, 1, before);

  // Every hostile file is refused, and changes nothing.
  size_t bytes = 0;
  unsigned char* content = read_file(path, &bytes);
  for (size_t at = 0; at < bytes; at += at < 160 ? 1 : 97) {
    content[at] ^= 0x10;
    write_file(changed, content, bytes);
    content[at] ^= 0x10;
    CHECK(nvb_kv_cache_restore(other, 2, changed, f->stream) == NVB_ERROR_IO);
  }
  const size_t lengths[] = {0, 1, 127, 128, bytes / 2, bytes - 1};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; ++i) {
    write_file(changed, content, lengths[i]);
    CHECK_FAILS(nvb_kv_cache_restore(other, 2, changed, f->stream), NVB_ERROR_IO, "changed");
  }
  unsigned char* longer = malloc(bytes + 1);
  memcpy(longer, content, bytes);
  longer[bytes] = 0;
  write_file(changed, longer, bytes + 1);
  CHECK_FAILS(nvb_kv_cache_restore(other, 2, changed, f->stream), NVB_ERROR_IO, "bytes");
  free(longer);
  free(content);
  uint32_t tokens = 9;
  CHECK_OK(nvb_kv_cache_get_length(other, 2, &tokens));
  CHECK_EQUAL(tokens, 0);
  CHECK_OK(nvb_kv_cache_destroy(other));

  // Of another geometry, no regular file, no file.
  nvb_kv_cache_options narrow = options;
  narrow.head_dim = 8;
  CHECK_OK(nvb_kv_cache_create(f->backend, &narrow, &other));
  CHECK_FAILS(nvb_kv_cache_restore(other, 0, path, f->stream), NVB_ERROR_INVALID_ARGUMENT, "head_dim is 16", "8");
  CHECK_OK(nvb_kv_cache_destroy(other));
  narrow = options;
  narrow.capacity = 20;
  CHECK_OK(nvb_kv_cache_create(f->backend, &narrow, &other));
  CHECK_FAILS(nvb_kv_cache_restore(other, 0, path, f->stream), NVB_ERROR_INVALID_ARGUMENT, "21 tokens", "20");
  CHECK_OK(nvb_kv_cache_destroy(other));
  CHECK(mkfifo(pipe, 0600) == 0);
  CHECK_FAILS(nvb_kv_cache_restore(cache, 1, pipe, f->stream), NVB_ERROR_IO, "a pipe");
  CHECK_FAILS(nvb_kv_cache_save(cache, 0, pipe, f->stream), NVB_ERROR_IO, "a pipe");
  CHECK_FAILS(nvb_kv_cache_restore(cache, 1, folder, f->stream), NVB_ERROR_IO, "a folder");
  CHECK_FAILS(nvb_kv_cache_restore(cache, 1, NULL, f->stream), NVB_ERROR_IO, "cannot open");
  CHECK_FAILS(nvb_kv_cache_restore(cache, 1, "/nowhere/at/all", f->stream), NVB_ERROR_IO, "/nowhere/at/all");
  CHECK_FAILS(nvb_kv_cache_save(cache, 0, "/nowhere/at/all", f->stream), NVB_ERROR_IO, "/nowhere/at/all");
  unlink(pipe), unlink(changed), unlink(path);
  CHECK_OK(nvb_kv_cache_destroy(cache));
}

int main(void) {
  fixture f = open_fixture();
  char folder[] = "/tmp/nvb_kv_swap_XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  for (size_t i = 0; i < sizeof kKinds / sizeof *kKinds; ++i) {
    test_swap(&f, &kKinds[i]);
    test_file(&f, &kKinds[i], folder);
  }
  test_few_pages(&f);
  CHECK(rmdir(folder) == 0);
  close_fixture(&f);
  return test_result();
}
