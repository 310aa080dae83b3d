// Attention over a KV cache or over ragged key and value tensors: what Rust passes to the launchers.
//
//   output[t, h] = softmax_k(mask(cap(scale * query[t, h] . key[k, h / group]))) . value[k, h / group]
//
// with group = query_heads / kv_heads and, when soft_cap > 0, cap(s) = soft_cap * tanh(s / soft_cap), applied before
// the mask. A query at position q sees key k iff k < kv_length, k <= q if causal, and, when window > 0, q - k < window
// (causal) or |q - k| < window. lse, if not null, is f32 [rows, query_heads]: the natural logarithm of the sum of the
// exponentials of the visible scores. A row that sees no key gives output 0 and lse -inf. Keys and values at or past
// kv_length are never read.
//
// Supported by both operations: query, key/value and output of any float dtype each, head_dim 1 to 512, query_heads a
// multiple of kv_heads, scale finite, soft_cap >= 0, window >= 0, lengths to 2^30. Everything else is
// cudaErrorInvalidValue. All strides are in elements and the head dimension is contiguous.
#pragma once

#include "../common/kv_placement.h"
#include "../common/launch.h"

// Sequences of one prefill launch: the table travels in the kernel's arguments, which older drivers cap at 4096 bytes.
enum { NVB_ATTENTION_MAX_SEQUENCES = 128 };

// Counters of a decode launch: this many uint32 for every (sequence, query head).
enum { NVB_ATTENTION_DECODE_COUNTERS = 17 };

struct nvb_attention_sequence {
  // Elements from key (and from value) to head 0 of this sequence's key 0; where there are pages, entries from the page
  // table's first to this sequence's.
  int64_t kv_offset;
  int32_t query_start;  // first row in query, output and lse
  int32_t query_count;  // rows; row i stands at position kv_length - query_count + i
  int32_t kv_length;    // valid keys
  int32_t first_block;  // ignored: the launcher's own
};

// Prefill: many query rows a sequence. The tensor-core kernels take capability >= 8.0, keys and values of F16 or BF16,
// query and output of that dtype or F32 (such a query is rounded to the keys' dtype), scale > 0, head_dim a multiple of
// 8, and query, key, value and output rows aligned to 16 bytes; everything else runs the f32 kernel.
struct nvb_attention_prefill_params {
  const void* query;
  const void* key;
  const void* value;
  void* output;
  float* lse;  // may be null
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_head_stride;
  int64_t key_token_stride;
  int64_t value_head_stride;
  int64_t value_token_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  uint32_t query_dtype;
  uint32_t kv_dtype;
  uint32_t output_dtype;
  int32_t sequences;  // entries of `sequence` in use
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t causal;  // 0 or 1
  int32_t window;  // 0 = none
  float scale;
  float soft_cap;     // 0 = none
  uint32_t reserved;  // 0
  nvb_kv_placement placement;
  nvb_attention_sequence sequence[NVB_ATTENTION_MAX_SEQUENCES];
};

// Decode: one query row a sequence, at a position that the kernel reads from device memory; row b sees the keys
// 0 ..= positions[b] of its slot. A position or slot outside the cache makes the row empty. The keys of a sequence
// are divided among `splits` blocks whose results the last one to finish merges in a fixed order, so that equal
// arguments give equal bits.
//
// `counters` is NVB_ATTENTION_DECODE_COUNTERS * sequences * query_heads uint32 that are zero before the first launch;
// every launch leaves them zero. `workspace` is scratch of nvb_cuda_attention_decode_workspace bytes, 16-byte aligned,
// of any content (may be null if that is 0). Launches that may overlap in time must share neither.
//
// The tensor-core kernel takes capability >= 8.0, a key/value dtype of F16 or BF16, any query and output dtype,
// head_dim a multiple of 8, and key and value rows aligned to 16 bytes; everything else runs the f32 kernel.
// What it takes runs a kernel made for latency, which wants no workspace, where few sequences see few keys (by
// max_kv_length and window): splits 0, head_dim up to 256, query rows aligned to 16 bytes.
struct nvb_attention_decode_params {
  const void* query;         // [sequences, query_heads, head_dim]
  const void* key;           // [slots, kv_heads, capacity, head_dim], or as `placement` says
  const void* value;         // as key
  const int32_t* positions;  // [sequences]
  const int32_t* slots;      // [sequences]; null: row b has slot b
  void* output;              // [sequences, query_heads, head_dim]
  float* lse;                // may be null
  void* workspace;
  uint32_t* counters;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_sequence_stride;
  int64_t key_head_stride;
  int64_t key_token_stride;
  int64_t value_sequence_stride;
  int64_t value_head_stride;
  int64_t value_token_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  uint32_t query_dtype;
  uint32_t kv_dtype;
  uint32_t output_dtype;
  int32_t sequences;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t slot_count;     // slots of the cache
  int32_t capacity;       // positions of a slot
  int32_t max_kv_length;  // what the host expects positions[b] + 1 not to exceed; it sizes the grid, not the result
  int32_t window;         // 0 = none
  int32_t splits;         // blocks a sequence and KV head, 1 to 256; 0 = chosen to fill the device
  float scale;
  float soft_cap;  // 0 = none
  nvb_kv_placement placement;
};

extern "C" {

cudaError_t nvb_cuda_attention_prefill(const nvb_attention_prefill_params* params, const nvb_launch* launch) noexcept;

cudaError_t nvb_cuda_attention_decode(const nvb_attention_decode_params* params, const nvb_launch* launch) noexcept;

// Bytes of workspace for exactly these arguments (fewer sequences may need more: they are split more finely). It does
// not depend on the positions, so it holds for every replay of a captured launch.
size_t nvb_cuda_attention_decode_workspace(const nvb_attention_decode_params* params,
                                           const nvb_launch* launch) noexcept;

// The kernel that the launcher would run, as a static string; null for arguments that it refuses.
const char* nvb_cuda_attention_prefill_kernel_name(const nvb_attention_prefill_params* params,
                                                   const nvb_launch* launch) noexcept;
const char* nvb_cuda_attention_decode_kernel_name(const nvb_attention_decode_params* params,
                                                  const nvb_launch* launch) noexcept;
}
