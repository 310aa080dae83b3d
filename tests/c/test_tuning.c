// Kernels by name: the list, explanations, overrides, and tuning with a file.
#include <sys/stat.h>

#include "check.h"

enum { ROWS = 3, COLUMNS = 256, DEPTH = 128 };

static nvb_kernel_info kernel_at(nvb_backend* backend, uint32_t index) {
  nvb_kernel_info info;
  nvb_kernel_info_init(&info);
  CHECK_OK(nvb_kernel_get(backend, index, &info));
  return info;
}

static nvb_linear_case int8_case(uint64_t rows) {
  nvb_linear_case product;
  nvb_linear_case_init(&product);
  product.rows = rows;
  product.columns = COLUMNS;
  product.depth = DEPTH;
  product.input_dtype = NVB_DTYPE_BF16;
  product.format = NVB_WEIGHT_FORMAT_INT8;
  return product;
}

// The text about a product of `rows`; static, for one use at a time.
static const char* explanation(nvb_backend* backend, uint64_t rows) {
  static char text[4096];
  nvb_linear_case product = int8_case(rows);
  size_t needed = 0;
  CHECK_OK(nvb_kernel_explain(backend, &product, text, sizeof text, &needed));
  CHECK_EQUAL(needed, strlen(text) + 1);
  return text;
}

static void check_mentions(const char* text, const char* words) {
  if (strstr(text, words) == NULL) check_fail(__FILE__, __LINE__, words, text);
}

typedef struct {
  fixture* f;
  nvb_linear_case product;
} call_context;

static nvb_status get_kernel(void* value, void* context) {
  return nvb_kernel_get(((call_context*)context)->f->backend, 0, value);
}

static nvb_status explain(void* value, void* context) {
  return nvb_kernel_explain(((call_context*)context)->f->backend, value, NULL, 0, NULL);
}

static void test_list(fixture* f) {
  uint32_t all = 0, count = 0;
  CHECK_OK(nvb_kernel_count(NULL, &all));
  CHECK_OK(nvb_kernel_count(f->backend, &count));
  CHECK(count > 1 && count < all);
  for (uint32_t i = 0; i < all; ++i) {
    nvb_kernel_info info = kernel_at(NULL, i);
    CHECK(info.operation == NVB_OPERATION_LINEAR || info.operation == NVB_OPERATION_ATTENTION_PREFILL ||
          info.operation == NVB_OPERATION_ATTENTION_DECODE);
    CHECK((strncmp(info.name, "linear", 6) == 0) == (info.operation == NVB_OPERATION_LINEAR));
    CHECK(info.name[0] != '\0' && info.inputs[0] != '\0' && info.encodings[0] != '\0' && info.summary[0] != '\0');
    CHECK(info.depth_multiple >= 1 && info.alignment >= 1);
    CHECK_EQUAL(info.overridden, 0);
  }
  uint32_t kind = test_on_cpu() ? NVB_DEVICE_CPU : NVB_DEVICE_CUDA;
  for (uint32_t i = 0; i < count; ++i) CHECK_EQUAL(kernel_at(f->backend, i).device_kind, kind);

  nvb_kernel_info info;
  nvb_kernel_info_init(&info);
  CHECK_FAILS(nvb_kernel_get(f->backend, count, &info), NVB_ERROR_INVALID_ARGUMENT, "kernel index");
  CHECK_FAILS(nvb_kernel_count(f->backend, NULL), NVB_ERROR_INVALID_ARGUMENT, "count", "NULL");
  CHECK_FAILS(nvb_kernel_count(foreign_handle(), &count), NVB_ERROR_INVALID_ARGUMENT, "not a backend handle");
  call_context context = {f, int8_case(ROWS)};
  CHECK_STRUCT(info, get_kernel, &context);
  CHECK_STRUCT(context.product, explain, &context);
}

