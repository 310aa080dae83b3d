// Weights: arrangements, sources, and what is refused.
#include "check.h"

typedef struct {
  fixture* f;
  nvb_weight* weight;
} weight_context;

static nvb_status create(void* value, void* context) {
  nvb_weight* weight = NULL;
  nvb_status status = nvb_weight_create(((weight_context*)context)->f->backend, value, NULL, &weight);
  CHECK((status == NVB_OK) == (weight != NULL));
  CHECK_OK(nvb_weight_destroy(weight));
  return status;
}

static nvb_status get_info(void* value, void* context) {
  return nvb_weight_get_info(((weight_context*)context)->weight, value);
}

static nvb_weight_desc describe(nvb_tensor* parts, size_t count, uint32_t arrangement, uint32_t source) {
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = parts;
  desc.part_count = count;
  desc.arrangement = arrangement;
  desc.source = source;
  return desc;
}

static nvb_weight_info info_of(nvb_weight* weight) {
  nvb_weight_info info;
  nvb_weight_info_init(&info);
  CHECK_OK(nvb_weight_get_info(weight, &info));
  return info;
}

// x · Wᵀ with x = (1, 10, 100) shows which row stands where.
static void check_product(fixture* f, nvb_weight* weight, const float* expected, int64_t columns) {
  const float x[3] = {1, 10, 100};
  float y[8] = {0};
  void *input = upload(f, x, sizeof x), *output = upload(f, y, sizeof y);
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(input, NVB_DTYPE_F32, 1, 3);
  args.weight = weight;
  args.output = nvb_tensor_2d(output, NVB_DTYPE_F32, 1, columns);
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  download(f, y, output, sizeof y);
  for (int64_t i = 0; i < columns; ++i) CHECK_NEAR(y[i], expected[i], 1e-6);
  release(f, input);
  release(f, output);
}

