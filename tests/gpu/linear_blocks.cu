// Products of few rows with blocks of GGUF on a device: linear_quantized_blocks against sums in f64 of the elements
// that common/block_element.cuh decodes, and its time beside linear_quantized_plain's and beside the bytes of W.
//
//   linear_blocks check               every format, input type, epilogue and a few awkward shapes
//   linear_blocks bench [m] [format]  the products of Gemma 3 4B and Llama 3 8B, weights out of the cache
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"
#include "driver_function.h"
#include "linear/linear_quantized_plain.cuh"
#include "linear/sm80/linear_quantized_blocks.cuh"

namespace {

using gpu::on_device;
using gpu::random_bits;

struct Format {
  const char* name;
  uint32_t code;
  int elements, bytes;
  int halves[2];  // where scales lie; -1: none, of MXFP4 an exponent lies at 0
};
constexpr Format kFormats[] = {
    {"q4_0", NVB_BLOCKS_Q4_0, 32, 18, {0, -1}},     {"q4_1", NVB_BLOCKS_Q4_1, 32, 20, {0, 2}},
    {"q5_0", NVB_BLOCKS_Q5_0, 32, 22, {0, -1}},     {"q5_1", NVB_BLOCKS_Q5_1, 32, 24, {0, 2}},
    {"q8_0", NVB_BLOCKS_Q8_0, 32, 34, {0, -1}},     {"q2_k", NVB_BLOCKS_Q2_K, 256, 84, {80, 82}},
    {"q3_k", NVB_BLOCKS_Q3_K, 256, 110, {108, -1}}, {"q4_k", NVB_BLOCKS_Q4_K, 256, 144, {0, 2}},
    {"q5_k", NVB_BLOCKS_Q5_K, 256, 176, {0, 2}},    {"q6_k", NVB_BLOCKS_Q6_K, 256, 210, {208, -1}},
    {"iq4_nl", NVB_BLOCKS_IQ4_NL, 32, 18, {0, -1}}, {"iq4_xs", NVB_BLOCKS_IQ4_XS, 256, 136, {0, -1}},
    {"mxfp4", NVB_BLOCKS_MXFP4, 32, 17, {-1, -1}},
};

std::vector<uint8_t> random_blocks(const Format& format, int64_t count, uint64_t seed) {
  std::vector<uint8_t> data(count * format.bytes);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(random_bits(seed + i) >> 8);
  for (int64_t block = 0; block < count; ++block) {
    uint8_t* const at = data.data() + block * format.bytes;
    const uint64_t bits = random_bits(seed * 31 + block);
    if (format.code == NVB_BLOCKS_MXFP4) at[0] = static_cast<uint8_t>(118 + bits % 8);
    for (const int offset : format.halves) {
      if (offset < 0) continue;
      const __half value = __float2half(std::ldexp(1.0f + (bits >> offset % 20 & 255) / 256.0f, -8));
      std::memcpy(at + offset, &value, 2);
    }
  }
  return data;
}

template <uint32_t Code>
__global__ void reference(const uint8_t* weight, int64_t stride, const double* x, int64_t m, int64_t n, int64_t k,
                          double* sums, double* sizes) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= m * n) return;
  const int64_t token = index / n, row = index % n;
  double sum = 0, size = 0;
  for (int64_t i = 0; i < k; i += 4) {
    float w[4];
    nvb::load_four_of_blocks<Code>(weight + row * stride, i, w);
    for (int j = 0; j < 4; ++j) sum += w[j] * x[token * k + i + j], size += fabs(w[j] * x[token * k + i + j]);
  }
  sums[index] = sum, sizes[index] = size;
}

std::vector<uint8_t> encoded(const std::vector<float>& values, uint32_t dtype, std::vector<double>& exact) {
  std::vector<uint8_t> bytes(values.size() * nvb::float_dtype_bytes(dtype));
  exact.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == NVB_F32) {
      std::memcpy(&bytes[4 * i], &values[i], 4), exact[i] = values[i];
    } else if (dtype == NVB_F16) {
      const __half half = __float2half(values[i]);
      std::memcpy(&bytes[2 * i], &half, 2), exact[i] = __half2float(half);
    } else {
      const __nv_bfloat16 half = __float2bfloat16(values[i]);
      std::memcpy(&bytes[2 * i], &half, 2), exact[i] = __bfloat162float(half);
    }
  }
  return bytes;
}

int failures = 0;

