// The last step of a product whose result is left in 8 bits: rows of f32 to codes with a scale a row.
#pragma once

#include "../common/quantized_output.h"

// values [rows, columns] of f32 → quantized_output and, where it is not null, output [rows, columns] of any float
// dtype. Row strides in elements, device memory, any alignment; nothing overlaps anything else.
struct nvb_linear_to_codes_params {
  const float* values;
  void* output;  // or null
  int64_t rows;
  int64_t columns;
  int64_t values_stride;
  int64_t output_stride;
  uint32_t output_dtype;
  uint32_t reserved;
  nvb_quantized_output quantized_output;
};
static_assert(sizeof(nvb_linear_to_codes_params) == 88, "src/cuda/linear_to_codes.rs mirrors this layout");

extern "C" cudaError_t nvb_cuda_linear_to_codes(const nvb_linear_to_codes_params* params,
                                                const nvb_launch* launch) noexcept;
