// Rotation of pairs of elements by angles that grow with the position, from tensor to tensor.
#pragma once

#include "../common/launch.h"

enum nvb_rotary_code : uint32_t {
  NVB_ROTARY_HALF = 0,         // x[i] and x[i + rotary_dim / 2] are a pair
  NVB_ROTARY_INTERLEAVED = 1,  // x[2i] and x[2i + 1] are
};

// Heads of the tokens, and where they go.
struct nvb_rotary_heads {
  const void* input;
  void* output;
  const void* norm;          // weights of a head's elements; null: no norm
  const int32_t* rows;       // null: none
  int64_t count;             // heads of a token
  int64_t input_strides[3];  // of batch, token, head
  int64_t output_strides[3];
  int64_t rows_stride;  // from token to token
  int64_t output_rows;
  uint32_t input_dtype;
  uint32_t output_dtype;
  uint32_t norm_dtype;
  float epsilon;
  float magnitude;
  uint32_t turn;  // 0: they are copied
};

// Pair i of the rotary_dim elements from `first` on turns by position * frequencies[i] / factors[i], and is multiplied
// by `magnitude`; other elements are copied. With a norm the elements of a head are multiplied by rsqrt(mean of their
// squares + epsilon) and by their weights before all that. With rows, token t goes to row rows[t] of the output in its
// place; one that the output does not have is not written. f32 inside, one rounding at the store. Strides are in
// elements, a head's elements contiguous. The output may be the input itself, and must not overlap what is read
// otherwise.
//
// More than one kind of heads, such as queries, keys and values, are done by one launch where all of a head turns and
// it has 64, 128, 192 or 256 elements; other parameters have one kind, which turns unless rotary_dim is 0.
struct nvb_rotary_embedding_params {
  nvb_rotary_heads heads[3];
  const int32_t* positions;
  const float* factors;  // null: 1
  int64_t batch;         // not 0, as are the next
  int64_t tokens;
  int64_t head_dim;              // at most 576
  int64_t position_stride;       // from token to token
  int64_t position_axis_stride;  // between a token's positions
  uint32_t kinds;                // of heads
  uint32_t pairs;                // nvb_rotary_code
  uint32_t rotary_dim;
  uint32_t first;
  float frequencies[288];      // rotary_dim / 2 of them
  uint32_t position_axes[18];  // which of a token's positions turns the pair, in two bits each, the first pair lowest
};

extern "C" cudaError_t nvb_cuda_rotary_embedding(const nvb_rotary_embedding_params* params,
                                                 const nvb_launch* launch) noexcept;
