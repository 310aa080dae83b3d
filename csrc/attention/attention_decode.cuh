// What the decode kernels share: the part of a sequence that a block reads, and the merge of the parts
// ("flash-decoding", Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
//
// Block (split, kv_head * chunks + chunk, sequence) reads its part of the keys for the `heads` items of the chunk, each
// a query head of one of the sequence's rows (attention.h), and leaves, for each of its `parts` (warps, say), the
// unnormalised output, the maximum m and the sum l in shared memory. `epilogue_split` merges the parts; if the sequence
// is split, it writes (m, l, O) to the workspace, and the last block of every kGroup to arrive merges these, then the
// last group of all. A merge adds in the order of the splits whichever block does it, so the result does not depend on
// timing.
#pragma once

#include "../common/constant_reads.h"
#include "../common/fp8.cuh"
#include "../common/kv_placement.cuh"
#include "../common/programmatic_launch.cuh"
#include "../common/vector.cuh"
#include "attention.h"
#include "attention_head_terms.cuh"
#include "softmax.cuh"

namespace nvb {

inline constexpr int kMaxSplits = NVB_ATTENTION_MAX_SPLITS;
inline constexpr int kGroup = NVB_ATTENTION_MERGED_SPLITS;
inline constexpr int kMaxHeadsPerBlock = 16;
static_assert(kMaxSplits == kGroup * kGroup && NVB_ATTENTION_DECODE_COUNTERS == kGroup + 1,
              "two levels of merging: a counter for each group and one for the root");

// Query heads of all rows of a sequence that meet the same keys.
__host__ __device__ __forceinline__ int items_per_kv_head(const nvb_attention_decode_params& p) {
  return p.rows_per_sequence * (p.query_heads / p.kv_heads);
}

struct DecodeArguments {
  nvb_attention_decode_params params;
  float2* partial_sums;    // [sequences, kv_heads, items, slots_per_head]: m in powers of two, l
  float* partial_outputs;  // [sequences, kv_heads, items, slots_per_head, value_dim]
  uint32_t constant = 0;   // nvb_constant_reads
};

// The part of one block.
struct DecodeBlock {
  int sequence;
  int kv_head;
  int first;  // item of the KV head
  int heads;  // items
  int split;
  int splits;  // that have keys, at least 1; blocks from there on leave at once
  int slot;
  int begin;  // keys begin .. end, from the first to the last that some row of the sequence sees
  int end;
  // With sinks, keys before `window` stand for the first ones of the sequence: key window - sinks + i for key i.
  int window;
  int sinks;