static void test_arrangements(fixture* f) {
  const float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {7, 8, 9, 1, 1, 1};
  const float stacked[4] = {321, 654, 987, 111}, gated[2] = {321 * 987.0f, 654 * 111.0f};
  nvb_tensor parts[2] = {nvb_tensor_2d((void*)a, NVB_DTYPE_F32, 2, 3), nvb_tensor_2d((void*)b, NVB_DTYPE_F32, 2, 3)};
  nvb_weight* weight = NULL;
  nvb_weight_desc desc = describe(parts, 2, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  nvb_weight_info info = info_of(weight);
  CHECK(info.rows == 4 && info.columns == 3 && info.output_columns == 4 && info.bytes >= 48);
  CHECK(info.dtype == NVB_DTYPE_F32 && info.gated == 0);
  check_product(f, weight, stacked, 4);
  CHECK_OK(nvb_weight_destroy(weight));

  desc.arrangement = NVB_WEIGHT_GATED;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  info = info_of(weight);
  CHECK(info.rows == 4 && info.output_columns == 2 && info.gated == 1);
  check_product(f, weight, gated, 2);
  CHECK_OK(nvb_weight_destroy(weight));

  // The weight may come from device memory, too, and be borrowed there.
  void* on_device = upload(f, a, sizeof a);
  nvb_tensor part = nvb_tensor_2d(on_device, NVB_DTYPE_F32, 2, 3);
  for (uint32_t source = NVB_SOURCE_DEVICE; source <= NVB_SOURCE_BORROWED; ++source) {
    desc = describe(&part, 1, NVB_WEIGHT_STACKED, source);
    CHECK_OK(nvb_weight_create(f->backend, &desc, NULL, &weight));
    CHECK((info_of(weight).bytes == 0) == (source == NVB_SOURCE_BORROWED));
    check_product(f, weight, stacked, 2);
    CHECK_OK(nvb_weight_destroy(weight));
  }
  release(f, on_device);
}

static void test_errors(fixture* f) {
  float values[64] = {0};
  nvb_tensor good = nvb_tensor_2d(values, NVB_DTYPE_F32, 4, 8);
  nvb_tensor parts[2];
  nvb_weight* weight = foreign_handle();
  nvb_weight_desc desc = describe(parts, 2, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
#define REFUSED(...) \
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, f->stream, &weight), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  parts[0] = good;
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F16, 4, 8);
  REFUSED("parts[1]", "f16", "f32");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F32, 4, 9);
  REFUSED("parts[1]", "9", "8");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F32, 0, 8);
  REFUSED("parts[1]", "empty");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_I32, 4, 8);
  REFUSED("parts[1]", "i32");
  parts[1] = nvb_tensor_1d(values, NVB_DTYPE_F32, 8);
  REFUSED("parts[1]", "rank 1");
  parts[1] = nvb_tensor_2d(NULL, NVB_DTYPE_F32, 4, 8);
  REFUSED("parts[1]", "NULL");
  parts[1] = nvb_tensor_2d((char*)values + 2, NVB_DTYPE_F32, 4, 7);
  REFUSED("parts[1]", "aligned", "4");
  parts[1] = nvb_tensor_2d(values, 10, 4, 8);
  REFUSED("parts[1]", "dtype 10");
  parts[1] = nvb_tensor_make(values, NVB_DTYPE_F32, 5, 1, 1, 1, 1);
  REFUSED("parts[1]", "rank 5", "4");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F32, -4, 8);
  REFUSED("parts[1]", "-4");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F32, INT64_MAX, INT64_MAX);
  REFUSED("parts[1]", "overflow");
  parts[1] = good;
  parts[1].strides[0] = 8;
  parts[1].strides[1] = 2;
  REFUSED("parts[1]", "stride is 2", "1");
  memset(&parts[1], 0, sizeof parts[1]);
  REFUSED("parts[1]", "missing");
  parts[1] = nvb_tensor_2d(values, NVB_DTYPE_F32, 5, 8);
  desc.arrangement = NVB_WEIGHT_GATED;
  REFUSED("gate and up");
  desc.part_count = 1;
  REFUSED("gate and up");
  desc.part_count = 0;
  REFUSED("at least one part");
  desc.part_count = (size_t)1 << 36;
  REFUSED("part_count is 68719476736", "65536");
  desc = describe(NULL, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  REFUSED("parts", "NULL", "1");
  desc = describe(parts, 1, 2, NVB_SOURCE_HOST);
  REFUSED("arrangement is 2");
  desc = describe(parts, 1, NVB_WEIGHT_STACKED, 4);
  REFUSED("source is 4");
  desc.source = NVB_SOURCE_IN_PLACE;
  REFUSED("tensors are not packed in their place", "Q4_0");
  desc = describe(parts, 2, NVB_WEIGHT_STACKED, NVB_SOURCE_BORROWED);
  void* block = upload(f, values, sizeof values);
  parts[0] = parts[1] = nvb_tensor_2d(block, NVB_DTYPE_F32, 4, 8);
  REFUSED("borrowed");
  parts[1] = nvb_tensor_2d(block, NVB_DTYPE_F32, 9, 8);
  desc.source = NVB_SOURCE_DEVICE;
  REFUSED("parts[1]", "288 bytes", "past the end");
  if (!test_on_cpu()) {
    parts[1] = good;
    REFUSED("parts[1]", "not memory of");
  }
  release(f, block);
  desc = describe(&good, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  CHECK_FAILS(nvb_weight_create(NULL, &desc, NULL, &weight), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "weight", "NULL");
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, foreign_handle(), &weight), NVB_ERROR_INVALID_ARGUMENT,
              "not a stream");
  CHECK(weight == foreign_handle());
}

// What `weight` says its values are.
static void values_of(fixture* f, nvb_weight* weight, float* values, int64_t rows, int64_t columns) {
  size_t bytes = (size_t)(rows * columns) * sizeof *values;
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, bytes, f->stream, &block));
  nvb_tensor output = nvb_tensor_2d(block, NVB_DTYPE_F32, rows, columns);
  CHECK_OK(nvb_weight_dequantize(weight, &output, f->stream));
  download(f, values, block, bytes);
  release(f, block);
}

