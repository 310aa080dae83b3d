// Layer normalisation, with the residual sum in front of it.
#pragma once

#include "../common/norm.h"

// Per row, all in f32:
//   s = residual ? residual + input : input;  residual_output = s                                   (if given)
//   output = (s - mean(s)) * rsqrt(variance(s) + epsilon) * weight + bias, from the unrounded s      (if given)
// with the variance over all columns (Ba, Kiros and Hinton, arXiv:1607.06450); a null weight is 1, a null bias 0.
//
// Supports 1 to 65536 columns; rows aligned to 16 bytes (8 for 16-bit rows beside f32 ones) take vector loads.
struct nvb_layer_norm_params : nvb_norm_rows {
  const void* weight;  // [columns], or null
  const void* bias;    // [columns], or null
  float epsilon;
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_layer_norm(const nvb_layer_norm_params* params, const nvb_launch* launch) noexcept;
