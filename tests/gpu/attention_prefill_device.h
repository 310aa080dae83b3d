// What the programs that run a prefill kernel on a device share: copies of a case's memory, shapes, and their timing.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_DEVICE_H
#define NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_DEVICE_H

#include <cuda_runtime.h>

#include <string>

#include "attention_prefill_cases.h"
#include "device.h"
#include "driver_function.h"

namespace attention_device {

using attention_cases::Case;
using attention_cases::Region;
using attention_cases::Regions;

using gpu::device_launch;

inline void* to_device(const Region& region) {
  void* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(region.bytes, 16)));
  MUST(cudaMemcpy(device, region.data, region.bytes, cudaMemcpyHostToDevice));
  return device;
}

using LaunchCase = cudaError_t (*)(const nvb_attention_prefill_params& p, const Case& test, const nvb_launch& launch);

// Runs a case twice on copies of its memory; the second run has to give the same bits.
inline std::string run_twice(const nvb_attention_prefill_params& host, const Case& test, const Regions& regions,
                             LaunchCase launch_case) {
  nvb_attention_prefill_params p = host;
  p.query = to_device(regions.query), p.key = to_device(regions.key), p.value = to_device(regions.value);
  p.output = to_device(regions.output), p.lse = static_cast<float*>(to_device(regions.lse));
  const float* const scales = static_cast<const float*>(to_device(regions.scales));
  const float* const sinks = static_cast<const float*>(to_device(regions.sinks));
  if (test.sinks) p.sinks = sinks;
  const float* const slopes = static_cast<const float*>(to_device(regions.slopes));
  if (test.slopes) p.slopes = slopes;
  const void* const mask = to_device(regions.mask);
  if (test.mask != 0) p.mask = mask;
  uint32_t* const mask_tiles = static_cast<uint32_t*>(to_device(regions.mask_tiles));
  if (p.mask_tiles != nullptr) p.mask_tiles = mask_tiles;
  const int32_t* const table = static_cast<const int32_t*>(to_device(regions.table));
  if (test.page_tokens > 0) p.placement.pages = table;
  if (test.scales) {
    p.query_scale = scales, p.key_scale = scales + test.kv_heads, p.value_scale = scales + 2 * test.kv_heads;
  }
  const nvb_launch launch = device_launch(nullptr);
  std::string wrong;
  std::vector<uint8_t> first(regions.output.bytes);
  for (int round = 0; round < 2 && wrong.empty(); ++round) {
    MUST(cudaMemcpy(p.output, regions.output.data, regions.output.bytes, cudaMemcpyHostToDevice));
    const cudaError_t error = launch_case(p, test, launch);
    if (error != cudaSuccess) wrong = cudaGetErrorString(error);
    MUST(cudaDeviceSynchronize());
    if (round == 0) MUST(cudaMemcpy(first.data(), p.output, first.size(), cudaMemcpyDeviceToHost));
  }
  MUST(cudaMemcpy(regions.output.data, p.output, regions.output.bytes, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(regions.lse.data, p.lse, regions.lse.bytes, cudaMemcpyDeviceToHost));
  if (wrong.empty() && std::memcmp(first.data(), regions.output.data, first.size()) != 0) wrong = "two runs differ";
  for (const void* device :
       {p.query, p.key, p.value, static_cast<const void*>(p.output), static_cast<const void*>(p.lse),
        static_cast<const void*>(scales), static_cast<const void*>(sinks), static_cast<const void*>(table),
        static_cast<const void*>(slopes), mask, static_cast<const void*>(mask_tiles)}) {
    MUST(cudaFree(const_cast<void*>(device)));
  }
  return wrong;
}

inline int check(std::vector<Case> cases, const std::string& filter, LaunchCase launch_case) {
  for (const int head_dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Case one;
      one.name = "many tiles";
      one.head_dim = one.value_dim = head_dim;
      one.dtype = cases.front().dtype;
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
    const std::string wrong =
        attention_cases::check(test, [&](const nvb_attention_prefill_params& p, const Case& one,
                                         const Regions& regions) { return run_twice(p, one, regions, launch_case); });
    if (wrong.empty()) continue;
    ++failures;
    std::printf("%s (%d/%d, dtype %u%s): %s\n", test.name, test.head_dim, test.value_dim, test.dtype,
                test.causal ? ", causal" : "", wrong.c_str());
  }
  std::printf("%d cases, %d failures\n", runs, failures);
  return failures;
}

struct Shape {
  int head_dim, value_dim, query_heads, kv_heads, length;
  bool causal;
  int window;
  int queries = 0;      // the last of one sequence; 0: all of them, of as many sequences as kTokens makes
  int page_tokens = 0;  // of its pages, which lie in any order; 0: contiguous
};

// Pairs of a query and a key that it sees.
inline double pairs(const Shape& shape) {
  const double length = shape.length, queries = shape.queries;
  if (queries > 0) return queries * (length - (queries - 1) / 2);
  if (shape.window > 0 && shape.window < shape.length) {
    const double window = shape.window;
    return window * (window + 1) / 2 + (length - window) * window;
  }
  return shape.causal ? length * length / 2 : length * length;
}

constexpr int kTokens = 16384;

constexpr int kMostPages = 1 << 16;

// Memory for the largest shape, filled once with normal numbers of one dtype.
struct Memory {
  uint32_t dtype;
  void* data[4];
  int32_t* pages;

  Memory(uint32_t its_dtype, size_t elements) : dtype(its_dtype) {
    const attention_cases::Elements some(dtype, 1 << 20), all(dtype, elements);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 1 << 20; ++i) some.set(i, normal(random));
    const size_t bytes = static_cast<size_t>(all.bytes());
    MUST(cudaMalloc(reinterpret_cast<void**>(&pages), kMostPages * sizeof(int32_t)));
    for (size_t i = 0; i < 4; ++i) {
      for (size_t at = 0; at < elements; ++at) {
        const size_t from = (at * 7 + (at >> 20) + i) & ((1 << 20) - 1);
        std::memcpy(all.at(static_cast<int64_t>(at)), some.at(static_cast<int64_t>(from)), bytes);
      }
      // The last one is the output's, of two bytes an element.
      MUST(cudaMalloc(&data[i], elements * 2));
      MUST(cudaMemcpy(data[i], all.at(0), elements * bytes, cudaMemcpyHostToDevice));
    }
  }
};

