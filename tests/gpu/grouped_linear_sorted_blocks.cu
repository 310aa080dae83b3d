// Products of tokens in the order of their experts with blocks of GGUF on a device: grouped_linear_sorted_blocks
// against sums in f64 of the elements that common/block_element.cuh decodes, and its time.
//
//   grouped_linear_sorted_blocks check   every format, tiles that are full and not, experts without a token
//   grouped_linear_sorted_blocks bench   the experts of Qwen 3 30B-A3B for prompts of several lengths
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"
#include "driver_function.h"
#include "grouped_linear/sm90/grouped_linear_sorted_blocks.cuh"

namespace {

using gpu::on_device;
using gpu::random_bits;

struct Format {
  const char* name;
  uint32_t code;
  int bytes;
  int halves[2];  // where scales lie; -1: none
};
constexpr Format kFormats[] = {
    {"q2_k", NVB_BLOCKS_Q2_K, 84, {80, 82}},   {"q3_k", NVB_BLOCKS_Q3_K, 110, {108, -1}},
    {"q4_k", NVB_BLOCKS_Q4_K, 144, {0, 2}},    {"q5_k", NVB_BLOCKS_Q5_K, 176, {0, 2}},
    {"q6_k", NVB_BLOCKS_Q6_K, 210, {208, -1}}, {"iq4_xs", NVB_BLOCKS_IQ4_XS, 136, {0, -1}},
};

struct Shape {
  int tokens, used, experts;
  int64_t n, k;
};

template <uint32_t Code>
__global__ void reference(nvb_grouped_linear_params p, const double* x, const int* ids, double* sums, double* sizes) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= p.rows * p.n) return;
  const int64_t row = index / p.n, column = index % p.n;
  const uint8_t* const w = static_cast<const uint8_t*>(p.weight) + (ids[row] * p.n + column) * p.weight_stride;
  double sum = 0, size = 0;
  for (int64_t i = 0; i < p.k; i += 4) {
    float four[4];
    nvb::load_four_of_blocks<Code>(w, i, four);
    for (int j = 0; j < 4; ++j) {
      const double term = four[j] * x[row / p.used * p.k + i + j];
      sum += term, size += fabs(term);
    }
  }
  sums[index] = sum, sizes[index] = size;
}

struct Problem {
  nvb_grouped_linear_params params = {};
  double* x = nullptr;
  int* ids = nullptr;
  ~Problem() {
    for (const void* data :
         {params.input, params.weight, static_cast<const void*>(params.expert_offsets),
          static_cast<const void*>(params.order), static_cast<const void*>(params.output),
          static_cast<const void*>(params.workspace), static_cast<const void*>(x), static_cast<const void*>(ids)}) {
      cudaFree(const_cast<void*>(data));
    }
  }
};

void make(Problem& problem, const Format& format, const Shape& shape) {
  const int64_t stride = shape.k / 256 * format.bytes, rows = int64_t{shape.tokens} * shape.used;
  std::vector<uint8_t> w(shape.experts * shape.n * stride);
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<uint8_t>(random_bits(i) >> 8);
  for (size_t at = 0; at < w.size(); at += format.bytes) {
    for (const int offset : format.halves) {
      if (offset < 0) continue;
      const __half value = __float2half(std::ldexp(1.0f + (random_bits(at + offset) & 255) / 256.0f, -8));
      std::memcpy(&w[at + offset], &value, 2);
    }
  }
  std::vector<__nv_bfloat16> x(shape.tokens * shape.k);
  std::vector<double> exact(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const uint64_t bits = random_bits(i + 77);
    const float value = static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) / (1 << 23);
    x[i] = __float2bfloat16(value * (bits % 97 == 0 ? 200.0f : 1.0f));
    exact[i] = __bfloat162float(x[i]);
  }
  // Each token has neighbours from a random expert on, never the last expert but where there are no others.
  const int named = std::max(1, shape.experts - 1);
  std::vector<int> ids(rows), order, offsets = {0};
  for (int64_t row = 0; row < rows; ++row) {
    ids[row] = static_cast<int>((random_bits(row / shape.used + 5) + row % shape.used) % named);
  }
  for (int expert = 0; expert < shape.experts; ++expert) {
    for (int64_t row = 0; row < rows; ++row) {
      if (ids[row] == expert) order.push_back(static_cast<int>(row));
    }
    offsets.push_back(static_cast<int>(order.size()));
  }
  nvb_grouped_linear_params& p = problem.params;
  p.input = on_device(x), p.weight = on_device(w), p.expert_offsets = on_device(offsets), p.order = on_device(order);
  problem.x = on_device(exact), problem.ids = on_device(ids);
  MUST(cudaMalloc(&p.output, rows * shape.n * 4));
  p.rows = rows, p.input_rows = shape.tokens, p.n = shape.n, p.k = shape.k, p.used = shape.used;
  p.input_stride = shape.k, p.weight_stride = stride, p.output_stride = shape.n;
  p.experts = p.all_experts = shape.experts;
  p.input_dtype = NVB_BF16, p.output_dtype = NVB_F32, p.encoding = format.code;
  MUST(cudaMalloc(&p.workspace, nvb::grouped::SortedInput(nullptr, rows, shape.k / 256).bytes));
}

