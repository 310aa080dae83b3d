// The last step of every linear kernel: f32 sums of neighbouring columns → bias, activation, gating, residual,
// rounding, store.
#pragma once

#include "activation.cuh"
#include "vector.cuh"

namespace nvb {

// Where the sums of one product go; `columns` counts them before gating.
//
// The residual is what an earlier kernel wrote: a kernel of programmatic_launch.cuh finishes its sums after it has
// waited for that. It may be the output, of which each element is read and written by one thread.
struct LinearEpilogue {
  const void* bias;
  const void* residual;
  void* output;
  int64_t columns;
  int64_t residual_stride;
  int64_t output_stride;
  uint32_t bias_dtype;
  uint32_t residual_dtype;
  uint32_t output_dtype;
  uint32_t activation;
  bool gated;
  bool vectors;           // the output's rows are 16-byte aligned
  bool residual_vectors;  // and the residual's
};

// Nothing is added to the product.
template <typename Params>
inline LinearEpilogue make_epilogue_alone(const Params& params, int64_t columns) {
  LinearEpilogue epilogue = {};
  epilogue.bias = params.bias;
  epilogue.output = params.output;
  epilogue.columns = columns;
  epilogue.output_stride = params.output_stride;
  epilogue.bias_dtype = params.bias_dtype;
  epilogue.output_dtype = params.output_dtype;
  epilogue.activation = params.activation;
  epilogue.gated = params.gated != 0;
  epilogue.vectors = is_aligned16(params.output, params.output_stride, float_dtype_bytes(params.output_dtype));
  return epilogue;
}

template <typename Params>
inline LinearEpilogue make_epilogue(const Params& params, int64_t columns) {
  LinearEpilogue epilogue = make_epilogue_alone(params, columns);
  epilogue.residual = params.residual;
  epilogue.residual_stride = params.residual_stride;
  epilogue.residual_dtype = params.residual_dtype;
  epilogue.residual_vectors =
      is_aligned16(params.residual, params.residual_stride, float_dtype_bytes(params.residual_dtype));
  return epilogue;
}

// What launchers ask of the residual: none, or one of a float dtype.
template <typename Params>
inline bool is_valid_residual(const Params& params) {
  return params.residual == nullptr || float_dtype_bytes(params.residual_dtype) != 0;
}

// The bias of `Count` columns from `column` on; 0 without a bias and past the end. Column 0 has element `first` of it:
// an argument, because a copy of the epilogue with a moved pointer is not to be had. nvcc 13.0 drops the store to the
// copy and reads the __grid_constant__ parameter.
template <int Count>
__device__ __forceinline__ void load_bias(const LinearEpilogue& epilogue, int64_t column, float (&bias)[Count],
                                          int64_t first = 0) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    bias[i] = epilogue.bias != nullptr && column + i < epilogue.columns
                  ? load_element(epilogue.bias, epilogue.bias_dtype, first + column + i)
                  : 0.0f;
  }
}

// Adds the residual to `Count` columns of one row of the output from `column` on, a multiple of Count; `whole`: all of
// them exist. Never fused with a product in front of it, or a row's last bit would depend on where it lies.
template <int Count>
__device__ __forceinline__ void add_residual(const LinearEpilogue& epilogue, int64_t row, int64_t column, bool whole,
                                             float (&values)[Count]) {
  const int64_t start = row * epilogue.residual_stride + column;
  if constexpr (Count > 1) {
    if (whole && epilogue.residual_vectors) {
      float added[Count];
      load_elements(epilogue.residual, epilogue.residual_dtype, start, added);
#pragma unroll
      for (int i = 0; i < Count; ++i) values[i] = __fadd_rn(values[i], added[i]);
      return;
    }
  }
  const int64_t columns = epilogue.gated ? epilogue.columns / 2 : epilogue.columns;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (column + i >= columns) continue;
    values[i] = __fadd_rn(values[i], load_element(epilogue.residual, epilogue.residual_dtype, start + i));
  }
}

// Finishes `Count` columns of one row from `column` on, a multiple of Count; columns past the end are dropped.
template <int Count>
__device__ __forceinline__ void store_columns(const LinearEpilogue& epilogue, int64_t row, int64_t column,
                                              const float (&sums)[Count], const float (&bias)[Count]) {
  const int64_t start = row * epilogue.output_stride;
  const bool whole = column + Count <= epilogue.columns;
  const bool vectors = epilogue.vectors && whole;
  if (epilogue.gated) {
    float values[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      values[i] = activate(epilogue.activation, sums[2 * i] + bias[2 * i]) * (sums[2 * i + 1] + bias[2 * i + 1]);
    }
    if (epilogue.residual != nullptr) add_residual(epilogue, row, column / 2, whole, values);
    if constexpr (Count > 2) {
      if (vectors) return store_elements(epilogue.output, epilogue.output_dtype, start + column / 2, values);
    }
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      if (column + 2 * i >= epilogue.columns) return;
      store_element(epilogue.output, epilogue.output_dtype, start + column / 2 + i, values[i]);
    }
    return;
  }
  float values[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) values[i] = activate(epilogue.activation, sums[i] + bias[i]);
  if (epilogue.residual != nullptr) add_residual(epilogue, row, column, whole, values);
  if (vectors) return store_elements(epilogue.output, epilogue.output_dtype, start + column, values);
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (column + i >= epilogue.columns) return;
    store_element(epilogue.output, epilogue.output_dtype, start + column + i, values[i]);
  }
}

}  // namespace nvb
