// The one way to a backend: options over a configuration or a preset. Each field by itself, what overrides what, what
// runs, and what is refused.
#include "check.h"

enum { MIB = 1 << 20 };

static nvb_configuration* create(uint32_t preset) {
  nvb_configuration* configuration = NULL;
  CHECK_OK(nvb_configuration_create(preset, &configuration));
  return configuration;
}

// The value of a field in what the backend reports.
static const char* running(const nvb_backend* backend, const char* field) {
  static char json[8192], text[256];
  nvb_configuration* c = create(NVB_PRESET_INFERENCE);
  CHECK_OK(nvb_backend_get_configuration_json(backend, json, sizeof json, NULL));
  CHECK_OK(nvb_configuration_apply_json(c, json));
  CHECK_OK(nvb_configuration_get(c, field, text, sizeof text, NULL));
  CHECK_OK(nvb_configuration_destroy(c));
  return text;
}

static void expect_running(const nvb_backend* backend, const char* field, const char* expected) {
  const char* value = running(backend, field);
  // "cuda" is answered with the GPU that was taken, such as "cuda:0".
  if (strcmp(expected, "cuda") == 0 && strncmp(value, "cuda:", 5) == 0) return;
  if (strcmp(value, expected) != 0) printf("%s is %s, not %s\n", field, value, expected);
  CHECK(strcmp(value, expected) == 0);
}

// Fields --------------------------------------------------------------------------------------------------------------

enum { TEXT, WORD, LONG, REAL };  // how a field of options is stored

typedef struct {
  const char* field;
  const char* value;  // as a configuration takes it
  size_t offset;  // of the field of nvb_memory_options if `field` starts with "memory.", else of nvb_backend_options
  int kind;
  uint64_t code;         // as the options take it
  const char* reported;  // if that is not `value`
} row;

static const char* kernel_name(void) {
  static nvb_kernel_info kernel;
  fixture f = open_fixture();
  nvb_kernel_info_init(&kernel);
  CHECK_OK(nvb_kernel_get(f.backend, 0, &kernel));
  close_fixture(&f);
  return kernel.name;
}

// What a field cannot do without.
static const char* company(const char* field, nvb_memory_options* memory) {
  if (strcmp(field, "memory.growth") == 0) {
    memory->initial_bytes = 128 * MIB;
    return "{\"memory\": {\"initial_bytes\": \"128MiB\"}}";
  }
  if (strcmp(field, "memory.limit_of") == 0) {
    memory->limit_fraction = 0.25;
    return "{\"memory\": {\"limit_fraction\": 0.25}}";
  }
  return "{}";
}

static void set_option(void* options, const row* r) {
  void* at = (char*)options + r->offset;
  const uint32_t word = (uint32_t)r->code;
  const double real = strtod(r->value, NULL);
  if (r->kind == TEXT) memcpy(at, &r->value, sizeof r->value);
  if (r->kind == WORD) memcpy(at, &word, sizeof word);
  if (r->kind == LONG) memcpy(at, &r->code, sizeof r->code);
  if (r->kind == REAL) memcpy(at, &real, sizeof real);
}

