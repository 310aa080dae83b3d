// rope: per-head RMSNorm of queries and keys, rotary position embedding, and the append to the KV cache, in one launch.
//
//   x    = norm ? x * rsqrt(mean(x^2) + epsilon) * (weight_offset + norm) : x               over the head's elements
//   x[i], x[i + r/2] = x[i] * cos - x[i + r/2] * sin, x[i + r/2] * cos + x[i] * sin         i < r/2, r = rotary_dim
//          angle = position * (1 / base^(2i / r)) * position_scale, each step in f32 as in HF transformers
//
// (Su et al., arXiv:2104.09864, with halves as pairs.) Elements from r on pass through; rotary_dim 0 rotates nothing.
// Queries are then multiplied by query_scale and stored; keys are stored and appended, values appended unchanged.
//
// A cache in 8 bits holds x / key_scale[head] and value / value_scale[head], rounded to nearest even and saturated; one
// of rows with scales of their own holds what kv_row.cuh says, and takes a head_dim to 576.
//
// Supported: any float dtype for each tensor, for the caches FP8 too, head_dim 1 to 512, rotary_dim even and at most
// head_dim, any strides with the head dimension contiguous. query, key and value are each optional, and so are
// query_norm, key_norm, key_output and the caches (that of the keys with key; that of the values with value, and beside
// it alone). An output may be its own input, in place. A token whose slot or position lies outside the cache, or whose
// page table entry is no page, is not appended; its outputs are written all the same.
#pragma once

#include "../common/kv_placement.h"
#include "../common/launch.h"

struct nvb_rope_params {
  const void* query;         // [tokens, query_heads, head_dim]
  const void* key;           // [tokens, kv_heads, head_dim]
  const void* value;         // as key
  void* query_output;        // as query
  void* key_output;          // as key
  const void* query_norm;    // [head_dim]
  const void* key_norm;      // [head_dim]
  void* key_cache;           // [slot_count, kv_heads, capacity, head_dim], or as `placement` says
  void* value_cache;         // as key_cache
  const float* key_scale;    // [kv_heads], of caches in 8 bits; null: 1
  const float* value_scale;  // as key_scale
  const int32_t* positions;  // [tokens]
  const int32_t* slots;      // [tokens]; null: slot 0
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t query_output_token_stride;
  int64_t query_output_head_stride;
  int64_t key_output_token_stride;
  int64_t key_output_head_stride;
  int64_t cache_slot_stride;
  int64_t cache_head_stride;
  int64_t cache_token_stride;
  uint32_t query_dtype;
  uint32_t key_dtype;
  uint32_t value_dtype;
  uint32_t query_output_dtype;
  uint32_t key_output_dtype;
  uint32_t query_norm_dtype;
  uint32_t key_norm_dtype;
  uint32_t cache_dtype;
  int32_t tokens;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t slot_count;
  int32_t capacity;
  float base;
  float position_scale;
  float query_scale;
  float epsilon;
  float weight_offset;
  nvb_kv_placement placement;
};

extern "C" {

cudaError_t nvb_cuda_rope(const nvb_rope_params* params, const nvb_launch* launch) noexcept;

// The kernel that the launcher would run, as a static string; null for arguments that it refuses.
const char* nvb_cuda_rope_kernel_name(const nvb_rope_params* params, const nvb_launch* launch) noexcept;
}
