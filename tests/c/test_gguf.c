// GGUF files: opened from a path and from memory, their tensors and metadata, and what is refused.
#include "check.h"

typedef struct {
  unsigned char bytes[4096];
  size_t size;
} buffer;

static void put(buffer* b, const void* data, size_t size) {
  memcpy(b->bytes + b->size, data, size);
  b->size += size;
}

static void put_u32(buffer* b, uint32_t value) {
  put(b, &value, sizeof value);
}

static void put_u64(buffer* b, uint64_t value) {
  put(b, &value, sizeof value);
}

static void put_text(buffer* b, const char* text) {
  put_u64(b, strlen(text));
  put(b, text, strlen(text));
}

static void put_tensor(buffer* b, const char* name, uint64_t columns, uint64_t rows, uint32_t kind, uint64_t offset) {
  put_text(b, name);
  put_u32(b, 2);
  put_u64(b, columns);
  put_u64(b, rows);
  put_u32(b, kind);
  put_u64(b, offset);
}

// Metadata of each kind, an F32 matrix [2, 3] and a Q4_0 matrix [2, 32].
static buffer sample(void) {
  buffer b = {.size = 0};
  put(&b, "GGUF", 4);
  put_u32(&b, 3);
  put_u64(&b, 2);
  put_u64(&b, 5);
  put_text(&b, "general.architecture");
  put_u32(&b, 8);
  put_text(&b, "gemma3");
  put_text(&b, "layers");
  put_u32(&b, 4);
  put_u32(&b, 26);
  put_text(&b, "epsilon");
  put_u32(&b, 6);
  float epsilon = 0.25f;
  put(&b, &epsilon, sizeof epsilon);
  put_text(&b, "tokens");
  put_u32(&b, 9);
  put_u32(&b, 8);
  put_u64(&b, 2);
  put_text(&b, "<pad>");
  put_text(&b, "");
  put_text(&b, "types");
  put_u32(&b, 9);
  put_u32(&b, 5);
  put_u64(&b, 3);
  const int32_t types[3] = {1, -2, 3};
  put(&b, types, sizeof types);
  put_tensor(&b, "norm", 3, 2, 0, 0);
  put_tensor(&b, "matrix", 32, 2, 2, 32);
  while (b.size % 32 != 0) put(&b, "", 1);
  const float norm[8] = {1, 2, 3, 4, 5, 6, 0, 0};
  put(&b, norm, sizeof norm);
  for (int row = 0; row < 2; ++row) {
    const uint16_t scale = 0x3800;
    put(&b, &scale, sizeof scale);
    for (int i = 0; i < 16; ++i) put(&b, &(unsigned char){(unsigned char)(i | (15 - i) << 4)}, 1);
  }
  return b;
}

static nvb_gguf_tensor tensor_of(nvb_gguf* file, const char* name) {
  nvb_gguf_tensor tensor;
  nvb_gguf_tensor_init(&tensor);
  CHECK_OK(nvb_gguf_find_tensor(file, name, &tensor));
  return tensor;
}

static nvb_gguf_value value_of(nvb_gguf* file, const char* key) {
  nvb_gguf_value value;
  nvb_gguf_value_init(&value);
  CHECK_OK(nvb_gguf_find_value(file, key, &value));
  return value;
}