static void test_formats(fixture* f) {
  enum { ROWS = 40, COLUMNS = 192 };
  static float values[ROWS * COLUMNS], back[ROWS * COLUMNS];
  uint32_t state = 1;
  for (int i = 0; i < ROWS * COLUMNS; ++i) values[i] = next_number(&state);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, ROWS, COLUMNS);
  static const struct {
    uint32_t format, granularity, group_size, zero_points, clipping;
    uint32_t reported_granularity, reported_group;
    uint64_t scale_bytes;
    double error;
  } cases[] = {
      {NVB_WEIGHT_FORMAT_BF16, 0, 0, 0, 0, 0, 0, 0, 3e-3},
      {NVB_WEIGHT_FORMAT_F16, 0, 0, 0, 0, 0, 0, 0, 4e-4},
      {NVB_WEIGHT_FORMAT_F32, 0, 0, 0, 0, 0, 0, 0, 0},
      {NVB_WEIGHT_FORMAT_FP8_E4M3, 0, 0, 0, 0, NVB_GRANULARITY_ROWS, 0, 4 * ROWS, 4e-2},
      {NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_GRANULARITY_BLOCKS, 0, 0, 0, NVB_GRANULARITY_BLOCKS, 128, 8, 4e-2},
      {NVB_WEIGHT_FORMAT_FP8_E5M2, NVB_GRANULARITY_TENSOR, 0, 0, 0, NVB_GRANULARITY_TENSOR, 0, 4 * ROWS, 7e-2},
      {NVB_WEIGHT_FORMAT_SFP, 0, 0, 0, 0, NVB_GRANULARITY_ROWS, 0, 4 * ROWS, 4e-2},
      {NVB_WEIGHT_FORMAT_INT8, 0, 0, 0, 0, NVB_GRANULARITY_ROWS, 0, 4 * ROWS, 5e-3},
      {NVB_WEIGHT_FORMAT_INT8, 0, 64, 0, 1, NVB_GRANULARITY_GROUPS, 64, 2 * 3 * ROWS, 5e-3},
      {NVB_WEIGHT_FORMAT_INT4, 0, 0, 0, 0, NVB_GRANULARITY_GROUPS, 32, 2 * 6 * ROWS, 9e-2},
      {NVB_WEIGHT_FORMAT_INT4, 0, 128, 1, 1, NVB_GRANULARITY_GROUPS, 128, 4 * 2 * ROWS, 9e-2},
      {NVB_WEIGHT_FORMAT_INT4, NVB_GRANULARITY_ROWS, 0, 0, 0, NVB_GRANULARITY_ROWS, 128, 2 * 2 * ROWS, 9e-2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    nvb_weight_desc desc = describe(&part, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
    desc.format = cases[i].format;
    desc.granularity = cases[i].granularity;
    desc.group_size = cases[i].group_size;
    desc.zero_points = cases[i].zero_points;
    desc.clipping = cases[i].clipping;
    nvb_weight* weight = NULL;
    CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
    nvb_weight_info info = info_of(weight);
    CHECK_EQUAL(info.encoding, cases[i].format);
    CHECK_EQUAL(info.granularity, cases[i].reported_granularity);
    CHECK_EQUAL(info.group_size, cases[i].reported_group);
    CHECK_EQUAL(info.zero_points, cases[i].zero_points);
    CHECK((info.dtype == 0) == (cases[i].reported_granularity != 0));
    // A GPU's INT4 is padded to blocks of 16 rows.
    CHECK(info.scale_bytes >= cases[i].scale_bytes && info.scale_bytes <= cases[i].scale_bytes * 48 / ROWS);
    CHECK(info.relative_error <= cases[i].error && (info.relative_error > 0) == (cases[i].error > 0));
    values_of(f, weight, back, ROWS, COLUMNS);
    double difference = 0, norm = 0;
    for (int j = 0; j < ROWS * COLUMNS; ++j) {
      difference += pow((double)back[j] - values[j], 2);
      norm += pow(values[j], 2);
    }
    CHECK_NEAR(sqrt(difference / norm), info.relative_error, 1e-5);
    CHECK_OK(nvb_weight_destroy(weight));
  }
}

// One row of each format of a file, packed by hand; every value is exact.
static void test_sources(fixture* f) {
  enum { COLUMNS = 256 };
  static unsigned char data[8 * COLUMNS];
  static float expected[8 * COLUMNS], values[8 * COLUMNS];
  static int32_t order[COLUMNS];
  const uint16_t half = 0x3800, eighth = 0x3000,
                 scales[16] = {0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800,
                               0x3000, 0x3000, 0x3000, 0x3000, 0x3000, 0x3000, 0x3000, 0x3000};
  const uint32_t zeros[2] = {0x88888888u, 0x88888888u};
  nvb_weight_desc desc = describe(NULL, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  nvb_weight_blocks blocks;
  memset(&blocks, 0, sizeof blocks);
  desc.blocks = &blocks;
  blocks.data = data;
  blocks.columns = COLUMNS;
  nvb_weight* weight = NULL;
#define SOURCE(source, row_count, byte_count, wanted)                                    \
  desc.source_format = (source);                                                         \
  blocks.rows = (row_count);                                                             \
  blocks.bytes = (byte_count);                                                           \
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));                    \
  CHECK_EQUAL(info_of(weight).encoding, (wanted));                                       \
  CHECK_NEAR(info_of(weight).relative_error, 0, 0);                                      \
  values_of(f, weight, values, (row_count), COLUMNS);                                    \
  for (int i = 0; i < (row_count) * COLUMNS; ++i) CHECK_NEAR(values[i], expected[i], 0); \
  CHECK_OK(nvb_weight_destroy(weight))

  for (int i = 0; i < COLUMNS; ++i) {
    unsigned char* block = data + i / 32 * 18;
    memcpy(block, i < 128 ? &half : &eighth, 2);
    unsigned char* byte = block + 2 + i % 16;
    int q = i * 7 % 16;
    *byte = (unsigned char)(i % 32 < 16 ? q : *byte | q << 4);
    expected[i] = (i < 128 ? 0.5f : 0.125f) * (float)(q - 8);
  }
  SOURCE(NVB_SOURCE_FORMAT_GGUF_Q4_0, 1, COLUMNS / 32 * 18, NVB_WEIGHT_FORMAT_INT4);
  for (int i = 0; i < COLUMNS; ++i) {
    memcpy(data + i / 32 * 34, &half, 2);
    data[i / 32 * 34 + 2 + i % 32] = (unsigned char)i;
    expected[i] = 0.5f * (float)(int8_t)i;
  }
  SOURCE(NVB_SOURCE_FORMAT_GGUF_Q8_0, 1, COLUMNS / 32 * 34, NVB_WEIGHT_FORMAT_INT8);
  for (int i = 0; i < COLUMNS; ++i) {
    data[i] = (unsigned char)(i % 64 + 64);
    expected[i] = (1 + (float)(i % 8) / 8) * ldexpf(1, i / 8 % 8 - 7);
  }
  SOURCE(NVB_SOURCE_FORMAT_SFP, 1, COLUMNS, NVB_WEIGHT_FORMAT_SFP);
  for (int i = 0; i < COLUMNS; ++i) {
    const unsigned char header[4] = {0x00, 0x3f, 0, 0};
    memcpy(data + i / 128 * 132, header, 4);
    data[i / 128 * 132 + 4 + i % 128] = (unsigned char)i;
    expected[i] = 0.5f * (float)(int8_t)i;
  }
  SOURCE(NVB_SOURCE_FORMAT_I8, 1, 264, NVB_WEIGHT_FORMAT_INT8);

  // Eight rows of AWQ and GPTQ in two groups: element (n, k) has the code (k + 3n) % 16.
  uint32_t* words = (uint32_t*)(void*)data;
  static const int nibble_of[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  memset(data, 0, sizeof data);
  blocks.scales = scales;
  blocks.scale_bytes = sizeof scales;
  blocks.zeros = zeros;
  blocks.zero_bytes = sizeof zeros;
  blocks.group_size = 128;
  for (int n = 0; n < 8; ++n) {
    for (int k = 0; k < COLUMNS; ++k) {
      uint32_t q = (uint32_t)(k + 3 * n) % 16;
      words[k] |= q << 4 * nibble_of[n];
      expected[n * COLUMNS + k] = (k < 128 ? 0.5f : 0.125f) * ((float)q - 8);
    }
  }
  SOURCE(NVB_SOURCE_FORMAT_AWQ, 8, COLUMNS * 4, NVB_WEIGHT_FORMAT_INT4);
  memset(data, 0, sizeof data);
  for (int k = 0; k < COLUMNS; ++k) order[k] = (k + 5) % 2;
  for (int n = 0; n < 8; ++n) {
    for (int k = 0; k < COLUMNS; ++k) {
      uint32_t q = (uint32_t)(k + 3 * n) % 16;
      words[k / 8 * 8 + n] |= q << 4 * (k % 8);
      expected[n * COLUMNS + k] = (order[k] == 0 ? 0.5f : 0.125f) * ((float)q - 8);
    }
  }
  blocks.order = order;
  blocks.order_bytes = sizeof order;
  SOURCE(NVB_SOURCE_FORMAT_GPTQ, 8, COLUMNS * 4, NVB_WEIGHT_FORMAT_INT4);

#define SOURCE_REFUSED(...) \
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, f->stream, &weight), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  blocks.version = 3;
  SOURCE_REFUSED("blocks[0]", "version is 3");
  blocks.version = 0;
  order[9] = 7;
  SOURCE_REFUSED("g_idx[9] is 7", "2 groups");
  blocks.order_bytes = 12;
  SOURCE_REFUSED("g_idx", "12", "1024");
  blocks.bytes = 16;
  SOURCE_REFUSED("qweight", "16 bytes", "1024");
  blocks.scale_dtype = NVB_DTYPE_I32;
  SOURCE_REFUSED("scale_dtype is 4");
  blocks.reserved[3] = 1;
  SOURCE_REFUSED("reserved");
  memset(&blocks, 0, sizeof blocks);
  blocks.rows = 1;
  blocks.columns = COLUMNS;
  desc.source_format = NVB_SOURCE_FORMAT_GGUF_Q4_K;
  SOURCE_REFUSED("Q4_K", "0 bytes", "144");
  blocks.bytes = 144;
  SOURCE_REFUSED("data", "NULL", "144");
  blocks.data = data;
  memset(data, 0xff, 144);
  SOURCE_REFUSED("Q4_K block 0 of row 0", "NaN");
  blocks.rows = -1;
  SOURCE_REFUSED("rows is -1");
  desc.source_format = 21;
  blocks.rows = 1;
  SOURCE_REFUSED("source_format is 21");
  desc.source = NVB_SOURCE_DEVICE;
  SOURCE_REFUSED("host memory");
  desc.source = NVB_SOURCE_HOST;
  desc.source_format = NVB_SOURCE_FORMAT_TENSOR;
  SOURCE_REFUSED("`blocks` is given");
  desc.blocks = NULL;
  desc.source_format = NVB_SOURCE_FORMAT_SFP;
  SOURCE_REFUSED("blocks", "NULL");
#undef SOURCE
#undef SOURCE_REFUSED
}

