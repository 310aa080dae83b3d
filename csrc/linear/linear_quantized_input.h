// A quantised input as products in 8 bits want it: aligned rows that end in zeros.
#pragma once

#include "../common/launch.h"

// output [rows, output_row_bytes] = values [rows, columns] and zeros after them; output_scales = scales. Strides in
// bytes; the quantised values of any alignment, the output's rows multiples of 16 bytes on such boundaries.
// Device memory, no overlap.
struct nvb_linear_quantized_input_params {
  const void* values;
  const float* scales;  // [rows]
  void* output;
  float* output_scales;
  int64_t rows;
  int64_t columns;
  int64_t row_bytes;
  int64_t output_row_bytes;
};

extern "C" cudaError_t nvb_cuda_linear_quantized_input(const nvb_linear_quantized_input_params* params,
                                                       const nvb_launch* launch) noexcept;
