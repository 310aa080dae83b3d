// graph: a multilayer perceptron, recorded once and launched for each batch of inputs.
//
//   graph [DEVICE]     "auto" (the default), "cpu", "cuda:N"
//
// Shapes and addresses are those of the recording; what changes from launch to launch is what lies in the input.
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 4, INPUTS = 64, HIDDEN = 128, OUTPUTS = 16, BATCHES = 3 };

// This program ends at the first error; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "graph: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "graph: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

typedef struct {
  nvb_backend* backend;
  nvb_memory_manager* memory;
  nvb_stream* stream;
  nvb_weight *first, *second;
  void *input, *hidden, *output;
} perceptron;

static nvb_weight* create_weight(const perceptron* model, int64_t rows, int64_t columns) {
  static float values[HIDDEN * INPUTS];
  for (int64_t i = 0; i < rows * columns; ++i) values[i] = (float)(i * 37 % 101 - 50) / 500;
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, rows, columns);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  MUST(nvb_weight_create(model->backend, &desc, model->stream, &weight));
  return weight;
}

// output = second · gelu(first · input), with the activation as an operation of its own, as many a model has it.
static void forward(const perceptron* model) {
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(model->input, NVB_DTYPE_F32, ROWS, INPUTS);
  args.weight = model->first;
  args.output = nvb_tensor_2d(model->hidden, NVB_DTYPE_F32, ROWS, HIDDEN);
  MUST(nvb_linear(model->backend, &args, model->stream));
  nvb_elementwise_args gelu;
  nvb_elementwise_args_init(&gelu);
  gelu.input = gelu.output = args.output;
  gelu.activation = NVB_ACTIVATION_GELU_TANH;
  MUST(nvb_activate(model->backend, &gelu, model->stream));
  args.input = args.output;
  args.weight = model->second;
  args.output = nvb_tensor_2d(model->output, NVB_DTYPE_F32, ROWS, OUTPUTS);
  MUST(nvb_linear(model->backend, &args, model->stream));
}

static void set_input(const perceptron* model, int batch) {
  float values[ROWS * INPUTS];
  for (int i = 0; i < ROWS * INPUTS; ++i) values[i] = (float)((i + batch) % 17) / 17;
  MUST(nvb_memory_copy(model->memory, model->input, values, sizeof values, NVB_COPY_HOST_TO_DEVICE, model->stream));
  MUST(nvb_stream_synchronize(model->stream));
}

static void get_output(const perceptron* model, float values[ROWS * OUTPUTS]) {
  const size_t bytes = ROWS * OUTPUTS * sizeof *values;
  MUST(nvb_memory_copy(model->memory, values, model->output, bytes, NVB_COPY_DEVICE_TO_HOST, model->stream));
  MUST(nvb_stream_synchronize(model->stream));
}

typedef nvb_status (*text_of_graph)(const nvb_graph*, uint32_t, char*, size_t, size_t*);

// Prints a text of the library's whose length it tells.
static void print_text(text_of_graph get, const nvb_graph* graph) {
  size_t needed = 0;
  MUST(get(graph, NVB_GRAPH_FORMAT_TEXT, NULL, 0, &needed));
  char* text = malloc(needed);
  EXPECT(text != NULL);
  MUST(get(graph, NVB_GRAPH_FORMAT_TEXT, text, needed, NULL));
  fputs(text, stdout);
  free(text);
}

// What a device lacks for the graph, of this machine or elsewhere.
static void print_findings(nvb_graph* graph, const char* device) {
  nvb_graph_validation found;
  nvb_graph_validation_init(&found);
  MUST(nvb_graph_validate(graph, device, &found));
  printf("%s: %u errors, %u warnings, %u notes, %llu bytes\n", found.device, found.errors, found.warnings, found.notes,
         (unsigned long long)found.memory_needed);
  for (uint32_t i = 0; i < found.errors + found.warnings + found.notes; ++i) {
    nvb_graph_finding finding;
    nvb_graph_finding_init(&finding);
    MUST(nvb_graph_get_finding(graph, i, &finding));
    printf("  %s\n", finding.text);
  }
}

