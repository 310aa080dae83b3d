// The prefill attention of compute capability 9.0 on a device: its results beside the formula in f64, and its speed.
// It needs nvcc to build and a driver to run, nothing else of this project (attention_prefill_wgmma.sh builds it):
//
//   tests/gpu/attention_prefill_wgmma.sh                   builds, checks and measures
//   target/gpu/attention_prefill_wgmma check [CASE]        the cases whose names contain CASE
//   target/gpu/attention_prefill_wgmma bench [HEAD_DIM]    TFLOP/s of the shapes below
//   target/gpu/attention_prefill_wgmma tiles [HEAD_DIM]    the same with other tiles, to choose among them
//   target/gpu/attention_prefill_wgmma once HEAD_DIM CAUSAL LENGTH    one shape, launched three times, for a profiler
//
// Shapes: BF16, 16,384 tokens in sequences of 512 to 16,384, 2048 / head_dim heads, head_dim 64, 128 and 256, with and
// without a causal mask, which counts half of the operations; and grouped heads, a window and a value dim of its own. A
// graph of several launches is replayed; tensors are larger than L2. The median of the replays counts.
#include <cuda_runtime.h>

// The launcher itself, because it can be asked for any tile here.
#include "attention/sm90/attention_prefill_wgmma.cu"
#include "attention_prefill_cases.h"

// The library finds the driver by itself (csrc/driver); here the runtime does.
extern "C" void* nvb_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
}

