// device_info: what the library was built with, what this machine has, what it is doing, and what suits which work.
#include <inttypes.h>
#include <nvbackend.h>
#include <stdio.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;

// Prints what failed; 1, for main to return.
static int failed(const char* what) {
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "%s: %s\n", what, text);
  return 1;
}

static void print_features(uint64_t features) {
  static const struct {
    uint64_t bit;
    const char* name;
  } names[] = {
      {NVB_FEATURE_TENSOR_CORES, "Tensor Cores"},
      {NVB_FEATURE_BF16, "BF16"},
      {NVB_FEATURE_FP8, "FP8"},
      {NVB_FEATURE_FP4, "FP4"},
      {NVB_FEATURE_TMA, "TMA"},
      {NVB_FEATURE_WGMMA, "wgmma"},
      {NVB_FEATURE_COOPERATIVE_LAUNCH, "cooperative launch"},
      {NVB_FEATURE_MANAGED_MEMORY, "managed memory"},
      {NVB_FEATURE_MEMORY_POOLS, "memory pools"},
      {NVB_FEATURE_VIRTUAL_MEMORY, "virtual memory"},
      {NVB_FEATURE_ECC, "ECC"},
  };
  const char* separator = "  features: ";
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    if (!(features & names[i].bit)) continue;
    printf("%s%s", separator, names[i].name);
    separator = ", ";
  }
  if (*separator == ',') printf("\n");
}

static void print_device(const nvb_device_info* info) {
  printf("%s: %s, %.1f GiB", info->name, info->architecture, (double)info->total_memory / GIB);
  if (info->peak_bandwidth != 0) printf(" at %.0f GB/s", (double)info->peak_bandwidth / 1e9);
  if (info->numa_node >= 0) printf(", NUMA node %" PRId32, info->numa_node);
  printf("\n");
  if (info->kind == NVB_DEVICE_CUDA) {
    printf("  cuda:%" PRId32 " at %s, %s, driver for CUDA %" PRId32 ".%" PRId32 "\n", info->ordinal, info->pci_bus_id,
           info->uuid, info->driver_version / 1000, info->driver_version % 1000 / 10);
    printf("  compute capability %" PRId32 ".%" PRId32 ", %" PRId32 " multiprocessors at %" PRId32
           " MHz, L2 %.1f MiB\n",
           info->compute_capability / 10, info->compute_capability % 10, info->multiprocessors, info->clock_mhz,
           (double)info->l2_bytes / (1024.0 * 1024.0));
  }
  print_features(info->features);
  if (info->obstacle[0] != '\0') printf("  cannot be used: %s\n", info->obstacle);
}

// Each value where the device tells it.
static void print_usage(uint32_t index) {
  nvb_device_usage usage;
  nvb_device_usage_init(&usage);
  if (nvb_hardware_get_usage(index, &usage) != NVB_OK) {
    char text[1024];
    nvb_last_error_message(text, sizeof text);
    printf("  now: %s\n", text);
    return;
  }
  printf("  now:");
  if (usage.known & NVB_USAGE_UTILIZATION) printf(" %" PRIu32 " %% busy,", usage.utilization);
  if (usage.known & NVB_USAGE_TEMPERATURE) printf(" %" PRIu32 " degrees C,", usage.temperature);
  if (usage.known & NVB_USAGE_POWER) printf(" %.0f W,", usage.power / 1000.0);
  if (usage.known & NVB_USAGE_CLOCK) printf(" %" PRIu32 " MHz,", usage.clock);
  if (usage.known & NVB_USAGE_MEMORY) {
    printf(" %.1f of %.1f GiB used", (double)usage.memory_used / GIB, (double)usage.memory_total / GIB);
  }
  printf("\n");
}

static int print_build(void) {
  nvb_build_info build;
  nvb_build_info_init(&build);
  if (nvb_get_build_info(&build) != NVB_OK) return failed("nvb_get_build_info");
  printf("nvbackend %s, ABI %" PRIu32 "\n", nvb_version_string(), nvb_abi_version());
  if (build.cuda) {
    printf("built with CUDA %" PRIu32 ".%" PRIu32 " for %s\n", build.cuda_toolkit_version / 1000,
           build.cuda_toolkit_version % 1000 / 10, build.architectures);
  } else {
    printf("built for the CPU alone\n");
  }
  return 0;
}

static int print_environment(void) {
  nvb_environment environment;
  nvb_environment_init(&environment);
  if (nvb_hardware_get_environment(&environment) != NVB_OK) return failed("nvb_hardware_get_environment");
  // No GPU is a normal answer, not a failure of this program.
  if (environment.obstacle[0] != '\0') printf("no CUDA device: %s\n", environment.obstacle);
  for (uint32_t i = 0; i < environment.libraries; ++i) {
    nvb_library library;
    nvb_library_init(&library);
    if (nvb_hardware_get_library(i, &library) != NVB_OK) return failed("nvb_hardware_get_library");
    printf("  %s: %s\n", library.name, library.found ? library.path : library.reason);
  }
  return 0;
}

static int print_devices(void) {
  uint32_t count = 0;
  if (nvb_hardware_get_device_count(&count) != NVB_OK) return failed("nvb_hardware_get_device_count");
  for (uint32_t i = 0; i < count; ++i) {
    nvb_device_info info;
    nvb_device_info_init(&info);
    if (nvb_hardware_get_device_info(i, &info) != NVB_OK) return failed("nvb_hardware_get_device_info");
    print_device(&info);
    print_usage(i);
  }
  return 0;
}

// Rows reach columns: "." itself, a number the rank of the link, "-" through host memory only.
static int print_peers(void) {
  int32_t count = 0;
  if (nvb_cuda_get_device_count(&count) != NVB_OK || count < 2) return 0;
  printf("peer access:\n");
  for (int32_t from = 0; from < count; ++from) {
    for (int32_t to = 0; to < count; ++to) {
      nvb_peer_access access;
      nvb_peer_access_init(&access);
      if (nvb_hardware_get_peer_access(from, to, &access) != NVB_OK) return failed("nvb_hardware_get_peer_access");
      if (from == to) {
        printf("  .");
      } else if (access.accessible) {
        printf(" %2" PRId32, access.performance_rank);
      } else {
        printf("  -");
      }
    }
    printf("\n");
  }
  return 0;
}

static int print_ranking(void) {
  static const char* const workloads[] = {"prefill", "decode", "training", "test"};
  for (uint32_t workload = NVB_WORKLOAD_PREFILL; workload <= NVB_WORKLOAD_TEST; ++workload) {
    nvb_recommendation first;
    nvb_recommendation_init(&first);
    if (nvb_hardware_recommend(workload, 0, &first) != NVB_OK) return failed("nvb_hardware_recommend");
    printf("for %s: %s (%s)\n", workloads[workload], first.device, first.reason);
  }
  return 0;
}

int main(void) {
  if (print_build() || print_environment() || print_devices() || print_peers() || print_ranking()) return 1;

  // What an engine gets that leaves the choice to the library.
  nvb_backend* backend = NULL;
  if (nvb_backend_create(NULL, &backend) != NVB_OK) return failed("nvb_backend_create");
  nvb_device_info chosen;
  nvb_device_info_init(&chosen);
  const int status =
      nvb_backend_get_device_info(backend, &chosen) == NVB_OK ? 0 : failed("nvb_backend_get_device_info");
  if (status == 0) printf("chosen for \"auto\": %s\n", chosen.name);
  return nvb_backend_destroy(backend) == NVB_OK ? status : 1;
}
