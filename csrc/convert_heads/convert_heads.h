// Heads of queries, keys and values, rotated and rounded: output = round(rotate(x) / scale).
//
// rotate(x) multiplies x by the signs and then each `block` of elements by the Hadamard matrix of that size and by
// `factor` = 1 / sqrt(block). Sums are f32: neighbours first, then pairs twice as far apart each, lower + upper and
// lower - upper, which gives the bits that src/cpu/convert_heads.rs gives.
#pragma once

#include "../common/launch.h"

#define NVB_CONVERT_HEADS_SIGN_WORDS 18

// Axes are two of tokens, heads, and head_dim, with any strides, in elements; head_dim and heads are
// not 0. The output may be the input where
// strides and dtypes are equal. head_dim is a multiple of 8 and of `block`, a power of two up to 512.
struct nvb_convert_heads_params {
  const void* input;
  void* output;
  float* scales;  // one for each heads_per_scale heads; null: 1
  int64_t shape[4];
  int64_t input_strides[4];
  int64_t output_strides[4];
  int64_t heads_per_scale;
  uint32_t input_dtype;   // a float dtype
  uint32_t output_dtype;  // a float dtype, or FP8, which alone has scales
  uint32_t write_scales;  // 1: the largest magnitude of a scale's heads / largest, computed before the output
  uint32_t block;
  float factor;
  float largest;                                 // of the output's dtype
  uint32_t rotate;                               // 0: signs and factor are not read
  uint32_t signs[NVB_CONVERT_HEADS_SIGN_WORDS];  // bit i % 32 of word i / 32: element i changes its sign
  uint32_t reserved;                             // 0
};

extern "C" cudaError_t nvb_cuda_convert_heads(const nvb_convert_heads_params* params,
                                              const nvb_launch* launch) noexcept;
