// Configurations: presets, fields as text, JSON in and out, and backends made from them.
#include "check.h"

static nvb_configuration* create(uint32_t preset) {
  nvb_configuration* configuration = NULL;
  CHECK_OK(nvb_configuration_create(preset, &configuration));
  return configuration;
}

static nvb_status create_backend(const nvb_configuration* configuration, nvb_log_callback callback, void* user_data,
                                 nvb_backend** backend) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.configuration = configuration;
  options.log_callback = callback;
  options.log_user_data = user_data;
  return nvb_backend_create(&options, backend);
}

static const char* field(const nvb_configuration* configuration, const char* name) {
  static char text[256];
  size_t needed = 0;
  CHECK_OK(nvb_configuration_get(configuration, name, text, sizeof text, &needed));
  CHECK_EQUAL(needed, strlen(text) + 1);
  return text;
}

static void test_fields(void) {
  nvb_configuration* c = create(NVB_PRESET_INFERENCE);
  CHECK(strcmp(field(c, "device"), "auto") == 0 && strcmp(field(c, "memory.growth"), "true") == 0);
  CHECK_OK(nvb_configuration_set(c, "memory.limit", "1073741824"));
  CHECK_OK(nvb_configuration_set(c, "precision", "bf16"));
  CHECK(strcmp(field(c, "memory.limit"), "1073741824") == 0 && strcmp(field(c, "precision"), "bf16") == 0);
  CHECK_FAILS(nvb_configuration_set(c, "precision", "fp64"), NVB_ERROR_CONFIGURATION, "precision is \"fp64\"",
              "\"auto\", \"f32\", \"f16\" or \"bf16\"");
  CHECK_OK(nvb_configuration_set(c, "memory.limit", "1.5 GiB"));
  CHECK(strcmp(field(c, "memory.limit"), "1610612736") == 0);
  CHECK_OK(nvb_configuration_apply_json(c, "{\"memory\": {\"limit\": \"1GiB\"}}"));
  CHECK(strcmp(field(c, "memory.limit"), "1073741824") == 0);
  CHECK_FAILS(nvb_configuration_set(c, "memory.limit", "1G"), NVB_ERROR_CONFIGURATION, "is \"1G\"", "\"8GiB\"");
  CHECK_FAILS(nvb_configuration_set(c, "memory.limit_fraction", "2"), NVB_ERROR_CONFIGURATION, "is 2", "from 0 to 1");
  CHECK_FAILS(nvb_configuration_set(c, "speed", "11"), NVB_ERROR_CONFIGURATION, "\"speed\"", "precision");
  CHECK_FAILS(nvb_configuration_set(c, NULL, NULL), NVB_ERROR_CONFIGURATION, "\"\"");
  CHECK(strcmp(field(c, "precision"), "bf16") == 0);
  CHECK_OK(nvb_configuration_validate(c));
  CHECK_OK(nvb_configuration_set(c, "memory.limit_fraction", "0.5"));
  CHECK_FAILS(nvb_configuration_validate(c), NVB_ERROR_CONFIGURATION, "memory.limit is 1073741824", "0.5");
  char small[4] = "";
  size_t needed = 0;
  CHECK_OK(nvb_configuration_get(c, "precision", small, 3, &needed));
  CHECK(strcmp(small, "bf") == 0 && needed == 5);
  CHECK_OK(nvb_configuration_get(c, "precision", NULL, 0, NULL));
  CHECK_FAILS(nvb_configuration_get(NULL, "precision", NULL, 0, NULL), NVB_ERROR_INVALID_ARGUMENT, "configuration");
  CHECK_OK(nvb_configuration_destroy(c));
  CHECK_FAILS(nvb_configuration_validate(c), NVB_ERROR_INVALID_ARGUMENT, "configuration", "destroyed");
  CHECK_OK(nvb_configuration_destroy(NULL));
}

