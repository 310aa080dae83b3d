// What a device lacks for a graph: findings of this machine's devices and of those that are elsewhere.
#include "graph_layer.h"

static nvb_graph_validation validated(nvb_graph* graph, const char* device) {
  nvb_graph_validation validation;
  nvb_graph_validation_init(&validation);
  CHECK_OK(nvb_graph_validate(graph, device, &validation));
  return validation;
}

// Whether there is a finding with these words, and that all findings are told, errors first.
static int finds(nvb_graph* graph, const nvb_graph_validation* validation, uint32_t severity, uint32_t topic,
                 const char* words) {
  uint32_t counts[3] = {0, 0, 0}, before = NVB_SEVERITY_ERROR;
  const uint32_t count = validation->errors + validation->warnings + validation->notes;
  int found = 0;
  nvb_graph_finding finding;
  nvb_graph_finding_init(&finding);
  for (uint32_t i = 0; i < count; ++i) {
    CHECK_OK(nvb_graph_get_finding(graph, i, &finding));
    CHECK(finding.severity <= before && finding.topic <= NVB_TOPIC_LIBRARY && finding.text[0] != '\0');
    before = finding.severity;
    ++counts[finding.severity];
    found |= finding.severity == severity && finding.topic == topic && strstr(finding.text, words) != NULL;
  }
  CHECK_INVALID(nvb_graph_get_finding(graph, count, &finding));
  CHECK_EQUAL(counts[NVB_SEVERITY_ERROR], validation->errors);
  CHECK_EQUAL(counts[NVB_SEVERITY_WARNING], validation->warnings);
  CHECK_EQUAL(counts[NVB_SEVERITY_NOTE], validation->notes);
  return found;
}

// On its own device a layer lacks nothing, and all of its memory is counted.
static void test_own_device(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graph = record(f, &l, f->stream);
  float before[SEQUENCES * WIDTH], after[SEQUENCES * WIDTH];
  download(f, before, l.x, BYTES);
  nvb_graph_validation own = validated(graph, NULL);
  CHECK_EQUAL(own.errors, 0);
  CHECK(own.memory_needed > 4u * WIDTH * WIDTH && own.memory_needed < 1 << 20 && own.memory_total > own.memory_needed);
  CHECK(own.device[0] != '\0');
  CHECK_EQUAL(validated(graph, "").notes, own.notes);
  if (test_on_cpu()) {
    CHECK_EQUAL(validated(graph, "cpu").notes, own.notes);
    CHECK_EQUAL(own.compute_capability, 0);
  }
  // Nothing ran.
  download(f, after, l.x, BYTES);
  CHECK(memcmp(before, after, sizeof after) == 0);

  // Memory that sleeps is found, as a launch would find it.
  CHECK_OK(nvb_memory_sleep(f->memory, 1, NULL));
  nvb_graph_validation asleep = validated(graph, NULL);
  CHECK_EQUAL(asleep.errors, 1);
  CHECK(finds(graph, &asleep, NVB_SEVERITY_ERROR, NVB_TOPIC_MEMORY, "asleep"));
  CHECK_OK(nvb_memory_wake(f->memory, NULL));
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_handles(&l);
  destroy_memory(f, &l);
}

// A product with an FP8 weight in BF16.
static nvb_graph* record_fp8(fixture* f, void* data, int host_copy) {
  static float values[WIDTH * WIDTH];
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  desc.format = NVB_WEIGHT_FORMAT_FP8_E4M3;
  nvb_weight* made = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &made));
  nvb_linear_args args;
  nvb_linear_args_init(&args);
  args.input = nvb_tensor_2d(data, NVB_DTYPE_BF16, 1, WIDTH);
  args.output = nvb_tensor_2d((char*)data + 1024, NVB_DTYPE_BF16, 1, WIDTH);
  args.weight = made;
  static float host[4];
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  CHECK_OK(nvb_linear(f->backend, &args, f->stream));
  if (host_copy) {
    CHECK_OK(nvb_memory_copy(f->memory, data, host, sizeof host, NVB_COPY_HOST_TO_DEVICE, f->stream));
  }
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_OK(nvb_weight_destroy(made));
  return graph;
}

