// Hardware: the list of devices, usage, the processor, the environment, peers and the ranking.
#include "check.h"

static nvb_device_info device_at(uint32_t index) {
  nvb_device_info info;
  nvb_device_info_init(&info);
  CHECK_OK(nvb_hardware_get_device_info(index, &info));
  return info;
}

static uint32_t device_count(void) {
  uint32_t count = 0;
  CHECK_OK(nvb_hardware_get_device_count(&count));
  CHECK(count >= 1);
  return count;
}

static nvb_status get_device_info(void* value, void* context) {
  return nvb_hardware_get_device_info(*(uint32_t*)context, value);
}

static void test_devices(void) {
  uint32_t count = device_count(), last = count - 1;
  int32_t gpus = 0;
  if (nvb_cuda_get_device_count(&gpus) != NVB_OK) gpus = 0;
  for (uint32_t i = 0; i < count; ++i) {
    nvb_device_info info = device_at(i);
    CHECK(info.name[0] != '\0' && info.architecture[0] != '\0');
    CHECK_EQUAL(info.kind == NVB_DEVICE_CUDA, (int32_t)i < gpus);
    if (info.kind != NVB_DEVICE_CUDA) continue;
    CHECK_EQUAL(info.ordinal, i);
    CHECK(strncmp(info.uuid, "GPU-", 4) == 0 && strlen(info.uuid) == 40);
    CHECK(strlen(info.pci_bus_id) == 12 && info.multiprocessors > 0 && info.peak_bandwidth > 0);
    CHECK_EQUAL((info.features & NVB_FEATURE_BF16) != 0, info.compute_capability >= 80);
  }
  nvb_device_info cpu = device_at(last);
  CHECK_EQUAL(cpu.kind, NVB_DEVICE_CPU);
  CHECK(cpu.total_memory > 0 && cpu.multiprocessors >= 1 && cpu.obstacle[0] == '\0');
  CHECK_STRUCT(cpu, get_device_info, &last);
  char number[16];
  snprintf(number, sizeof number, "%u", count);
  CHECK_FAILS(nvb_hardware_get_device_info(count, &cpu), NVB_ERROR_INVALID_ARGUMENT, "device index", number);
  CHECK_FAILS(nvb_hardware_get_device_count(NULL), NVB_ERROR_INVALID_ARGUMENT, "count", "NULL");
  // A caller of the first release has no fields beyond the name.
  nvb_device_info older;
  memset(&older, 0x5a, sizeof older);
  older.struct_size = offsetof(nvb_device_info, features);
  CHECK_OK(nvb_hardware_get_device_info(last, &older));
  CHECK_EQUAL(older.kind, NVB_DEVICE_CPU);
  CHECK_EQUAL(older.features, 0x5a5a5a5a5a5a5a5a);
}

static nvb_status get_usage(void* value, void* context) {
  return nvb_hardware_get_usage(*(uint32_t*)context, value);
}

static void test_usage(void) {
  uint32_t count = device_count(), last = count - 1;
  nvb_device_usage usage;
  nvb_device_usage_init(&usage);
  CHECK_OK(nvb_hardware_get_usage(last, &usage));
  CHECK(usage.known & NVB_USAGE_MEMORY);
  CHECK(usage.memory_used > 0 && usage.memory_used < usage.memory_total && usage.utilization <= 100);
  CHECK((usage.known & NVB_USAGE_POWER) == 0 && usage.power == 0);
  CHECK_STRUCT(usage, get_usage, &last);
  CHECK_FAILS(nvb_hardware_get_usage(count, &usage), NVB_ERROR_INVALID_ARGUMENT, "device index");
  for (uint32_t i = 0; i < last; ++i) {
    nvb_device_info info = device_at(i);
    nvb_status status = nvb_hardware_get_usage(i, &usage);
    if (info.kind == NVB_DEVICE_TPU) CHECK_EQUAL(status, NVB_ERROR_UNSUPPORTED);
    if (info.kind == NVB_DEVICE_CUDA && status == NVB_OK) CHECK(usage.known & NVB_USAGE_MEMORY);
    if (info.kind == NVB_DEVICE_CUDA && status != NVB_OK) CHECK_FAILS(status, NVB_ERROR_UNSUPPORTED, "NVML");
  }
}

static nvb_status get_cpu_profile(void* value, void* context) {
  (void)context;
  return nvb_hardware_get_cpu_profile(value);
}

static void test_processor(void) {
  nvb_cpu_profile cpu;
  nvb_cpu_profile_init(&cpu);
  CHECK_OK(nvb_hardware_get_cpu_profile(&cpu));
  CHECK(cpu.sockets >= 1 && cpu.cores >= cpu.sockets && cpu.threads >= cpu.cores && cpu.available_threads >= 1);
  CHECK(cpu.name[0] != '\0' && cpu.architecture[0] != '\0' && cpu.total_memory > 0);
#if defined(__x86_64__)
  CHECK_EQUAL(strstr(cpu.instruction_sets, "avx2") != NULL, __builtin_cpu_supports("avx2") != 0);
#endif
  CHECK_STRUCT(cpu, get_cpu_profile, NULL);
  nvb_numa_node node;
  nvb_numa_node_init(&node);
  for (uint32_t i = 0; i < cpu.numa_nodes; ++i) {
    CHECK_OK(nvb_hardware_get_numa_node(i, &node));
    CHECK(node.free_memory <= node.total_memory);
    CHECK_EQUAL(node.threads == 0, node.thread_numbers[0] < 0);
  }
  CHECK_FAILS(nvb_hardware_get_numa_node(cpu.numa_nodes, &node), NVB_ERROR_INVALID_ARGUMENT, "NUMA node index");
}

