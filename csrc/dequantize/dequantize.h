// A quantised weight, or a part of it, as a float matrix.
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// output [rows, columns] (row stride in elements) = rows first_row .. + rows - 1 and columns first_column .. +
// columns - 1 of the matrix, in f32 with one rounding; device memory. With `order`, i32 [matrix.columns], column k goes
// to output column order[k]; the part then is all columns.
//
// Supported: every encoding and kind of scales of common/quantized.h; output in any float dtype, stride and alignment,
// vectors where its rows are 16-byte aligned; first_column a multiple of 8.
struct nvb_dequantize_params {
  nvb_quantized_matrix matrix;
  void* output;
  const int32_t* order;
  int64_t first_row;
  int64_t rows;
  int64_t first_column;
  int64_t columns;
  int64_t output_stride;
  uint32_t output_dtype;
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_dequantize(const nvb_dequantize_params* params, const nvb_launch* launch) noexcept;