static void test_json(void) {
  for (uint32_t preset = NVB_PRESET_INFERENCE; preset <= NVB_PRESET_DEVELOPMENT; ++preset) {
    nvb_configuration *c = create(preset), *copy = create(NVB_PRESET_INFERENCE);
    char json[4096], again[4096];
    size_t needed = 0;
    CHECK_OK(nvb_configuration_get_json(c, json, sizeof json, &needed));
    CHECK_EQUAL(needed, strlen(json) + 1);
    CHECK_OK(nvb_configuration_apply_json(copy, json));
    CHECK_OK(nvb_configuration_get_json(copy, again, sizeof again, NULL));
    CHECK(strcmp(json, again) == 0);
    CHECK_OK(nvb_configuration_destroy(c));
    CHECK_OK(nvb_configuration_destroy(copy));
  }
  nvb_configuration* c = create(NVB_PRESET_INFERENCE);
  CHECK_OK(nvb_configuration_apply_json(c, "{\"preset\": \"development\", \"memory\": {\"margin\": 7}}"));
  CHECK(strcmp(field(c, "logging.level"), "debug") == 0 && strcmp(field(c, "memory.margin"), "7") == 0);
  CHECK_FAILS(nvb_configuration_apply_json(c, "{\"threads\": true}"), NVB_ERROR_CONFIGURATION, "threads is true");
  CHECK_FAILS(nvb_configuration_apply_json(c, "{"), NVB_ERROR_CONFIGURATION, "line 1");
  CHECK_FAILS(nvb_configuration_apply_json(c, NULL), NVB_ERROR_CONFIGURATION, "line 1");
  CHECK_FAILS(nvb_configuration_create(5, &c), NVB_ERROR_INVALID_ARGUMENT, "preset is 5", "0 to 4");
  CHECK_FAILS(nvb_configuration_create(0, NULL), NVB_ERROR_INVALID_ARGUMENT, "configuration", "NULL");
  CHECK_OK(nvb_configuration_destroy(c));
}

static void count_records(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)target;
  CHECK(level <= NVB_LOG_INFO && strlen(message) == length);
  if (strstr(message, "backend on ") != NULL) ++*(int*)user_data;
}

static void ignore_record(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)level, (void)target, (void)message, (void)length, (void)user_data;
}

