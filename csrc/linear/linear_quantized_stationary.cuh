// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 16 tokens t and a large Int4 W without offsets, where the
// time is that of reading W: compute capability 9.0.
//
// Input-stationary: the blocks of a cluster divide k, a block's warps divide its slice, and a warp keeps its chunks of
// x in registers, as second operands of mma m16n8k16, while W passes by, one block of 16 rows after the other. A warp's
// part of such a block lies together in memory: two bulk copies bring it and its scales into a ring of the warp's own,
// so that no warp waits for another. The warps' sums of some blocks of rows meet in shared memory, where they are added
// in a fixed order; those of a cluster meet in the memory of the block that owns the rows.
//
// The rings are filled before griddepcontrol.wait: W and its scales may not be written by the grid before.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64 and at most Stationary::kChunks chunks
// a warp. Shared memory: StationaryPlan.
#pragma once

#include <algorithm>

#include "linear_quantized_stationary_parts.cuh"

namespace nvb {
namespace quantized {

// Up to 8 Tiles tokens.
template <Scales Kind, int Tiles>
struct Stationary {
  static constexpr int kChunks = Tiles == 1 ? 8 : 4;       // that a warp keeps, in 64 registers
  static constexpr int kWarps = Tiles == 1 ? 8 : 16;       // of a block, at most
  static constexpr int kBlocksPerSm = Tiles == 1 ? 2 : 1;  // of so many warps
  static constexpr int kStages = 2;                        // of a warp's ring
  static constexpr int kSteps = Kind == Scales::kGroups32 ? 2 : 1;
  static constexpr int kWeightBytes = kChunks * 512;
  static constexpr int kScaleBytes = kChunks * kSteps * 32;
  static constexpr int kStageBytes = kWeightBytes + kScaleBytes;
  static constexpr int kVectors = Tiles * 32;  // of 4 sums of a block of rows
};

// How a product is divided, and where in a block's shared memory things lie: rings, sums (and x on its way), sums
// received from the cluster, barriers.
struct StationaryPlan {
  int cluster_shift;  // log2 of the blocks of a cluster
  int warps;          // of a block
  int rows, longer;   // blocks of rows of a cluster, and how many clusters take one more
  int phase_rows;     // blocks of rows between two meetings of the warps
  int sums_at, received_at, barriers_at, bytes;
  unsigned grid;
};

template <Scales Kind, typename T, int Tiles>
__global__ void __launch_bounds__(32 * Stationary<Kind, Tiles>::kWarps, Stationary<Kind, Tiles>::kBlocksPerSm)
    linear_quantized_stationary(const __grid_constant__ nvb_linear_quantized_params p,
                                const __grid_constant__ LinearEpilogue epilogue,
                                const __grid_constant__ StationaryPlan plan) {
#if __CUDA_ARCH__ == 900
  using Shape = Stationary<Kind, Tiles>;
  constexpr int kChunks = Shape::kChunks, kSteps = Shape::kSteps, kVectors = Shape::kVectors;
  extern __shared__ __align__(128) char base[];
  // The shuffle tells the compiler that a warp agrees on its number.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warps = plan.warps;
  const int shift = plan.cluster_shift;
  const int rank = shift > 0 ? static_cast<int>(cluster_rank()) : 0;
  const int m = static_cast<int>(p.m);

  // This warp's chunks, and the cluster's blocks of rows.
  const int chunks = static_cast<int>(p.k / kChunk);
  const int slice = rank * chunks >> shift, slice_end = (rank + 1) * chunks >> shift;
  const int begin = slice + (slice_end - slice) * warp / warps;
  const int count = slice + (slice_end - slice) * (warp + 1) / warps - begin;
  const int cluster = static_cast<int>(blockIdx.x >> shift);
  const int64_t first_row = static_cast<int64_t>(cluster) * plan.rows + min(cluster, plan.longer);
  const int rows = plan.rows + (cluster < plan.longer ? 1 : 0);
  const int owned = (rows - rank + (1 << shift) - 1) >> shift;

  const int group_shift = Kind == Scales::kGroups64 && p.group == 128 ? 1 : 0;
  const int groups = Kind == Scales::kGroups32 ? 2 * chunks : (chunks + group_shift) >> group_shift;
  const int first_group = Kind == Scales::kGroups32 ? 2 * begin : begin >> group_shift;
  const int odd = begin & group_shift;
  const int scale_bytes = 32 * (Kind == Scales::kGroups32 ? 2 * count : (odd + count + group_shift) >> group_shift);

  char* const ring = base + warp * (Shape::kStages * Shape::kStageBytes);
  float4* const sums = reinterpret_cast<float4*>(base + plan.sums_at);
  float4* const received = reinterpret_cast<float4*>(base + plan.received_at);
  uint64_t* const full = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + warp * Shape::kStages;
  uint64_t* const all_received = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + warps * Shape::kStages;

  allow_next_grid();
  if (lane < Shape::kStages) {
    barrier_init(full + lane, 1);
    barrier_init_fence();
  }
  if (shift > 0) {
    if (threadIdx.x == 0) {
      barrier_init(all_received, 1);
      barrier_init_fence();
      int lanes = 0;  // that hold a token
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) lanes += 8 * (min(max(m - 8 * tile, 0), 8) + 1 >> 1);
      barrier_expect(all_received, (owned << shift) * lanes * 16);
    }
    __syncwarp();
    cluster_arrive();
  }
  __syncwarp();

