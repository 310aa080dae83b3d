// layer_norm: residual sum and normalisation of one row in one pass over memory (formula in layer_norm.h).
//
// Shapes: [rows, columns], dtypes per operand, vectors of 8, 4 or 1 elements by alignment. Work: a row block
// (row_block.cuh) a row. Registers: the row, 8 or 16 f32 a thread, so every input byte is read once and the variance is
// that of the differences from the mean, without the cancellation of E[s^2] - mean^2. Rows that do not fit
// (`layer_norm_long_kernel`) are read again for each step, through L2. Shared memory: 256 bytes for the two reductions.
#include "../common/norm.cuh"
#include "layer_norm.h"

namespace nvb {
namespace {

constexpr int64_t kMaximumColumns = 65536;

// What s at `column` is made of.
struct raw_sum {
  uint4 input;
  uint4 residual;
};

template <int Width>
__device__ __forceinline__ raw_sum load_sum(const nvb_layer_norm_params& p, int64_t row, int64_t column) {
  raw_sum raw = {load_raw_input<Width>(p, row, column), make_uint4(0, 0, 0, 0)};
  if (p.residual != nullptr) raw.residual = load_raw_residual<Width>(p, row, column);
  return raw;
}

template <int Width>
__device__ __forceinline__ void unpack_sum(const nvb_layer_norm_params& p, const raw_sum& raw, float (&values)[Width]) {
  unpack_raw<Width>(raw.input, p.input_dtype, values);
  if (p.residual != nullptr) add_residual<Width>(p, raw.residual, values);
}

// (s - mean) * inverse * weight + bias, stored.
template <int Width>
__device__ __forceinline__ void store_normalized(const nvb_layer_norm_params& p, int64_t row, int64_t column,
                                                 float mean, float inverse, float (&values)[Width]) {
  float weights[Width];
  float biases[Width];
  if (p.weight != nullptr) load_vector<Width>(p.weight, p.weight_dtype, column, weights);
  if (p.bias != nullptr) load_vector<Width>(p.bias, p.weight_dtype, column, biases);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    values[i] = (values[i] - mean) * inverse;
    if (p.weight != nullptr) values[i] *= weights[i];
    if (p.bias != nullptr) values[i] += biases[i];
  }
  store_output<Width>(p, row, column, values);
}

template <int Width, int Values>
__global__ void __launch_bounds__(kRowThreads<Width>) layer_norm_kernel(const nvb_layer_norm_params p) {
  constexpr int kVectors = Values / Width;
  __shared__ float mean_scratch[32];
  __shared__ float variance_scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  begin_overlapped();
  if (row >= p.rows) return;
  const int columns = static_cast<int>(p.columns);
  const int first = threadIdx.x * Width;
  const int step = blockDim.x * Width;

  // The sum and its mean; what lies past the row's end is 0.
  raw_sum raw[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step < columns) raw[v] = load_sum<Width>(p, row, first + v * step);
  }
  float values[kVectors][Width];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack_sum<Width>(p, raw[v], values[v]);
    if (p.residual_output != nullptr && first + v * step < columns) {
      store_residual_output<Width>(p, row, first + v * step, values[v]);
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) sum += values[v][i];
  }
  if (p.output == nullptr) return;
  const float mean = row_sum(sum, mean_scratch) / static_cast<float>(p.columns);

  // Variance.
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step >= columns) break;
#pragma unroll
    for (int i = 0; i < Width; ++i) squares += (values[v][i] - mean) * (values[v][i] - mean);
  }
  const float inverse = rsqrtf(row_sum(squares, variance_scratch) / static_cast<float>(p.columns) + p.epsilon);

  // Norm.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step >= columns) break;
    store_normalized<Width>(p, row, first + v * step, mean, inverse, values[v]);
  }
}

template <int Width>
__global__ void __launch_bounds__(kLongRowThreads, 1) layer_norm_long_kernel(const nvb_layer_norm_params p) {
  __shared__ float mean_scratch[32];
  __shared__ float variance_scratch[32];
  begin_overlapped();
  const int64_t row = blockIdx.x;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * Width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;
  float values[Width];
  float mean = 0.0f;
  float inverse = 1.0f;
  if (p.output != nullptr) {
    float sum = 0.0f;
    for (int64_t column = first; column < p.columns; column += step) {
      unpack_sum<Width>(p, load_sum<Width>(p, row, column), values);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum += values[i];
    }
    mean = row_sum(sum, mean_scratch) / static_cast<float>(p.columns);
    float squares = 0.0f;
    for (int64_t column = first; column < p.columns; column += step) {
      unpack_sum<Width>(p, load_sum<Width>(p, row, column), values);
#pragma unroll
      for (int i = 0; i < Width; ++i) squares += (values[i] - mean) * (values[i] - mean);
    }
    inverse = rsqrtf(row_sum(squares, variance_scratch) / static_cast<float>(p.columns) + p.epsilon);
  }

  // Store both. Each element is read for the last time by the thread that then overwrites it, so in place is sound.
  for (int64_t column = first; column < p.columns; column += step) {
    unpack_sum<Width>(p, load_sum<Width>(p, row, column), values);
    if (p.residual_output != nullptr) store_residual_output<Width>(p, row, column, values);
    if (p.output != nullptr) store_normalized<Width>(p, row, column, mean, inverse, values);
  }
}

// Few rows take more threads, because nobody else hides the latency of their loads.
template <int Width>
cudaError_t enqueue(const nvb_layer_norm_params& p, const nvb_launch* launch) {
  const bool few = p.rows <= launch->multiprocessors && p.columns <= kShortRowValues * kRowThreads<Width>;
  if (few || p.columns <= kShortRowValues * 32) {
    return enqueue_row_blocks(layer_norm_kernel<Width, kShortRowValues>, p, Width, kShortRowValues, launch);
  }
  if (p.columns <= kRowValues<Width> * kRowThreads<Width>) {
    return enqueue_row_blocks(layer_norm_kernel<Width, kRowValues<Width>>, p, Width, kRowValues<Width>, launch);
  }
  return enqueue_long_rows(layer_norm_long_kernel<Width>, p, launch);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_layer_norm(const nvb_layer_norm_params* params, const nvb_launch* launch) noexcept {
  const nvb_layer_norm_params& p = *params;
  if (p.columns > nvb::kMaximumColumns) return cudaErrorInvalidValue;
  return nvb::enqueue_norm(p, p.weight, p.bias,
                           [&](auto width) { return nvb::enqueue<decltype(width)::value>(p, launch); });
}
