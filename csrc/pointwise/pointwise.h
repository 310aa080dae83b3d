// A function of one or two tensors, element by element, over four strided axes.
#pragma once

#include "../common/launch.h"

enum nvb_pointwise_code : uint32_t {
  NVB_POINTWISE_COPY = 1,           // x, rounded to the output's dtype
  NVB_POINTWISE_ADD = 2,            // x + y
  NVB_POINTWISE_SUBTRACT = 3,       // x - y
  NVB_POINTWISE_MULTIPLY = 4,       // x * y
  NVB_POINTWISE_DIVIDE = 5,         // x / y
  NVB_POINTWISE_SCALE = 6,          // x * alpha + beta
  NVB_POINTWISE_CLAMP = 7,          // min(max(x, alpha), beta)
  NVB_POINTWISE_NEGATE = 8,         // -x
  NVB_POINTWISE_ABSOLUTE = 9,       // |x|
  NVB_POINTWISE_SQUARE = 10,        // x * x
  NVB_POINTWISE_SQUARE_ROOT = 11,   // sqrt(x)
  NVB_POINTWISE_EXPONENTIAL = 12,   // exp(x)
  NVB_POINTWISE_TANH = 13,          // tanh(x)
  NVB_POINTWISE_SIGMOID = 14,       // 1 / (1 + exp(-x))
  NVB_POINTWISE_RELU = 15,          // max(x, 0)
  NVB_POINTWISE_SILU = 16,          // x / (1 + exp(-x))
  NVB_POINTWISE_GELU_TANH = 17,     // as nvb_activation_code has it
  NVB_POINTWISE_GELU_ERF = 18,      // likewise
  NVB_POINTWISE_GELU_SIGMOID = 19,  // x / (1 + exp(-1.702 x))
};

// In f32 with one rounding at the store. All pointers are device memory.
//
// Supports every combination of float dtypes, any strides, and COPY of words (all dtypes NVB_I32). Axes are outermost
// first. An operand's extent divides the output's, and place i of the output reads place i mod extent. `second` is null
// unless the function takes two. The output may be an operand of the same extents and strides, and must not overlap
// them otherwise.
struct nvb_pointwise_params {
  const void* input;
  const void* second;
  void* output;
  int64_t shape[4];  // of the output; none is 0
  int64_t input_shape[4];
  int64_t second_shape[4];
  int64_t input_strides[4];  // in elements
  int64_t second_strides[4];
  int64_t output_strides[4];
  uint32_t function;  // nvb_pointwise_code
  uint32_t input_dtype;
  uint32_t second_dtype;
  uint32_t output_dtype;
  float alpha;
  float beta;
};

extern "C" cudaError_t nvb_cuda_pointwise(const nvb_pointwise_params* params, const nvb_launch* launch) noexcept;
