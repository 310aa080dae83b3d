// One layer of a Gemma 3 decode step for decode_step.cu: its weights and activations on the device, its launches, and
// the products again in f32.
#ifndef NVBACKEND_TESTS_GPU_DECODE_STEP_LAYER_H
#define NVBACKEND_TESTS_GPU_DECODE_STEP_LAYER_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/programmatic_launch.cuh"
#include "common/reduce.cuh"
#include "device.h"
#include "linear/linear_kernels.h"
#include "linear/linear_quantized.h"
#include "linear/sm90/linear_quantized_choices.h"
#include "rms_norm/rms_norm.h"

// decode_step_int4.cu, decode_step_int8.cu: by `choice`, or by the table without one; false if it does not fit.
bool launch_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                 const nvb::quantized::DecodeChoice* choice, cudaError_t& result);
bool launch_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                 const nvb::quantized::DecodeChoice* choice, cudaError_t& result);

// decode_step_gemv.cu: linear_gemv for rows of BF16 that are aligned.
cudaError_t launch_gemv(const nvb_linear_params& params, const nvb_launch& launch);

namespace decode_step {

using nvb::quantized::DecodeChoice;
using bf16 = __nv_bfloat16;

struct Model {
  const char* name;
  int64_t width, heads, kv_heads, head_dim, feed_forward;
};

enum class Format { kBf16, kInt8, kInt4 };  // Int8 with scales of rows, Int4 with scales of groups of 32
constexpr int kProducts = 4;
constexpr const char* kProductNames[kProducts] = {"qkv", "o", "gate_up", "down"};
constexpr int kGated = 2;  // the product whose rows are pairs

__device__ inline float random_float(size_t i, uint32_t seed, float low, float high) {
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return low + (high - low) * static_cast<float>(x >> 8) / 16777216.0f;
}

template <typename T>
__global__ void fill(T* values, size_t count, float low, float high, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    values[i] = static_cast<T>(random_float(i, seed, low, high));
  }
}

// Element (row, column) of a weight of `columns`; common/quantized.h says where it lies.
__device__ inline float element(const void* data, const void* scales, Format format, int64_t row, int64_t column,
                                int64_t columns) {
  if (format == Format::kBf16) return static_cast<const bf16*>(data)[row * columns + column];
  if (format == Format::kInt8) {
    return static_cast<const int8_t*>(data)[row * columns + column] * static_cast<const float*>(scales)[row];
  }
  const int64_t chunks = columns / 64;
  const int half = row % 16 / 8, lane = 4 * (row % 8) + column % 16 / 4, nibble = column % 4 / 2 * 2 + half;
  const int64_t word = ((row / 16 * chunks + column / 64) * 32 + lane) * 4 + column % 64 / 16;
  const uint32_t q = static_cast<const uint32_t*>(data)[word] >> 4 * (nibble + column % 2 * 4) & 15;
  const int64_t group = (row / 16 * 2 * chunks + column / 32) * 16 + row % 8 * 2 + half;
  return __half2float(static_cast<const __half*>(scales)[group]) * (static_cast<int>(q) - 8);
}

__global__ void reference_sums(const void* data, const void* scales, Format format, const bf16* x, int64_t columns,
                               float* sums) {
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < columns; i += 32) {
    sum += element(data, scales, format, blockIdx.x, i, columns) * static_cast<float>(x[i]);
  }
  sum = nvb::warp_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Stands in for rope and attention: what 64 blocks of 64 KiB take for some hundred keys.
constexpr int kAttentionBlocks = 64, kAttentionBytes = 64 << 10, kAttentionCycles = 5000;
__global__ void attend(const bf16* qkv, bf16* attended, int64_t width) {
  nvb::begin_overlapped();
  const long long start = clock64();
  while (clock64() - start < kAttentionCycles) {
  }
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) attended[i] = qkv[i];
}