// The observable side of fields that any device has; the kernels that the others choose are looked at by name
// elsewhere.
static void check_effect(const nvb_backend* backend, const char* field) {
  fixture f = {NULL, NULL, NULL};
  CHECK_OK(nvb_backend_get_memory_manager(backend, 0, &f.memory));
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  void* block = NULL;
  CHECK_OK(nvb_memory_allocate(f.memory, 5000, NULL, &block));
  CHECK_OK(nvb_memory_get_statistics(f.memory, &statistics));
  char text[1 << 14] = "";
  if (strcmp(field, "threads") == 0 && test_on_cpu()) {
    nvb_device_info info;
    nvb_device_info_init(&info);
    CHECK_OK(nvb_backend_get_device_info(backend, &info));
    CHECK_EQUAL(info.multiprocessors, 3);
  } else if (strcmp(field, "precision") == 0) {
    nvb_kv_cache_options options;
    nvb_kv_cache_options_init(&options);
    options.layers = options.sequences = options.kv_heads = 1;
    options.head_dim = 8;
    options.capacity = 16;
    nvb_kv_cache* cache = NULL;
    uint64_t bytes = 0;
    CHECK_OK(nvb_kv_cache_create(backend, &options, &cache));
    CHECK_OK(nvb_kv_cache_get_bytes(cache, &bytes));
    CHECK_EQUAL(bytes, 2 * 8 * 16 * 2);
    CHECK_OK(nvb_kv_cache_destroy(cache));
  } else if (strcmp(field, "linear_kernel") == 0) {
    nvb_kernel_info kernel;
    nvb_kernel_info_init(&kernel);
    CHECK_OK(nvb_kernel_get(backend, 0, &kernel));
    CHECK_EQUAL(kernel.overridden, 1);
  } else if (strcmp(field, "memory.limit") == 0) {
    CHECK_EQUAL(statistics.limit, 256 * MIB);
  } else if (strcmp(field, "memory.limit_fraction") == 0) {
    CHECK(statistics.limit > 0 && statistics.limit <= statistics.device_total / 2 + 1);
  } else if (strcmp(field, "memory.limit_of") == 0) {
    CHECK(statistics.limit > 0 && statistics.limit < statistics.device_total / 4);
  } else if (strcmp(field, "memory.margin") == 0) {
    CHECK_EQUAL(statistics.margin, 4096);
  } else if (strcmp(field, "memory.initial_bytes") == 0) {
    CHECK_EQUAL(statistics.reserved, 96 * MIB);
  } else if (strcmp(field, "memory.growth") == 0) {
    void* other = NULL;
    CHECK_FAILS(nvb_memory_allocate(f.memory, 200 * MIB, NULL, &other), NVB_ERROR_OUT_OF_MEMORY, "limit is 134217728");
  } else if (strcmp(field, "memory.pooling") == 0) {
    CHECK_EQUAL(statistics.reserved, 5000);
  } else if (strcmp(field, "memory.leak_tracking") == 0) {
    CHECK_OK(nvb_memory_get_leak_report(f.memory, text, sizeof text, NULL));
    CHECK(strstr(text, "5000") != NULL);
  } else if (strcmp(field, "memory.trace_events") == 0) {
    CHECK_OK(nvb_memory_get_snapshot(f.memory, text, sizeof text, NULL));
    CHECK(strstr(text, "\"trace\"") != NULL && strstr(text, "\"allocate\"") != NULL);
  } else if (strcmp(field, "memory.spill") == 0) {
    void* spilled = NULL;
    CHECK_OK(nvb_memory_set_limit(f.memory, 64 * MIB));
    CHECK_OK(nvb_memory_allocate(f.memory, 100 * MIB, NULL, &spilled));
    CHECK_OK(nvb_memory_get_statistics(f.memory, &statistics));
    CHECK_EQUAL(statistics.spilled, 100 * MIB);
    CHECK_OK(nvb_memory_free(f.memory, spilled, NULL));
  }
  CHECK_OK(nvb_memory_free(f.memory, block, NULL));
  CHECK_OK(nvb_memory_manager_destroy(f.memory));
}

// One field, given by options and by a configuration: the backend reports it and does so.
static void check_field(const row* r) {
  const char* const reported = r->reported != NULL ? r->reported : r->value;
  const int of_memory = strncmp(r->field, "memory.", 7) == 0;
  for (int configured = 0; configured < 2; ++configured) {
    nvb_backend_options options = device_options();
    nvb_memory_options memory;
    nvb_memory_options_init(&memory);
    const char* with = company(r->field, &memory);
    nvb_configuration* c = NULL;
    if (configured) {
      nvb_backend_options_init(&options);
      c = create(NVB_PRESET_INFERENCE);
      CHECK_OK(nvb_configuration_set(c, "device", test_device()));
      CHECK_OK(nvb_configuration_set(c, "threads", "2"));
      CHECK_OK(nvb_configuration_apply_json(c, with));
      CHECK_OK(nvb_configuration_set(c, r->field, r->value));
      options.configuration = c;
    } else {
      if (of_memory) options.memory = &memory;
      set_option(of_memory ? (void*)&memory : (void*)&options, r);
    }
    nvb_backend* backend = NULL;
    if (CHECK_OK(nvb_backend_create(&options, &backend))) {
      expect_running(backend, r->field, reported);
      check_effect(backend, r->field);
    }
    CHECK_OK(nvb_backend_destroy(backend));
    CHECK_OK(nvb_configuration_destroy(c));
  }
}