static void test_wrong_cases(fixture* f) {
  static const struct {
    size_t offset;
    uint32_t value;
    const char* words;
  } wrong[] = {
      {offsetof(nvb_linear_case, input_dtype), NVB_DTYPE_I32, "input_dtype is 4"},
      {offsetof(nvb_linear_case, output_dtype), 99, "output_dtype is 99"},
      {offsetof(nvb_linear_case, activation), 9, "activation is 9"},
      {offsetof(nvb_linear_case, bias), 2, "bias is 2"},
      {offsetof(nvb_linear_case, format), 0, "format is 0"},
      {offsetof(nvb_linear_case, format), 77, "format is 77"},
      {offsetof(nvb_linear_case, granularity), 77, "granularity is 77"},
      {offsetof(nvb_linear_case, group_size), 33, "group_size is 33"},
      {offsetof(nvb_linear_case, zero_points), 1, "zero points"},
      {offsetof(nvb_linear_case, arrangement), 5, "arrangement is 5"},
      {offsetof(nvb_linear_case, residual), 2, "residual is 2"},
      {offsetof(nvb_linear_case, columns), 0, "a weight of 0 rows"},
      {offsetof(nvb_linear_case, depth), 0, "of 0;"},
      {offsetof(nvb_linear_case, rows) + 4, 1, "rows is 4294967299"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    nvb_linear_case product = int8_case(ROWS);
    memcpy((char*)&product + wrong[i].offset, &wrong[i].value, sizeof wrong[i].value);
    CHECK_FAILS(nvb_kernel_explain(f->backend, &product, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, wrong[i].words);
    nvb_linear_case both[2] = {int8_case(ROWS), product};
    CHECK_FAILS(nvb_tune_linear(f->backend, both, 2, NULL, NULL, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "cases[1]",
                wrong[i].words);
  }
}

static void test_override(fixture* f) {
  const char* name = test_on_cpu() ? "linear_cpu_64" : "linear_quantized_plain";
  check_mentions(explanation(f->backend, ROWS), "the default for this shape");
  CHECK_OK(nvb_kernel_override(f->backend, NVB_OPERATION_LINEAR, name));
  check_mentions(explanation(f->backend, ROWS), "it is the override");
  uint32_t count = 0, overridden = 0;
  CHECK_OK(nvb_kernel_count(f->backend, &count));
  for (uint32_t i = 0; i < count; ++i) {
    nvb_kernel_info info = kernel_at(f->backend, i);
    overridden += info.overridden;
    CHECK_EQUAL(info.overridden, strcmp(info.name, name) == 0);
  }
  CHECK_EQUAL(overridden, 1);
  // A refused name leaves the override as it was.
  CHECK_FAILS(nvb_kernel_override(f->backend, NVB_OPERATION_LINEAR, "fastest"), NVB_ERROR_CONFIGURATION, "fastest",
              name);
  CHECK_FAILS(nvb_kernel_override(f->backend, NVB_OPERATION_SOFTMAX, name), NVB_ERROR_CONFIGURATION, "softmax");
  CHECK_FAILS(nvb_kernel_override(f->backend, 99, name), NVB_ERROR_INVALID_ARGUMENT, "operation is 99");
  CHECK_FAILS(nvb_kernel_override(NULL, NVB_OPERATION_LINEAR, name), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  check_mentions(explanation(f->backend, ROWS), "it is the override");
  CHECK_OK(nvb_kernel_override(f->backend, NVB_OPERATION_LINEAR, NULL));
  check_mentions(explanation(f->backend, ROWS), "the default for this shape");

  nvb_backend_options options = device_options();
  nvb_backend* other = NULL;
  options.linear_kernel = "fastest";
  CHECK_FAILS(nvb_backend_create(&options, &other), NVB_ERROR_CONFIGURATION, "fastest", name);
  options.linear_kernel = name;
  CHECK_OK(nvb_backend_create(&options, &other));
  check_mentions(explanation(other, ROWS), "it is the override");
  CHECK_OK(nvb_backend_destroy(other));
}

typedef struct {
  uint32_t calls, chosen, wrong;
  uint32_t stop_after;
} progress_count;

static uint32_t count_progress(const nvb_tune_progress* progress, void* user_data) {
  progress_count* count = user_data;
  CHECK_EQUAL(progress->struct_size, sizeof *progress);
  CHECK(progress->case_index < progress->case_count && progress->candidate < progress->candidate_count);
  CHECK(progress->name[0] != '\0');
  if (progress->outcome == NVB_TUNE_WRONG || progress->outcome == NVB_TUNE_FAILED) {
    fprintf(stderr, "%s: %s\n", progress->name, progress->reason);
  }
  count->wrong += progress->outcome == NVB_TUNE_WRONG || progress->outcome == NVB_TUNE_FAILED;
  count->chosen += progress->outcome == NVB_TUNE_CHOSEN;
  return ++count->calls == count->stop_after;
}

static nvb_tune_report tune(nvb_backend* backend, const nvb_linear_case* cases, size_t count,
                            progress_count* progress) {
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  options.rounds = 2;
  nvb_tune_report report;
  nvb_tune_report_init(&report);
  CHECK_OK(nvb_tune_linear(backend, cases, count, &options, count_progress, progress, &report));
  return report;
}

// Every encoding, with few rows and with many.
static size_t many_cases(nvb_linear_case* cases) {
  static const uint32_t formats[] = {NVB_WEIGHT_FORMAT_BF16, NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_WEIGHT_FORMAT_FP8_E5M2,
                                     NVB_WEIGHT_FORMAT_INT8, NVB_WEIGHT_FORMAT_INT4};
  size_t count = 0;
  for (size_t i = 0; i < sizeof formats / sizeof *formats; ++i) {
    for (uint64_t rows = ROWS; rows <= 8 * 27; rows *= 8) {
      cases[count] = int8_case(rows);
      cases[count].format = formats[i];
      cases[count].bias = rows > ROWS;
      cases[count].activation = i % 2 == 0 ? NVB_ACTIVATION_NONE : NVB_ACTIVATION_GELU_TANH;
      cases[count].arrangement = i == 2 ? NVB_WEIGHT_GATED : NVB_WEIGHT_STACKED;
      ++count;
    }
  }
  return count;
}

static void test_tuning(const char* file) {
  nvb_backend_options options = device_options();
  options.tuning_file = file;
  nvb_backend* backend = NULL;
  if (!CHECK_OK(nvb_backend_create(&options, &backend))) return;
  nvb_linear_case cases[32];
  size_t count = many_cases(cases);
  progress_count progress = {0, 0, 0, 0};
  nvb_tune_report report = tune(backend, cases, count, &progress);
  CHECK_EQUAL(report.tuned, count);
  CHECK_EQUAL(progress.chosen, count);
  CHECK_EQUAL(report.wrong + report.failed, 0);
  CHECK_EQUAL(progress.wrong, 0);
  CHECK(report.measured >= 2 * count);
  CHECK_EQUAL(report.stopped, 0);
  CHECK_EQUAL(report.saved, 1);
  CHECK(report.chosen_seconds > 0 && report.chosen_seconds <= report.default_seconds);
  CHECK(strcmp(report.file_error, "") == 0);
  CHECK_OK(nvb_backend_destroy(backend));

  // Another process would find what this backend finds.
  CHECK_OK(nvb_backend_create(&options, &backend));
  size_t known = 0;
  for (size_t i = 0; i < count; ++i) {
    char text[4096];
    CHECK_OK(nvb_kernel_explain(backend, &cases[i], text, sizeof text, NULL));
    known += strstr(text, "the tuned entry") != NULL;
    if (getenv("NVB_TEST_VERBOSE") != NULL) printf("%s\n\n", text);
  }
  CHECK_EQUAL(known, count);
  // Rows with the same next power of two share a choice.
  nvb_linear_case product = cases[6];
  product.rows = 4;
  char text[4096];
  CHECK_OK(nvb_kernel_explain(backend, &product, text, sizeof text, NULL));
  check_mentions(text, "the tuned entry");

  // A caller that has seen enough; a file that cannot be written.
  progress = (progress_count){0, 0, 0, 1};
  report = tune(backend, cases, count, &progress);
  CHECK_EQUAL(report.stopped, 1);
  CHECK_EQUAL(report.tuned, 0);
  CHECK_OK(nvb_backend_destroy(backend));
  CHECK(chmod(file, 0444) == 0);
  CHECK_OK(nvb_backend_create(&options, &backend));
  progress.stop_after = 0;
  report = tune(backend, cases, 1, &progress);
  CHECK_EQUAL(report.tuned, 1);
  CHECK_EQUAL(report.saved, 0);
  check_mentions(report.file_error, "read-only");
  CHECK_OK(nvb_backend_destroy(backend));
}

// Tuned products compute what untuned ones do.
static void test_products_follow(fixture* f) {
  static float values[COLUMNS * DEPTH], x[ROWS * DEPTH], before[ROWS * COLUMNS], after[ROWS * COLUMNS];
  uint32_t state = 1;
  for (int i = 0; i < COLUMNS * DEPTH; ++i) values[i] = next_number(&state);
  for (int i = 0; i < ROWS * DEPTH; ++i) x[i] = next_number(&state);
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, COLUMNS, DEPTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.format = NVB_WEIGHT_FORMAT_INT8;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, NULL, &weight));
  void *input = upload(f, x, sizeof x), *output = upload(f, before, sizeof before);
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(input, NVB_DTYPE_F32, ROWS, DEPTH);
  args.weight = weight;
  args.output = nvb_tensor_2d(output, NVB_DTYPE_F32, ROWS, COLUMNS);
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  download(f, before, output, sizeof before);

  nvb_linear_case product;
  nvb_linear_case_init(&product);
  product.weight = weight;
  product.rows = ROWS;
  product.input_dtype = NVB_DTYPE_F32;
  progress_count progress = {0, 0, 0, 0};
  nvb_tune_report report = tune(f->backend, &product, 1, &progress);
  CHECK_EQUAL(report.tuned, 1);
  CHECK_EQUAL(report.saved, 0);
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  download(f, after, output, sizeof after);
  for (int i = 0; i < ROWS * COLUMNS; ++i) CHECK_NEAR(after[i], before[i], 1e-4);

  product.columns = COLUMNS;
  CHECK_FAILS(nvb_kernel_explain(f->backend, &product, NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "`weight` is given");
  CHECK_OK(nvb_tune_linear(f->backend, NULL, 0, NULL, NULL, NULL, NULL));
  CHECK_FAILS(nvb_tune_linear(f->backend, NULL, 1, NULL, NULL, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "NULL");
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  options.clock = 5;
  CHECK_FAILS(nvb_tune_linear(f->backend, NULL, 0, &options, NULL, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT,
              "clock is 5");
  release(f, input);
  release(f, output);
  CHECK_OK(nvb_weight_destroy(weight));
}

int main(void) {
  fixture f = open_fixture();
  test_list(&f);
  test_wrong_cases(&f);
  test_override(&f);
  test_products_follow(&f);
  close_fixture(&f);
  char file[] = "/tmp/nvb_tuning_XXXXXX";
  int descriptor = mkstemp(file);
  CHECK(descriptor >= 0);
  close(descriptor);
  test_tuning(file);
  CHECK(remove(file) == 0);
  return test_result();
}
