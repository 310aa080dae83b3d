// The sum of each row: output = scale * sum of input.
#pragma once

#include "../common/launch.h"

// f32 inside, one rounding at the store; every combination of float dtypes. Axes are three of rows and the columns,
// with any strides, in elements. Without columns a sum is 0. The output must not overlap the input.
struct nvb_sum_rows_params {
  const void* input;
  void* output;
  int64_t shape[4];  // of the input; the first three are not 0
  int64_t input_strides[4];
  int64_t output_strides[4];
  uint32_t input_dtype;
  uint32_t output_dtype;
  float scale;
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_sum_rows(const nvb_sum_rows_params* params, const nvb_launch* launch) noexcept;