static void test_backend(void) {
  nvb_configuration* c = create(NVB_PRESET_INFERENCE);
  nvb_backend* backend = foreign_handle();
  int lines = 0;
  CHECK_OK(nvb_configuration_set(c, "device", test_device()));
  CHECK_OK(nvb_configuration_set(c, "threads", "2"));
  CHECK_OK(nvb_configuration_set(c, "precision", "f16"));
  CHECK_OK(nvb_configuration_set(c, "logging.level", "info"));
  CHECK_OK(create_backend(c, count_records, &lines, &backend));
  CHECK_EQUAL(lines, 1);
  char json[4096];
  CHECK_OK(nvb_backend_get_configuration_json(backend, json, sizeof json, NULL));
  CHECK(strstr(json, "\"precision\": \"f16\"") != NULL);
  // The dtype that a call leaves open is the configuration's.
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
  CHECK_OK(nvb_backend_destroy(backend));

  backend = foreign_handle();
  if (test_on_cpu()) {
    CHECK_OK(nvb_configuration_set(c, "tensor_cores", "required"));
    CHECK_FAILS(create_backend(c, NULL, NULL, &backend), NVB_ERROR_UNSUPPORTED, "tensor_cores", "cpu");
    CHECK_OK(nvb_configuration_set(c, "tensor_cores", "auto"));
    CHECK_OK(nvb_configuration_set(c, "fp8", "required"));
    CHECK_FAILS(create_backend(c, NULL, NULL, &backend), NVB_ERROR_FP8, "fp8", "cpu");
    CHECK_OK(nvb_configuration_set(c, "fp8", "auto"));
  }
  CHECK_OK(nvb_configuration_set(c, "memory.growth", "false"));
  CHECK_FAILS(create_backend(c, NULL, NULL, &backend), NVB_ERROR_CONFIGURATION, "memory.growth");
  CHECK_FAILS(create_backend(c, NULL, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK(backend == foreign_handle());
  CHECK_OK(nvb_configuration_destroy(c));
}

// What runs, however the backend was made: a configuration of the JSON makes the same again.
static void test_running(void) {
  char json[4096], again[4096], text[64];
  CHECK_EQUAL(setenv("NVB_TUNING_FILE", "/nonexistent/choices.txt", 1), 0);
  nvb_backend_options options = device_options();
  options.memory_limit = 3 << 28;
  options.vendor_libraries = NVB_SWITCH_OFF;
  nvb_backend* backend = NULL;
  nvb_memory_manager* memory = NULL;
  CHECK_OK(nvb_backend_create(&options, &backend));
  CHECK_EQUAL(unsetenv("NVB_TUNING_FILE"), 0);
  CHECK_OK(nvb_backend_get_configuration_json(backend, json, sizeof json, NULL));
  // "cuda" is answered with the GPU that was taken, such as "cuda:0".
  snprintf(text, sizeof text, "\"device\": \"%s", test_device());
  CHECK(strstr(json, text) != NULL);
  if (test_on_cpu()) CHECK(strstr(json, "\"threads\": 2") != NULL);
  CHECK(strstr(json, "\"limit\": 805306368") != NULL && strstr(json, "\"vendor_libraries\": false") != NULL);
  CHECK(strstr(json, "\"precision\": \"auto\"") == NULL && strstr(json, "\"level\": \"warning\"") != NULL);
  CHECK(strstr(json, "\"tuning_file\": \"/nonexistent/choices.txt\"") != NULL);
  CHECK(strstr(json, "\"profiling\": false") != NULL && strstr(json, "\"linear_kernel\": \"\"") != NULL);

  nvb_configuration* c = create(NVB_PRESET_THROUGHPUT);
  CHECK_OK(nvb_configuration_apply_json(c, json));
  CHECK_OK(nvb_configuration_validate(c));
  nvb_backend* copy = NULL;
  CHECK_OK(create_backend(c, NULL, NULL, &copy));
  CHECK_OK(nvb_backend_get_configuration_json(copy, again, sizeof again, NULL));
  CHECK(strcmp(json, again) == 0);
  CHECK_OK(nvb_backend_destroy(copy));
  CHECK_OK(nvb_configuration_destroy(c));

  nvb_kernel_info kernel;
  nvb_kernel_info_init(&kernel);
  CHECK_OK(nvb_kernel_get(backend, 0, &kernel));
  CHECK_OK(nvb_kernel_override(backend, NVB_OPERATION_LINEAR, kernel.name));
  CHECK_OK(nvb_backend_set_profiling(backend, 1));
  CHECK_OK(nvb_backend_get_memory_manager(backend, 0, &memory));
  CHECK_OK(nvb_memory_set_limit(memory, 1 << 28));
  CHECK_OK(nvb_backend_get_configuration_json(backend, json, sizeof json, NULL));
  CHECK(strstr(json, "\"profiling\": true") != NULL && strstr(json, "\"limit\": 268435456") != NULL);
  CHECK(strstr(json, kernel.name) != NULL);
  CHECK_OK(nvb_memory_manager_destroy(memory));
  CHECK_OK(nvb_backend_destroy(backend));
}

// What a backend of this preset writes to standard error by itself, while `logged` says whether it has a callback.
static size_t written_by(uint32_t preset, int logged) {
  char path[] = "/tmp/nvbackend_configuration_XXXXXX";
  const int file = mkstemp(path), kept = dup(STDERR_FILENO);
  CHECK(file >= 0 && kept >= 0 && dup2(file, STDERR_FILENO) >= 0);
  nvb_configuration* c = create(preset);
  nvb_backend *backend = NULL, *second = NULL;
  int lines = 0;
  nvb_status status = nvb_configuration_set(c, "device", test_device());
  const nvb_log_callback callback = logged ? ignore_record : NULL;
  if (status == NVB_OK) status = create_backend(c, callback, &lines, &backend);
  if (status == NVB_OK) status = create_backend(c, callback, &lines, &second);
  // A failing call is a debug record.
  const nvb_status failing = nvb_stream_synchronize(NULL);
  const nvb_status destroyed = nvb_backend_destroy(backend) | nvb_backend_destroy(second);
  const nvb_status silent = nvb_stream_synchronize(NULL);
  CHECK(dup2(kept, STDERR_FILENO) >= 0);
  CHECK_OK(status);
  CHECK_OK(destroyed);
  CHECK(failing == NVB_ERROR_INVALID_ARGUMENT && silent == failing);
  static char text[1 << 16];
  const ssize_t length = pread(file, text, sizeof text - 1, 0);
  CHECK(length >= 0);
  text[length > 0 ? length : 0] = '\0';
  if (length > 0) {
    const char* record = strstr(text, "[DEBUG nvbackend");
    CHECK(record != NULL && strstr(text, "backend on ") != NULL);
    const char* failure = strstr(text, "nvb_stream_synchronize");
    // Once, though two backends asked for records, and not after they are gone.
    CHECK(failure != NULL && strstr(strchr(failure, '\n'), "nvb_stream_synchronize: ") == NULL);
  }
  close(kept);
  close(file);
  unlink(path);
  CHECK_OK(nvb_configuration_destroy(c));
  return (size_t)length;
}

static void test_standard_error(void) {
  if (getenv("NVB_LOG") != NULL) {
    printf("NVB_LOG is set, which decides what is written to standard error\n");
    return;
  }
  CHECK(written_by(NVB_PRESET_DEVELOPMENT, 0) > 0);
  CHECK_EQUAL(written_by(NVB_PRESET_DEVELOPMENT, 1), 0);
  CHECK_EQUAL(written_by(NVB_PRESET_INFERENCE, 0), 0);
}

int main(void) {
  test_fields();
  test_json();
  test_backend();
  test_running();
  test_standard_error();
  return test_result();
}
