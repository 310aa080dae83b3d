// Attention over a KV cache or over ragged key and value tensors: what Rust passes to the launchers.
//
//   output[t, h] = softmax_k(mask(cap(scale * query[t, h] . key[k, h / group]))) . value[k, h / group]
//
// with group = query_heads / kv_heads and, when soft_cap > 0, cap(s) = soft_cap * tanh(s / soft_cap), applied before
// the mask. A query at position q sees key k iff k < kv_length, k <= q if causal, and, when window > 0, q - k < window
// (causal) or |q - k| < window; what an additive mask holds for q and k is added to the capped score, and -inf hides
// the key. lse, if not null, is f32 [rows, query_heads]: the natural logarithm of the sum of the exponentials of the
// visible scores. A row that sees no key gives output 0 and lse -inf. Keys and values at or past kv_length are never
// read.
//
// A prefix of P keys replaces k <= q by k <= max(q, P - 1) and the window by |q - k| < window.
//
// With sink_tokens > 0 a query sees the keys k < sink_tokens before its window too.
//
// With dropout_threshold > 0 the weight of row r (counted as the rows of lse), query head h and key k is 0 where the
// byte that common/dropout.cuh has for it is below the threshold, and multiplied by dropout_scale elsewhere, after the
// sum that weights are divided by and the lse were formed.
//
// With chunk > 0 a query at q sees key k only where k / chunk == q / chunk. slopes[h] * |q - k| is taken from the
// capped score, and exp(sinks[h]) is a further term of the sum of the exponentials, of the lse too, which has no value.
// The tables of kernels say which take a chunk, slopes and sinks.
//
// Queries and keys have head_dim elements, values and outputs value_dim. Scales of quantised queries, keys and values
// multiply what is read: (query * query_scale) . (key * key_scale), and (value * value_scale).
//
// Supported by both operations: query, key/value and output of any float dtype each, keys and values of FP8 too, and
// of rows with scales of their own, each of the two of its own dtype,
// head_dim 1 to 576, value_dim 1 to 512, query_heads a multiple of kv_heads, scale finite, soft_cap >= 0, window >= 0,
// lengths to 2^30. Everything else is cudaErrorInvalidValue. All strides are in elements and the head dimension is
// contiguous.
#pragma once

#include "../common/kv_placement.h"
#include "../common/launch.h"

// Sequences of one prefill launch: the table travels in the kernel's arguments, which older drivers cap at 4096 bytes.
enum { NVB_ATTENTION_MAX_SEQUENCES = 128 };

// Splits of a sequence's keys in a decode launch, at most, and how many partial results one block merges.
enum { NVB_ATTENTION_MAX_SPLITS = 256, NVB_ATTENTION_MERGED_SPLITS = 16 };

// The most query rows of a sequence in a decode launch.
enum { NVB_ATTENTION_MAX_ROWS_PER_SEQUENCE = 16 };

// Counters of a decode launch: this many uint32 for every (row, query head).
enum { NVB_ATTENTION_DECODE_COUNTERS = 17 };

// A sequence begins `start` times a tensor's sequence stride behind the tensor's first element. Where the rows of all
// sequences lie one after the other, starts are numbers of rows, and that stride is the token stride; where each has a
// block of its own, as in a cache or in a batch of equal lengths, they are numbers of sequences.
struct nvb_attention_sequence {
  int32_t query_start;  // in query, output, lse and mask
  int32_t query_count;  // rows; row i stands at position kv_length - query_count + i
  int32_t kv_start;     // in key and value; where there are pages, the row of the page table
  int32_t kv_length;    // valid keys
  int32_t first_block;  // of the launch: the blocks of the sequences before it, query_heads a tile of rows
  int32_t prefix;       // keys from the first on that the causal mask hides from no row
};