template <uint32_t Code>
void check(const Format& format, int64_t m, int64_t n, int64_t k, uint32_t dtype, bool gated, bool extras,
           const nvb_launch& launch) {
  const int64_t blocks = k / format.elements, stride = blocks * format.bytes, out = gated ? n / 2 : n;
  uint8_t* const weight = on_device(random_blocks(format, n * blocks, m + n + k));
  std::vector<float> values(m * k);
  for (size_t i = 0; i < values.size(); ++i) {
    // Tokens of very different size, some elements far larger than the others.
    const uint64_t bits = random_bits(i + 5);
    const float value = static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) / (1 << 23);
    values[i] = value * (bits % 97 == 0 ? 200.0f : 1.0f) *
                (dtype == NVB_F16 ? 1.0f : std::ldexp(1.0f, static_cast<int>(i / k % 3) * 20 - 20));
  }
  std::vector<double> exact;
  uint8_t* const input = on_device(encoded(values, dtype, exact));
  double* const x = on_device(exact);
  std::vector<float> bias(n), residual(m * out);
  for (int64_t i = 0; i < n; ++i) bias[i] = static_cast<float>(i % 5) - 2.0f;
  for (int64_t i = 0; i < m * out; ++i) residual[i] = static_cast<float>(i % 11) * 0.5f;
  double *sums, *sizes;
  float* output;
  MUST(cudaMalloc(&sums, m * n * 8));
  MUST(cudaMalloc(&sizes, m * n * 8));
  MUST(cudaMalloc(&output, m * out * 4));
  MUST(cudaMemset(output, 0xff, m * out * 4));
  reference<Code><<<static_cast<unsigned>((m * n + 127) / 128), 128>>>(weight, stride, x, m, n, k, sums, sizes);
  nvb_linear_quantized_params p = {};
  p.input = input, p.weight = weight, p.output = output;
  p.m = m, p.n = n, p.k = k, p.input_stride = k, p.weight_stride = stride, p.output_stride = out;
  p.input_dtype = dtype, p.output_dtype = NVB_F32, p.encoding = Code, p.gated = gated;
  if (extras) {
    p.bias = on_device(bias), p.bias_dtype = NVB_F32;
    p.residual = on_device(residual), p.residual_dtype = NVB_F32, p.residual_stride = out;
  }
  void* workspace = nullptr;
  MUST(cudaMalloc(&workspace, nvb::quantized::blocks_workspace(p) + 1));
  p.workspace = workspace;
  MUST(nvb::quantized::launch_blocks_format<Code>(p, launch));
  MUST(cudaDeviceSynchronize());
  std::vector<double> want(m * n), size(m * n);
  std::vector<float> got(m * out);
  MUST(cudaMemcpy(want.data(), sums, m * n * 8, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(size.data(), sizes, m * n * 8, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(got.data(), output, m * out * 4, cudaMemcpyDeviceToHost));
  double worst = 0;
  for (int64_t token = 0; token < m; ++token) {
    for (int64_t i = 0; i < out; ++i) {
      double value = want[token * n + (gated ? 2 * i : i)], scale = size[token * n + (gated ? 2 * i : i)];
      if (extras) value += bias[gated ? 2 * i : i], scale += 2;
      if (gated) {
        const double up = want[token * n + 2 * i + 1] + (extras ? bias[2 * i + 1] : 0.0f);
        scale = scale * std::fabs(up) + size[token * n + 2 * i + 1] * std::fabs(value), value *= up;
      }
      if (extras) value += residual[token * out + i], scale += std::fabs(residual[token * out + i]);
      const double error = std::fabs(got[token * out + i] - value) / (scale + 1e-30);
      worst = error > worst || !(error == error) ? error : worst;
    }
  }
  // The step of x is that of the largest of 256 elements, some 200 times the others here.
  const bool passed = worst < 2e-5;
  failures += !passed;
  std::printf("%s %-7s m %3lld n %4lld k %5lld x %u%s%s: error %.1e of the sum of sizes\n", passed ? "ok  " : "FAIL",
              format.name, static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), dtype,
              gated ? " gated" : "", extras ? " bias residual" : "", worst);
  for (const void* data : {static_cast<const void*>(weight), p.input, static_cast<const void*>(x),
                           static_cast<const void*>(workspace), p.bias, p.residual, static_cast<const void*>(sums),
                           static_cast<const void*>(sizes), static_cast<const void*>(output)}) {
    if (data != nullptr) cudaFree(const_cast<void*>(data));
  }
}

template <uint32_t Code>
float microseconds(std::vector<nvb_linear_quantized_params>& copies, nvb_launch launch, bool plain) {
  const int launches = std::max<int>(40, static_cast<int>(copies.size()));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) {
    const auto& p = copies[i % copies.size()];
    MUST(plain ? nvb::quantized::launch_plain_encoding<Code>(p, launch)
               : nvb::quantized::launch_blocks_format<Code>(p, launch));
  }
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
    times.push_back(time * 1e3f / launches);
  }
  std::sort(times.begin(), times.end());
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
  return times[times.size() / 2];
}

