// nvb_stream_explain: operations tell how they would run, and do not.
#include "check.h"

enum { ROWS = 3, WIDTH = 64, MOST = 16 };

typedef struct plans {
  int count;
  struct {
    uint32_t operation, reason;
    uint64_t workspace_bytes;
    double operations, bytes;
    char kernel[64], text[2048];
  } at[MOST];
} plans;

static void note(const nvb_kernel_plan* plan, void* user_data) {
  plans* all = user_data;
  CHECK_EQUAL(plan->struct_size, sizeof *plan);
  CHECK(all->count < MOST);
  if (all->count == MOST) return;
  all->at[all->count].operation = plan->operation;
  all->at[all->count].reason = plan->reason;
  all->at[all->count].workspace_bytes = plan->workspace_bytes;
  all->at[all->count].operations = plan->operations;
  all->at[all->count].bytes = plan->bytes;
  snprintf(all->at[all->count].kernel, sizeof all->at[all->count].kernel, "%s", plan->kernel);
  snprintf(all->at[all->count].text, sizeof all->at[all->count].text, "%s", plan->text);
  ++all->count;
}

static nvb_tensor vectors(void* data) {
  return nvb_tensor_2d(data, NVB_DTYPE_F32, ROWS, WIDTH);
}

static nvb_status add(fixture* f, nvb_stream* stream, void* data) {
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.second = args.output = vectors(data);
  return nvb_add(f->backend, &args, stream);
}

static void check_sum(fixture* f, void* data, float expected) {
  float values[ROWS * WIDTH];
  download(f, values, data, sizeof values);
  for (int i = 0; i < ROWS * WIDTH; ++i) CHECK_EQUAL(values[i], expected);
}

static nvb_status matrix(fixture* f, void* data, nvb_stream* stream) {
  nvb_matmul_args args;
  nvb_matmul_args_init(&args);
  args.a = nvb_tensor_2d(data, NVB_DTYPE_F32, ROWS, WIDTH);
  args.b = nvb_tensor_2d(data, NVB_DTYPE_F32, ROWS, WIDTH);
  args.output = nvb_tensor_2d((char*)data + ROWS * WIDTH * 4, NVB_DTYPE_F32, ROWS, ROWS);
  args.transpose_b = 1;
  return nvb_matmul(f->backend, &args, stream);
}

// Nothing runs while operations are explained, and they run again afterwards.
static void test_nothing_runs(fixture* f, nvb_stream* stream) {
  float ones[2 * ROWS * WIDTH];
  for (size_t i = 0; i < sizeof ones / sizeof *ones; ++i) ones[i] = 1;
  void* data = upload(f, ones, sizeof ones);
  plans all = {0};
  CHECK_OK(nvb_stream_explain(f->backend, stream, note, &all));
  CHECK_OK(add(f, stream, data));
  CHECK_OK(nvb_memory_fill(f->memory, data, 7, sizeof ones, stream));
  CHECK_OK(nvb_memory_copy(f->memory, data, (char*)data + ROWS * WIDTH * 4, ROWS * WIDTH * 4, NVB_COPY_DEVICE_TO_DEVICE,
                           stream));
  CHECK_OK(matrix(f, data, stream));
  // Arguments are checked as ever, and what is refused has no plan.
  CHECK_INVALID(add(f, stream, NULL));
  CHECK_OK(nvb_stream_explain(f->backend, stream, NULL, NULL));
  check_sum(f, data, 1);

  static const uint32_t expected[] = {NVB_OPERATION_ELEMENTWISE, NVB_OPERATION_MEMORY_FILL, NVB_OPERATION_MEMORY_COPY,
                                      NVB_OPERATION_MATMUL};
  CHECK_EQUAL(all.count, sizeof expected / sizeof *expected);
  for (int i = 0; i < all.count; ++i) {
    CHECK_EQUAL(all.at[i].operation, expected[i]);
    CHECK(all.at[i].kernel[0] != '\0' && strstr(all.at[i].text, all.at[i].kernel) != NULL);
    CHECK(strstr(all.at[i].text, "workspace") != NULL && all.at[i].bytes > 0);
  }
  CHECK_EQUAL(all.at[0].reason, NVB_REASON_ONLY);
  CHECK_EQUAL(all.at[0].bytes, 3 * ROWS * WIDTH * 4);
  CHECK_EQUAL(all.at[1].workspace_bytes, 0);
  CHECK_EQUAL(all.at[3].operations, 2 * ROWS * ROWS * WIDTH);
  CHECK_OK(add(f, stream, data));
  CHECK_EQUAL(all.count, sizeof expected / sizeof *expected);
  check_sum(f, data, 2);
  release(f, data);
}