// Launches the graph for each batch; its outputs are those expected, to the bit.
static void check_launches(const perceptron* model, nvb_graph* graph, float (*expected)[ROWS * OUTPUTS]) {
  int different = 0;
  for (int batch = 0; batch < BATCHES; ++batch) {
    float output[ROWS * OUTPUTS];
    set_input(model, batch);
    MUST(nvb_graph_launch(graph, model->stream));
    get_output(model, output);
    for (int i = 0; i < ROWS * OUTPUTS; ++i) different += output[i] != expected[batch][i];
  }
  EXPECT(different == 0);
}

int main(int argc, char** argv) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = argc > 1 ? argv[1] : "auto";
  perceptron model = {0};
  MUST(nvb_backend_create(&options, &model.backend));
  MUST(nvb_backend_get_memory_manager(model.backend, 0, &model.memory));
  MUST(nvb_stream_create(model.backend, 0, &model.stream));
  model.first = create_weight(&model, HIDDEN, INPUTS);
  model.second = create_weight(&model, OUTPUTS, HIDDEN);
  MUST(nvb_memory_allocate(model.memory, ROWS * INPUTS * sizeof(float), model.stream, &model.input));
  MUST(nvb_memory_allocate(model.memory, ROWS * HIDDEN * sizeof(float), model.stream, &model.hidden));
  MUST(nvb_memory_allocate(model.memory, ROWS * OUTPUTS * sizeof(float), model.stream, &model.output));

  float expected[BATCHES][ROWS * OUTPUTS];
  for (int batch = 0; batch < BATCHES; ++batch) {
    set_input(&model, batch);
    forward(&model);
    get_output(&model, expected[batch]);
  }

  // The very same calls, which are noted instead of run.
  nvb_graph* graph = NULL;
  MUST(nvb_graph_create(model.backend, &graph));
  MUST(nvb_graph_begin(graph, model.stream));
  forward(&model);
  MUST(nvb_graph_end(graph, model.stream));
  print_text(nvb_graph_describe, graph);

  // The graph keeps the weights.
  MUST(nvb_weight_destroy(model.first));
  MUST(nvb_weight_destroy(model.second));
  check_launches(&model, graph, expected);
  printf("%d batches: launches give what the calls give\n", BATCHES);

  // Before anything is deployed: what this device and others lack.
  print_findings(graph, NULL);
  print_findings(graph, "T4");
  print_findings(graph, "9.0");

  // Nobody reads what a launch leaves in the hidden layer. The level of exact rewrites changes no bit.
  const nvb_tensor hidden = nvb_tensor_2d(model.hidden, NVB_DTYPE_F32, ROWS, HIDDEN);
  MUST(nvb_graph_mark_internal(graph, &hidden));
  nvb_graph_optimize_options optimization;
  nvb_graph_optimize_options_init(&optimization);
  optimization.measure_times = optimization.measure_errors = 1;
  optimization.stream = model.stream;
  MUST(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, &optimization));
  print_text(nvb_graph_get_report, graph);
  check_launches(&model, graph, expected);
  printf("%d batches: the optimised graph gives the same\n", BATCHES);

  // Where the time goes; what the launches of the profile wrote is put back.
  MUST(nvb_graph_profile(graph, NULL));
  print_text(nvb_graph_get_profile, graph);

  MUST(nvb_graph_destroy(graph));
  MUST(nvb_memory_free(model.memory, model.input, model.stream));
  MUST(nvb_memory_free(model.memory, model.hidden, model.stream));
  MUST(nvb_memory_free(model.memory, model.output, model.stream));
  MUST(nvb_stream_destroy(model.stream));
  MUST(nvb_memory_manager_destroy(model.memory));
  MUST(nvb_backend_destroy(model.backend));
  return 0;
}
