// The last step of a product that another library or another operation made: scales, bias, activation, gating,
// residual.
#pragma once

#include "launch.h"

// product [rows, columns] → output [rows, columns] = act(product + bias) + residual, or, gated, [rows, columns / 2]
// with the columns in (gate, up) pairs. The product is of any float dtype or i32, and is first multiplied by
// row_scales[row] * column_scales[column] if these are given (both or none). Any float dtypes, any strides. Not gated,
// the output may be the product itself, if that is of floats; it may be the residual.
struct nvb_linear_epilogue_params {
  const void* product;
  const float* row_scales;     // [rows] or null
  const float* column_scales;  // [columns] or null
  const void* bias;            // [columns] or null
  const void* residual;        // of the output's shape, or null
  void* output;
  int64_t rows;
  int64_t columns;
  int64_t product_stride;
  int64_t residual_stride;
  int64_t output_stride;
  uint32_t product_dtype;
  uint32_t bias_dtype;      // ignored without a bias
  uint32_t residual_dtype;  // ignored without a residual
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t gated;  // 0 or 1
};

extern "C" cudaError_t nvb_cuda_linear_epilogue(const nvb_linear_epilogue_params* params,
                                                const nvb_launch* launch) noexcept;