// Prefill: many query rows a sequence. The tensor-core kernels take capability >= 8.0, keys and values of F16 or BF16,
// query and output of that dtype or F32 (such a query is rounded to the keys' dtype), scale > 0, head_dim a multiple of
// 8, and query, key, value and output rows aligned to 16 bytes, without a mask and without scales of queries and keys;
// the f32 kernel takes everything else. Blocks start in the order of the table, so the sequences with the most work
// come first.
//
// Lengths are those of the table, or lie in device memory: then `query_starts`, or without it rows of max_query_count a
// sequence with starts 0, 1, 2, ..., and `kv_starts` or `kv_lengths` say what the table would, the table is not read,
// and `sequences` may be any number. The bounds from `query_rows` on size the launch and keep what a kernel reads
// within the tensors: a sequence whose query starts pass one has no rows, one whose keys do has no keys, and rows past
// max_query_count are left as they are.
struct nvb_attention_prefill_params {
  const void* query;
  const void* key;
  const void* value;
  void* output;
  float* lse;  // may be null
  // Of KV head i, scale[i * stride]; null: 1.
  const float* query_scale;
  const float* key_scale;
  const float* value_scale;
  // Row i of a sequence and query head h meet key k at
  // mask[start * mask_sequence_stride + i * mask_row_stride + h * mask_head_stride + k]; null: none. Of I32 the last
  // term is the word k / 32, whose bit k % 32 is 1 where the row sees the key.
  const void* mask;
  const float* sinks;   // [query_heads]; null: none
  const float* slopes;  // as sinks
  // Row i of a sequence follows its row tree_parents[start * lse_sequence_stride + i], which is below i, or none. It
  // sees, of the keys kv_length - query_count + j, those of the rows j that it comes from, itself included, and stands
  // as many keys behind the tree's first as there are of them before it. Up to 64 rows a sequence; null: no tree.
  const int32_t* tree_parents;
  // Scratch of kernels whose shape finds_mask_tiles, two bits for each tile of keys, for the rows of query up to the
  // last sequence's last one, and the query heads, or one where mask_head_stride is 0: rows * heads * 2 words for every
  // 32 tiles of the longest sequence's keys. Null: no tile is left out.
  uint32_t* mask_tiles;
  // Scratch of kernels whose shape names it; null: they do without. Counters are 0 between launches.
  float* partial;
  uint32_t* counters;
  const int32_t* query_starts;      // [sequences + 1], rows
  const int32_t* kv_starts;         // [sequences + 1], rows of key and value; null: kv_lengths has the lengths
  const int32_t* kv_lengths;        // [sequences]
  const int32_t* kv_sequences;      // [sequences], of the cache; null: 0, 1, 2, ...
  const uint32_t* dropout_offsets;  // [2], low and high word, added to dropout_offset; null: nothing is
  int64_t query_sequence_stride;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_sequence_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_sequence_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t output_sequence_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  int64_t lse_sequence_stride;  // in rows
  int64_t mask_sequence_stride;
  int64_t mask_row_stride;
  int64_t mask_head_stride;
  uint64_t dropout_seed;
  uint64_t dropout_offset;  // its lower 48 bits
  uint32_t query_dtype;
  uint32_t kv_dtype;     // of keys
  uint32_t value_dtype;  // 0: that of the keys
  uint32_t output_dtype;
  uint32_t mask_dtype;         // any float dtype, or I32
  int32_t query_scale_stride;  // 0 (one of the tensor) or 1 (one a KV head), as the other two
  int32_t key_scale_stride;
  int32_t value_scale_stride;
  int32_t sequences;  // entries of `sequence` in use, or of kv_lengths
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  int32_t causal;  // 0 or 1
  int32_t window;  // 0 = none
  float scale;
  float soft_cap;           // 0 = none
  int32_t heads_per_group;  // query heads, of whole KV heads, whose blocks start side by side and share L2
  // What lengths in device memory may not pass.
  int32_t query_rows;       // of query
  int32_t kv_rows;          // of key and value; of a cache: its sequences
  int32_t max_query_count;  // rows of a sequence
  int32_t max_kv_length;
  int32_t chunk;               // 0 = none
  int32_t sink_tokens;         // 0 = none
  uint32_t dropout_threshold;  // up to 255; 0 = no dropout
  float dropout_scale;
  // The visible keys of each tile of rows are divided into as many parts; part i writes output and lse i * part_rows
  // rows further on. Kernels whose shape has tile_rows take more than one. 0: one.
  int32_t parts;
  int32_t part_rows;
  int32_t one_order;  // 1: the sums of a row are in an order that does not depend on the other rows
  uint32_t reserved;  // 0
  nvb_kv_placement placement;
  nvb_attention_sequence sequence[NVB_ATTENTION_MAX_SEQUENCES];
};

