// RMS normalisation, with the residual sum and the norm in front of it that Gemma puts between two blocks.
#pragma once

#include "../common/norm.h"
#include "../common/quantized_output.h"

// Per row, all in f32, with norm(x, w) = x * rsqrt(mean(x^2) + epsilon) * (weight_offset + w):
//   b = post_weight ? norm(input, post_weight) : input
//   s = residual ? residual + b : b
//   residual_output = s                                     (if given)
//   output = weight ? norm(s, weight) : s * rsqrt(...)      (if given), from the unrounded s
//   quantized_output = output in 8 bits, quantised before any rounding (if given)
// Zhang and Sennrich, arXiv:1910.07467; weight_offset is 1 for Gemma, 0 for Llama. Null = absent.
//
// Supports any number of columns; rows aligned to 16 bytes (8 for 16-bit rows beside f32 ones) take vector loads.
struct nvb_rms_norm_params : nvb_norm_rows {
  const void* post_weight;  // [columns], or null
  const void* weight;       // [columns], or null
  float epsilon;
  float weight_offset;
  nvb_quantized_output quantized_output;  // overlaps nothing else
};

extern "C" cudaError_t nvb_cuda_rms_norm(const nvb_rms_norm_params* params, const nvb_launch* launch) noexcept;