  __device__ __forceinline__ int token(int key) const { return key < window && sinks > 0 ? key - window + sinks : key; }
};

// Where the block's item i finds its query and leaves its output.
struct DecodeItem {
  int row;   // of the call
  int head;  // query head
};
__device__ __forceinline__ DecodeItem item_of(const nvb_attention_decode_params& p, const DecodeBlock& block, int i) {
  const int group = p.query_heads / p.kv_heads;
  const int item = block.first + i;
  if (p.rows_per_sequence == 1) return {block.sequence, block.kv_head * group + item};
  return {block.sequence * p.rows_per_sequence + item / group, block.kv_head * group + item % group};
}

// The keys begin .. end that a query at `position` sees; none where that is outside the cache.
struct DecodeKeys {
  int begin;
  int end;
};
__device__ __forceinline__ DecodeKeys keys_at(const nvb_attention_decode_params& p, int position) {
  const int length = position >= 0 && position < p.capacity ? position + 1 : 0;
  int begin = p.window > 0 ? max(0, length - p.window) : 0;
  if (p.chunk > 0 && length > 0) begin = max(begin, (length - 1) / p.chunk * p.chunk);
  return {begin, length};
}
// The position of the block's item i, and its head's slope in powers of two, 0 where it has none.
struct ItemSlope {
  int position;
  float slope;
};
__device__ __forceinline__ ItemSlope item_slope(const nvb_attention_decode_params& p, const DecodeBlock& block, int i) {
  if (p.slopes == nullptr || i >= block.heads) return {0, 0.0f};
  const DecodeItem item = item_of(p, block, i);
  return {p.positions[item.row], slope_of(p.slopes, item.head)};
}
// What all rows of a sequence see together. Called by whole warps, whose lanes have a row each, so that the positions
// are loaded side by side.
template <bool Old>
__device__ __forceinline__ DecodeKeys sequence_keys(const nvb_attention_decode_params& p, int sequence) {
  if (p.rows_per_sequence == 1) return keys_at(p, load_index<Old>(p.positions + sequence));
  const int lane = threadIdx.x % 32;
  DecodeKeys keys{0, 0};
  if (lane < p.rows_per_sequence) {
    keys = keys_at(p, load_index<Old>(p.positions + sequence * p.rows_per_sequence + lane));
  }
  if (keys.end == 0) keys.begin = kMaxLength;
#pragma unroll
  for (int offset = NVB_ATTENTION_MAX_ROWS_PER_SEQUENCE / 2; offset > 0; offset /= 2) {
    keys.begin = min(keys.begin, __shfl_xor_sync(0xffffffffu, keys.begin, offset));
    keys.end = max(keys.end, __shfl_xor_sync(0xffffffffu, keys.end, offset));
  }
  // Lanes 16 to 31 reduced nothing but their own.
  keys.begin = __shfl_sync(0xffffffffu, keys.begin, 0);
  keys.end = __shfl_sync(0xffffffffu, keys.end, 0);
  return {min(keys.begin, keys.end), keys.end};
}
// What the block's item i sees. With one row a sequence those are the keys of the block.
__device__ __forceinline__ DecodeKeys item_keys(const nvb_attention_decode_params& p, const DecodeBlock& block, int i) {
  if (p.rows_per_sequence == 1 || i >= block.heads) return {block.begin, block.end};
  const DecodeKeys keys = keys_at(p, p.positions[item_of(p, block, i).row]);
  return {max(keys.begin, block.begin), min(keys.end, block.end)};
}

// The block's place in the grid: sequence, split, KV head and items.
__device__ __forceinline__ DecodeBlock block_items(const nvb_attention_decode_params& p) {
  DecodeBlock block;
  block.sequence = blockIdx.z;
  block.split = blockIdx.x;
  block.kv_head = static_cast<int>(blockIdx.y) / p.chunks;
  block.first = static_cast<int>(blockIdx.y) % p.chunks * p.heads_per_chunk;
  block.heads = min(p.heads_per_chunk, items_per_kv_head(p) - block.first);
  block.window = block.sinks = 0;
  return block;
}

// Divides the visible keys in tiles of kTileKeys over the splits, with at least `min_tiles` in each. `Old`: the grids
// in front may be writing positions and slots, so the result is good for what is asked for in L2 alone.
template <int kTileKeys, bool Old = false>
__device__ __forceinline__ DecodeBlock find_decode_block(const DecodeArguments& arguments, int min_tiles) {
  const nvb_attention_decode_params& p = arguments.params;
  DecodeBlock block = block_items(p);
  const DecodeKeys keys = sequence_keys<Old>(p, block.sequence);
  block.slot = p.slots != nullptr ? load_index<Old>(p.slots + block.sequence) : block.sequence;
  const bool inside = block.slot >= 0 && block.slot < p.slot_count;
  const int length = inside ? keys.end : 0;
  block.window = keys.begin;
  block.sinks = inside ? min(p.sink_tokens, keys.begin) : 0;
  const int visible = (inside ? keys.end - keys.begin : 0) + block.sinks;
  const int tiles = (visible + kTileKeys - 1) / kTileKeys;
  const int split_tiles = max(min_tiles, (tiles + arguments.params.splits - 1) / arguments.params.splits);
  block.splits = max(1, (tiles + split_tiles - 1) / split_tiles);
  block.begin = length - visible + block.split * split_tiles * kTileKeys;
  block.end = min(length, block.begin + split_tiles * kTileKeys);
  return block;
}

// Elements from the tensor's first to head 0 of the block's sequence. Where there are pages its origin is the table's
// row.
__device__ __forceinline__ int64_t sequence_offset(const nvb_attention_decode_params& p, const DecodeBlock& block,
                                                   int64_t stride) {
  return p.placement.pages != nullptr ? 0 : block.slot * stride;
}
__device__ __forceinline__ const int32_t* page_row(const nvb_attention_decode_params& p, const DecodeBlock& block) {
  return p.placement.pages + block.slot * p.placement.page_row_stride;
}

// What a block leaves in shared memory. The merge overwrites `maximum` and `sum`.
struct SplitResult {
  const float* output;  // part i, head h, column c at i * part_stride + h * head_stride + c
  int part_stride;
  int head_stride;
  int parts;       // at most kGroup
  float* maximum;  // [kGroup][kMaxHeadsPerBlock], in powers of two
  float* sum;      // [kGroup][kMaxHeadsPerBlock]
};

// For each head, turns the maxima of `count` parts into their weights and leaves the joint (m, l) in `total`. A head
// without a key has m = -inf, l = 0 and weights 0.
__device__ __forceinline__ void weigh_parts(float* maximum, float* sum, int count, int heads, float2* total) {
  if (static_cast<int>(threadIdx.x) < heads) {
    const int head = threadIdx.x;
    float most = -CUDART_INF_F;
    for (int i = 0; i < count; ++i) most = fmaxf(most, maximum[i * kMaxHeadsPerBlock + head]);
    float all = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float weight = exp2_fast(maximum[i * kMaxHeadsPerBlock + head] - exponent_base(most));
      maximum[i * kMaxHeadsPerBlock + head] = weight;
      all += weight * sum[i * kMaxHeadsPerBlock + head];
    }
    total[head] = make_float2(most, all);
  }
}