namespace {

using attention_cases::Case;

void must(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}
#define MUST(call) must(call, #call)

nvb_launch device_launch(cudaStream_t stream) {
  int device = 0, major = 0, minor = 0;
  nvb_launch launch = {};
  MUST(cudaGetDevice(&device));
  MUST(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MUST(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  MUST(cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  MUST(cudaDeviceGetAttribute(&launch.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  MUST(cudaDeviceGetAttribute(&launch.l2_bytes, cudaDevAttrL2CacheSize, device));
  launch.capability = 10 * major + minor;
  launch.stream = stream;
  return launch;
}

// Runs a case twice on copies of its memory; the second run has to give the same bits.
std::string run(const nvb_attention_prefill_params& host, const Case& test, const attention_cases::Regions& regions) {
  nvb_attention_prefill_params p = host;
  const auto to_device = [](const attention_cases::Region& region) {
    void* device = nullptr;
    MUST(cudaMalloc(&device, std::max<size_t>(region.bytes, 16)));
    MUST(cudaMemcpy(device, region.data, region.bytes, cudaMemcpyHostToDevice));
    return device;
  };
  p.query = to_device(regions.query), p.key = to_device(regions.key), p.value = to_device(regions.value);
  p.output = to_device(regions.output), p.lse = static_cast<float*>(to_device(regions.lse));
  const nvb_launch launch = device_launch(nullptr);
  std::string wrong;
  std::vector<uint8_t> first(regions.output.bytes);
  for (int round = 0; round < 2 && wrong.empty(); ++round) {
    MUST(cudaMemcpy(p.output, regions.output.data, regions.output.bytes, cudaMemcpyHostToDevice));
    const cudaError_t error = nvb::prefill_wgmma::launch_prefill(p, launch);
    if (error != cudaSuccess) wrong = cudaGetErrorString(error);
    MUST(cudaDeviceSynchronize());
    if (round == 0) MUST(cudaMemcpy(first.data(), p.output, first.size(), cudaMemcpyDeviceToHost));
  }
  MUST(cudaMemcpy(regions.output.data, p.output, regions.output.bytes, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(regions.lse.data, p.lse, regions.lse.bytes, cudaMemcpyDeviceToHost));
  if (wrong.empty() && std::memcmp(first.data(), regions.output.data, first.size()) != 0) wrong = "two runs differ";
  for (const void* device :
       {p.query, p.key, p.value, static_cast<const void*>(p.output), static_cast<const void*>(p.lse)}) {
    MUST(cudaFree(const_cast<void*>(device)));
  }
  return wrong;
}

int check(const std::string& filter) {
  std::vector<Case> cases = attention_cases::cases();
  for (const int head_dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Case one;
      one.name = "many tiles";
      one.head_dim = one.value_dim = head_dim;
      one.causal = causal;
      one.sequences = {{700, 1100}, {384, 384}, {384, 384}, {33, 900}};
      one.query_heads = 4, one.kv_heads = 2;
      cases.push_back(one);
    }
  }
  int failures = 0, runs = 0;
  for (const Case& test : cases) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    ++runs;
    const std::string wrong = attention_cases::check(test, run);
    if (wrong.empty()) continue;
    ++failures;
    std::printf("%s (%d/%d, %s%s): %s\n", test.name, test.head_dim, test.value_dim,
                test.dtype == NVB_F16 ? "f16" : "bf16", test.causal ? ", causal" : "", wrong.c_str());
  }
  std::printf("%d cases, %d failures\n", runs, failures);
  return failures;
}

struct Shape {
  int head_dim, value_dim, query_heads, kv_heads, length;
  bool causal;
  int window;
};

// Pairs of a query and a key that it sees.
double pairs(const Shape& shape) {
  const double length = shape.length;
  if (shape.window > 0 && shape.window < shape.length) {
    const double window = shape.window;
    return window * (window + 1) / 2 + (length - window) * window;
  }
  return shape.causal ? length * length / 2 : length * length;
}

constexpr int kTokens = 16384;

// Memory for the largest shape, filled once with bits of BF16 numbers around 1.
struct Memory {
  uint16_t* data[4];
  explicit Memory(size_t elements) {
    std::vector<uint16_t> host(elements);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> some(1 << 20);
    for (uint16_t& one : some) one = attention_cases::to_bits(NVB_BF16, normal(random));
    for (int i = 0; i < 4; ++i) {
      for (size_t at = 0; at < elements; ++at) host[at] = some[(at * 7 + at / some.size() + i) % some.size()];
      MUST(cudaMalloc(&data[i], elements * 2));
      MUST(cudaMemcpy(data[i], host.data(), elements * 2, cudaMemcpyHostToDevice));
    }
  }
};

using Launch = cudaError_t (*)(const nvb_attention_prefill_params& p, const nvb_launch& launch);

nvb_attention_prefill_params params_of(const Shape& shape, const Memory& memory) {
  nvb_attention_prefill_params p = {};
  p.query = memory.data[0], p.key = memory.data[1], p.value = memory.data[2], p.output = memory.data[3];
  p.query_head_stride = shape.head_dim, p.query_token_stride = int64_t{shape.query_heads} * shape.head_dim;
  p.key_head_stride = p.value_head_stride = shape.head_dim;
  p.key_token_stride = p.value_token_stride = int64_t{shape.kv_heads} * shape.head_dim;
  p.output_head_stride = shape.value_dim, p.output_token_stride = int64_t{shape.query_heads} * shape.value_dim;
  p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16;
  p.query_sequence_stride = p.query_token_stride, p.output_sequence_stride = p.output_token_stride;
  p.key_sequence_stride = p.key_token_stride, p.value_sequence_stride = p.value_token_stride;
  p.lse_sequence_stride = 1;
  p.query_heads = shape.query_heads, p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim, p.value_dim = shape.value_dim;
  p.causal = shape.causal, p.window = shape.window;
  p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.sequences = kTokens / shape.length;
  for (int i = 0; i < p.sequences; ++i) {
    p.sequence[i] = {i * shape.length, shape.length, i * shape.length, shape.length, 0};
  }
  return p;
}

double measure(const Shape& shape, const Memory& memory, cudaStream_t stream,
               Launch launch_kernel = nvb::prefill_wgmma::launch_prefill) {
  const nvb_attention_prefill_params p = params_of(shape, memory);
  const nvb_launch launch = device_launch(stream);
  const double operations = 2.0 * (shape.head_dim + shape.value_dim) * shape.query_heads * p.sequences * pairs(shape);
  // About 20 ms a replay at 500 TFLOP/s.
  const int launches = std::clamp(static_cast<int>(20e-3 * 500e12 / operations), 2, 100);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) MUST(launch_kernel(p, launch));
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < 8; ++round) {
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    float milliseconds = 0;
    MUST(cudaEventElapsedTime(&milliseconds, begin, end));
    if (round >= 2) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  return operations * launches / (times[times.size() / 2] * 1e-3) / 1e12;
}

struct Candidate {
  const char* name;  // query rows, keys, and whether warpgroups take turns
  int head_dim;
  Launch launch;
};

template <typename Tile>
Candidate candidate(const char* name) {
  return {name, Tile::kHeadDim, nvb::prefill_wgmma::launch_with<__nv_bfloat16, Tile>};
}

void compare_tiles(int only) {
  using nvb::prefill_wgmma::Tile;
  const Candidate candidates[] = {
      candidate<Tile<64, 64, 3, 128, true>>("192 x 128, turns"),
      candidate<Tile<64, 64, 3, 128, false>>("192 x 128"),
      candidate<Tile<64, 64, 3, 112, true>>("192 x 112, turns"),
      candidate<Tile<64, 64, 2, 128, true>>("128 x 128, turns"),
      candidate<Tile<64, 64, 2, 176, true>>("128 x 176, turns"),
      candidate<Tile<64, 64, 2, 176, false>>("128 x 176"),
      candidate<Tile<128, 128, 2, 128, true>>("128 x 128, turns"),
      candidate<Tile<128, 128, 2, 128, false>>("128 x 128"),
      candidate<Tile<128, 128, 2, 176, true>>("128 x 176, turns"),
      candidate<Tile<128, 128, 2, 176, false>>("128 x 176"),
      candidate<Tile<128, 128, 2, 112, true>>("128 x 112, turns"),
      candidate<Tile<128, 128, 3, 80, true>>("192 x 80, turns"),
      candidate<Tile<256, 256, 2, 80, false>>("128 x 80"),
      candidate<Tile<256, 256, 2, 80, true>>("128 x 80, turns"),
  };
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const Memory memory(size_t{kTokens} * 4096);
  std::printf("TFLOP/s, %d tokens, sequences of 512, 2k, 16k, full and causal\n", kTokens);
  for (const Candidate& one : candidates) {
    if (only != 0 && one.head_dim != only) continue;
    std::printf("head_dim %-3d %-18s", one.head_dim, one.name);
    for (const bool causal : {false, true}) {
      for (const int length : {512, 2048, 16384}) {
        const int heads = 2048 / one.head_dim;
        const Shape shape = {one.head_dim, one.head_dim, heads, heads, length, causal, 0};
        std::printf(" %5.0f", measure(shape, memory, stream, one.launch));
        std::fflush(stdout);
      }
    }
    std::printf("\n");
  }
  MUST(cudaStreamDestroy(stream));
}

void bench(int only) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const Memory memory(size_t{kTokens} * 4096);
  std::printf("TFLOP/s, %d tokens, sequences of 512, 1k, 2k, 4k, 8k, 16k\n", kTokens);
  for (const int head_dim : {64, 128, 256}) {
    if (only != 0 && head_dim != only) continue;
    for (const bool causal : {false, true}) {
      std::printf("head_dim %-3d %-7s", head_dim, causal ? "causal" : "full");
      for (int length = 512; length <= kTokens; length *= 2) {
        std::printf(" %5.0f",
                    measure({head_dim, head_dim, 2048 / head_dim, 2048 / head_dim, length, causal, 0}, memory, stream));
        std::fflush(stdout);
      }
      std::printf("\n");
    }
  }
  if (only != 0) return;
  const std::pair<const char*, Shape> others[] = {
      {"grouped heads 32/8, 128, causal, 4k", {128, 128, 32, 8, 4096, true, 0}},
      {"window 1024, 128, 16k", {128, 128, 16, 16, 16384, true, 1024}},
      {"window 1024, 64, 16k", {64, 64, 32, 32, 16384, true, 1024}},
      {"192/128, causal, 4k", {192, 128, 16, 16, 4096, true, 0}},
      {"192/192, causal, 4k", {192, 192, 16, 16, 4096, true, 0}},
      {"96, causal, 4k", {96, 96, 16, 16, 4096, true, 0}},
  };
  for (const auto& [name, shape] : others) std::printf("%-36s %5.0f\n", name, measure(shape, memory, stream));
  MUST(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const std::string which = argc > 2 ? argv[2] : "";
  int failures = 0;
  if (what == "check" || what == "all") failures = check(which);
  if (what == "bench" || what == "all") bench(std::atoi(which.c_str()));
  if (what == "tiles") compare_tiles(std::atoi(which.c_str()));
  if (what == "once" && argc == 5) {
    const int head_dim = std::atoi(argv[2]), heads = 2048 / head_dim;
    const Memory memory(size_t{kTokens} * 4096);
    const nvb_attention_prefill_params p =
        params_of({head_dim, head_dim, heads, heads, std::atoi(argv[4]), std::atoi(argv[3]) != 0, 0}, memory);
    for (int i = 0; i < 3; ++i) MUST(nvb::prefill_wgmma::launch_prefill(p, device_launch(nullptr)));
    MUST(cudaDeviceSynchronize());
  }
  return failures == 0 ? 0 : 1;
}
