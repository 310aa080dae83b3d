// tuning: which kernel a product takes and why, another one by name, and the fastest one measured and kept in a file.
//
//   tuning [DEVICE [FILE]]     DEVICE: "auto" (the default), "cpu", "cuda:N"; FILE: where choices are kept and read
//   from
#include <inttypes.h>
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "tuning: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "tuning: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

static nvb_backend* open_backend(const char* device, const char* file) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = device;
  options.tuning_file = file;
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  return backend;
}

// A product of a model that need not be loaded: 8 rows with an INT8 weight of 512 x 256.
static nvb_linear_case product(void) {
  nvb_linear_case value;
  nvb_linear_case_init(&value);
  value.rows = 8;
  value.columns = 512;
  value.depth = 256;
  value.input_dtype = NVB_DTYPE_BF16;
  value.format = NVB_WEIGHT_FORMAT_INT8;
  return value;
}

// Prints which kernel would run, and returns whether the text has these words.
static int explained(nvb_backend* backend, const char* when, const char* words) {
  const nvb_linear_case value = product();
  size_t needed = 0;
  MUST(nvb_kernel_explain(backend, &value, NULL, 0, &needed));
  char* text = malloc(needed);
  EXPECT(text != NULL);
  MUST(nvb_kernel_explain(backend, &value, text, needed, NULL));
  // The first line is the product, the second the kernel and the reason; others follow that could do it, or cannot.
  const char* line = text + strcspn(text, "\n");
  line += strspn(line, "\n ");
  printf("%s: %.*s\n", when, (int)strcspn(line, "\n"), line);
  const int found = strstr(text, words) != NULL;
  free(text);
  return found;
}

static nvb_kernel_info kernel_at(nvb_backend* backend, uint32_t index) {
  nvb_kernel_info info;
  nvb_kernel_info_init(&info);
  MUST(nvb_kernel_get(backend, index, &info));
  return info;
}

// Every kernel by name; the last one of products takes the product for a while.
static void choose_by_name(nvb_backend* backend) {
  uint32_t count = 0, last = UINT32_MAX;
  MUST(nvb_kernel_count(backend, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const nvb_kernel_info info = kernel_at(backend, i);
    printf("  %-32s inputs %s; weights %s\n", info.name, info.inputs, info.encodings);
    if (info.operation == NVB_OPERATION_LINEAR) last = i;
  }
  EXPECT(last != UINT32_MAX);
  MUST(nvb_kernel_override(backend, NVB_OPERATION_LINEAR, kernel_at(backend, last).name));
  EXPECT(kernel_at(backend, last).overridden == 1);
  explained(backend, "overridden", "");
  MUST(nvb_kernel_override(backend, NVB_OPERATION_LINEAR, NULL));
}

// Hears of every candidate; anything but 0 would end the tuning.
static uint32_t show(const nvb_tune_progress* progress, void* user_data) {
  ++*(int*)user_data;
  if (progress->outcome == NVB_TUNE_CHOSEN) printf("  chosen: %s, %.1f us\n", progress->name, progress->seconds * 1e6);
  return 0;
}

int main(int count, char** arguments) {
  const char* device = count > 1 ? arguments[1] : "auto";
  const char* file = count > 2 ? arguments[2] : NULL;
  if (file != NULL) remove(file);
  nvb_backend* backend = open_backend(device, file);
  EXPECT(explained(backend, "before", "the default for this shape"));
  choose_by_name(backend);

  const nvb_linear_case value = product();
  nvb_tune_options options;
  nvb_tune_options_init(&options);
  options.rounds = 3;
  nvb_tune_report report;
  nvb_tune_report_init(&report);
  int heard = 0;
  MUST(nvb_tune_linear(backend, &value, 1, &options, show, &heard, &report));
  printf("tuned %" PRIu64 " product: %" PRIu64 " candidates measured, %.1f us by default, %.1f us as chosen\n",
         report.tuned, report.measured, report.default_seconds * 1e6, report.chosen_seconds * 1e6);
  EXPECT(report.tuned == 1 && report.wrong == 0 && heard > 0);
  EXPECT(report.saved == (file != NULL));
  EXPECT(explained(backend, "tuned", "tuned"));
  MUST(nvb_backend_destroy(backend));

  // A later process on the same device and driver, with the same build, starts with the choices.
  if (file != NULL) {
    backend = open_backend(device, file);
    EXPECT(explained(backend, "read from the file", "tuned"));
    MUST(nvb_backend_destroy(backend));
  }
  return 0;
}
