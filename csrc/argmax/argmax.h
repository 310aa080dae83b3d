// The index of each row's largest element.
#pragma once

#include "../common/launch.h"

// tokens[r] = the lowest i with logits[r, i] = max_j logits[r, j]. NaN never wins; a row of NaN alone gives 0. All
// pointers are device memory. The same inputs give the same result on every device.
//
// Supports float dtypes, 1 to 2^30 columns, any stride; rows aligned to 16 bytes take vector loads.
struct nvb_argmax_params {
  const void* logits;  // [rows, columns]
  int32_t* tokens;     // [rows]
  void* workspace;     // nvb_cuda_argmax_workspace bytes, 16-byte aligned, need not be cleared; null if that is 0
  int64_t rows;
  int64_t columns;
  int64_t logits_stride;  // between rows, in elements
  uint32_t logits_dtype;
  uint32_t reserved;  // 0
};

// Reads rows and columns alone of the params.
extern "C" size_t nvb_cuda_argmax_workspace(const nvb_argmax_params* params, const nvb_launch* launch) noexcept;
extern "C" cudaError_t nvb_cuda_argmax(const nvb_argmax_params* params, const nvb_launch* launch) noexcept;
