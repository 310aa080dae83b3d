// Scales, bias, activation, gating and residual of a product that another library made: output = act(product * scales +
// bias) + residual, or of (gate, up) pairs of columns act(gate * scales + bias) * (up * scales + bias) + residual.
//
// Shapes: product [rows, columns] with any row stride, output [rows, columns] or [rows, columns / 2]; any float dtypes,
// and i32 sums of INT8 products.
// Bound by memory: a thread keeps 8 columns and their bias and walks down the rows. Vector loads need 16-byte aligned
// rows of the product, vector stores 16-byte aligned rows of the output; the rest goes element by element. Without
// gating a thread reads and writes the same columns, so the output may be the product.
#include <algorithm>
#include <type_traits>

#include "linear_epilogue.cuh"
#include "linear_epilogue.h"

namespace nvb {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 8;  // a thread
static_assert(kColumns % kVector<float> == 0 && kColumns % kVector<__half> == 0, "whole vectors of every dtype");

template <typename T>
__device__ __forceinline__ float element_of(T value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    return static_cast<float>(value);
  } else {
    return to_float(value);
  }
}

// 16 bytes of the product as f32.
template <typename T>
__device__ __forceinline__ void load_part(const T* source, float* values) {
  if constexpr (std::is_same_v<T, int32_t>) {
    const int4 raw = *reinterpret_cast<const int4*>(source);
    values[0] = element_of(raw.x), values[1] = element_of(raw.y);
    values[2] = element_of(raw.z), values[3] = element_of(raw.w);
  } else {
    float part[kVector<T>];
    load16_as_float(source, part);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) values[i] = part[i];
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    linear_epilogue(const T* product, const int64_t product_stride, const int64_t rows, const float* row_scales,
                    const float* column_scales, const LinearEpilogue epilogue, const bool vector_loads) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  if (column >= epilogue.columns) return;
  float bias[kColumns];
  load_bias(epilogue, column, bias);
  float scales[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    scales[i] = column_scales != nullptr && column + i < epilogue.columns ? column_scales[column + i] : 1.0f;
  }
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* const source = product + row * product_stride + column;
    float values[kColumns];
    if (vector_loads && column + kColumns <= epilogue.columns) {
#pragma unroll
      for (int i = 0; i < kColumns; i += kVector<T>) load_part(source + i, values + i);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) values[i] = column + i < epilogue.columns ? element_of(source[i]) : 0.0f;
    }
    if (row_scales != nullptr) {
      const float row_scale = row_scales[row];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) values[i] *= row_scale * scales[i];
    }
    store_columns(epilogue, row, column, values, bias);
  }
}

template <typename T>
cudaError_t launch_dtype(const nvb_linear_epilogue_params& params, const nvb_launch& launch) {
  const int64_t blocks = (params.columns + kThreads * kColumns - 1) / (kThreads * kColumns);
  // Sixteen blocks a multiprocessor fill it; more rows are walked, so that the bias is loaded once for many of them.
  const int64_t wanted = (static_cast<int64_t>(launch.multiprocessors) * 16 + blocks - 1) / blocks;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(std::min({params.rows, wanted, static_cast<int64_t>(65535)})));
  linear_epilogue<T><<<grid, kThreads, 0, launch.stream>>>(
      static_cast<const T*>(params.product), params.product_stride, params.rows, params.row_scales,
      params.column_scales, make_epilogue(params, params.columns),
      is_aligned16(params.product, params.product_stride, sizeof(T)));
  return cudaPeekAtLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_linear_epilogue(const nvb_linear_epilogue_params* params,
                                                const nvb_launch* launch) noexcept {
  const nvb_linear_epilogue_params& p = *params;
  const bool valid = p.rows >= 0 && p.columns >= 0 && p.gated <= 1 && (p.gated == 0 || p.columns % 2 == 0) &&
                     p.activation <= NVB_SILU && nvb::float_dtype_bytes(p.output_dtype) != 0 &&
                     (p.bias == nullptr || nvb::float_dtype_bytes(p.bias_dtype) != 0) && nvb::is_valid_residual(p) &&
                     (p.row_scales == nullptr) == (p.column_scales == nullptr);
  if (!valid) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  switch (p.product_dtype) {
    case NVB_F32:
      return nvb::launch_dtype<float>(p, *launch);
    case NVB_F16:
      return nvb::launch_dtype<__half>(p, *launch);
    case NVB_BF16:
      return nvb::launch_dtype<__nv_bfloat16>(p, *launch);
    case NVB_I32:
      return nvb::launch_dtype<int32_t>(p, *launch);
    default:
      return cudaErrorInvalidValue;
  }
}