__device__ __forceinline__ void store_final(const nvb_attention_decode_params& p, const DecodeBlock& block, int head,
                                            int column, float output, float sum) {
  const float scale = p.value_scale != nullptr ? p.value_scale[block.kv_head] : 1.0f;
  const float value = sum == 0.0f ? 0.0f : output / sum * scale;
  const DecodeItem item = item_of(p, block, head);
  store_element(p.output, p.output_dtype, item.row * p.output_token_stride + item.head * p.output_head_stride + column,
                value);
}
// What an item's output is divided by: its sum, and that of its sink.
__device__ __forceinline__ float final_sum(const nvb_attention_decode_params& p, const DecodeBlock& block, int head,
                                           const float2& state) {
  if (p.sinks == nullptr) return state.y;
  const RowEnd end = row_end(state.x, state.y, p.sinks, item_of(p, block, head).head);
  return end.inverse == 0.0f ? 0.0f : 1.0f / end.inverse;
}
__device__ __forceinline__ void store_item_lse(const nvb_attention_decode_params& p, const DecodeBlock& block, int head,
                                               const float2& state) {
  const DecodeItem item = item_of(p, block, head);
  p.lse[static_cast<int64_t>(item.row) * p.query_heads + item.head] = row_end(state.x, state.y, p.sinks, item.head).lse;
}
__device__ __forceinline__ void store_final_lse(const nvb_attention_decode_params& p, const DecodeBlock& block,
                                                const float2* total) {
  if (p.lse != nullptr && static_cast<int>(threadIdx.x) < block.heads) {
    store_item_lse(p, block, threadIdx.x, total[threadIdx.x]);
  }
}

// Calls store(head, column, sum over i < count of weight i * partial output of slot first_slot + i), Width columns a
// thread. All loads of a thread are in flight together; they go past L1, because other blocks wrote during this launch.
template <int Width, typename Store>
__device__ __forceinline__ void merge_parts(const DecodeArguments& arguments, int64_t first_slot, int count, int heads,
                                            const float* weights, const Store& store) {
  const int value_dim = arguments.params.value_dim;
  const int groups = value_dim / Width;
  for (int index = threadIdx.x; index < heads * groups; index += blockDim.x) {
    const int head = index / groups;
    const int column = (index - head * groups) * Width;
    const float* part =
        arguments.partial_outputs + (first_slot + head * arguments.params.slots_per_head) * value_dim + column;
    float values[kGroup][Width];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= count) continue;
      if constexpr (Width == 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(part + static_cast<int64_t>(i) * value_dim));
        values[i][0] = four.x, values[i][1] = four.y, values[i][2] = four.z, values[i][3] = four.w;
      } else {
        values[i][0] = __ldcg(part + static_cast<int64_t>(i) * value_dim);
      }
    }
    float sums[Width] = {};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= count) continue;
      const float weight = weights[i * kMaxHeadsPerBlock + head];
#pragma unroll
      for (int j = 0; j < Width; ++j) sums[j] += weight * values[i][j];
    }
#pragma unroll
    for (int j = 0; j < Width; ++j) store(head, column + j, sums[j]);
  }
}

