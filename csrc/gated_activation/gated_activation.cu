// y = act(gate) * up, elementwise, in f32 with one rounding at the store.
//
// Interleaved (gate, up) pairs are what linear_epilogue does without a bias; the kernel here takes separate tensors.
// Shapes: gate, up, output [rows, columns], any row strides; gate and up of one float dtype. Bound by memory: a thread
// finishes 8 neighbouring columns, as vectors where all rows are 16-byte aligned, else element by element. Output in 8
// bits needs a row's largest magnitude first: a block takes a row (quantized_row.cuh).
#include <algorithm>

#include "../common/activation.cuh"
#include "../common/linear_epilogue.h"
#include "../common/programmatic_launch.cuh"
#include "../common/quantized_row.cuh"
#include "gated_activation.h"

namespace nvb {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 8;  // a thread
static_assert(kColumns % kVector<float> == 0 && kColumns % kVector<__half> == 0, "whole vectors of every dtype");
static_assert(kColumns == kRowColumns, "one way to load them");

template <typename T>
__device__ __forceinline__ void load_columns(const T* source, float (&values)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; i += kVector<T>) {
    float part[kVector<T>];
    load16_as_float(source + i, part);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) values[i + j] = part[j];
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gated_activation(const nvb_gated_activation_params p, const bool vectors) {
  begin_overlapped();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  if (column >= p.columns) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_stride + column;
    const T* const up = static_cast<const T*>(p.up) + row * p.up_stride + column;
    const int64_t output = row * p.output_stride + column;
    if (vectors && column + kColumns <= p.columns) {
      float gates[kColumns], ups[kColumns];
      load_columns(gate, gates);
      load_columns(up, ups);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) gates[i] = activate(p.activation, gates[i]) * ups[i];
      store_elements(p.output, p.output_dtype, output, gates);
    } else {
      const int count = static_cast<int>(min(static_cast<int64_t>(kColumns), p.columns - column));
      for (int i = 0; i < count; ++i) {
        store_element(p.output, p.output_dtype, output + i,
                      activate(p.activation, to_float(gate[i])) * to_float(up[i]));
      }
    }
  }
}

// The values of kColumns columns of a row; 0 past its end.
template <typename T>
__device__ __forceinline__ void load_values(const nvb_gated_activation_params& p, int64_t row, int64_t column,
                                            bool vectors, float (&values)[kColumns]) {
  const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_stride + column;
  const T* const up = static_cast<const T*>(p.up) + row * p.up_stride + column;
  float ups[kColumns];
  if (vectors && column + kColumns <= p.columns) {
    load_columns(gate, values);
    load_columns(up, ups);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const bool inside = column + i < p.columns;
      values[i] = inside ? to_float(gate[i]) : 0.0f;
      ups[i] = inside ? to_float(up[i]) : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) values[i] = activate(p.activation, values[i]) * ups[i];
}

template <typename T, bool Keeps>
__global__ void __launch_bounds__(kRowThreads)
    gated_activation_quantized(const nvb_gated_activation_params p, const bool vectors) {
  begin_overlapped();
  const int64_t row = blockIdx.x;
  const QuantizedRowTarget target = {p.quantized_output, p.output, p.output_stride, p.columns, p.output_dtype, vectors};
  quantize_row<Keeps>(target, row, [&](int64_t column, float(&values)[kRowColumns]) {
    load_values<T>(p, row, column, vectors, values);
  });
}

template <typename T>
cudaError_t launch_dtype(const nvb_gated_activation_params& p, const nvb_launch& launch) {
  const bool vectors = is_aligned16(p.gate, p.gate_stride, sizeof(T)) && is_aligned16(p.up, p.up_stride, sizeof(T)) &&
                       is_aligned16(p.output, p.output_stride, float_dtype_bytes(p.output_dtype));
  if (p.quantized_output.data != nullptr) {
    if (p.rows > 0x7fffffff) return cudaErrorInvalidValue;
    const unsigned rows = static_cast<unsigned>(p.rows), threads = row_threads(p.rows, p.columns, launch);
    const auto kernel =
        p.columns <= kKeptRow ? gated_activation_quantized<T, true> : gated_activation_quantized<T, false>;
    return launch_overlapped(kernel, dim3(rows), dim3(threads), 0, &launch, p, vectors);
  }
  const dim3 grid(static_cast<unsigned>((p.columns + kThreads * kColumns - 1) / (kThreads * kColumns)),
                  static_cast<unsigned>(std::min(p.rows, static_cast<int64_t>(65535))));
  return launch_overlapped(gated_activation<T>, grid, dim3(kThreads), 0, &launch, p, vectors);
}

cudaError_t launch_interleaved(const nvb_gated_activation_params& p, const nvb_launch& launch) {
  nvb_linear_epilogue_params epilogue{};
  epilogue.product = p.gate;
  epilogue.output = p.output;
  epilogue.rows = p.rows;
  epilogue.columns = 2 * p.columns;
  epilogue.product_stride = p.gate_stride;
  epilogue.output_stride = p.output_stride;
  epilogue.product_dtype = p.input_dtype;
  epilogue.output_dtype = p.output_dtype;
  epilogue.activation = p.activation;
  epilogue.gated = 1;
  return nvb_cuda_linear_epilogue(&epilogue, &launch);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_gated_activation(const nvb_gated_activation_params* params,
                                                 const nvb_launch* launch) noexcept {
  const nvb_gated_activation_params& p = *params;
  if (p.rows < 0 || p.columns < 0 || p.activation > NVB_SILU || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      !nvb_is_valid_output(p.quantized_output) || (p.output == nullptr && p.quantized_output.data == nullptr) ||
      (p.up == nullptr && p.quantized_output.data != nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.up == nullptr) return nvb::launch_interleaved(p, *launch);
  switch (p.input_dtype) {
    case NVB_F32:
      return nvb::launch_dtype<float>(p, *launch);
    case NVB_F16:
      return nvb::launch_dtype<__half>(p, *launch);
    case NVB_BF16:
      return nvb::launch_dtype<__nv_bfloat16>(p, *launch);
    default:
      return cudaErrorInvalidValue;
  }
}
