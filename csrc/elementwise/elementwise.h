// Operations on elements: one or two [rows, columns] tensors in, one out.
#pragma once

#include "../common/launch.h"

enum nvb_elementwise_code : uint32_t {
  NVB_ELEMENTWISE_ADD = 1,         // input + other
  NVB_ELEMENTWISE_MULTIPLY = 2,    // input * other
  NVB_ELEMENTWISE_SCALE = 3,       // input * scalar
  NVB_ELEMENTWISE_SOFT_CAP = 4,    // scalar * tanh(input / scalar)
  NVB_ELEMENTWISE_CONVERT = 5,     // input, rounded to the output's dtype
  NVB_ELEMENTWISE_ACTIVATION = 6,  // `activation` of input, an nvb_activation_code
};

// In f32 with one rounding at the store. All pointers are device memory.
//
// Supports every combination of float dtypes, any sizes and strides; operands whose rows are all aligned to 16 bytes (8
// for 16-bit rows beside f32 ones) take vector loads. `other` is read by ADD and MULTIPLY only, else null; its stride 0
// repeats its one row for every row. The output may be the input or `other` itself (same address, dtype and stride, and
// then no stride 0), and must not overlap them otherwise.
struct nvb_elementwise_params {
  const void* input;
  const void* other;
  void* output;
  int64_t rows;
  int64_t columns;
  int64_t input_stride;  // between rows, in elements; so are all strides
  int64_t other_stride;
  int64_t output_stride;
  uint32_t operation;  // nvb_elementwise_code
  uint32_t activation;
  uint32_t input_dtype;
  uint32_t other_dtype;
  uint32_t output_dtype;
  float scalar;
};

extern "C" cudaError_t nvb_cuda_elementwise(const nvb_elementwise_params* params, const nvb_launch* launch) noexcept;
