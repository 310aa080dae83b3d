// Columns of x in the order in which a weight has them.
#pragma once

#include "../common/launch.h"

// output [rows, columns] = input [rows, columns] with column k = input column order[k]; elements of 2 or 4 bytes, row
// strides in elements, device memory. Any sizes, strides and alignment; the output must not overlap the input.
struct nvb_linear_order_params {
  const void* input;
  const int32_t* order;  // [columns], each in 0 .. columns - 1; null: as they are
  void* output;
  int64_t rows;
  int64_t columns;
  int64_t input_stride;
  int64_t output_stride;
  uint32_t dtype;
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_linear_order(const nvb_linear_order_params* params, const nvb_launch* launch) noexcept;
