// The last step of every linear kernel: f32 sums of neighbouring columns → bias, activation, gating, rounding, store.
#pragma once

#include "../common/activation.cuh"
#include "../common/vector.cuh"
#include "linear.h"

namespace nvb {

// Where the sums of one product go; `columns` counts them before gating.
struct LinearEpilogue {
  const void* bias;
  void* output;
  int64_t columns;
  int64_t output_stride;
  uint32_t bias_dtype;
  uint32_t output_dtype;
  uint32_t activation;
  bool gated;
  bool vectors;  // the output's rows are 16-byte aligned
};

template <typename Params>
inline LinearEpilogue make_epilogue(const Params& params, int64_t columns) {
  return {params.bias,
          params.output,
          columns,
          params.output_stride,
          params.bias_dtype,
          params.output_dtype,
          params.activation,
          params.gated != 0,
          is_aligned16(params.output, params.output_stride, float_dtype_bytes(params.output_dtype))};
}

// The bias of `Count` columns from `column` on; 0 without a bias and past the end.
template <int Count>
__device__ __forceinline__ void load_bias(const LinearEpilogue& epilogue, int64_t column, float (&bias)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    bias[i] = epilogue.bias != nullptr && column + i < epilogue.columns
                  ? load_element(epilogue.bias, epilogue.bias_dtype, column + i)
                  : 0.0f;
  }
}

// Finishes `Count` columns of one row from `column` on, a multiple of Count; columns past the end are dropped.
template <int Count>
__device__ __forceinline__ void store_columns(const LinearEpilogue& epilogue, int64_t row, int64_t column,
                                              const float (&sums)[Count], const float (&bias)[Count]) {
  const int64_t start = row * epilogue.output_stride;
  const bool vectors = epilogue.vectors && column + Count <= epilogue.columns;
  if (epilogue.gated) {
    float values[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      values[i] = activate(epilogue.activation, sums[2 * i] + bias[2 * i]) * (sums[2 * i + 1] + bias[2 * i + 1]);
    }
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
  if (vectors) return store_elements(epilogue.output, epilogue.output_dtype, start + column, values);
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (column + i >= epilogue.columns) return;
    store_element(epilogue.output, epilogue.output_dtype, start + column + i, values[i]);
  }
}

}  // namespace nvb
