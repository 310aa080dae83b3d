// Layer normalisation, with the residual sum in front of it.
#pragma once

#include "../common/launch.h"

// Per row, all in f32:
//   s = residual ? residual + input : input;  residual_output = s                                   (if given)
//   output = (s - mean(s)) * rsqrt(variance(s) + epsilon) * weight + bias, from the unrounded s      (if given)
// with the variance over all columns (Ba, Kiros and Hinton, arXiv:1607.06450); a null weight is 1, a null bias 0. All
// pointers are device memory.
//
// Supports float dtypes, one each for input, residual and residual_output, output, and weight and bias; 1 to 65536
// columns and any strides; rows aligned to 16 bytes (8 for 16-bit rows beside f32 ones) take vector loads.
// residual_output may be residual, and output may be input (same address, dtype and stride); no other overlap.
struct nvb_layer_norm_params {
  const void* input;      // [rows, columns]
  const void* residual;   // [rows, columns], or null
  void* residual_output;  // [rows, columns], or null
  const void* weight;     // [columns], or null
  const void* bias;       // [columns], or null
  void* output;           // [rows, columns], or null
  int64_t rows;
  int64_t columns;
  int64_t input_stride;  // between rows, in elements; so are all strides
  int64_t residual_stride;
  int64_t residual_output_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t residual_dtype;  // of residual and residual_output
  uint32_t weight_dtype;    // of weight and bias
  uint32_t output_dtype;
  float epsilon;
  uint32_t reserved;  // 0
};
static_assert(sizeof(nvb_layer_norm_params) == 120, "src/cuda/layer_norm.rs mirrors this layout");

extern "C" cudaError_t nvb_cuda_layer_norm(const nvb_layer_norm_params* params, const nvb_launch* launch) noexcept;