static void test_format_errors(fixture* f) {
  float values[64] = {0};
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 2, 32);
  nvb_weight* weight = foreign_handle();
  nvb_weight_desc desc = describe(&part, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
#define FORMAT_REFUSED(...) \
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, f->stream, &weight), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
  desc.format = 10;
  FORMAT_REFUSED("format is 10");
  desc.format = NVB_WEIGHT_FORMAT_INT4;
  desc.group_size = 48;
  FORMAT_REFUSED("group_size is 48", "32, 64 or 128");
  desc.granularity = NVB_GRANULARITY_ROWS;
  FORMAT_REFUSED("group_size is 48", "no groups");
  desc.group_size = 0;
  desc.granularity = 5;
  FORMAT_REFUSED("granularity is 5");
  desc.granularity = NVB_GRANULARITY_BLOCKS;
  FORMAT_REFUSED("int4", "blocks");
  desc.granularity = 0;
  desc.format = NVB_WEIGHT_FORMAT_FP8_E4M3;
  desc.zero_points = 1;
  FORMAT_REFUSED("zero points", "int4");
  desc.zero_points = 0;
  desc.clipping = 1;
  FORMAT_REFUSED("clipping");
  desc.format = NVB_WEIGHT_FORMAT_BF16;
  FORMAT_REFUSED("clipping");
  desc.clipping = 2;
  CHECK_FAILS(nvb_weight_create(f->backend, &desc, f->stream, &weight), NVB_ERROR_CONFIGURATION, "clipping is 2");
  desc.clipping = 0;
  desc.format = NVB_WEIGHT_FORMAT_INT8;
  values[33] = NAN;
  FORMAT_REFUSED("parts[0]", "row 1, column 1", "NaN");
  values[33] = 0;
  void* block = upload(f, values, sizeof values);
  part = nvb_tensor_2d(block, NVB_DTYPE_F32, 2, 32);
  desc.source = NVB_SOURCE_BORROWED;
  FORMAT_REFUSED("borrowed", "converted");
  CHECK(weight == foreign_handle());