static nvb_linear_args product(nvb_weight* weight, void* input, void* output) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = vectors(input);
  args.weight = weight;
  args.output = vectors(output);
  return args;
}

// A product says what nvb_kernel_explain says, and follows an override.
static void test_products(fixture* f) {
  static float values[WIDTH * WIDTH];
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  void* data = upload(f, values, sizeof values);
  const nvb_linear_args args = product(weight, data, (char*)data + ROWS * WIDTH * 4);
  const char* name = test_on_cpu() ? "linear_cpu_64" : "linear_simt";
  plans all = {0};
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, note, &all));
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  CHECK_OK(nvb_kernel_override(f->backend, NVB_OPERATION_LINEAR, name));
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  CHECK_OK(nvb_kernel_override(f->backend, NVB_OPERATION_LINEAR, NULL));
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
  CHECK_EQUAL(all.count, 2);
  CHECK_EQUAL(all.at[0].reason, NVB_REASON_DEFAULT);
  CHECK(strstr(all.at[0].text, "the default for this shape") != NULL);
  CHECK_EQUAL(all.at[1].reason, NVB_REASON_OVERRIDE);
  CHECK(strcmp(all.at[1].kernel, name) == 0 && strstr(all.at[1].text, "it is the override") != NULL);
  CHECK_OK(nvb_weight_destroy(weight));
  release(f, data);
}

// An empty operation runs nothing, and so it says.
static void test_empty_product(fixture* f) {
  static float values[WIDTH];
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, 1, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(NULL, NVB_DTYPE_F32, 0, WIDTH);
  args.output = nvb_tensor_2d(NULL, NVB_DTYPE_F32, 0, 1);
  args.weight = weight;
  plans all = {0};
  CHECK_OK(nvb_stream_explain(f->backend, NULL, note, &all));
  CHECK_OK(nvb_linear(f->backend, &args, NULL));
  CHECK_OK(nvb_stream_explain(f->backend, NULL, NULL, NULL));
  CHECK_EQUAL(all.count, 1);
  CHECK(all.at[0].kernel[0] == '\0' && strstr(all.at[0].text, "runs nothing") != NULL);
  CHECK_OK(nvb_weight_destroy(weight));
}

static void test_errors(fixture* f) {
  plans all = {0};
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, note, &all));
  CHECK_FAILS(nvb_stream_explain(f->backend, f->stream, note, &all), NVB_ERROR_INVALID_ARGUMENT, "already");
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
  CHECK_OK(nvb_stream_explain(f->backend, f->stream, NULL, NULL));
  CHECK_INVALID(nvb_stream_explain(NULL, f->stream, note, &all));
  fixture other = open_fixture();
  CHECK_FAILS(nvb_stream_explain(other.backend, f->stream, note, &all), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  close_fixture(&other);
  nvb_stream* gone = NULL;
  CHECK_OK(nvb_stream_create(f->backend, 0, &gone));
  CHECK_OK(nvb_stream_explain(f->backend, gone, note, &all));
  CHECK_OK(nvb_stream_destroy(gone));
  CHECK_INVALID(nvb_stream_explain(f->backend, gone, NULL, NULL));
  CHECK_EQUAL(all.count, 0);
}

int main(void) {
  fixture f = open_fixture();
  test_nothing_runs(&f, f.stream);
  test_nothing_runs(&f, NULL);
  test_products(&f);
  test_empty_product(&f);
  test_errors(&f);
  close_fixture(&f);
  return test_result();
}
