// The attention over all keys from the results over parts of them.
#pragma once

#include "../common/launch.h"

// With the parts' outputs O_p and lse_p = ln sum exp(score):
//
//   lse = ln sum_p exp(lse_p)
//   O   = sum_p exp(lse_p - lse) * O_p
//
// ("flash-decoding", Dao et al. 2023), in f32, in the order of the parts and with one rounding. A part of lse -inf
// counts nothing, whatever its output holds; where all parts are so, O is 0 and lse -inf. All pointers are device
// memory.
//
// Supports every pair of float dtypes, 1 to 2^31 - 1 parts, head_dim 1 to 512, any strides; rows aligned to 16 bytes (8
// for 16-bit rows beside f32 ones) take vector loads. What is written overlaps nothing that is read.
struct nvb_attention_merge_params {
  const void* outputs;  // [parts, tokens, heads, head_dim]
  const float* lses;    // [parts, tokens, heads]
  void* output;         // [tokens, heads, head_dim]
  float* lse;           // [tokens, heads]; may be null
  int64_t part_stride;  // in elements, as all strides
  int64_t token_stride;
  int64_t head_stride;
  int64_t lse_part_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  int32_t parts;
  int32_t tokens;
  int32_t heads;
  int32_t head_dim;
  uint32_t input_dtype;
  uint32_t output_dtype;
};

extern "C" cudaError_t nvb_cuda_attention_merge(const nvb_attention_merge_params* params,
                                                const nvb_launch* launch) noexcept;
