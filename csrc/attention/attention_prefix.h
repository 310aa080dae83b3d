// Decode over keys that all sequences of a call share: what goes before and after the two attentions of which it is
// made.
//
// The first `prefix_tokens` keys are one sequence's of the cache. Every row sees all of them, so the prefix is a
// prefill without a mask: the query heads of a group, in all rows, are its query rows, and its keys are divided into
// parts that run side by side as sequences of that prefill do, each with a copy of the queries, because the prefill
// of 9.0 wants queries and outputs to begin at the same row. What follows the prefix is an ordinary decode over caches
// that begin behind it. With the outputs O and the natural logarithms of the sums lse of all of these,
//
//   lse = ln sum exp(lse_i)    O = sum exp(lse_i - lse) * O_i
//
// in the order of the parts, the decode last. Elements are of any float dtype; all strides are in elements.
#pragma once

#include "../common/launch.h"

struct nvb_attention_prefix_params {
  const void* query;         // [rows, query_heads, head_dim]
  const int32_t* positions;  // [rows], counted from the first token of the prefix
  void* packed;              // [parts, rows * group, kv_heads, head_dim] of query_dtype, group = query_heads / kv_heads
  int32_t* own_positions;    // [rows]: behind the prefix; -1 of rows that see no key there
  const float* outputs;      // [parts, rows * group, kv_heads, value_dim], of the prefix
  const float* lses;         // [parts, rows * group, kv_heads]
  const float* own_outputs;  // [rows, query_heads, value_dim], of what follows
  const float* own_lses;     // [rows, query_heads]
  void* output;              // [rows, query_heads, value_dim]
  float* lse;                // [rows, query_heads]; may be null
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  uint32_t query_dtype;
  uint32_t output_dtype;
  int32_t rows;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;       // 1 to 576
  int32_t value_dim;      // 1 to 512
  int32_t prefix_tokens;  // at least 1
  int32_t capacity;       // positions of a slot
  int32_t parts;          // 1 to 128
};

// Writes `packed` and `own_positions`. A row whose position is not prefix_tokens - 1 at the least, and below capacity,
// is empty.
extern "C" cudaError_t nvb_cuda_attention_prefix_pack(const nvb_attention_prefix_params*, const nvb_launch*) noexcept;

// Writes `output` and `lse`, which are 0 and -inf in empty rows.
extern "C" cudaError_t nvb_cuda_attention_prefix_merge(const nvb_attention_prefix_params*, const nvb_launch*) noexcept;