static void test_fields(void) {
  const int cpu = test_on_cpu();
#define OPTION(name) offsetof(nvb_backend_options, name)
#define MEMORY(name) offsetof(nvb_memory_options, name)
  const row rows[] = {
      {"device", test_device(), OPTION(device), TEXT, 0, NULL},
      {"architecture", "80", OPTION(architecture), WORD, 80, cpu ? "0" : NULL},
      {"threads", "3", OPTION(threads), WORD, 3, NULL},
      {"precision", "f16", OPTION(precision), WORD, NVB_PRECISION_F16, NULL},
      {"fp8", "off", OPTION(fp8), WORD, NVB_SWITCH_OFF, NULL},
      {"tensor_cores", "off", OPTION(tensor_cores), WORD, NVB_SWITCH_OFF, NULL},
      {"attention", "plain", OPTION(attention), WORD, NVB_ATTENTION_PLAIN, NULL},
      {"vendor_libraries", "false", OPTION(vendor_libraries), WORD, NVB_SWITCH_OFF, NULL},
      {"quantized_activations", "true", OPTION(quantized_activations), WORD, NVB_SWITCH_ON, NULL},
      {"batch_invariant", "true", OPTION(batch_invariant), WORD, NVB_SWITCH_ON, NULL},
      {"linear_kernel", kernel_name(), OPTION(linear_kernel), TEXT, 0, NULL},
      {"tuning_file", "/nonexistent/choices.txt", OPTION(tuning_file), TEXT, 0, NULL},
      {"memory.limit", "268435456", MEMORY(limit), LONG, 256 * MIB, NULL},
      // A part of the memory is reported in bytes.
      {"memory.limit_fraction", "0.5", MEMORY(limit_fraction), REAL, 0, "0"},
      {"memory.limit_of", "free", MEMORY(limit_of), WORD, NVB_LIMIT_OF_FREE, "total"},
      {"memory.margin", "4096", MEMORY(margin), LONG, 4096, NULL},
      {"memory.initial_bytes", "100663296", MEMORY(initial_bytes), LONG, 96 * MIB, NULL},
      {"memory.growth", "false", MEMORY(growth), WORD, NVB_SWITCH_OFF, NULL},
      {"memory.range_bytes", "1073741824", MEMORY(range_bytes), LONG, 1 << 30, NULL},
      {"memory.pooling", "false", MEMORY(pooling), WORD, NVB_SWITCH_OFF, NULL},
      {"memory.thread_cache_bytes", "none", MEMORY(thread_cache_bytes), LONG, NVB_MEMORY_NONE, NULL},
      {"memory.zero_on_free", "true", MEMORY(zero_on_free), WORD, NVB_SWITCH_ON, NULL},
      {"memory.leak_tracking", "full", MEMORY(leak_tracking), WORD, NVB_LEAK_TRACKING_FULL, NULL},
      {"memory.leak_sample_bytes", "4096", MEMORY(leak_sample_bytes), LONG, 4096, NULL},
      {"memory.trace_events", "16", MEMORY(trace_events), LONG, 16, NULL},
      {"memory.wait_microseconds", "5", MEMORY(wait_microseconds), LONG, 5, NULL},
      {"memory.spill", "pinned", MEMORY(spill), WORD, NVB_SPILL_PINNED, NULL},
      {"timing.profiling", "true", OPTION(profiling), WORD, NVB_SWITCH_ON, NULL},
      {"logging.level", "error", OPTION(log_level), WORD, NVB_LOG_ERROR, NULL},
  };
  const size_t count = sizeof rows / sizeof *rows;
  for (size_t i = 0; i < count; ++i) check_field(&rows[i]);

  // No field is forgotten: each is one line of the JSON, beside those that open and close objects.
  char json[8192];
  size_t fields = 0;
  nvb_configuration* c = create(NVB_PRESET_INFERENCE);
  CHECK_OK(nvb_configuration_get_json(c, json, sizeof json, NULL));
  CHECK_OK(nvb_configuration_destroy(c));
  for (char* line = strtok(json, "\n"); line != NULL; line = strtok(NULL, "\n")) {
    fields += strstr(line, "\": ") != NULL && line[strlen(line) - 1] != '{';
  }
  CHECK_EQUAL(fields, count);
}

// What overrides what ------------------------------------------------------------------------------------------------

static nvb_backend* create_with(const nvb_backend_options* options) {
  nvb_backend* backend = NULL;
  CHECK_OK(nvb_backend_create(options, &backend));
  return backend;
}