int failures = 0;

template <uint32_t Code>
void check(const Format& format, const Shape& shape, const nvb_launch& launch) {
  Problem problem;
  make(problem, format, shape);
  const nvb_grouped_linear_params& p = problem.params;
  const int64_t count = p.rows * p.n;
  MUST(cudaMemset(p.output, 0xff, count * 4));
  MUST(nvb::grouped::launch_sorted_blocks_format<Code>(p, launch));
  MUST(cudaStreamSynchronize(launch.stream));
  double *sums, *sizes;
  MUST(cudaMalloc(&sums, count * 8));
  MUST(cudaMalloc(&sizes, count * 8));
  reference<Code><<<static_cast<unsigned>((count + 127) / 128), 128>>>(p, problem.x, problem.ids, sums, sizes);
  std::vector<double> want(count), size(count);
  std::vector<float> got(count);
  MUST(cudaMemcpy(want.data(), sums, count * 8, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(size.data(), sizes, count * 8, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(got.data(), p.output, count * 4, cudaMemcpyDeviceToHost));
  cudaFree(sums), cudaFree(sizes);
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double error = std::fabs(got[i] - want[i]) / (size[i] + 1e-30);
    worst = error > worst || !(error == error) ? error : worst;
  }
  // Elements of Q6_K and IQ4_XS have 11 bits here, and some of x are 200 times the others.
  const double bound = Code == NVB_BLOCKS_Q6_K || Code == NVB_BLOCKS_IQ4_XS ? 5e-4 : 5e-6;
  failures += !(worst < bound);
  std::printf("%s %-6s %4d tokens, %d of %3d experts, %4lld x %4lld: error %.1e of the sum of sizes\n",
              worst < bound ? "ok  " : "FAIL", format.name, shape.tokens, shape.used, shape.experts,
              static_cast<long long>(shape.n), static_cast<long long>(shape.k), worst);
}

template <uint32_t Code>
void bench(const Format& format, const Shape& shape, const nvb_launch& launch) {
  Problem problem;
  make(problem, format, shape);
  constexpr int kLaunches = 20;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(nvb::grouped::launch_sorted_blocks_format<Code>(problem.params, launch));
  MUST(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLaunches; ++i) MUST(nvb::grouped::launch_sorted_blocks_format<Code>(problem.params, launch));
  MUST(cudaStreamEndCapture(launch.stream, &graph));
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int run = 0; run < 9; ++run) {
    MUST(cudaEventRecord(begin, launch.stream));
    MUST(cudaGraphLaunch(exec, launch.stream));
    MUST(cudaEventRecord(end, launch.stream));
    MUST(cudaEventSynchronize(end));
    float time;
    MUST(cudaEventElapsedTime(&time, begin, end));
    times.push_back(time * 1e3f / kLaunches);
  }
  std::sort(times.begin(), times.end());
  std::printf("%-6s %4d tokens, %d of %3d experts, %4lld x %4lld: %7.1f us\n", format.name, shape.tokens, shape.used,
              shape.experts, static_cast<long long>(shape.n), static_cast<long long>(shape.k), times[times.size() / 2]);
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
}

template <uint32_t Code>
void run(const Format& format, bool measures, const nvb_launch& launch) {
  if (!measures) {
    // Rows of blocks begin at multiples of 16 bytes.
    const int64_t k = format.bytes % 16 == 0 ? 256 : 2048;
    for (const Shape& shape : {Shape{40, 2, 8, 96, k}, Shape{100, 8, 16, 200, 2048}, Shape{3, 1, 5, 8, k},
                               Shape{300, 1, 1, 776, k}, Shape{90, 4, 40, 24, 2 * k}}) {
      check<Code>(format, shape, launch);
    }
  } else if (Code == NVB_BLOCKS_Q4_K || Code == NVB_BLOCKS_Q6_K) {
    for (const int tokens : {16, 128, 512, 1024, 4096}) bench<Code>(format, {tokens, 8, 128, 768, 2048}, launch);
    if (Code == NVB_BLOCKS_Q4_K) bench<Code>(format, {512, 8, 128, 2048, 768}, launch);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const nvb_launch launch = gpu::device_launch(stream);
  const bool measures = mode == "bench";
  run<NVB_BLOCKS_Q2_K>(kFormats[0], measures, launch);
  run<NVB_BLOCKS_Q3_K>(kFormats[1], measures, launch);
  run<NVB_BLOCKS_Q4_K>(kFormats[2], measures, launch);
  run<NVB_BLOCKS_Q5_K>(kFormats[3], measures, launch);
  run<NVB_BLOCKS_Q6_K>(kFormats[4], measures, launch);
  run<NVB_BLOCKS_IQ4_XS>(kFormats[5], measures, launch);
  if (!measures) std::printf("%d failures\n", failures);
  return failures != 0;
}