#undef FORMAT_REFUSED
  desc.source = NVB_SOURCE_DEVICE;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  nvb_tensor output = nvb_tensor_2d(block, NVB_DTYPE_F32, 4, 16);
  CHECK_FAILS(nvb_weight_dequantize(weight, &output, f->stream), NVB_ERROR_INVALID_ARGUMENT, "output", "[4, 16]");
  output = nvb_tensor_2d(block, NVB_DTYPE_I32, 2, 32);
  CHECK_FAILS(nvb_weight_dequantize(weight, &output, f->stream), NVB_ERROR_INVALID_ARGUMENT, "output", "i32");
  CHECK_FAILS(nvb_weight_dequantize(weight, NULL, f->stream), NVB_ERROR_INVALID_ARGUMENT, "output", "NULL");
  CHECK_FAILS(nvb_weight_dequantize(NULL, &output, f->stream), NVB_ERROR_INVALID_ARGUMENT, "weight", "NULL");
  CHECK_OK(nvb_weight_destroy(weight));
  release(f, block);
}

static void test_handles(fixture* f) {
  float values[6] = {0};
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 2, 3);
  nvb_weight_desc desc = describe(&part, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  weight_context context = {f, NULL};
  CHECK_STRUCT(desc, create, &context);
  CHECK_OK(nvb_weight_create(f->backend, &desc, NULL, &context.weight));
  nvb_weight_info info;
  nvb_weight_info_init(&info);
  CHECK_STRUCT(info, get_info, &context);
  CHECK_FAILS(nvb_weight_get_info(NULL, &info), NVB_ERROR_INVALID_ARGUMENT, "weight", "NULL");

  // The weight of another backend.
  fixture other = open_fixture();
  void* block = upload(&other, values, sizeof values);
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(block, NVB_DTYPE_F32, 1, 3);
  args.output = nvb_tensor_2d((char*)block + 16, NVB_DTYPE_F32, 1, 2);
  args.weight = context.weight;
  CHECK_FAILS(nvb_linear(other.backend, &args, NULL), NVB_ERROR_INVALID_ARGUMENT, "weight", "another backend");
  release(&other, block);
  close_fixture(&other);

  CHECK_OK(nvb_weight_destroy(context.weight));
  CHECK_FAILS(nvb_weight_get_info(context.weight, &info), NVB_ERROR_INVALID_ARGUMENT, "weight", "destroyed");
  CHECK_FAILS(nvb_weight_destroy(context.weight), NVB_ERROR_INVALID_ARGUMENT, "weight", "destroyed");
  CHECK_FAILS(nvb_weight_destroy(foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a weight");
  CHECK_OK(nvb_weight_destroy(NULL));
}

static void test_growth(fixture* f) {
  static float values[1000];
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 10, 99);
  nvb_weight_desc desc = describe(&part, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  nvb_memory_statistics before = statistics_of(f->memory);
  long kilobytes = 0;
  for (int i = 0; i < 1100; ++i) {
    if (i == 100) kilobytes = resident_kilobytes();
    nvb_weight* weight = NULL;
    CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
    CHECK_OK(nvb_weight_destroy(weight));
  }
  CHECK_GROWTH(kilobytes);
  CHECK_EQUAL(statistics_of(f->memory).allocated, before.allocated);
  CHECK_EQUAL(statistics_of(f->memory).blocks, before.blocks);
}

int main(void) {
  fixture f = open_fixture();
  test_arrangements(&f);
  test_errors(&f);
  test_formats(&f);
  test_sources(&f);
  test_format_errors(&f);
  test_handles(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
