// RMS normalisation, with the residual sum and the norm in front of it that Gemma puts between two blocks.
#pragma once

#include "../common/launch.h"

// Per row, all in f32, with norm(x, w) = x * rsqrt(mean(x^2) + epsilon) * (weight_offset + w):
//   b = post_weight ? norm(input, post_weight) : input
//   s = residual ? residual + b : b
//   residual_output = s                                     (if given)
//   output = weight ? norm(s, weight) : s * rsqrt(...)      (if given), from the unrounded s
// Zhang and Sennrich, arXiv:1910.07467; weight_offset is 1 for Gemma, 0 for Llama. All pointers are device memory.
//
// Supports float dtypes, one each for input, residual and residual_output, output, and the two weights; any number of
// columns and any strides; rows aligned to 16 bytes (8 for 16-bit rows beside f32 ones) take vector loads.
// residual_output may be residual, and output may be input (same address, dtype and stride); no other overlap. Null =
// absent.
struct nvb_rms_norm_params {
  const void* input;        // [rows, columns]
  const void* post_weight;  // [columns], or null
  const void* residual;     // [rows, columns], or null
  void* residual_output;    // [rows, columns], or null
  const void* weight;       // [columns], or null
  void* output;             // [rows, columns], or null
  int64_t rows;
  int64_t columns;
  int64_t input_stride;  // between rows, in elements; so are all strides
  int64_t residual_stride;
  int64_t residual_output_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t residual_dtype;  // of residual and residual_output
  uint32_t weight_dtype;    // of weight and post_weight
  uint32_t output_dtype;
  float epsilon;
  float weight_offset;
};
static_assert(sizeof(nvb_rms_norm_params) == 120, "src/cuda mirrors this layout");

extern "C" cudaError_t nvb_cuda_rms_norm(const nvb_rms_norm_params* params, const nvb_launch* launch) noexcept;