using Launch = cudaError_t (*)(const nvb_attention_prefill_params& p, const nvb_launch& launch);

inline nvb_attention_prefill_params params_of(const Shape& shape, const Memory& memory) {
  nvb_attention_prefill_params p = {};
  p.query = memory.data[0], p.key = memory.data[1], p.value = memory.data[2], p.output = memory.data[3];
  p.query_head_stride = shape.head_dim, p.query_token_stride = int64_t{shape.query_heads} * shape.head_dim;
  p.key_head_stride = p.value_head_stride = shape.head_dim;
  p.key_token_stride = p.value_token_stride = int64_t{shape.kv_heads} * shape.head_dim;
  p.output_head_stride = shape.value_dim, p.output_token_stride = int64_t{shape.query_heads} * shape.value_dim;
  p.query_dtype = p.kv_dtype = memory.dtype;
  p.output_dtype = NVB_BF16;
  p.query_sequence_stride = p.query_token_stride, p.output_sequence_stride = p.output_token_stride;
  p.key_sequence_stride = p.key_token_stride, p.value_sequence_stride = p.value_token_stride;
  p.lse_sequence_stride = 1;
  p.query_heads = shape.query_heads, p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim, p.value_dim = shape.value_dim;
  p.causal = shape.causal, p.window = shape.window;
  p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.sequences = kTokens / shape.length;
  if (shape.queries > 0) {
    p.sequences = 1;
    p.sequence[0] = {0, shape.queries, 0, shape.length, 0, 0};
    if (shape.page_tokens > 0) {
      p.placement.pages = memory.pages;
      p.placement.page_row_stride = shape.length / shape.page_tokens;
      p.placement.block_stride = p.placement.value_block_stride = shape.page_tokens * p.key_token_stride;
      p.placement.page_tokens = shape.page_tokens, p.placement.page_count = shape.length / shape.page_tokens;
    }
    return p;
  }
  for (int i = 0; i < p.sequences; ++i) {
    p.sequence[i] = {i * shape.length, shape.length, i * shape.length, shape.length, 0, 0};
  }
  return p;
}

// The table of a shape's pages.
inline void shuffle_pages(const Shape& shape, const Memory& memory) {
  if (shape.page_tokens == 0) return;
  std::vector<int32_t> table(static_cast<size_t>(shape.length / shape.page_tokens));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  MUST(cudaMemcpy(memory.pages, table.data(), table.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
}

// TFLOP/s: the median of the replays of a graph of several launches, each `milliseconds` long at 500 TFLOP/s.
inline double measure(const Shape& shape, const Memory& memory, cudaStream_t stream, Launch launch_kernel,
                      double milliseconds = 20) {
  const nvb_attention_prefill_params p = params_of(shape, memory);
  shuffle_pages(shape, memory);
  const nvb_launch launch = device_launch(stream);
  const double operations = 2.0 * (shape.head_dim + shape.value_dim) * shape.query_heads * p.sequences * pairs(shape);
  const int launches = std::clamp(static_cast<int>(milliseconds * 1e-3 * 500e12 / operations), 2, 100);
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
    float time = 0;
    MUST(cudaEventElapsedTime(&time, begin, end));
    if (round >= 2) times.push_back(time);
  }
  std::sort(times.begin(), times.end());
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  return operations * launches / (times[times.size() / 2] * 1e-3) / 1e12;
}

struct Candidate {
  const char* name;
  int head_dim;
  Launch launch;
};

inline void compare(const std::vector<Candidate>& candidates, int only, const Memory& memory) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  std::printf("TFLOP/s, %d tokens, sequences of 512, 2k, 16k, full and causal\n", kTokens);
  for (const Candidate& one : candidates) {
    if (only != 0 && one.head_dim != only) continue;
    std::printf("head_dim %-3d %-58s", one.head_dim, one.name);
    for (const bool causal : {false, true}) {
      for (const int length : {512, 2048, 16384}) {
        const int heads = 2048 / one.head_dim;
        const Shape shape = {one.head_dim, one.head_dim, heads, heads, length, causal, 0};
        std::printf(" %5.0f", measure(shape, memory, stream, one.launch, 10));
        std::fflush(stdout);
      }
    }
    std::printf("\n");
  }
  MUST(cudaStreamDestroy(stream));
}

}  // namespace attention_device

#endif  // NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_DEVICE_H
