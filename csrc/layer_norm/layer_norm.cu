// layer_norm: residual sum and normalisation of one row in one pass over memory (formula in layer_norm.h).
//
// Shapes: [rows, columns], dtypes per operand, vectors of 8, 4 or 1 elements by alignment. Work: a row block
// (row_block.cuh) a row. Registers: the row, 8 or 16 f32 a thread, so every input byte is read once and the variance is
// that of the differences from the mean, without the cancellation of E[s^2] - mean^2. Rows that do not fit
// (`layer_norm_long_kernel`) are read again for each step, through L2. Shared memory: 256 bytes for the two reductions.
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "layer_norm.h"

namespace nvb {
namespace {

// Values of a row that a thread keeps, and the threads of the longest such row.
template <int Width>
constexpr int kValues = Width == 1 ? 8 : 16;
template <int Width>
constexpr int kThreads = Width == 4 ? 512 : 1024;
constexpr int kShortRowValues = 8;
constexpr int kLongRowThreads = 1024;
constexpr int64_t kMaximumColumns = 65536;

// What s at `column` is made of.
struct raw_sum {
  uint4 input;
  uint4 residual;
};

template <int Width>
__device__ __forceinline__ raw_sum load_sum(const nvb_layer_norm_params& p, int64_t row, int64_t column) {
  raw_sum raw = {load_raw<Width>(p.input, p.input_dtype, row * p.input_stride + column), make_uint4(0, 0, 0, 0)};
  if (p.residual != nullptr) {
    raw.residual = load_raw<Width>(p.residual, p.residual_dtype, row * p.residual_stride + column);
  }
  return raw;
}

template <int Width>
__device__ __forceinline__ void unpack_sum(const nvb_layer_norm_params& p, const raw_sum& raw, float (&values)[Width]) {
  unpack_raw<Width>(raw.input, p.input_dtype, values);
  if (p.residual == nullptr) return;
  float addends[Width];
  unpack_raw<Width>(raw.residual, p.residual_dtype, addends);
#pragma unroll
  for (int i = 0; i < Width; ++i) values[i] += addends[i];
}

// (s - mean) * inverse * weight + bias, stored.
template <int Width>
__device__ __forceinline__ void finish(const nvb_layer_norm_params& p, int64_t row, int64_t column, float mean,
                                       float inverse, float (&values)[Width]) {
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
  store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values);
}

template <int Width, int Values>
__global__ void __launch_bounds__(kThreads<Width>) layer_norm_kernel(const nvb_layer_norm_params p) {
  constexpr int kVectors = Values / Width;
  __shared__ float mean_scratch[32];
  __shared__ float variance_scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
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
      store_vector<Width>(p.residual_output, p.residual_dtype, row * p.residual_output_stride + first + v * step,
                          values[v]);
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
    finish<Width>(p, row, first + v * step, mean, inverse, values[v]);
  }
}

template <int Width>
__global__ void __launch_bounds__(kLongRowThreads, 1) layer_norm_long_kernel(const nvb_layer_norm_params p) {
  __shared__ float mean_scratch[32];
  __shared__ float variance_scratch[32];
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
    if (p.residual_output != nullptr) {
      store_vector<Width>(p.residual_output, p.residual_dtype, row * p.residual_output_stride + column, values);
    }
    if (p.output != nullptr) finish<Width>(p, row, column, mean, inverse, values);
  }
}

template <int Width, int Values>
cudaError_t enqueue_registers(const nvb_layer_norm_params& p, const nvb_launch* launch) {
  const dim3 block = row_block_shape(p.columns, Width, Values);
  const int64_t blocks = ceiling_divide(p.rows, block.y);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  layer_norm_kernel<Width, Values><<<static_cast<unsigned>(blocks), block, 0, launch->stream>>>(p);
  return cudaGetLastError();
}

// Few rows take more threads, because nobody else hides the latency of their loads.
template <int Width>
cudaError_t enqueue(const nvb_layer_norm_params& p, const nvb_launch* launch) {
  const bool few = p.rows <= launch->multiprocessors && p.columns <= kShortRowValues * kThreads<Width>;
  if (few || p.columns <= kShortRowValues * 32) return enqueue_registers<Width, kShortRowValues>(p, launch);
  if (p.columns <= kValues<Width> * kThreads<Width>) return enqueue_registers<Width, kValues<Width>>(p, launch);
  if (!fits_grid(p.rows)) return cudaErrorInvalidValue;
  layer_norm_long_kernel<Width><<<static_cast<unsigned>(p.rows), kLongRowThreads, 0, launch->stream>>>(p);
  return cudaGetLastError();
}

bool is_supported(const nvb_layer_norm_params& p) {
  const bool sums = p.residual != nullptr || p.residual_output != nullptr;
  const bool weighs = p.weight != nullptr || p.bias != nullptr;
  return float_dtype_bytes(p.input_dtype) != 0 && (!sums || float_dtype_bytes(p.residual_dtype) != 0) &&
         (!weighs || float_dtype_bytes(p.weight_dtype) != 0) &&
         (p.output == nullptr || float_dtype_bytes(p.output_dtype) != 0) && p.columns <= kMaximumColumns;
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_layer_norm(const nvb_layer_norm_params* params, const nvb_launch* launch) noexcept {
  const nvb_layer_norm_params& p = *params;
  if (!nvb::is_supported(p)) return cudaErrorInvalidValue;
  if (p.rows <= 0 || p.columns <= 0) return cudaSuccess;
  switch (nvb::widest_vector(p.columns, {{p.input, p.input_stride, p.input_dtype},
                                         {p.residual, p.residual_stride, p.residual_dtype},
                                         {p.residual_output, p.residual_output_stride, p.residual_dtype},
                                         {p.weight, 0, p.weight_dtype},
                                         {p.bias, 0, p.weight_dtype},
                                         {p.output, p.output_stride, p.output_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