template <typename T>
T* allocate(size_t count) {
  void* memory = nullptr;
  MUST(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

class Layer {
 public:
  // Of `sets` of weights a chain takes one after the other; by default enough that none is in L2 when its turn comes.
  Layer(const Model& model, Format format, const nvb_launch& launch, int sets = 0)
      : model_(model), format_(format), launch_(launch), sets_(sets) {
    rows_[0] = (model.heads + 2 * model.kv_heads) * model.head_dim, columns_[0] = model.width;
    rows_[1] = model.width, columns_[1] = model.heads * model.head_dim;
    rows_[2] = 2 * model.feed_forward, columns_[2] = model.width;
    rows_[3] = model.width, columns_[3] = model.feed_forward;
    for (int i = 0; i < kProducts; ++i) bytes_ += weight_bytes(i) + scale_bytes(i);
    if (sets_ == 0) sets_ = static_cast<int>((size_t{200} << 20) / bytes_) + 2;
    for (int set = 0; set < sets_; ++set) {
      for (int i = 0; i < kProducts; ++i) {
        auto* const data = allocate<char>(weight_bytes(i));
        auto* const scales = allocate<char>(scale_bytes(i) + 16);
        const uint32_t seed = 4 * set + i;
        if (format == Format::kBf16) fill(reinterpret_cast<bf16*>(data), weight_bytes(i) / 2, 0.05f, seed);
        if (format != Format::kBf16) fill(reinterpret_cast<int8_t*>(data), weight_bytes(i), 127.0f, seed);
        if (format == Format::kInt8) fill(reinterpret_cast<float*>(scales), scale_bytes(i) / 4, 0.0005f, seed);
        if (format == Format::kInt4) fill(reinterpret_cast<__half*>(scales), scale_bytes(i) / 2, 0.01f, seed);
        data_.push_back(data), scales_.push_back(scales);
      }
    }
    const size_t most = 2 * static_cast<size_t>(model.feed_forward) + 8192;
    for (bf16** buffer : {&hidden_, &qkv_, &attended_, &gated_, &checked_}) *buffer = allocate<bf16>(most);
    norms_ = allocate<bf16>(4 * model.width);
    residual_ = allocate<float>(most), sums_ = allocate<float>(most);
    fill(norms_, 4 * model.width, 0.1f, 1), fill(residual_, model.width, 1.0f, 2);
    for (bf16* buffer : {hidden_, attended_, gated_}) fill(buffer, most, 1.0f, 3);
    MUST(cudaDeviceSynchronize());
  }
  Layer(const Layer&) = delete;
  ~Layer() {
    for (void* memory : data_) cudaFree(memory);
    for (void* memory : scales_) cudaFree(memory);
    for (bf16* buffer : {hidden_, qkv_, attended_, gated_, checked_, norms_}) cudaFree(buffer);
    cudaFree(residual_), cudaFree(sums_);
  }

  double bytes() const { return static_cast<double>(bytes_); }
  int64_t rows(int product) const { return rows_[product]; }
  int64_t columns(int product) const { return columns_[product]; }

  // Queues one layer, whose products are divided as `choices` say; null: by the table.
  void queue(int layer, const DecodeChoice* const (&choices)[kProducts]) {
    const int set = layer % sets_;
    queue_product(set, 0, choices[0], hidden_, qkv_);
    MUST(cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionBytes));
    MUST(nvb::launch_overlapped(attend, dim3(kAttentionBlocks), dim3(128), kAttentionBytes, &launch_, qkv_, attended_,
                                columns_[1]));
    queue_product(set, 1, choices[1], attended_, hidden_);
    queue_norms(0);
    queue_product(set, 2, choices[2], hidden_, gated_);
    queue_product(set, 3, choices[3], gated_, hidden_);
    queue_norms(2);
  }

  // ‖out − ref‖ / ‖ref‖ of a product alone; NaN where it does not fit.
  double error(int product, const DecodeChoice* choice) {
    const bf16* const input = product == 1 ? attended_ : product == 3 ? gated_ : hidden_;
    const int64_t rows = rows_[product], outputs = product == kGated ? rows / 2 : rows;
    reference_sums<<<static_cast<unsigned>(rows), 32, 0, launch_.stream>>>(data_[product], scales_[product], format_,
                                                                           input, columns_[product], sums_);
    MUST(cudaMemsetAsync(checked_, 0xff, outputs * sizeof(bf16), launch_.stream));
    cudaError_t result = cudaSuccess;
    if (!launch_product(0, product, choice, input, checked_, result)) return NAN;
    MUST(result);
    std::vector<float> sums(rows);
    std::vector<bf16> output(outputs);
    MUST(cudaStreamSynchronize(launch_.stream));
    MUST(cudaMemcpy(sums.data(), sums_, rows * sizeof(float), cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy(output.data(), checked_, outputs * sizeof(bf16), cudaMemcpyDeviceToHost));
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < outputs; ++i) {
      const double gate = product == kGated ? sums[2 * i] : 0.0;
      const double gelu = 0.5 * gate * (1.0 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)));
      const double expected = product == kGated ? gelu * sums[2 * i + 1] : sums[i];
      difference += std::pow(static_cast<float>(output[i]) - expected, 2);
      norm += expected * expected;
    }
    return std::sqrt(difference / norm);
  }

 protected:
  size_t weight_bytes(int i) const {
    const size_t elements = static_cast<size_t>(rows_[i] * columns_[i]);
    return format_ == Format::kBf16 ? 2 * elements : format_ == Format::kInt8 ? elements : elements / 2;
  }
  size_t scale_bytes(int i) const {
    if (format_ == Format::kBf16) return 0;
    return format_ == Format::kInt8 ? 4 * rows_[i] : rows_[i] * columns_[i] / 16;
  }
  template <typename T>
  void fill(T* values, size_t count, float most, uint32_t seed) {
    decode_step::fill<<<528, 256>>>(values, count, -most, most, seed);
  }

  bool launch_product(int set, int i, const DecodeChoice* choice, const bf16* input, bf16* output,
                      cudaError_t& result) {
    const auto describe = [&](auto& p) {
      p.input = input, p.output = output, p.weight = data_[set * kProducts + i];
      p.m = 1, p.n = rows_[i], p.k = columns_[i];
      p.input_stride = p.weight_stride = p.k, p.output_stride = p.n;
      p.input_dtype = p.output_dtype = NVB_BF16;
      p.gated = i == kGated ? 1 : 0, p.activation = i == kGated ? NVB_GELU_TANH : NVB_NONE;
    };
    if (format_ == Format::kBf16) {
      if (choice != nullptr) return false;
      nvb_linear_params p = {};
      describe(p);
      p.weight_dtype = NVB_BF16;
      // As linear.cu chooses.
      const bool is_ring = p.n * p.k > int64_t{1} << 26 ? p.k <= 2560 : p.k >= 1024 || p.n <= 8192;
      result = is_ring ? nvb::launch_linear_gemv_ring<bf16>(p, launch_) : launch_gemv(p, launch_);
      return true;
    }
    nvb_linear_quantized_params p = {};
    describe(p);
    p.scales = scales_[set * kProducts + i];
    const bool int4 = format_ == Format::kInt4;
    p.encoding = int4 ? NVB_INT4 : NVB_INT8;
    p.scale_kind = int4 ? NVB_SCALES_GROUPS : NVB_SCALES_ROWS, p.group = int4 ? 32 : 0;
    return int4 ? launch_int4(p, launch_, choice, result) : launch_int8(p, launch_, choice, result);
  }
  void queue_product(int set, int i, const DecodeChoice* choice, const bf16* input, bf16* output) {
    cudaError_t result = cudaErrorInvalidValue;
    launch_product(set, i, choice, input, output, result);
    MUST(result);
  }
  void queue_norms(int first) {
    nvb_rms_norm_params p = {};
    p.input = p.output = hidden_, p.residual = p.residual_output = residual_;
    p.rows = 1, p.columns = model_.width;
    p.input_stride = p.residual_stride = p.residual_output_stride = p.output_stride = model_.width;
    p.input_dtype = p.weight_dtype = p.output_dtype = NVB_BF16, p.residual_dtype = NVB_F32;
    p.post_weight = norms_ + first * model_.width, p.weight = norms_ + (first + 1) * model_.width;
    p.epsilon = 1e-6f, p.weight_offset = 1.0f;
    MUST(nvb_cuda_rms_norm(&p, &launch_));
  }

  Model model_;
  Format format_;
  nvb_launch launch_;
  int sets_;
  int64_t rows_[kProducts], columns_[kProducts];
  size_t bytes_ = 0;
  std::vector<void*> data_, scales_;
  bf16 *hidden_, *qkv_, *attended_, *gated_, *checked_, *norms_;
  float *residual_, *sums_;
};

}  // namespace decode_step

#endif