namespace nvb {

constexpr bool has_device_lengths(const nvb_attention_prefill_params& p) {
  return p.kv_starts != nullptr || p.kv_lengths != nullptr;
}

// Tiles of `rows` query rows that are enough whatever lengths device memory holds.
inline int64_t most_tiles(const nvb_attention_prefill_params& p, int rows) {
  const int64_t of_sequences = int64_t{p.sequences} * ((int64_t{p.max_query_count} + rows - 1) / rows);
  if (p.query_starts == nullptr) return of_sequences;
  const int64_t of_rows = (p.query_rows + int64_t{p.sequences} * (rows - 1)) / rows;
  return of_rows < of_sequences ? of_rows : of_sequences;
}

// Whether keys and values are floats or FP8 of one dtype; others, and rows with scales of their own (kv_row.cuh), are
// for kernels that say so.
template <typename Params>
bool has_plain_elements(const Params& p) {
  return p.kv_dtype <= NVB_F8_E5M2 && (p.value_dtype == 0 || p.value_dtype == p.kv_dtype);
}
template <typename Params>
constexpr uint32_t value_dtype_of(const Params& p) {
  return p.value_dtype == 0 ? p.kv_dtype : p.value_dtype;
}

inline bool has_scales(const nvb_attention_prefill_params& p) {
  return p.query_scale != nullptr || p.key_scale != nullptr || p.value_scale != nullptr;
}

// Whether heads, a chunk, a tree, a prefix, a mask or dropout change the softmax. Up to NVB_ATTENTION_MAX_SEQUENCES
// sequences have one.
inline bool has_terms(const nvb_attention_prefill_params& p) {
  if (p.sinks != nullptr || p.slopes != nullptr || p.chunk != 0 || p.tree_parents != nullptr || p.mask != nullptr ||
      p.dropout_threshold > 0) {
    return true;
  }
  for (int i = 0; i < p.sequences && !has_device_lengths(p); ++i) {
    if (p.sequence[i].prefix > 0) return true;
  }
  return false;
}

}  // namespace nvb

// Decode: `rows_per_sequence` query rows a sequence, 1 to 16, at positions that the kernel reads from device memory.
// Row r of sequence b is row b * rows_per_sequence + r of query, output, lse and positions; it sees the keys 0 ..= its
// position of slot slots[b], within the window. So several draft tokens are verified in one call: their keys are in the
// cache, and their positions ascend. A position or slot outside the cache makes the row empty; -1 says so of rows that
// a sequence does not need. Keys that some row of the sequence sees may meet another row's weights of 0, so their
// values must be finite. The keys of a sequence are divided among `splits` blocks whose results the last one to finish
// merges in a fixed order, so that equal arguments give equal bits.
//
// The rows of a sequence and the query heads of a group meet the same keys. A KV head has rows_per_sequence * group
// items, item i being row i / group and query head kv_head * group + i % group, and what is called "heads" of a block
// below (heads_per_chunk, heads_per_block) counts items.
//
// `key_scale` and `value_scale` multiply what the cache holds: key = key_scale[kv_head] * stored.
//
// `counters` is NVB_ATTENTION_DECODE_COUNTERS * rows * query_heads uint32 that are zero before the first launch, with
// rows = sequences * rows_per_sequence; every launch leaves them zero. `workspace` is scratch of any content, 16-byte
// aligned: two f32 for each of slots_per_head * rows * query_heads partial results, padded to 16 bytes, and their
// outputs of value_dim f32. Both may be null where slots_per_head is 0. A kernel whose shape has min_tiles 0 divides
// the tiles of all sequences among `splits` blocks in all, up to `resident` a multiprocessor; slots_per_head is 0 then,
// and the workspace has the results of 2 * splits * heads_per_chunk items. Launches that may overlap in time must share
// neither.
//
// The tensor-core kernel takes capability >= 8.0, a key/value dtype of F16 or BF16 without scales, any query and output
// dtype, head_dim a multiple of 8, and key and value rows aligned to 16 bytes; the f32 kernel takes everything else.
// The kernel made for latency takes what the former takes with head_dim up to 256 and query rows aligned to 16 bytes,
// as long as the keys are few enough for its passes, and wants no workspace.
// What a decode does to its new tokens first, one a sequence, as rope.h says:
//
//   query = query_scale * rotate(norm(query, query_norm)), rounded to its dtype
//   the key rotate(norm(key, key_norm)) and the value join the cache at the token's position
//
// where it has a place there. No two sequences of a launch may be the same of the cache.
struct nvb_attention_decode_rope {
  const void* key;         // [sequences, kv_heads, head_dim]
  const void* value;       // [sequences, kv_heads, value_dim]
  const void* query_norm;  // [head_dim]; null: none
  const void* key_norm;    // [head_dim]; null: none
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  uint32_t key_dtype;
  uint32_t value_dtype;
  uint32_t query_norm_dtype;
  uint32_t key_norm_dtype;
  int32_t rotary_dim;  // 0: no rotation
  float base;
  float position_scale;
  float query_scale;
  float epsilon;
  float weight_offset;
};

