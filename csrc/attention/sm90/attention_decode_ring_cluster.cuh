// How attention_decode_ring.cuh divides one row (a sequence, KV head and chunk) among the blocks of a cluster, and how
// they merge it: each sends its partial result into the shared memory of all, a share of the columns to each, so that
// no fence of the device, counter or workspace is needed, and every block merges its share.
//
// Shared memory: [cluster][places] of {four columns of an item, (maximum, sum)}; column group i of all items lies in
// block i % cluster. A barrier counts the bytes. A block that waits for all parts outlives what is sent to it.
#pragma once

#include "../../common/cluster.cuh"
#include "attention_decode_ring_merge.cuh"

namespace nvb::decode_ring {

inline constexpr int kMaxCluster = 16;

// Column groups of a block's share, at most.
__host__ __device__ __forceinline__ int places_of(int items, int groups, int cluster) {
  return (items * groups + cluster - 1) / cluster;
}

// The block's equal part of the tiles of its cluster's row, which may be none. Every lane of the warp knows it.
template <typename Tile>
__device__ __forceinline__ Segment segment_in_cluster(const nvb_attention_decode_params& p, int cluster, int& slot,
                                                      int& old_end) {
  const int row = static_cast<int>(blockIdx.x) / cluster, rank = static_cast<int>(blockIdx.x) % cluster;
  const int units = p.kv_heads * p.chunks;
  Segment segment;
  segment.sequence = row / units;
  const int unit = row % units;
  segment.kv_head = unit / p.chunks;
  segment.first = unit % p.chunks * p.heads_per_chunk;
  segment.heads = min(p.heads_per_chunk, items_per_kv_head(p) - segment.first);
  const Visible visible = find_visible<Tile>(p, segment.sequence);
  const int first = visible.tiles * rank / cluster, end = visible.tiles * (rank + 1) / cluster;
  segment.first_tile = visible.first_tile + first;
  segment.ring_first = 0, segment.ring_end = end - first;
  segment.slot = 0;
  segment.begin = visible.begin, segment.end = visible.end;
  segment.all_begin = visible.all_begin, segment.all_end = visible.all_end;
  segment.counter = segment.first_block = 0;
  segment.blocks = cluster;
  segment.last = 1;
  slot = visible.slot, old_end = visible.old_end;
  return segment;
}

// By one thread, any time before the barrier is waited for.
template <typename Tile>
__device__ __forceinline__ void expect_parts(uint64_t* arrived, int items, int cluster) {
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int own = (items * (Tile::kHeadDim / 4) - rank + cluster - 1) / cluster;
  barrier_expect(arrived, cluster * own * 32);
}

// Sends four columns of an item to the block that merges them.
template <typename Tile>
__device__ __forceinline__ void send_part(float4* received, uint64_t* arrived, int items, int cluster, int index,
                                          const Merged& part) {
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int owner = index % cluster, place = index / cluster;
  const int places = places_of(items, Tile::kHeadDim / 4, cluster);
  const uint32_t to = cluster_address(received + 2 * (rank * places + place), owner);
  const uint32_t barrier = cluster_address(arrived, owner);
  cluster_store(to, {part.output.x, part.output.y, part.output.z, part.output.w}, barrier);
  cluster_store(to + 16, {part.maximum, part.sum, 0.0f, 0.0f}, barrier);
}

// Merges the block's share, in the order of the blocks.
template <typename Tile>
__device__ __forceinline__ void merge_in_cluster(const nvb_attention_decode_params& p, const Segment& segment,
                                                 const float4* received, uint64_t* arrived) {
  constexpr int kGroups = Tile::kHeadDim / 4;
  constexpr int kBatch = 8;
  const int cluster = segment.blocks, rank = static_cast<int>(blockIdx.x) % cluster;
  const int places = places_of(segment.heads, kGroups, cluster);
  barrier_wait(arrived, 0);
  for (int place = threadIdx.x; place * cluster + rank < segment.heads * kGroups; place += 32 * Tile::kWarps) {
    const int index = place * cluster + rank;
    Merged merged{-CUDART_INF_F, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    for (int first = 0; first < cluster; first += kBatch) {
      float2 states[kBatch];
      float4 outputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        states[i] = make_float2(-CUDART_INF_F, 0.0f), outputs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i >= cluster) continue;
        const float4* const part = received + 2 * ((first + i) * places + place);
        outputs[i] = part[0];
        states[i] = *reinterpret_cast<const float2*>(part + 1);
      }
      merged.add(states, outputs);
    }
    store_four(p, segment.block(), index / kGroups, index % kGroups * 4, merged.output,
               make_float2(merged.maximum, merged.sum));
  }
}

}  // namespace nvb::decode_ring
