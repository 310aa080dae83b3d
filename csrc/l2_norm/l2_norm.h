// Rows divided by their length: output = input / max(sqrt(sum of input^2), epsilon).
#pragma once

#include "../common/launch.h"

// f32 inside, one rounding at the store; every combination of float dtypes. Squares are added of elements that are
// divided by the row's largest, so that none overflows. Axes are three of rows and the columns, with any strides, in
// elements. The output may be the input.
struct nvb_l2_norm_params {
  const void* input;
  void* output;
  int64_t shape[4];  // none is 0
  int64_t input_strides[4];
  int64_t output_strides[4];
  uint32_t input_dtype;
  uint32_t output_dtype;
  float epsilon;      // above 0
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_l2_norm(const nvb_l2_norm_params* params, const nvb_launch* launch) noexcept;