  // Fill the ring. Scales of chunks past the warp's last stay 0.
  const char* weight = static_cast<const char*>(p.weight) + (first_row * chunks + begin) * 512;
  const char* scale = static_cast<const char*>(p.scales) + (first_row * groups + first_group) * 32;
  int next = 0;
  const auto copy_next = [&](int slot) {
    if (lane == 0 && next < rows) {
      char* const target = ring + slot * Shape::kStageBytes;
      barrier_expect(full + slot, count * 512 + scale_bytes);
      bulk_copy_once(target, weight, count * 512, full + slot);
      bulk_copy_once(target + Shape::kWeightBytes, scale, scale_bytes, full + slot);
    }
    ++next;
    weight += static_cast<int64_t>(chunks) * 512;
    scale += static_cast<int64_t>(groups) * 32;
  };
#pragma unroll 1
  for (int i = 0; i < Shape::kStages; ++i) {
    copy_next(i);
    for (int at = scale_bytes + lane * 4; at < Shape::kScaleBytes; at += 128) {
      *reinterpret_cast<uint32_t*>(ring + i * Shape::kStageBytes + Shape::kWeightBytes + at) = 0;
    }
  }
  __syncwarp();

  wait_for_previous_grid();
  uint32_t x[kChunks][Tiles][4][2];
  load_stationary<T>(static_cast<const T*>(p.input) + static_cast<int64_t>(begin) * kChunk, p.input_stride, m, count,
                     reinterpret_cast<char*>(sums) + warp * (4 * kTokenBytes<kChunks>), x);
  if (Tiles > 1) __syncthreads();  // the sums take the place of x
  if (shift > 0) cluster_wait();   // the owners' barriers are made

  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int phase = 0; phase < rows; phase += plan.phase_rows) {
    const int phase_end = min(phase + plan.phase_rows, rows);
#pragma unroll 1
    for (int row = phase; row < phase_end; ++row) {
      const char* const stage = ring + slot * Shape::kStageBytes;
      barrier_wait(full + slot, parity);
      float totals[Tiles][4] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 raw = load16(stage + c * 512 + lane * 16);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int group = Kind == Scales::kGroups32 ? 2 * c + s : (c + odd) >> group_shift;
          const float2 factor = __half22float2(
              as_f16(*reinterpret_cast<const uint32_t*>(stage + Shape::kWeightBytes + group * 32 + lane / 4 * 4)));
          float products[Tiles][4] = {};
#pragma unroll
          for (int j = s * 4 / kSteps; j < (s + 1) * 4 / kSteps; ++j) {
            uint32_t a[4];
            Int4Decoder<T>::fragment(words[j], a);
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
              mma_m16n8k16<T>(products[tile], a, x[c][tile][j][0], x[c][tile][j][1]);
            }
          }
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              totals[tile][e] = fmaf(e < 2 ? factor.x : factor.y, products[tile][e], totals[tile][e]);
            }
          }
        }
      }
      __syncwarp();
      copy_next(slot);
      if (++slot == Shape::kStages) slot = 0, parity ^= 1;
      float4* const target = sums + ((row - phase) * warps + warp) * kVectors + lane;
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        if (8 * tile + lane % 4 * 2 >= m) continue;
        target[tile * 32] = make_float4(totals[tile][0], totals[tile][1], totals[tile][2], totals[tile][3]);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < (phase_end - phase) * kVectors; i += blockDim.x) {
      const int row = phase + i / kVectors, place = i % kVectors;
      const float4* const parts = sums + (row - phase) * warps * kVectors + place;
      float total[4] = {};
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        const float4 part = parts[w * kVectors];
        total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
      }
      if (shift == 0) {
        finish_fragment<T>(p, epilogue, first_row + row, place / 32, total);
      } else if (place / 32 * 8 + lane % 4 * 2 < m) {
        const int owner = row & ((1 << shift) - 1);
        float4* const target = received + ((row >> shift << shift) + rank) * kVectors + place;
        cluster_store(cluster_address(target, owner), total, cluster_address(all_received, owner));
      }
    }
    if (phase_end < rows) __syncthreads();
  }
  if (shift > 0) {
    barrier_wait(all_received, 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < owned * kVectors; i += blockDim.x) {
      const int row = i / kVectors, place = i % kVectors;
      float total[4] = {};
#pragma unroll 2
      for (int r = 0; r < 1 << shift; ++r) {
        const float4 part = received[((row << shift) + r) * kVectors + place];
        total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
      }
      finish_fragment<T>(p, epilogue, first_row + (row << shift) + rank, place / 32, total);
    }
  }
