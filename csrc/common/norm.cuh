// What the kernels of rms_norm and layer_norm share: how much of a row a thread keeps, the residual sum, and launches.
//
// A row block (row_block.cuh) keeps a row in registers, so every input byte is read once: up to 16384 columns of 16-bit
// operands, 8192 where an f32 operand (whose raw words take twice the registers, hence at most 512 threads) or
// unaligned rows are among them.
#pragma once

#include <type_traits>

#include "norm.h"
#include "programmatic_launch.cuh"
#include "row_block.cuh"
#include "runtime_vector.cuh"

namespace nvb {

// Values of a row that a thread keeps, and the threads of the longest such row.
template <int Width>
inline constexpr int kRowValues = Width == 1 ? 8 : 16;
template <int Width>
inline constexpr int kRowThreads = Width == 4 ? 512 : 1024;
inline constexpr int kShortRowValues = 8;
// A row that does not fit is read again for each step, by this many threads.
inline constexpr int kLongRowThreads = 1024;

template <int Width>
__device__ __forceinline__ uint4 load_raw_input(const nvb_norm_rows& p, int64_t row, int64_t column) {
  return load_raw<Width>(p.input, p.input_dtype, row * p.input_stride + column);
}

// The residual is there.
template <int Width>
__device__ __forceinline__ uint4 load_raw_residual(const nvb_norm_rows& p, int64_t row, int64_t column) {
  return load_raw<Width>(p.residual, p.residual_dtype, row * p.residual_stride + column);
}

template <int Width>
__device__ __forceinline__ void add_residual(const nvb_norm_rows& p, const uint4& raw, float (&values)[Width]) {
  float addends[Width];
  unpack_raw<Width>(raw, p.residual_dtype, addends);
#pragma unroll
  for (int i = 0; i < Width; ++i) values[i] += addends[i];
}

template <int Width>
__device__ __forceinline__ void store_residual_output(const nvb_norm_rows& p, int64_t row, int64_t column,
                                                      const float (&values)[Width]) {
  store_vector<Width>(p.residual_output, p.residual_dtype, row * p.residual_output_stride + column, values);
}

template <int Width>
__device__ __forceinline__ void store_output(const nvb_norm_rows& p, int64_t row, int64_t column,
                                             const float (&values)[Width]) {
  store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values);
}

// A kernel that keeps rows in registers and begins with `begin_overlapped`, `values` a thread.
template <typename Params>
cudaError_t enqueue_row_blocks(void (*kernel)(Params), const Params& p, int width, int values,
                               const nvb_launch* launch) {
  const dim3 block = row_block_shape(p.columns, width, values);
  const int64_t blocks = ceiling_divide(p.rows, block.y);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), block, 0, launch, p);
}

// A kernel that takes a long row a block, and begins so too.
template <typename Params>
cudaError_t enqueue_long_rows(void (*kernel)(Params), const Params& p, const nvb_launch* launch) {
  if (!fits_grid(p.rows)) return cudaErrorInvalidValue;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kLongRowThreads), 0, launch, p);
}

// Checks the dtypes of what is there, `first` and `second` being the operation's weights, and calls enqueue with the
// widest vectors' width as a constant.
template <typename Enqueue>
cudaError_t enqueue_norm(const nvb_norm_rows& p, const void* first, const void* second, Enqueue enqueue) {
  const bool sums = p.residual != nullptr || p.residual_output != nullptr;
  const bool weighs = first != nullptr || second != nullptr;
  if (float_dtype_bytes(p.input_dtype) == 0 || (sums && float_dtype_bytes(p.residual_dtype) == 0) ||
      (weighs && float_dtype_bytes(p.weight_dtype) == 0) ||
      (p.output != nullptr && float_dtype_bytes(p.output_dtype) == 0)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows <= 0 || p.columns <= 0) return cudaSuccess;
  switch (widest_vector(p.columns, {{p.input, p.input_stride, p.input_dtype},
                                    {p.residual, p.residual_stride, p.residual_dtype},
                                    {p.residual_output, p.residual_output_stride, p.residual_dtype},
                                    {first, 0, p.weight_dtype},
                                    {second, 0, p.weight_dtype},
                                    {p.output, p.output_stride, p.output_dtype}})) {
    case 8:
      return enqueue(std::integral_constant<int, 8>{});
    case 4:
      return enqueue(std::integral_constant<int, 4>{});
    default:
      return enqueue(std::integral_constant<int, 1>{});
  }
}

}  // namespace nvb
