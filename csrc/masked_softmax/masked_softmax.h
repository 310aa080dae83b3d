// Softmax of attention scores with a mask that is added, ALiBi and sinks:
// s = scale * input + slope(head) * mask;  output = exp(s - max) / (sum of exp(s - max) + exp(sink[head] - max)).
#pragma once

#include "../common/launch.h"

// f32 inside, one rounding at the store; every combination of float dtypes. Axes are batch, heads, rows and columns,
// the last contiguous; strides are in elements. A mask's extents divide the input's, and its places repeat; its columns
// are the input's. slope(head) is 1 where alibi_bias is 0, else 2^(-alibi_bias * (head + 1) / alibi_heads) below
// alibi_heads, the largest power of two that is at most the number of heads, and 2^(-alibi_bias * (2 * (head -
// alibi_heads) + 1) / (2 * alibi_heads)) from there on. A row without weight gives zeros. The output may be the input.
struct nvb_masked_softmax_params {
  const void* input;
  const void* mask;    // null: none
  const float* sinks;  // null: none
  void* output;
  int64_t shape[4];  // none is 0
  int64_t input_strides[4];
  int64_t output_strides[4];
  int64_t mask_shape[4];
  int64_t mask_strides[4];
  uint32_t input_dtype;
  uint32_t mask_dtype;
  uint32_t output_dtype;
  float scale;
  float alibi_bias;
  uint32_t alibi_heads;
};

extern "C" cudaError_t nvb_cuda_masked_softmax(const nvb_masked_softmax_params* params,
                                               const nvb_launch* launch) noexcept;
