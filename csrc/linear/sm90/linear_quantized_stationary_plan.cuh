// How linear_quantized_stationary.cuh divides a product, and what its blocks keep in shared memory.
#pragma once

#include <algorithm>

#include "linear_quantized_stationary_parts.cuh"

namespace nvb {
namespace quantized {

// Up to 8 Tiles tokens, groups of GroupK.
template <int GroupK, bool ZeroPoints, int Tiles>
struct Stationary {
  static constexpr int kChunks = Tiles == 1 ? 8 : 4;       // that a warp keeps, in 64 registers
  static constexpr int kWarps = Tiles == 1 ? 8 : 16;       // of a block, at most
  static constexpr int kBlocksPerSm = Tiles == 1 ? 2 : 1;  // of so many warps
  static constexpr int kStages = 2;                        // of a warp's ring
  // Groups of warps that need the same x get one copy of it, behind one stage of W, for memory serves in turn. Without
  // zero points, where a block has one group, a warp fetches its own x: 14.3 µs instead of 15.0 for 16 tokens and
  // 14336 x 4096 elements on an H200.
  static constexpr bool kSharedInput = ZeroPoints && Tiles == 2;
  static constexpr int kEarly = kSharedInput ? 1 : kStages;
  static constexpr int kSteps = GroupK == 32 ? 2 : 1;
  static constexpr int kUnit = ZeroPoints && GroupK == 128 ? 2 : 1;  // chunks that stay together
  static constexpr int kGroups = kChunks * kSteps / kUnit;           // of a warp, at most
  static constexpr int kWeightBytes = kChunks * 512;
  static constexpr int kScaleBytes = kGroups * 32;
  static constexpr int kStageBytes = kWeightBytes + kScaleBytes * (ZeroPoints ? 2 : 1);
  static constexpr int kVectors = Tiles * 32;                                      // of 4 sums of a block of rows
  static constexpr int kScratchBytes = Tiles == 1 ? 0 : 4 * kTokenBytes<kChunks>;  // for a warp's x on its way
  // A warp's: stages, then the groups' sums of x.
  static constexpr int kGroupQuads = (kGroups + 3) / 4;
  static constexpr int kRingBytes = kStages * kStageBytes + (ZeroPoints ? kGroupQuads * Tiles * 256 : 0);
};

// How a product is divided, and where in a block's shared memory things lie: rings, sums (and x on its way), sums
// received from the cluster, barriers.
struct StationaryPlan {
  int cluster_shift;  // log2 of the blocks of a cluster
  int warps;          // of a block
  int warps_k;        // of a group
  int x_pitch;        // bytes of a token of the shared input
  int rows, longer;   // blocks of rows of a cluster, and how many clusters take one more
  int phase_rows;     // blocks of rows between two meetings of the warps, a multiple of the groups
  int sums_at, received_at, barriers_at, bytes;
  unsigned grid;
};

// Lays a product out over clusters of 1 << cluster_shift blocks of `groups` groups of warps, blocks_per_sm on a
// multiprocessor; false if it does not fit.
template <int GroupK, bool ZeroPoints, int Tiles>
bool make_stationary_plan(const nvb_linear_quantized_params& p, const nvb_launch& launch, int cluster_shift, int groups,
                          int blocks_per_sm, StationaryPlan& plan) {
  using Shape = Stationary<GroupK, ZeroPoints, Tiles>;
  constexpr int kReservedBytes = 1024;  // of shared memory, by the system for each block
  constexpr int kRowBytes = Shape::kVectors * 16, kBarrierBytes = static_cast<int>(sizeof(uint64_t));
  const int cluster = 1 << cluster_shift;
  const int units = (static_cast<int>(p.k / kChunk) + Shape::kUnit - 1) / Shape::kUnit;
  const int slice = (units + cluster - 1) / cluster;
  constexpr int kWarpUnits = Shape::kChunks / Shape::kUnit;
  const int warps_k = (slice + kWarpUnits - 1) / kWarpUnits, warps = warps_k * groups;
  if (warps > Shape::kWarps || warps_k > units / cluster) return false;
  const int64_t row_blocks = (p.n + kTileRows - 1) / kTileRows;
  // Clusters of four leave some multiprocessors of a GPC over: past 85 % of all they would wait for a second wave.
  const int places = launch.multiprocessors * blocks_per_sm / cluster;
  const int64_t clusters = std::min<int64_t>(row_blocks, std::max(1, cluster < 4 ? places : places * 85 / 100));
  const int rows = static_cast<int>((row_blocks + clusters - 1) / clusters);
  const int bytes =
      (launch.shared_bytes_per_block + kReservedBytes) / std::max(blocks_per_sm, Shape::kBlocksPerSm) - kReservedBytes;
  plan.x_pitch = slice * Shape::kUnit * kChunk * 2 + 32;  // half a warp reads four tokens from all banks
  const int x_bytes = Shape::kSharedInput ? static_cast<int>(p.m) * plan.x_pitch : warps * Shape::kScratchBytes;
  const int rings = warps * (Shape::kRingBytes + Shape::kStages * kBarrierBytes) + 2 * kBarrierBytes;
  const int received = cluster == 1 ? 0 : (rows + cluster - 1) / cluster * cluster * kRowBytes;
  const int left = bytes - rings - received;
  const int turn_bytes = warps * kRowBytes;  // of a block of rows for each group
  if (left < std::max(x_bytes, turn_bytes)) return false;
  const int turns = (rows + groups - 1) / groups;
  const int phases = (turns + left / turn_bytes - 1) / (left / turn_bytes);
  const int phase_turns = (turns + phases - 1) / phases;
  plan.cluster_shift = cluster_shift;
  plan.warps = warps;
  plan.warps_k = warps_k;
  plan.rows = static_cast<int>(row_blocks / clusters);
  plan.longer = static_cast<int>(row_blocks % clusters);
  plan.phase_rows = phase_turns * groups;
  plan.sums_at = warps * Shape::kRingBytes;
  plan.received_at = plan.sums_at + std::max((x_bytes + 15) / 16 * 16, phase_turns * turn_bytes);
  plan.barriers_at = plan.received_at + received;
  plan.bytes = plan.barriers_at + (warps * Shape::kStages + 2) * kBarrierBytes;
  plan.grid = static_cast<unsigned>(clusters * cluster);
  return true;
}

}  // namespace quantized
}  // namespace nvb
