// Softmax over rows.
#pragma once

#include "../common/launch.h"

// output[r, i] = e^(scale * input[r, i] - m) / sum_j e^(scale * input[r, j] - m), m = max_j scale * input[r, j], in f32
// with one rounding. A row of -inf alone gives zeros; a NaN or a +inf makes its whole row NaN. All pointers are device
// memory.
//
// Supports every pair of float dtypes, 1 to 2^30 columns, any strides; rows aligned to 16 bytes (8 for 16-bit rows
// beside f32 ones) take vector loads. The output may be the input itself (same address, dtype and stride); no other
// overlap.
struct nvb_softmax_params {
  const void* input;  // [rows, columns]
  void* output;       // [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t input_stride;  // between rows, in elements; so are all strides
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t output_dtype;
  float scale;
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_softmax(const nvb_softmax_params* params, const nvb_launch* launch) noexcept;