static void check_sample(fixture* f, nvb_gguf* file) {
  nvb_gguf_info info;
  nvb_gguf_info_init(&info);
  CHECK_OK(nvb_gguf_get_info(file, &info));
  CHECK(info.tensor_count == 2 && info.value_count == 5 && info.version == 3 && info.alignment == 32);
  CHECK_EQUAL(info.bytes, sample().size);

  nvb_gguf_value value = value_of(file, "general.architecture");
  CHECK(value.content == NVB_GGUF_TEXT && value.count == 6 && memcmp(value.data, "gemma3", 6) == 0);
  CHECK(strcmp(value.key, "general.architecture") == 0);
  value = value_of(file, "layers");
  CHECK(value.content == NVB_GGUF_INTEGER && value.integer == 26 && value.real == 26);
  value = value_of(file, "epsilon");
  CHECK(value.content == NVB_GGUF_REAL && value.real == 0.25);
  value = value_of(file, "types");
  int32_t types[3] = {0};
  CHECK(value.content == NVB_GGUF_ARRAY && value.count == 3 && value.element_kind == 5);
  memcpy(types, value.data, sizeof types);
  CHECK(types[0] == 1 && types[1] == -2 && types[2] == 3);
  CHECK(value_of(file, "tokens").content == NVB_GGUF_TEXTS && value_of(file, "tokens").count == 2);
  const char* text = NULL;
  size_t length = 99;
  CHECK_OK(nvb_gguf_get_text(file, "tokens", 0, &text, &length));
  CHECK(length == 5 && memcmp(text, "<pad>", 5) == 0);
  CHECK_OK(nvb_gguf_get_text(file, "tokens", 1, &text, &length));
  CHECK_EQUAL(length, 0);

  nvb_gguf_tensor norm = tensor_of(file, "norm"), matrix = tensor_of(file, "matrix"), second;
  CHECK(norm.dtype == NVB_DTYPE_F32 && norm.source_format == 0 && norm.rank == 2 && norm.bytes == 24);
  CHECK(norm.shape[0] == 2 && norm.shape[1] == 3 && norm.shape[2] == 1);
  CHECK(((const float*)norm.data)[5] == 6);
  CHECK(matrix.dtype == 0 && matrix.source_format == NVB_SOURCE_FORMAT_GGUF_Q4_0 && matrix.kind == 2);
  nvb_gguf_tensor_init(&second);
  CHECK_OK(nvb_gguf_get_tensor(file, 1, &second));
  CHECK(second.data == matrix.data && strcmp(second.name, "matrix") == 0);
  nvb_gguf_value_init(&value);
  CHECK_OK(nvb_gguf_get_value(file, 1, &value));
  CHECK(strcmp(value.key, "layers") == 0);

  // A weight of it.
  nvb_weight_blocks blocks;
  memset(&blocks, 0, sizeof blocks);
  blocks.data = matrix.data;
  blocks.bytes = matrix.bytes;
  blocks.rows = matrix.shape[0];
  blocks.columns = matrix.shape[1];
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.blocks = &blocks;
  desc.part_count = 1;
  desc.source_format = matrix.source_format;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  float values[64] = {0};
  void* block = upload(f, values, sizeof values);
  nvb_tensor output = nvb_tensor_2d(block, NVB_DTYPE_F32, 2, 32);
  CHECK_OK(nvb_weight_dequantize(weight, &output, f->stream));
  download(f, values, block, sizeof values);
  for (int i = 0; i < 64; ++i) CHECK_NEAR(values[i], 0.5 * ((i % 32 < 16 ? i % 16 : 15 - i % 16) - 8), 0);
  release(f, block);
  CHECK_OK(nvb_weight_destroy(weight));
}

static void test_sources(fixture* f) {
  buffer b = sample();
  nvb_gguf* file = NULL;
  CHECK_OK(nvb_gguf_open_memory(b.bytes, b.size, &file));
  check_sample(f, file);
  CHECK_OK(nvb_gguf_destroy(file));

  char path[] = "/tmp/nvb_test_gguf_XXXXXX";
  int descriptor = mkstemp(path);
  CHECK(descriptor >= 0 && write(descriptor, b.bytes, b.size) == (ssize_t)b.size);
  close(descriptor);
  CHECK_OK(nvb_gguf_open(path, &file));
  check_sample(f, file);
  CHECK_OK(nvb_gguf_destroy(file));
  // Cut short, it is refused with its name.
  CHECK(truncate(path, (off_t)b.size - 1) == 0);
  CHECK_FAILS(nvb_gguf_open(path, &file), NVB_ERROR_INVALID_ARGUMENT, path, "matrix", "68", "67");
  CHECK(truncate(path, 0) == 0);
  CHECK_FAILS(nvb_gguf_open(path, &file), NVB_ERROR_IO, path, "0 bytes");
  unlink(path);
  CHECK_FAILS(nvb_gguf_open(path, &file), NVB_ERROR_IO, path, "cannot open");
  CHECK_FAILS(nvb_gguf_open(NULL, &file), NVB_ERROR_IO, "cannot open");
}