static void test_devices_elsewhere(fixture* f) {
  void* data = NULL;
  CHECK_OK(nvb_memory_allocate(f->memory, 4096, f->stream, &data));
  nvb_graph* graph = record_fp8(f, data, test_on_cpu());
  static const struct {
    const char* device;
    int32_t capability;
    int knows_memory, fp8_is_converted, bf16_is_converted, launches_programmatically;
  } devices[] = {
      {"7.5", 75, 0, 1, 1, 0},  {"T4", 75, 1, 1, 1, 0},  {"A100 80GB", 80, 1, 1, 0, 0}, {"NVIDIA L40S", 89, 1, 0, 0, 0},
      {"H200", 90, 1, 0, 0, 1}, {"9.0", 90, 0, 0, 0, 1}, {"12.0", 120, 0, 0, 0, 1},
  };
  for (size_t i = 0; i < sizeof devices / sizeof *devices; ++i) {
    nvb_graph_validation found = validated(graph, devices[i].device);
    CHECK_EQUAL(found.compute_capability, devices[i].capability);
    CHECK_EQUAL(found.memory_total > 0, devices[i].knows_memory);
    CHECK_EQUAL(finds(graph, &found, NVB_SEVERITY_WARNING, NVB_TOPIC_DTYPE, "FP8"), devices[i].fp8_is_converted);
    CHECK_EQUAL(finds(graph, &found, NVB_SEVERITY_WARNING, NVB_TOPIC_DTYPE, "BF16"), devices[i].bf16_is_converted);
    CHECK_EQUAL(finds(graph, &found, NVB_SEVERITY_NOTE, NVB_TOPIC_CAPABILITY, "programmatic"),
                !devices[i].launches_programmatically);
    CHECK_EQUAL(finds(graph, &found, NVB_SEVERITY_NOTE, NVB_TOPIC_MEMORY, "not known"), !devices[i].knows_memory);
    CHECK(finds(graph, &found, NVB_SEVERITY_NOTE, NVB_TOPIC_DEVICE, "recorded again"));
    if (test_on_cpu()) CHECK(finds(graph, &found, NVB_SEVERITY_WARNING, NVB_TOPIC_MEMORY, "page-locked"));
  }
  nvb_graph_validation old = validated(graph, "6.1");
  CHECK(finds(graph, &old, NVB_SEVERITY_ERROR, NVB_TOPIC_CAPABILITY, "7.0 is the oldest"));
  nvb_graph_validation tpu = validated(graph, "tpu:0");
  CHECK(finds(graph, &tpu, NVB_SEVERITY_ERROR, NVB_TOPIC_DEVICE, "no executor for TPUs"));

  // What two nodes have in common is told once.
  nvb_graph_validation t4 = validated(graph, "T4");
  nvb_graph_finding finding;
  nvb_graph_finding_init(&finding);
  int told = 0;
  for (uint32_t i = 0; i < t4.errors + t4.warnings; ++i) {
    CHECK_OK(nvb_graph_get_finding(graph, i, &finding));
    if (finding.topic != NVB_TOPIC_DTYPE) continue;
    CHECK_EQUAL(finding.nodes, 2);
    CHECK_EQUAL(finding.first_node, 0);
    ++told;
  }
  CHECK_EQUAL(told, 2);
  CHECK_OK(nvb_graph_destroy(graph));
  release(f, data);
}

// A graph that names more memory than a device has does not run there. Its operations never run: that they were
// recorded is enough.
static void test_too_much_memory(fixture* f) {
  if (!test_on_cpu()) return;  // A GPU does not let memory be named that it cannot reach.
  enum { ROWS = 1 << 16, COLUMNS = 1 << 17 };
  static float row[4];
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = nvb_tensor_2d(row, NVB_DTYPE_F32, ROWS, COLUMNS);
  args.activation = NVB_ACTIVATION_SILU;
  CHECK_OK(nvb_activate(f->backend, &args, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  nvb_graph_validation small = validated(graph, "A10");
  CHECK_EQUAL(small.memory_needed, (long long)ROWS * COLUMNS * 4);
  CHECK(finds(graph, &small, NVB_SEVERITY_ERROR, NVB_TOPIC_MEMORY,
              "32.00 GiB are named by the graph; the device has 24.00"));
  nvb_graph_validation tight = validated(graph, "V100 32GB");
  CHECK(finds(graph, &tight, NVB_SEVERITY_WARNING, NVB_TOPIC_MEMORY, "nine tenths"));
  nvb_graph_validation large = validated(graph, "H200");
  CHECK(!finds(graph, &large, NVB_SEVERITY_ERROR, NVB_TOPIC_MEMORY, "named"));
  CHECK_OK(nvb_graph_destroy(graph));
}

static nvb_status validate(void* validation, void* graph) {
  return nvb_graph_validate(graph, "9.0", validation);
}

static nvb_status get_finding(void* finding, void* graph) {
  return nvb_graph_get_finding(graph, 0, finding);
}

static void test_errors(fixture* f) {
  nvb_graph* graph = NULL;
  nvb_graph_validation validation;
  nvb_graph_validation_init(&validation);
  nvb_graph_finding finding;
  nvb_graph_finding_init(&finding);
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_FAILS(nvb_graph_validate(graph, NULL, &validation), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_INVALID(nvb_graph_get_finding(graph, 0, &finding));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_FAILS(nvb_graph_validate(graph, NULL, &validation), NVB_ERROR_INVALID_ARGUMENT, "being recorded");
  CHECK_OK(nvb_graph_end(graph, f->stream));
  static const char* const wrong[] = {"H1000", "9", "9.", "9.0a", "99.9", "gpu", " ", "cuda:"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    CHECK_FAILS(nvb_graph_validate(graph, wrong[i], &validation), NVB_ERROR_INVALID_ARGUMENT, wrong[i], "RTX 4090");
  }
  CHECK(nvb_graph_validate(graph, "cuda:65535", &validation) != NVB_OK);
  CHECK_STRUCT(validation, validate, graph);
  CHECK_STRUCT(finding, get_finding, graph);
  CHECK_INVALID(nvb_graph_validate(graph, NULL, NULL));
  CHECK_INVALID(nvb_graph_get_finding(graph, 0, NULL));
  CHECK_INVALID(nvb_graph_validate(NULL, NULL, &validation));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_INVALID(nvb_graph_validate(graph, NULL, &validation));
  CHECK_INVALID(nvb_graph_get_finding(graph, 0, &finding));
}

int main(void) {
  fixture f = open_fixture();
  test_own_device(&f);
  test_devices_elsewhere(&f);
  test_too_much_memory(&f);
  test_errors(&f);
  close_fixture(&f);
  return test_result();
}
