// What the prefill kernels share: their arguments and the order in which blocks take tiles of query rows.
#pragma once

#include "attention.h"
#include "attention_head_terms.cuh"
#include "attention_prefill_lengths.cuh"
#include "attention_tree.cuh"
#include "softmax.cuh"

namespace nvb {

struct PrefillArguments {
  nvb_attention_prefill_params params;  // with window and chunk cut to kMaxLength
  // What divide_prefill found, for the kernels that call it.
  int tiles = 0;   // of rows of each sequence, where all have as many and the grid says so; else 0
  int groups = 1;  // of heads that share L2, where `tiles` is not 0
  int group = 1;   // query heads of a KV head
};
static_assert(sizeof(PrefillArguments) <= 4096, "drivers before 12.1 take at most 4096 bytes of kernel arguments");

// The tile of query rows of one block.
struct PrefillBlock {
  int sequence;  // below 0: none, past the last tile of lengths in device memory
  int head;
  int first_row;
};

// Blocks start in the order of their index. Within a sequence the order is: groups of heads, then tiles from the last
// to the first (under a causal mask the last has the most keys, so the short tiles fill the gaps at the end), then the
// heads of the group, which read the same keys at about the same time.
__device__ __forceinline__ PrefillBlock find_prefill_block(const PrefillArguments& arguments, int block,
                                                           int rows_per_tile) {
  if (has_device_lengths(arguments.params)) {
    const int heads = arguments.params.query_heads;
    const DeviceTile tile = find_device_tile(arguments.params, block / heads, rows_per_tile);
    return PrefillBlock{tile.sequence, block % heads, tile.first_row};
  }
  int low = 0;
  int high = arguments.params.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (arguments.params.sequence[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int tiles = (arguments.params.sequence[low].query_count + rows_per_tile - 1) / rows_per_tile;
  const int local = block - arguments.params.sequence[low].first_block;
  const int group_blocks = tiles * arguments.params.heads_per_group;
  const int group = local / group_blocks;
  const int first_head = group * arguments.params.heads_per_group;
  const int heads = min(arguments.params.heads_per_group, arguments.params.query_heads - first_head);
  const int rest = local - group * group_blocks;
  return PrefillBlock{low, first_head + rest % heads, (tiles - 1 - rest / heads) * rows_per_tile};
}

// Sequences of equal length whose heads make whole groups have a grid of heads of a group, tiles, and groups of all
// sequences, which starts in the same order. A block then neither searches nor divides, which takes some 1,500 clocks.
inline dim3 divide_prefill(PrefillArguments& arguments, int rows_per_tile, int blocks) {
  const nvb_attention_prefill_params& p = arguments.params;
  arguments.group = p.query_heads / p.kv_heads;
  arguments.groups = p.query_heads / p.heads_per_group;
  arguments.tiles = 0;
  if (has_device_lengths(p)) return dim3(blocks);
  const int tiles = (p.sequence[0].query_count + rows_per_tile - 1) / rows_per_tile;
  bool equal = p.query_heads % p.heads_per_group == 0 && tiles <= 65535 && p.sequences * arguments.groups <= 65535;
  for (int i = 1; i < p.sequences; ++i) {
    equal = equal && (p.sequence[i].query_count + rows_per_tile - 1) / rows_per_tile == tiles;
  }
  if (!equal) return dim3(blocks);
  arguments.tiles = tiles;
  return dim3(p.heads_per_group, tiles, p.sequences * arguments.groups);
}
__device__ __forceinline__ PrefillBlock find_prefill_block(const PrefillArguments& arguments, int rows_per_tile) {
  const int z = blockIdx.z;
  const int sequence = arguments.groups == 1 ? z : z / arguments.groups;
  const int group = arguments.groups == 1 ? 0 : z % arguments.groups;
  const int head = group * arguments.params.heads_per_group + blockIdx.x;
  return PrefillBlock{sequence, head, (arguments.tiles - 1 - static_cast<int>(blockIdx.y)) * rows_per_tile};
}

// The keys that the query at `position` sees of a sequence of kv_length keys, of which the first `prefix` are behind no
// causal mask. Both ends grow with the position. Without Terms there is no chunk and no prefix.
template <bool Terms>
__device__ __forceinline__ KeyRange visible_keys(const nvb_attention_prefill_params& p, int kv_length, int prefix,
                                                 int position) {
  if (Terms) {
    const int chunk_start = p.chunk > 0 && position > 0 ? position / p.chunk * p.chunk : 0;
    return visible_keys(position, kv_length, p.causal, p.window, prefix, p.chunk, chunk_start);
  }
  return visible_keys(position, kv_length, p.causal, p.window);
}

// Elements from the tensor's first to those of the block's first row.
__device__ __forceinline__ int64_t query_offset(const nvb_attention_prefill_params& p,
                                                const nvb_attention_sequence& sequence, const PrefillBlock& block) {
  return sequence.query_start * p.query_sequence_stride + block.first_row * p.query_token_stride +
         block.head * p.query_head_stride;
}
__device__ __forceinline__ int64_t output_offset(const nvb_attention_prefill_params& p,
                                                 const nvb_attention_sequence& sequence, const PrefillBlock& block) {
  return sequence.query_start * p.output_sequence_stride + block.first_row * p.output_token_stride +
         block.head * p.output_head_stride;
}
// Of `row` of the block.
__device__ __forceinline__ int64_t lse_offset(const nvb_attention_prefill_params& p,
                                              const nvb_attention_sequence& sequence, const PrefillBlock& block,
                                              int row) {
  return (sequence.query_start * p.lse_sequence_stride + block.first_row + row) * p.query_heads + block.head;
}

// Of key 0 in the mask of `row` of the block.
__device__ __forceinline__ int64_t mask_offset(const nvb_attention_prefill_params& p,
                                               const nvb_attention_sequence& sequence, const PrefillBlock& block,
                                               int row) {
  return sequence.query_start * p.mask_sequence_stride + (block.first_row + row) * p.mask_row_stride +
         block.head * p.mask_head_stride;
}

// The parents of the sequence's rows.
__device__ __forceinline__ const int32_t* tree_of(const nvb_attention_prefill_params& p,
                                                  const nvb_attention_sequence& sequence) {
  return p.tree_parents + sequence.query_start * p.lse_sequence_stride;
}

// The sequence's row of the page table.
__device__ __forceinline__ const int32_t* page_row(const nvb_attention_prefill_params& p,
                                                   const nvb_attention_sequence& sequence) {
  return p.placement.pages + sequence.kv_start * p.placement.page_row_stride;
}

// What a block's shared memory may hold, which decides the tiles of the tensor-core kernel: 227 KiB on capability 9.0
// and 10.x, 163 KiB on 8.0 and 8.7, 99 KiB on 8.6, 8.9 and 12.x.
enum class SharedClass { kSmall, kMedium, kLarge };

// Enqueues the kernel.
cudaError_t launch_prefill_mma_f16(const PrefillArguments& arguments, SharedClass shared, int blocks,
                                   cudaStream_t stream);
cudaError_t launch_prefill_mma_bf16(const PrefillArguments& arguments, SharedClass shared, int blocks,
                                    cudaStream_t stream);

cudaError_t launch_prefill_masked_f16(const PrefillArguments& arguments, const nvb_launch& launch);
cudaError_t launch_prefill_masked_bf16(const PrefillArguments& arguments, const nvb_launch& launch);

inline constexpr int kPrefillSimtRows = 64;
cudaError_t launch_prefill_simt(const PrefillArguments& arguments, int blocks, cudaStream_t stream);

}  // namespace nvb