static nvb_status get_info(void* value, void* context) {
  return nvb_gguf_get_info(context, value);
}

static nvb_status get_tensor(void* value, void* context) {
  return nvb_gguf_get_tensor(context, 0, value);
}

static nvb_status get_value(void* value, void* context) {
  return nvb_gguf_get_value(context, 0, value);
}

static void test_errors(void) {
  buffer b = sample();
  nvb_gguf* file = foreign_handle();
  for (size_t size = 0; size < b.size; ++size) {
    unsigned char* exact = malloc(size + 1);
    if (exact == NULL) abort();
    memcpy(exact, b.bytes, size);
    CHECK_INVALID(nvb_gguf_open_memory(exact, size, &file));
    free(exact);
  }
  CHECK_FAILS(nvb_gguf_open_memory(NULL, 4, &file), NVB_ERROR_INVALID_ARGUMENT, "data", "NULL");
  CHECK_FAILS(nvb_gguf_open_memory(b.bytes, b.size, NULL), NVB_ERROR_INVALID_ARGUMENT, "file", "NULL");
  CHECK(file == foreign_handle());

  CHECK_OK(nvb_gguf_open_memory(b.bytes, b.size, &file));
  nvb_gguf_info info;
  nvb_gguf_tensor tensor;
  nvb_gguf_value value;
  nvb_gguf_info_init(&info);
  nvb_gguf_tensor_init(&tensor);
  nvb_gguf_value_init(&value);
  CHECK_STRUCT(info, get_info, file);
  CHECK_STRUCT(tensor, get_tensor, file);
  CHECK_STRUCT(value, get_value, file);
  const char* text = NULL;
  size_t length = 0;
  CHECK_FAILS(nvb_gguf_get_tensor(file, 2, &tensor), NVB_ERROR_INVALID_ARGUMENT, "index is 2", "there are 2");
  CHECK_FAILS(nvb_gguf_get_value(file, SIZE_MAX, &value), NVB_ERROR_INVALID_ARGUMENT, "there are 5");
  CHECK_FAILS(nvb_gguf_find_tensor(file, "none", &tensor), NVB_ERROR_INVALID_ARGUMENT, "no tensor `none`");
  CHECK_FAILS(nvb_gguf_find_tensor(file, NULL, &tensor), NVB_ERROR_INVALID_ARGUMENT, "no tensor");
  CHECK_FAILS(nvb_gguf_find_value(file, "none", &value), NVB_ERROR_INVALID_ARGUMENT, "no metadata `none`");
  CHECK_FAILS(nvb_gguf_get_text(file, "tokens", 2, &text, &length), NVB_ERROR_INVALID_ARGUMENT, "index is 2");
  CHECK_FAILS(nvb_gguf_get_text(file, "types", 0, &text, &length), NVB_ERROR_INVALID_ARGUMENT, "no array of texts");
  CHECK_FAILS(nvb_gguf_get_text(file, "tokens", 0, NULL, &length), NVB_ERROR_INVALID_ARGUMENT, "data", "NULL");
  CHECK_OK(nvb_gguf_destroy(file));
  CHECK_FAILS(nvb_gguf_get_info(file, &info), NVB_ERROR_INVALID_ARGUMENT, "GGUF file", "destroyed");
  CHECK_OK(nvb_gguf_destroy(NULL));
}

int main(void) {
  fixture f = open_fixture();
  test_sources(&f);
  test_errors();
  close_fixture(&f);
  return test_result();
}