#endif
}

// Lays a product out over clusters of 1 << cluster_shift blocks, blocks_per_sm on a multiprocessor; false if it does
// not fit.
template <Scales Kind, int Tiles>
bool make_stationary_plan(const nvb_linear_quantized_params& p, const nvb_launch& launch, int cluster_shift,
                          int blocks_per_sm, StationaryPlan& plan) {
  using Shape = Stationary<Kind, Tiles>;
  constexpr int kReservedBytes = 1024;  // of shared memory, by the system for each block
  constexpr int kRowBytes = Shape::kVectors * 16, kBarrierBytes = static_cast<int>(sizeof(uint64_t));
  const int cluster = 1 << cluster_shift;
  const int chunks = static_cast<int>(p.k / kChunk);
  const int slice = (chunks + cluster - 1) / cluster;
  const int warps = (slice + Shape::kChunks - 1) / Shape::kChunks;
  if (warps > Shape::kWarps || warps > chunks / cluster) return false;
  const int64_t row_blocks = (p.n + kTileRows - 1) / kTileRows;
  const int64_t clusters = std::min<int64_t>(row_blocks, std::max(1, launch.multiprocessors * blocks_per_sm / cluster));
  const int rows = static_cast<int>((row_blocks + clusters - 1) / clusters);
  const int bytes =
      (launch.shared_bytes_per_block + kReservedBytes) / std::max(blocks_per_sm, Shape::kBlocksPerSm) - kReservedBytes;
  const int scratch = Tiles == 1 ? 0 : warps * 4 * kTokenBytes<Shape::kChunks>;
  const int rings = warps * Shape::kStages * (Shape::kStageBytes + kBarrierBytes) + kBarrierBytes;
  const int received = cluster == 1 ? 0 : (rows + cluster - 1) / cluster * cluster * kRowBytes;
  const int left = bytes - rings - received;
  if (left < std::max(scratch, warps * kRowBytes)) return false;
  const int phases = (rows + left / (warps * kRowBytes) - 1) / (left / (warps * kRowBytes));
  plan.cluster_shift = cluster_shift;
  plan.warps = warps;
  plan.rows = static_cast<int>(row_blocks / clusters);
  plan.longer = static_cast<int>(row_blocks % clusters);
  plan.phase_rows = (rows + phases - 1) / phases;
  plan.sums_at = warps * Shape::kStages * Shape::kStageBytes;
  plan.received_at = plan.sums_at + std::max(scratch, plan.phase_rows * warps * kRowBytes);
  plan.barriers_at = plan.received_at + received;
  plan.bytes = plan.barriers_at + (warps * Shape::kStages + 1) * kBarrierBytes;
  plan.grid = static_cast<unsigned>(clusters * cluster);
  return true;
}

}  // namespace quantized
}  // namespace nvb
