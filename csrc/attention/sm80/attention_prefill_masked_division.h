// How attention_prefill_masked.cuh divides the keys among blocks, and the scratch in which their results meet.
#pragma once

#include <algorithm>

#include "../../common/cluster_places.h"
#include "../attention.h"

namespace nvb::masked {

inline constexpr int kMostPairs = 8;       // of a row and a query head, of a block: the columns of S^T
inline constexpr int kKeys = 16;           // of a tile
inline constexpr int kMostBlocks = 16;     // of a cluster, where the device has places for such clusters
inline constexpr int kPortableBlocks = 8;  // that every device has which has clusters
inline constexpr int kManyKeys = 1024;     // from which on a cluster has more than those, or clusters share keys

// Four columns that each block of a cluster gets from all its blocks; the last blocks may get fewer.
__host__ __device__ constexpr int share_fours(int columns, int blocks) {
  return (columns / 4 + blocks - 1) / blocks;
}
// Fours of floats of a cluster's partial results for such a share: outputs, and a state for each pair.
__host__ __device__ constexpr int partial_fours(int fours) {
  return kMostPairs * (fours + 1);
}

// How many blocks share the keys of a chunk of pairs, in clusters of how many.
struct Division {
  int splits;    // blocks of a cluster
  int clusters;  // whose results meet in memory
};

// A cluster has as many blocks as the device has places for, each with keys, where there are clusters.
inline int splits_of(const nvb_launch& launch, int64_t chunks, int longest) {
  if (launch.capability < 90 || launch.capability >= 120) return 1;
  for (int splits = kMostBlocks; splits > kPortableBlocks && longest >= kManyKeys; splits -= 2) {
    if (splits * chunks <= launch.multiprocessors && chunks <= cluster_places(launch, splits)) return splits;
  }
  int splits = 1;
  while (splits < kPortableBlocks && 2 * splits * chunks <= launch.multiprocessors && splits * kKeys < longest) {
    splits *= 2;
  }
  return splits;
}

// What an H200 reads in a microsecond: a multiprocessor, and all of them. 64 of them read 2.45 TB/s, whatever they have
// on their way. And the microseconds that a meeting in memory takes.
inline constexpr double kMultiprocessorBytes = 38e3;
inline constexpr double kMemoryBytes = 4.1e6;
inline constexpr double kMeeting = 1.5;
inline constexpr int kMostClusters = 32;

// Of `chunks` chunks of pairs of all sequences and KV heads. Without scratch there is one cluster of each.
inline Division division_of(const nvb_attention_prefill_params& p, const nvb_launch& launch, int64_t chunks,
                            int longest, bool has_scratch) {
  if (p.one_order != 0) return {1, 1};
  Division best{splits_of(launch, chunks, longest), 1};
  if (!has_scratch || longest < kManyKeys) return best;
  const double bytes = 4.0 * p.head_dim * longest * static_cast<double>(chunks);
  const auto time = [&](const Division& d) {
    const double blocks = std::min<double>(static_cast<double>(d.splits * d.clusters * chunks), launch.multiprocessors);
    return bytes / std::min(blocks * kMultiprocessorBytes, kMemoryBytes) + (d.clusters > 1 ? kMeeting : 0.0);
  };
  const bool has_clusters = launch.capability >= 90 && launch.capability < 120;
  for (int splits = has_clusters ? kPortableBlocks : 1; splits >= 1; splits /= 2) {
    const int64_t places = std::min<int64_t>(cluster_places(launch, splits), launch.multiprocessors / splits);
    const Division division{splits, static_cast<int>(std::min<int64_t>(places / chunks, kMostClusters))};
    if (division.clusters > 1 && time(division) < 0.97 * time(best)) best = division;
  }
  return best;
}

// Pairs of the sequence with most rows, and its keys.
struct Extent {
  int pairs, longest;
  int64_t chunks;  // of all sequences and KV heads
};
inline Extent extent_of(const nvb_attention_prefill_params& p) {
  Extent extent{0, 0, 0};
  for (int i = 0; i < p.sequences; ++i) {
    extent.pairs = std::max(extent.pairs, p.sequence[i].query_count * (p.query_heads / p.kv_heads));
    extent.longest = std::max(extent.longest, p.sequence[i].kv_length);
  }
  extent.chunks = (extent.pairs + kMostPairs - 1) / kMostPairs * int64_t{p.kv_heads} * p.sequences;
  return extent;
}

// The scratch that a launch makes use of: bytes of `partial`, and counters.
struct Scratch {
  int64_t partial_bytes, counters;
};
inline Scratch scratch_of(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  const Extent extent = extent_of(p);
  if (extent.pairs == 0) return {0, 0};
  const Division division = division_of(p, launch, extent.chunks, extent.longest, true);
  if (division.clusters == 1) return {0, 0};
  const int64_t items = extent.chunks * division.splits;
  return {items * division.clusters * partial_fours(share_fours(p.head_dim, division.splits)) * int64_t{16}, items};
}

}  // namespace nvb::masked