// Called by the whole block with `result` complete, after a barrier. `total` is shared, [kMaxHeadsPerBlock].
__device__ __forceinline__ void epilogue_split(const DecodeArguments& arguments, const DecodeBlock& block,
                                               const SplitResult& result, float2* total) {
  const nvb_attention_decode_params& p = arguments.params;
  const int threads = blockDim.x;
  const int value_dim = p.value_dim;
  const int elements = block.heads * value_dim;
  __shared__ bool last;

  // Merge the block's own parts.
  weigh_parts(result.maximum, result.sum, result.parts, block.heads, total);
  __syncthreads();
  const int64_t row =
      ((static_cast<int64_t>(block.sequence) * p.kv_heads + block.kv_head) * items_per_kv_head(p) + block.first) *
      arguments.params.slots_per_head;
  for (int index = threadIdx.x; index < elements; index += threads) {
    const int head = index / value_dim;
    const int column = index - head * value_dim;
    float output = 0.0f;
    for (int i = 0; i < result.parts; ++i) {
      output += result.maximum[i * kMaxHeadsPerBlock + head] *
                result.output[i * result.part_stride + head * result.head_stride + column];
    }
    if (block.splits == 1) {
      store_final(p, block, head, column, output, final_sum(p, block, head, total[head]));
    } else {
      arguments.partial_outputs[(row + head * arguments.params.slots_per_head + block.split) * value_dim + column] =
          output;
    }
  }
  if (block.splits == 1) {
    store_final_lse(p, block, total);
    return;
  }
  if (static_cast<int>(threadIdx.x) < block.heads) {
    arguments.partial_sums[row + threadIdx.x * arguments.params.slots_per_head + block.split] = total[threadIdx.x];
  }

  uint32_t* counter =
      p.counters + (static_cast<int64_t>(block.sequence) * gridDim.y + blockIdx.y) * NVB_ATTENTION_DECODE_COUNTERS;
  int unit = block.split;    // this block's partial result at the present level
  int units = block.splits;  // all of them
  int first_slot = 0;        // where the level's results lie
  while (true) {
    // The last of the group to arrive goes on; atomicInc wraps the counter to 0 for the next launch.
    const int group = unit / kGroup;
    const int groups = (units + kGroup - 1) / kGroup;
    const int count = min(kGroup, units - group * kGroup);
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicInc(&counter[first_slot == 0 ? group : kGroup], count - 1) == static_cast<uint32_t>(count - 1);
      __threadfence();
    }
    __syncthreads();
    if (!last) return;

    // Merge the group.
    const int64_t slot = row + first_slot + group * kGroup;
    for (int index = threadIdx.x; index < count * block.heads; index += threads) {
      const int head = index / count;
      const int i = index - head * count;
      const float2 state = __ldcg(&arguments.partial_sums[slot + head * arguments.params.slots_per_head + i]);
      result.maximum[i * kMaxHeadsPerBlock + head] = state.x;
      result.sum[i * kMaxHeadsPerBlock + head] = state.y;
    }
    __syncthreads();
    weigh_parts(result.maximum, result.sum, count, block.heads, total);
    __syncthreads();
    const auto store = [&](int head, int column, float output) {
      if (groups == 1) {
        store_final(p, block, head, column, output, final_sum(p, block, head, total[head]));
      } else {
        arguments.partial_outputs[(row + head * arguments.params.slots_per_head + arguments.params.splits + group) *
                                      value_dim +
                                  column] = output;
      }
    };
    if (value_dim % 4 == 0) {
      merge_parts<4>(arguments, slot, count, block.heads, result.maximum, store);
    } else {
      merge_parts<1>(arguments, slot, count, block.heads, result.maximum, store);
    }
    if (groups == 1) {
      store_final_lse(p, block, total);
      return;
    }
    if (static_cast<int>(threadIdx.x) < block.heads) {
      arguments.partial_sums[row + threadIdx.x * arguments.params.slots_per_head + arguments.params.splits + group] =
          total[threadIdx.x];
    }
    unit = group;
    units = groups;
    first_slot = arguments.params.splits;
  }
}

// Keys of a tile of the tensor-core kernel, and of the f32 kernel.
inline constexpr int kDecodeMmaKeys = 16;
inline constexpr int kDecodeSimtKeys = 32;

inline constexpr int kDecodeStaticBytes = 4096;  // of shared memory, at most

// The kernels: for few keys (attention_decode_short.cu), on tensor cores, and plain ones. `supports_…` fills in the
// shape of the kernel for these arguments; `supports_decode_short` is asked after `supports_decode_mma`.
bool supports_decode_mma(const nvb_attention_decode_params& params, const nvb_launch& launch,
                         nvb_attention_decode_shape& shape);
bool supports_decode_short(const nvb_attention_decode_params& params, const nvb_launch& launch,
                           nvb_attention_decode_shape& shape);
bool supports_decode_simt(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_short(const DecodeArguments& arguments, const nvb_launch& launch);
cudaError_t launch_decode_mma(const DecodeArguments& arguments, const nvb_launch& launch);
cudaError_t launch_decode_simt(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