template <uint32_t Code>
void bench(const Format& format, int64_t m, int64_t n, int64_t k, uint32_t dtype, const nvb_launch& launch) {
  const int64_t stride = k / format.elements * format.bytes, bytes = n * stride;
  const int count = static_cast<int>(std::min<int64_t>(32, 1 + 200000000 / bytes));
  std::vector<nvb_linear_quantized_params> copies;
  std::vector<void*> owned;
  const auto blocks = random_blocks(format, 4096, 1);
  for (int i = 0; i < count; ++i) {
    nvb_linear_quantized_params p = {};
    void *weight, *input, *output;
    MUST(cudaMalloc(&weight, bytes));
    for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(blocks.size())) {
      MUST(cudaMemcpy(static_cast<uint8_t*>(weight) + at, blocks.data(),
                      std::min<int64_t>(bytes - at, static_cast<int64_t>(blocks.size())), cudaMemcpyHostToDevice));
    }
    MUST(cudaMalloc(&input, m * k * 4));
    MUST(cudaMemset(input, 0x3c, m * k * 4));
    MUST(cudaMalloc(&output, m * n * 4));
    for (void* data : {weight, input, output}) owned.push_back(data);
    p.m = m, p.k = k, p.input_dtype = dtype;
    MUST(cudaMalloc(&p.workspace, nvb::quantized::blocks_workspace(p) + 1));
    owned.push_back(p.workspace);
    p.input = input, p.weight = weight, p.output = output;
    p.m = m, p.n = n, p.k = k, p.input_stride = k, p.weight_stride = stride, p.output_stride = n;
    p.input_dtype = dtype, p.output_dtype = NVB_F32, p.encoding = Code;
    copies.push_back(p);
  }
  const float ours = microseconds<Code>(copies, launch, false), plain = microseconds<Code>(copies, launch, true);
  std::printf("%-7s m %2lld x %u %6lld x %5lld: %7.2f us %5.2f TB/s, plain %7.2f us, ratio %.2f\n", format.name,
              static_cast<long long>(m), dtype, static_cast<long long>(n), static_cast<long long>(k), ours,
              bytes / ours * 1e-6, plain, plain / ours);
  for (void* data : owned) cudaFree(data);
}

template <uint32_t Code>
void check_format(const Format& format, const nvb_launch& launch) {
  for (const uint32_t dtype : {NVB_F32, NVB_F16, NVB_BF16}) {
    for (const int64_t m : {1, 3, 8, 17, 33}) {
      check<Code>(format, m, 130, 2560, dtype, false, false, launch);
      check<Code>(format, m, 33, format.elements == 32 ? 1152 : 1280, dtype, false, m == 8, launch);
      check<Code>(format, m, 32, format.elements == 32 ? 1216 : 2560, dtype, false, false, launch);
    }
    check<Code>(format, 2, 48, 10240, dtype, true, true, launch);
    check<Code>(format, 1, 2, 256, dtype, true, false, launch);
    check<Code>(format, 5, 5000, 512, dtype, false, false, launch);
  }
}

template <uint32_t Code>
void bench_format(const Format& format, int64_t m, const nvb_launch& launch) {
  const bool main = format.code == NVB_BLOCKS_Q4_0 || format.code == NVB_BLOCKS_Q8_0 ||
                    format.code == NVB_BLOCKS_Q4_K || format.code == NVB_BLOCKS_Q6_K;
  const uint32_t dtype = m > 8 ? NVB_BF16 : NVB_F32;
  bench<Code>(format, m, 20480, 2560, dtype, launch);
  if (!main) return;
  const int64_t shapes[][2] = {{4096, 2560},  {2560, 2048},  {2560, 10240}, {4096, 4096},
                               {28672, 4096}, {4096, 14336}, {262144, 2560}};
  for (const auto& shape : shapes) bench<Code>(format, m, shape[0], shape[1], dtype, launch);
}

// All formats, or the one of this name.
template <typename Each>
void each_format(const std::string& name, Each&& each) {
  for (const Format& format : kFormats) {
    if (!name.empty() && name != format.name) continue;
    nvb::with_block_format(format.code, [&](auto code) {
      each(format, code);
      return cudaSuccess;
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const nvb_launch launch = gpu::device_launch(stream);
  if (mode == "bench") {
    const int64_t m = argc > 2 ? std::atoi(argv[2]) : 1;
    const std::string name = argc > 3 ? argv[3] : "";
    each_format(name, [&](const Format& format, auto code) { bench_format<decltype(code)::value>(format, m, launch); });
    return 0;
  }
  nvb_launch older = launch;
  older.capability = 80;  // its kernels copy weights in another way
  for (const nvb_launch& each : {launch, older}) {
    each_format("", [&](const Format& format, auto code) { check_format<decltype(code)::value>(format, each); });
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
