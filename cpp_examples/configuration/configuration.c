// configuration: what a backend is created with, from a preset, from JSON and from single fields, each step checked.
//
//   configuration [DEVICE]     "auto" (the default), "cpu", "cuda:N"
//
// An engine keeps its settings in a file of its own and hands the library's part of it on as JSON. The program shows
// that, what a wrong value is answered with, and what the backend runs with in the end.
#include <nvbackend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// This program ends at the first error that it does not expect; an engine would hand the status to its caller.
static void must(nvb_status status, const char* call) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "configuration: %s: %s\n", call, text);
  exit(1);
}
#define MUST(call) must((call), #call)

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "configuration: %s does not hold\n", what);
  exit(1);
}
#define EXPECT(condition) expect((condition), #condition)

// A preset, then what the engine's file says, then what the command line says: the later ones win.
static nvb_configuration* configure(const char* device) {
  nvb_configuration* configuration = NULL;
  MUST(nvb_configuration_create(NVB_PRESET_INFERENCE, &configuration));
  MUST(
      nvb_configuration_apply_json(configuration,
                                   "{\"preset\": \"throughput\", \"threads\": 2,"
                                   " \"memory\": {\"limit_fraction\": 0, \"limit\": \"1GiB\", \"margin\": \"none\"}}"));
  MUST(nvb_configuration_set(configuration, "device", device));
  MUST(nvb_configuration_set(configuration, "timing.profiling", "true"));
  char limit[32];
  MUST(nvb_configuration_get(configuration, "memory.limit", limit, sizeof limit, NULL));
  EXPECT(strcmp(limit, "1073741824") == 0);
  return configuration;
}

// A wrong value changes nothing, and the text says which field it is, and what it may be.
static void show_mistakes(nvb_configuration* configuration) {
  static const char* const wrong[][2] = {{"memory.limit", "1G"}, {"precision", "fp64"}, {"memory.limt", "1GB"}};
  char text[1024];
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    EXPECT(nvb_configuration_set(configuration, wrong[i][0], wrong[i][1]) == NVB_ERROR_CONFIGURATION);
    nvb_last_error_message(text, sizeof text);
    printf("refused: %s\n", text);
  }
  // Fields that do not go together are found when all are set.
  MUST(nvb_configuration_set(configuration, "memory.limit_fraction", "0.5"));
  EXPECT(nvb_configuration_validate(configuration) == NVB_ERROR_CONFIGURATION);
  nvb_last_error_message(text, sizeof text);
  printf("refused: %s\n", text);
  MUST(nvb_configuration_set(configuration, "memory.limit_fraction", "0"));
  MUST(nvb_configuration_validate(configuration));
}

static void print_record(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)level;
  ++*(int*)user_data;
  printf("log: %s: %.*s\n", target, (int)length, message);
}

int main(int count, char** arguments) {
  nvb_configuration* configuration = configure(count > 1 ? arguments[1] : "auto");
  show_mistakes(configuration);

  int records = 0;
  MUST(nvb_configuration_set(configuration, "logging.level", "info"));
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.configuration = configuration;
  options.log_callback = print_record;
  options.log_user_data = &records;
  nvb_backend* backend = NULL;
  MUST(nvb_backend_create(&options, &backend));
  EXPECT(records > 0);
  // The backend keeps what it was created with.
  MUST(nvb_configuration_destroy(configuration));

  // What it runs with says what was left open: the device that "auto" chose, the dtype of caches.
  size_t needed = 0;
  MUST(nvb_backend_get_configuration_json(backend, NULL, 0, &needed));
  char* json = malloc(needed);
  EXPECT(json != NULL);
  MUST(nvb_backend_get_configuration_json(backend, json, needed, NULL));
  printf("%s\n", json);
  EXPECT(strstr(json, "\"device\": \"auto\"") == NULL && strstr(json, "\"limit\": 1073741824") != NULL);
  free(json);
  MUST(nvb_backend_destroy(backend));
  return 0;
}
