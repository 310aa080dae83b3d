// Activations to 8 bits with a scale a row, before a product in 8 bits or after one.
#pragma once

#include "../common/quantized_output.h"

// values [rows, columns] of any float dtype → quantized_output [rows, code_columns], whose columns from `columns` on
// are zeros, and, where it is not null, output [rows, columns] of any float dtype. Row strides in elements, device
// memory, any alignment; nothing overlaps anything else.
struct nvb_quantize_tokens_params {
  const void* values;
  void* output;  // or null; then code_columns may be more than columns
  int64_t rows;
  int64_t columns;
  int64_t code_columns;
  int64_t values_stride;
  int64_t output_stride;
  uint32_t values_dtype;
  uint32_t output_dtype;
  nvb_quantized_output quantized_output;
};

extern "C" cudaError_t nvb_cuda_quantize_tokens(const nvb_quantize_tokens_params* params,
                                                const nvb_launch* launch) noexcept;
