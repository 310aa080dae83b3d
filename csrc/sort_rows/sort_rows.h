// The columns of each row in the order of their elements, all of them or the first `count`.
#pragma once

#include "../common/launch.h"

// Ascending or descending; of equal elements (-0 equals +0) the lower column comes first in either order, and NaN comes
// after every number. Every float dtype. Axes are three of rows and the columns, contiguous; strides are in elements.
// The output is I32 [.., count] and must not overlap the input.
struct nvb_sort_rows_params {
  const void* input;
  int32_t* output;
  void* workspace;   // nvb_cuda_sort_rows_workspace bytes, 16-byte aligned, need not be cleared; null if that is 0
  int64_t shape[4];  // of the input; none is 0
  int64_t input_strides[4];
  int64_t output_strides[4];
  int64_t count;  // 1 to shape[3]
  uint32_t input_dtype;
  uint32_t descending;
};

// Reads the shape and the count alone of the params.
extern "C" size_t nvb_cuda_sort_rows_workspace(const nvb_sort_rows_params* params) noexcept;
extern "C" cudaError_t nvb_cuda_sort_rows(const nvb_sort_rows_params* params, const nvb_launch* launch) noexcept;
