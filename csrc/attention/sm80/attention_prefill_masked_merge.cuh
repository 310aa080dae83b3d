// How the partial results of attention_prefill_masked.cuh meet: those of the warps of a block in its shared memory,
// those of the blocks of a cluster by writes into one another's, each block getting its share of the columns from all,
// and those of several clusters in memory, where of the blocks with the same share the last to come adds them. Every
// sum is in the order of the parts, so equal arguments give equal bits.
#pragma once

#include "../../common/cluster.cuh"
#include "../attention_partial.cuh"
#include "attention_prefill_masked_division.h"
#include "attention_prefill_masked_tile.cuh"

namespace nvb::masked {

template <typename Tile>
struct Merge {
  // [block of the cluster][pair][column of this block's share]; 16 shares may be 4 columns each more than all.
  __align__(16) float4 outputs[kMostPairs * (Tile::kHeadDim / 4 + kMostBlocks)];
  __align__(16) float4 block_states[kMostBlocks][kMostPairs];  // reference and sum of each block
  float2 states[Tile::kWarps][kMostPairs];                     // and of each warp
  uint64_t received;
  bool is_last;
};

// The pairs of a block, which one KV head serves.
struct Pairs {
  const nvb_attention_prefill_params& params;
  const nvb_attention_sequence& sequence;
  int kv_head, group, first, count;

  __device__ __forceinline__ PrefillBlock place(int pair) const {
    return PrefillBlock{0, kv_head * group + (first + pair) % group, (first + pair) / group};
  }

  // Normalises and stores four columns.
  __device__ __forceinline__ void store(int pair, int column, const Merged& merged) const {
    const PrefillBlock at = place(pair);
    const RowEnd end = row_end(merged.maximum, merged.sum, params.sinks, at.head);
    const int64_t offset = output_offset(params, sequence, at) + column;
    store_element(params.output, params.output_dtype, offset, merged.output.x * end.inverse);
    store_element(params.output, params.output_dtype, offset + 1, merged.output.y * end.inverse);
    store_element(params.output, params.output_dtype, offset + 2, merged.output.z * end.inverse);
    store_element(params.output, params.output_dtype, offset + 3, merged.output.w * end.inverse);
    if (params.lse != nullptr && column == 0) params.lse[lse_offset(params, sequence, at, 0)] = end.lse;
  }
};

// The columns that a block of a cluster gets from all its blocks, in fours.
struct Share {
  int splits, rank, fours, own_first, own_fours;

  __device__ __forceinline__ explicit Share(int columns, int splits)
      : splits(splits), rank(static_cast<int>(blockIdx.x) % splits), fours(share_fours(columns, splits)) {
    own_first = rank * fours;
    own_fours = max(0, min(columns / 4, own_first + fours) - own_first);
  }
  // What the others and the block itself write into its memory.
  __device__ __forceinline__ uint32_t bytes(int pairs) const {
    return own_fours == 0 ? 0 : static_cast<uint32_t>(16 * pairs * splits * (own_fours + 1));
  }
};

// Adds `count` parts, kBatch at a time, whose loads are under way together; those behind the last repeat it.
template <int kBatch, typename State, typename Output>
__device__ __forceinline__ Merged merge_of(int count, const State& state_of, const Output& output_of) {
  Merged merged = Merged::none();
  for (int first = 0; first < count; first += kBatch) {
    float2 states[kBatch];
    float4 outputs[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int part = min(first + i, count - 1);
      states[i] = state_of(part);
      outputs[i] = output_of(part);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= count) states[i] = make_float2(-CUDART_INF_F, 0.0f);
    }
    merged.add(states, outputs);
  }
  return merged;
}

// By the whole block, whose warps have left their outputs at `warp_outputs`, `warp_bytes` apart, and their states.
template <typename Tile>
__device__ __forceinline__ void merge_and_store(const Pairs& pairs, const Share& share, Merge<Tile>& merge,
                                                const unsigned char* warp_outputs, int warp_bytes) {
  constexpr int kFours = Tile::kHeadDim / 4, kBatch = 8;
  const nvb_attention_prefill_params& p = pairs.params;
  const int clusters = static_cast<int>(gridDim.x) / share.splits;
  const int64_t item = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * share.splits + share.rank;
  const int unit = partial_fours(share.fours);  // of a cluster: outputs, then states
  float4* const partial = reinterpret_cast<float4*>(p.partial) + item * clusters * unit;
  // Of the cluster's result, four columns of the block's share.
  const auto finish = [&](int pair, int four, const Merged& merged) {
    if (clusters == 1) {
      pairs.store(pair, 4 * (share.own_first + four), merged);
    } else {
      float4* const own = partial + static_cast<int64_t>(blockIdx.x / share.splits) * unit;
      own[pair * share.fours + four] = merged.output;
      if (four == 0) own[kMostPairs * share.fours + pair] = make_float4(merged.maximum, merged.sum, 0.0f, 0.0f);
    }
  };

  for (int index = static_cast<int>(threadIdx.x); index < pairs.count * kFours; index += Tile::kThreads) {
    const int pair = index / kFours, four = index % kFours;
    const Merged merged = merge_of<Tile::kWarps>(
        Tile::kWarps, [&](int warp) { return merge.states[warp][pair]; },
        [&](int warp) {
          const unsigned char* const row = warp_outputs + warp * warp_bytes + pair * Tile::kOutputPitch * 4;
          return reinterpret_cast<const float4*>(row)[four];
        });
    if (share.splits == 1) {
      finish(pair, four, merged);
      continue;
    }
    const int rank = four / share.fours, place = four - rank * share.fours;
    const uint32_t received = cluster_address(&merge.received, rank);
    const float output[4] = {merged.output.x, merged.output.y, merged.output.z, merged.output.w};
    cluster_store(cluster_address(&merge.outputs[(share.rank * kMostPairs + pair) * share.fours + place], rank), output,
                  received);
    const float state[4] = {merged.maximum, merged.sum, 0.0f, 0.0f};
    if (place == 0) cluster_store(cluster_address(&merge.block_states[share.rank][pair], rank), state, received);
  }
  const int own = pairs.count * share.own_fours;
  if (share.splits > 1) {
    barrier_wait(&merge.received, 0);
    for (int index = static_cast<int>(threadIdx.x); index < own; index += Tile::kThreads) {
      const int pair = index / share.own_fours, four = index % share.own_fours;
      finish(pair, four,
             merge_of<kBatch>(
                 share.splits,
                 [&](int block) {
                   const float4 state = merge.block_states[block][pair];
                   return make_float2(state.x, state.y);
                 },
                 [&](int block) { return merge.outputs[(block * kMostPairs + pair) * share.fours + four]; }));
    }
  }
  if (clusters == 1) return;

  __syncthreads();
  if (threadIdx.x == 0) merge.is_last = arrive_last(p.counters + item, static_cast<uint32_t>(clusters - 1));
  __syncthreads();
  if (!merge.is_last) return;
  for (int index = static_cast<int>(threadIdx.x); index < own; index += Tile::kThreads) {
    const int pair = index / share.own_fours, four = index % share.own_fours;
    const Merged merged = merge_of<kBatch>(
        clusters,
        [&](int cluster) {
          return __ldcg(reinterpret_cast<const float2*>(partial + static_cast<int64_t>(cluster) * unit +
                                                        kMostPairs * share.fours + pair));
        },
        [&](int cluster) {
          return __ldcg(partial + static_cast<int64_t>(cluster) * unit + pair * share.fours + four);
        });
    pairs.store(pair, 4 * (share.own_first + four), merged);
  }
}

}  // namespace nvb::masked
