// softmax: max-subtracted exponentials of one row, divided by their sum (formula in softmax.h).
//
// Shapes: [rows, columns], dtypes per operand, vectors of 8, 4 or 1 elements by alignment. Work: a row block
// (row_block.cuh) a row; rows of at most 512 elements are one warp each, four to a block.
// Registers: `softmax_kernel` keeps the row in registers, 16 f32 a thread, up to 16384 columns. Longer rows go to
// `softmax_long_kernel`: one pass keeps a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867), a second
// reads the row again, through L2, and writes.
// Shared memory: 256 bytes for the two reductions.
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "softmax.h"

namespace nvb {
namespace {

constexpr int kValues = 16;
constexpr int kThreads = 1024;
constexpr int64_t kRegisterRow = kValues * kThreads;
constexpr int64_t kMaximumColumns = int64_t{1} << 30;
constexpr int kLongBatch = 4;  // vectors a thread has under way in a long row

// What is subtracted in the exponent: the maximum, or 0 for a row of -inf, where -inf - -inf would be NaN.
__device__ __forceinline__ float exponent_shift(float maximum) {
  return maximum == -CUDART_INF_F ? 0.0f : maximum;
}

// A sum of 0 is a row of -inf.
__device__ __forceinline__ float reciprocal_sum(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

template <int Width>
__global__ void __launch_bounds__(kThreads) softmax_kernel(const nvb_softmax_params p) {
  constexpr int kVectors = kValues / Width;
  __shared__ float max_scratch[32];
  __shared__ float sum_scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int columns = static_cast<int>(p.columns);
  const int first = threadIdx.x * Width;
  const int step = blockDim.x * Width;

  // Load.
  uint4 raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (column < columns) raw[v] = load_raw<Width>(p.input, p.input_dtype, row * p.input_stride + column);
  }

  // Maximum of the scaled values; what lies past the row's end counts as -inf.
  float values[kVectors][Width];
  float maximum = -CUDART_INF_F;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack_raw<Width>(raw[v], p.input_dtype, values[v]);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      values[v][i] = first + v * step < columns ? values[v][i] * p.scale : -CUDART_INF_F;
      maximum = fmaxf(maximum, values[v][i]);
    }
  }
  const float shift = exponent_shift(row_max(maximum, max_scratch));

  // Exponentials and their sum.
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      values[v][i] = expf(values[v][i] - shift);
      sum += values[v][i];
    }
  }
  const float reciprocal = reciprocal_sum(row_sum(sum, sum_scratch));

  // Store.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (column >= columns) break;
#pragma unroll
    for (int i = 0; i < Width; ++i) values[v][i] *= reciprocal;
    store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values[v]);
  }
}

// Calls visit(values, column) for this thread's vectors of the row, kLongBatch loads at a time.
template <int Width, typename Visit>
__device__ __forceinline__ void visit_row(const nvb_softmax_params& p, int64_t row, Visit visit) {
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;
  for (int64_t first = static_cast<int64_t>(threadIdx.x) * Width; first < p.columns; first += kLongBatch * step) {
    uint4 raw[kLongBatch];
#pragma unroll
    for (int b = 0; b < kLongBatch; ++b) {
      if (first + b * step < p.columns) {
        raw[b] = load_raw<Width>(p.input, p.input_dtype, row * p.input_stride + first + b * step);
      }
    }
#pragma unroll
    for (int b = 0; b < kLongBatch; ++b) {
      if (first + b * step >= p.columns) break;
      float values[Width];
      unpack_raw<Width>(raw[b], p.input_dtype, values);
#pragma unroll
      for (int i = 0; i < Width; ++i) values[i] *= p.scale;
      visit(values, first + b * step);
    }
  }
}

template <int Width>
__global__ void __launch_bounds__(kThreads) softmax_long_kernel(const nvb_softmax_params p) {
  __shared__ float max_scratch[32];
  __shared__ float sum_scratch[32];
  const int64_t row = blockIdx.x;

  // Running maximum and sum of this thread's elements; the sum is relative to the maximum so far.
  float maximum = -CUDART_INF_F;
  float sum = 0.0f;
  visit_row<Width>(p, row, [&](const float(&values)[Width], int64_t) {
    float larger = maximum;
#pragma unroll
    for (int i = 0; i < Width; ++i) larger = fmaxf(larger, values[i]);
    const float shift = exponent_shift(larger);
    sum *= expf(maximum - shift);
#pragma unroll
    for (int i = 0; i < Width; ++i) sum += expf(values[i] - shift);
    maximum = larger;
  });

  // The row's maximum and sum.
  const float shift = exponent_shift(row_max(maximum, max_scratch));
  const float reciprocal = reciprocal_sum(row_sum(sum * expf(maximum - shift), sum_scratch));

  // Exponentials again, and store. Every read of the first pass is behind the barriers above, so in place is sound.
  visit_row<Width>(p, row, [&](float(&values)[Width], int64_t column) {
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = expf(values[i] - shift) * reciprocal;
    store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values);
  });
}

template <int Width>
cudaError_t enqueue(const nvb_softmax_params& p, const nvb_launch* launch) {
  const bool is_long = p.columns > kRegisterRow;
  const dim3 block = is_long ? dim3(kThreads) : row_block_shape(p.columns, Width, kValues);
  const int64_t blocks = ceiling_divide(p.rows, block.y);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  const unsigned grid = static_cast<unsigned>(blocks);
  if (is_long) {
    softmax_long_kernel<Width><<<grid, block, 0, launch->stream>>>(p);
  } else {
    softmax_kernel<Width><<<grid, block, 0, launch->stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_softmax(const nvb_softmax_params* params, const nvb_launch* launch) noexcept {
  const nvb_softmax_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      p.columns > nvb::kMaximumColumns) {
    return cudaErrorInvalidValue;
  }
  if (p.rows <= 0 || p.columns <= 0) return cudaSuccess;
  switch (nvb::widest_vector(p.columns,
                             {{p.input, p.input_stride, p.input_dtype}, {p.output, p.output_stride, p.output_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