static void test_overriding(void) {
  nvb_configuration* c = create(NVB_PRESET_TRAINING);
  CHECK_OK(nvb_configuration_apply_json(c, "{\"memory\": {\"limit_fraction\": 0.5, \"zero_on_free\": true}}"));
  CHECK_OK(nvb_configuration_set(c, "device", "cuda:4321"));
  nvb_backend_options options = device_options();
  nvb_memory_options memory;
  nvb_memory_options_init(&memory);
  options.configuration = c;
  options.fp8 = NVB_SWITCH_ON;
  options.memory = &memory;
  // A limit of the one form replaces one of the other.
  options.memory_limit = 256 * MIB;
  memory.spill = NVB_SPILL_NEVER;
  memory.margin = NVB_MEMORY_NONE;
  nvb_backend* backend = create_with(&options);
  // The backend keeps what it was created with.
  CHECK_OK(nvb_configuration_set(c, "precision", "f32"));
  expect_running(backend, "device", test_device());
  expect_running(backend, "precision", "bf16");
  expect_running(backend, "fp8", "auto");
  expect_running(backend, "memory.limit", "268435456");
  expect_running(backend, "memory.spill", "never");
  expect_running(backend, "memory.margin", "none");
  expect_running(backend, "memory.zero_on_free", "true");
  CHECK_OK(nvb_backend_destroy(backend));

  CHECK_OK(nvb_configuration_set(c, "memory.limit_fraction", "0"));
  CHECK_OK(nvb_configuration_set(c, "memory.limit", "70000000"));
  options.memory_limit = 0;
  memory.limit_fraction = 0.5;
  memory.zero_on_free = NVB_SWITCH_OFF;
  backend = create_with(&options);
  CHECK(strcmp(running(backend, "memory.limit"), "70000000") != 0);
  expect_running(backend, "memory.zero_on_free", "false");
  CHECK_OK(nvb_backend_destroy(backend));
  CHECK_OK(nvb_configuration_destroy(c));

  // A preset in place of a configuration, a text that is empty, and a struct of an engine that knew fewer fields.
  options = device_options();
  options.preset = NVB_PRESET_TRAINING;
  options.linear_kernel = options.tuning_file = "";
  backend = create_with(&options);
  expect_running(backend, "fp8", "off");
  expect_running(backend, "memory.spill", "managed");
  CHECK_OK(nvb_backend_destroy(backend));
  options.fp8 = NVB_SWITCH_ON;
  options.struct_size = offsetof(nvb_backend_options, fp8);
  backend = create_with(&options);
  expect_running(backend, "fp8", "off");
  CHECK_OK(nvb_backend_destroy(backend));
}

// A configuration of what a backend reports makes the same backend again.
static void test_again(void) {
  for (uint32_t preset = NVB_PRESET_INFERENCE; preset < NVB_PRESET_DEVELOPMENT; ++preset) {
    char json[8192], again[8192];
    nvb_backend_options options = device_options();
    options.preset = preset;
    nvb_backend* backend = create_with(&options);
    CHECK_OK(nvb_backend_get_configuration_json(backend, json, sizeof json, NULL));
    CHECK_OK(nvb_backend_destroy(backend));
    nvb_configuration* c = create(NVB_PRESET_THROUGHPUT);
    CHECK_OK(nvb_configuration_apply_json(c, json));
    nvb_backend_options_init(&options);
    options.configuration = c;
    backend = create_with(&options);
    CHECK_OK(nvb_backend_get_configuration_json(backend, again, sizeof again, NULL));
    CHECK(strcmp(json, again) == 0);
    if (strcmp(json, again) != 0) printf("preset %u\n%s\n%s\n", preset, json, again);
    CHECK_OK(nvb_backend_destroy(backend));
    CHECK_OK(nvb_configuration_destroy(c));
  }
}

// Errors --------------------------------------------------------------------------------------------------------------

