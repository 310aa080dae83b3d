// The matrices that rms_norm and layer_norm have in common.
#pragma once

#include "launch.h"

// Device memory. Float dtypes, one each for input, residual and residual_output, output, and the operation's weights;
// any strides. residual_output may be residual, and output may be input (same address, dtype and stride); no other
// overlap.
struct nvb_norm_rows {
  const void* input;      // [rows, columns]
  const void* residual;   // [rows, columns], or null
  void* residual_output;  // [rows, columns], or null
  void* output;           // [rows, columns], or null
  int64_t rows;
  int64_t columns;
  int64_t input_stride;  // between rows, in elements; so are all strides
  int64_t residual_stride;
  int64_t residual_output_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t residual_dtype;  // of residual and residual_output
  uint32_t weight_dtype;
  uint32_t output_dtype;
};