struct nvb_attention_decode_params {
  const void* query;         // [rows, query_heads, head_dim]
  const void* key;           // [slots, kv_heads, capacity, head_dim], or as `placement` says
  const void* value;         // as key, with value_dim elements
  const int32_t* positions;  // [rows]
  const int32_t* slots;      // [sequences]; null: sequence b has slot b
  void* output;              // [rows, query_heads, value_dim]
  float* lse;                // [rows, query_heads]; may be null
  const float* key_scale;    // [kv_heads]; null: 1
  const float* value_scale;  // as key_scale
  const float* sinks;        // [query_heads]; null: none
  const float* slopes;       // as sinks
  void* workspace;
  uint32_t* counters;
  const nvb_attention_decode_rope* rope;  // in host memory, read by the launcher; null: queries and cache are ready
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
  uint32_t kv_dtype;     // of keys
  uint32_t value_dtype;  // 0: that of the keys
  uint32_t output_dtype;
  int32_t sequences;
  int32_t rows_per_sequence;  // 1 to NVB_ATTENTION_MAX_ROWS_PER_SEQUENCE
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  int32_t slot_count;     // slots of the cache
  int32_t capacity;       // positions of a slot
  int32_t max_kv_length;  // what the host expects no position + 1 to exceed; it sizes the grid, not the result
  int32_t window;         // 0 = none
  float scale;
  float soft_cap;           // 0 = none
  int32_t splits;           // blocks a sequence, KV head and chunk, 1 to 256; of the kernel for few keys: of a cluster
  int32_t chunks;           // blocks that share a KV head
  int32_t heads_per_chunk;  // items of a block
  int32_t slots_per_head;   // partial results of a (row, query head): the splits and their groups; 0 for one split
  int32_t chunk;            // 0 = none
  int32_t sink_tokens;      // 0 = none
  nvb_kv_placement placement;
};

// How a prefill kernel divides its work.
struct nvb_attention_prefill_shape {
  int32_t rows;  // query rows of a block; 0: the kernel lays out its blocks itself
  // Rows and keys of a tile of a kernel that divides the keys of a tile into parts; 0: it does not.
  int32_t tile_rows;
  int32_t tile_keys;
  int32_t finds_mask_tiles;  // 0 or 1: with mask_tiles it leaves out tiles of keys that no row of a tile sees
  int32_t partial_bytes;     // that make the kernel faster as scratch `partial`, and as many
  int32_t counters;
};

// How a decode kernel divides its work: what a plan is made from.
struct nvb_attention_decode_shape {
  int32_t heads_per_block;  // the most items of a block
  int32_t keys;             // of a tile; of the kernel for few keys: of a pass of a block
  int32_t min_tiles;        // of a split; 0: the tiles of all sequences are divided evenly among the splits
  int32_t threads;          // of a block
  int32_t shared_bytes;     // of a block
  int32_t cluster;          // blocks that may merge in a cluster; 0: they merge through the workspace
  int32_t passes;           // of a block in a cluster, at most
  int32_t stages;           // tiles of keys under way at a time
  int32_t resident;         // where min_tiles is 0: the splits of a multiprocessor, at most
};

extern "C" {

// The kernels of each operation by their place in a table, the one to be preferred first: the name, or null past the
// last; whether it takes these arguments, what the plan fills in (first_block, heads_per_group; splits, chunks,
// heads_per_chunk, slots_per_head) left aside, and then its shape; and the launch of a plan. A launch of arguments that
// are not valid, or that the kernel does not take, is cudaErrorInvalidValue.
const char* nvb_cuda_attention_prefill_kernel_at(int index) noexcept;
int nvb_cuda_attention_prefill_kernel_supports(int index, const nvb_attention_prefill_params* params,
                                               const nvb_launch* launch, nvb_attention_prefill_shape* shape) noexcept;
cudaError_t nvb_cuda_attention_prefill_launch(int index, const nvb_attention_prefill_params* params, int blocks,
                                              const nvb_launch* launch) noexcept;

const char* nvb_cuda_attention_decode_kernel_at(int index) noexcept;
int nvb_cuda_attention_decode_kernel_supports(int index, const nvb_attention_decode_params* params,
                                              const nvb_launch* launch, nvb_attention_decode_shape* shape) noexcept;
cudaError_t nvb_cuda_attention_decode_launch(int index, const nvb_attention_decode_params* params,
                                             const nvb_launch* launch) noexcept;
}