static void test_errors(void) {
  nvb_backend* backend = foreign_handle();
  nvb_backend_options options;
#define REFUSE(field, value, ...)                                                              \
  do {                                                                                         \
    options = device_options();                                                                \
    options.field = (value);                                                                   \
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, __VA_ARGS__); \
  } while (0)
  REFUSE(preset, 5, "preset is 5", "0 to 4");
  REFUSE(threads, 4097, "threads is 4097", "0 to 4096");
  REFUSE(threads, 4000000000u, "threads is 4000000000", "0 to 4096");
  REFUSE(architecture, 8, "architecture is 8", "70 to 999");
  REFUSE(precision, 5, "precision is 5", "0 to 4");
  REFUSE(fp8, 4, "fp8 is 4", "0 to 3");
  REFUSE(tensor_cores, UINT32_MAX, "tensor_cores is 4294967295", "0 to 3");
  REFUSE(attention, 3, "attention is 3", "0 to 2");
  REFUSE(vendor_libraries, NVB_SWITCH_REQUIRED, "vendor_libraries is 3", "0 to 2");
  REFUSE(quantized_activations, 3, "quantized_activations is 3", "0 to 2");
  REFUSE(batch_invariant, 3, "batch_invariant is 3", "0 to 2");
  REFUSE(profiling, 3, "timing.profiling is 3", "0 to 2");
  REFUSE(log_level, NVB_LOG_TRACE + 1, "log_level is 6", "1 to 5");
  REFUSE(linear_kernel, "fastest", "linear_kernel is \"fastest\"", "one of");
  REFUSE(memory_limit, UINT64_MAX, "memory.limit is 18446744073709551615");
  REFUSE(device, "gpu", "device is \"gpu\"", "\"cuda:N\"");
  // Several devices: the reason and the advice.
  const char* const lists[] = {"cuda:0,1", "cuda:0,cuda:1", "cpu,cuda"};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i) {
    REFUSE(device, lists[i], lists[i], "a backend runs on one device", "one backend for each device");
  }

  // Fields that contradict each other, also where one is the configuration's.
  nvb_configuration* c = create(NVB_PRESET_LOW_LATENCY);
  options = device_options();
  options.configuration = c;
  options.preset = NVB_PRESET_TRAINING;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "preset is 3", "configuration");
  options.preset = 0;
  options.memory_limit = 100 * MIB;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "memory.initial_bytes is 268435456",
              "memory.limit 104857600");
  options.memory_limit = 0;
  options.tensor_cores = NVB_SWITCH_OFF;
  options.architecture = 90;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "tensor_cores is \"off\"",
              "architecture 90");
  options.architecture = 0;
  options.fp8 = NVB_SWITCH_REQUIRED;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_CONFIGURATION, "tensor_cores is \"off\"",
              "\"required\"");
  CHECK_FAILS(nvb_configuration_set(c, "speed", "11"), NVB_ERROR_CONFIGURATION, "\"speed\"", "precision");
  CHECK_FAILS(nvb_configuration_set(c, "device", "cuda:0,1"), NVB_ERROR_CONFIGURATION, "one device",
              "one backend for each");
  CHECK_FAILS(nvb_configuration_apply_json(c, "{\"device\": \"cuda:0,1\"}"), NVB_ERROR_CONFIGURATION, "one device");

  // What the device lacks.
  if (test_on_cpu()) {
    options = device_options();
    options.fp8 = NVB_SWITCH_REQUIRED;
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_FP8, "fp8", "cpu");
    options.fp8 = 0;
    options.tensor_cores = NVB_SWITCH_REQUIRED;
    CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_UNSUPPORTED, "tensor_cores", "cpu");
  }

  // Handles of configurations that are none, and structs that are too short or too long.
  fixture f = open_fixture();
  options = device_options();
  options.configuration = (const nvb_configuration*)f.stream;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_INVALID_ARGUMENT, "not a configuration");
  options.configuration = foreign_handle();
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_INVALID_ARGUMENT, "not a configuration");
  options.configuration = c;
  CHECK_OK(nvb_configuration_destroy(c));
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_INVALID_ARGUMENT, "configuration", "destroyed");
  close_fixture(&f);
  options = device_options();
  options.struct_size = 4;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_ABI_MISMATCH, "struct_size is 4");
  options.struct_size = offsetof(nvb_backend_options, log_callback) + 4;
  CHECK_FAILS(nvb_backend_create(&options, &backend), NVB_ERROR_ABI_MISMATCH, "inside the pointer");
  struct {
    nvb_backend_options known;
    uint64_t later;
  } longer = {device_options(), 1};
  longer.known.struct_size = sizeof longer;
  CHECK_FAILS(nvb_backend_create(&longer.known, &backend), NVB_ERROR_ABI_MISMATCH, "fields beyond");
  CHECK(backend == foreign_handle());
  longer.later = 0;
  backend = create_with(&longer.known);
  CHECK_OK(nvb_backend_destroy(backend));
}

int main(void) {
  test_fields();
  test_overriding();
  test_again();
  test_errors();
  return test_result();
}