static nvb_status get_environment(void* value, void* context) {
  (void)context;
  return nvb_hardware_get_environment(value);
}

static nvb_status get_library(void* value, void* context) {
  (void)context;
  return nvb_hardware_get_library(0, value);
}

static void test_environment(void) {
  nvb_environment environment;
  nvb_environment_init(&environment);
  CHECK_OK(nvb_hardware_get_environment(&environment));
  CHECK_STRUCT(environment, get_environment, NULL);
  int32_t gpus = 0;
  nvb_status status = nvb_cuda_get_device_count(&gpus);
  CHECK_EQUAL(environment.obstacle[0] == '\0', status == NVB_OK);
  CHECK_EQUAL(environment.libraries, 5);
  nvb_library library;
  nvb_library_init(&library);
  for (uint32_t i = 0; i < environment.libraries; ++i) {
    CHECK_OK(nvb_hardware_get_library(i, &library));
    CHECK_EQUAL(library.found, library.path[0] != '\0');
    CHECK_EQUAL(library.found, library.reason[0] == '\0');
  }
  CHECK_STRUCT(library, get_library, NULL);
  CHECK_FAILS(nvb_hardware_get_library(5, &library), NVB_ERROR_INVALID_ARGUMENT, "library index 5", "5");
}

static nvb_status get_peer_access(void* value, void* context) {
  (void)context;
  return nvb_hardware_get_peer_access(0, 0, value);
}

static void test_peers(void) {
  int32_t gpus = 0;
  nvb_peer_access access;
  nvb_peer_access_init(&access);
  if (nvb_cuda_get_device_count(&gpus) == NVB_OK) {
    CHECK_OK(nvb_hardware_get_peer_access(0, 0, &access));
    CHECK_EQUAL(access.accessible, 1);
    CHECK_STRUCT(access, get_peer_access, NULL);
    for (int32_t peer = 1; peer < gpus; ++peer) CHECK_OK(nvb_hardware_get_peer_access(0, peer, &access));
    CHECK_FAILS(nvb_hardware_get_peer_access(0, gpus, &access), NVB_ERROR_DEVICE, "peer is CUDA device");
    CHECK_FAILS(nvb_hardware_get_peer_access(-1, 0, &access), NVB_ERROR_DEVICE, "device is CUDA device -1");
  } else {
    CHECK_FAILS(nvb_hardware_get_peer_access(0, 0, &access), NVB_ERROR_CUDA_NOT_AVAILABLE, "nvb_hardware");
  }
  fixture one = open_fixture(), other = open_fixture();
  CHECK_OK(nvb_backend_enable_peer_access(one.backend, other.backend));
  CHECK_OK(nvb_backend_enable_peer_access(one.backend, other.backend));
  CHECK_OK(nvb_backend_enable_peer_access(one.backend, one.backend));
  CHECK_FAILS(nvb_backend_enable_peer_access(one.backend, NULL), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  CHECK_FAILS(nvb_backend_enable_peer_access(NULL, one.backend), NVB_ERROR_INVALID_ARGUMENT, "backend", "NULL");
  close_fixture(&other);
  close_fixture(&one);
}

static nvb_status recommend(void* value, void* context) {
  (void)context;
  return nvb_hardware_recommend(NVB_WORKLOAD_DECODE, 0, value);
}

static void test_ranking(void) {
  uint32_t count = device_count();
  nvb_recommendation place;
  nvb_recommendation_init(&place);
  for (uint32_t workload = NVB_WORKLOAD_PREFILL; workload <= NVB_WORKLOAD_TEST; ++workload) {
    uint64_t seen = 0;
    for (uint32_t i = 0; i < count; ++i) {
      CHECK_OK(nvb_hardware_recommend(workload, i, &place));
      CHECK_EQUAL(place.count, count);
      CHECK(place.device_index < count && place.reason[0] != '\0' && place.device[0] != '\0');
      seen |= (uint64_t)1 << place.device_index;
    }
    CHECK_EQUAL(seen, ((uint64_t)1 << count) - 1);
    CHECK_OK(nvb_hardware_recommend(workload, workload == NVB_WORKLOAD_TEST ? 0 : count - 1, &place));
    CHECK_EQUAL(place.kind, NVB_DEVICE_CPU);
    CHECK(place.runnable == 1 && strcmp(place.device, "cpu") == 0);
    CHECK_FAILS(nvb_hardware_recommend(workload, count, &place), NVB_ERROR_INVALID_ARGUMENT, "place index");
  }
  CHECK_STRUCT(place, recommend, NULL);
  CHECK_FAILS(nvb_hardware_recommend(4, 0, &place), NVB_ERROR_INVALID_ARGUMENT, "workload is 4", "0 to 3");
}

int main(void) {
  test_devices();
  test_usage();
  test_processor();
  test_environment();
  test_peers();
  test_ranking();
  return test_result();
}
