// Rotation of pairs of elements by angles that grow with the position, from tensor to tensor.
#pragma once

#include "../common/launch.h"

enum nvb_rotary_code : uint32_t {
  NVB_ROTARY_HALF = 0,         // x[i] and x[i + rotary_dim / 2] are a pair
  NVB_ROTARY_INTERLEAVED = 1,  // x[2i] and x[2i + 1] are
};

// Pair i of the rotary_dim elements from `first` on turns by position * frequencies[i] / factors[i], and is multiplied
// by `magnitude`; other elements are copied. With a norm the elements of a head are multiplied by rsqrt(mean of their
// squares + epsilon) and by their weights before all that. With rows, token t goes to row rows[t] of the output in its
// place; one that the output does not have is not written. f32 inside, one rounding at the store. Strides are in
// elements, a head's elements contiguous. The output may be the input itself, and must not overlap what is read
// otherwise.
struct nvb_rotary_embedding_params {
  const void* input;
  void* output;
  const int32_t* positions;
  const float* factors;  // null: 1
  const void* norm;      // weights of a head's elements; null: no norm
  const int32_t* rows;   // null: none
  int64_t shape[4];      // batch, tokens, heads, elements of a head (at most 512); none is 0
  int64_t input_strides[4];
  int64_t output_strides[4];
  int64_t position_stride;       // from token to token
  int64_t position_axis_stride;  // between a token's positions
  int64_t rows_stride;           // from token to token
  int64_t output_rows;
  uint32_t pairs;  // nvb_rotary_code
  uint32_t rotary_dim;
  uint32_t first;
  uint32_t input_dtype;
  uint32_t output_dtype;
  uint32_t norm_dtype;
  float epsilon;
  float magnitude;
  float frequencies[288];      // rotary_dim / 2 of them
  uint32_t position_axes[18];  // which of a token's positions turns the pair, in two bits each, the first pair lowest
};

extern "C" cudaError_t nvb_cuda_rotary_embedding(const nvb_rotary_embedding_params* params,
                                                 const nvb_launch* launch) noexcept;
