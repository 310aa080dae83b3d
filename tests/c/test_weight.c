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

static nvb_weight_desc describe(const nvb_tensor* parts, size_t count, uint32_t arrangement, uint32_t source) {
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

  // The same from device memory, and borrowed there.
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
  parts[1] = nvb_tensor_2d(values, 9, 4, 8);
  REFUSED("parts[1]", "dtype 9");
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
  desc = describe(NULL, 1, NVB_WEIGHT_STACKED, NVB_SOURCE_HOST);
  REFUSED("parts", "NULL", "1");
  desc = describe(parts, 1, 2, NVB_SOURCE_HOST);
  REFUSED("arrangement is 2");
  desc = describe(parts, 1, NVB_WEIGHT_STACKED, 3);
  REFUSED("source is 3");
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
  test_handles(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
