// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 16 tokens t and a large Int4 W, where the time is that of
// reading W: compute capability 9.0.
//
// Input-stationary: the blocks of a cluster divide k, the warps of a group divide the block's slice, and a warp keeps
// its chunks of x in registers, as second operands of mma m16n8k16, while W passes by, one block of 16 rows after the
// other; groups take turns. A warp's part of such a block lies together in memory: bulk copies bring it and its scales
// into a ring of the warp's own, so that no warp waits for another. The warps' sums of some blocks of rows meet in
// shared memory, where they are added in a fixed order; those of a cluster meet in the memory of the block that owns
// the rows.
//
// The first stages are on their way before griddepcontrol.wait: W and its scales and zero points may not be written by
// the grid before.
//
// With zero points, W = s q + o is multiplied as q alone, which takes a mask for each pair of values (UndecodedInt4),
// and Σ_groups o Σ x is added by one more product of the tensor cores for each block of rows, in tf32, whose operands
// are the zero points and the groups' sums of x in two parts. 16 tokens and 14336 x 4096 elements in groups of 32
// take 16.1 µs on an H200, where linear_quantized_stream takes 35.5. Without zero points that would cost more than
// Int4Decoder: 15.4 µs instead of 13.9 for 9 tokens.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64 and at most Stationary::kChunks chunks
// a warp. Shared memory: StationaryPlan.
#pragma once

#include "linear_quantized_stationary_plan.cuh"

namespace nvb {
namespace quantized {

template <int GroupK, bool ZeroPoints, typename T, int Tiles>
__global__ void __launch_bounds__(32 * Stationary<GroupK, ZeroPoints, Tiles>::kWarps,
                                  Stationary<GroupK, ZeroPoints, Tiles>::kBlocksPerSm)
    linear_quantized_stationary(const __grid_constant__ nvb_linear_quantized_params p,
                                const __grid_constant__ LinearEpilogue epilogue,
                                const __grid_constant__ StationaryPlan plan) {
#if __CUDA_ARCH__ == 900
  using Shape = Stationary<GroupK, ZeroPoints, Tiles>;
  constexpr int kChunks = Shape::kChunks, kSteps = Shape::kSteps, kVectors = Shape::kVectors, kUnit = Shape::kUnit;
  extern __shared__ __align__(128) char base[];
  // The shuffle tells the compiler that a warp agrees on its number.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warps_k = plan.warps_k, warp_k = warp % warps_k;
  const int groups_n = plan.warps / warps_k, group_n = warp / warps_k;
  const int shift = plan.cluster_shift;
  const int rank = shift > 0 ? static_cast<int>(cluster_rank()) : 0;
  const int m = static_cast<int>(p.m);

  // This warp's chunks, and the cluster's blocks of rows.
  const int chunks = static_cast<int>(p.k / kChunk);
  const int units = (chunks + kUnit - 1) / kUnit;
  const int slice = rank * units >> shift, slice_units = ((rank + 1) * units >> shift) - slice;
  const int begin = (slice + slice_units * warp_k / warps_k) * kUnit;
  const int count = min((slice + slice_units * (warp_k + 1) / warps_k) * kUnit, chunks) - begin;
  const int cluster = static_cast<int>(blockIdx.x >> shift);
  const int64_t first_row = static_cast<int64_t>(cluster) * plan.rows + min(cluster, plan.longer);
  const int rows = plan.rows + (cluster < plan.longer ? 1 : 0);
  const int owned = (rows - rank + (1 << shift) - 1) >> shift;

  constexpr int kGroupShift = GroupK == 128 ? 1 : 0;
  const int groups = GroupK == 32 ? 2 * chunks : (chunks + kGroupShift) >> kGroupShift;
  const int first_group = GroupK == 32 ? 2 * begin : begin >> kGroupShift;
  const int odd = kUnit == 2 ? 0 : begin & kGroupShift;
  const int scale_bytes = 32 * (GroupK == 32 ? 2 * count : (odd + count + kGroupShift) >> kGroupShift);

  char* const ring = base + warp * Shape::kRingBytes;
  float4* const sums = reinterpret_cast<float4*>(base + plan.sums_at);
  float4* const received = reinterpret_cast<float4*>(base + plan.received_at);
  uint64_t* const full = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + warp * Shape::kStages;
  uint64_t* const all_received = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + plan.warps * Shape::kStages;
  uint64_t* const x_arrived = all_received + 1;

  allow_next_grid();
  if (lane < Shape::kStages) {
    barrier_init(full + lane, 1);
    barrier_init_fence();
  }
  if (Shape::kSharedInput && threadIdx.x == 0) {
    barrier_init(x_arrived, 1);
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
  const char* weight = static_cast<const char*>(p.weight) + ((first_row + group_n) * chunks + begin) * 512;
  int64_t scale_at = ((first_row + group_n) * groups + first_group) * 32;
  int next = group_n;
  const auto copy_next = [&](int slot) {
    if (lane == 0 && next < rows) {
      char* const target = ring + slot * Shape::kStageBytes;
      barrier_expect(full + slot, count * 512 + scale_bytes * (ZeroPoints ? 2 : 1));
      bulk_copy_once(target, weight, count * 512, full + slot);
      char* const scales = target + Shape::kWeightBytes;
      bulk_copy_once(scales, static_cast<const char*>(p.scales) + scale_at, scale_bytes, full + slot);
      if constexpr (ZeroPoints) {
        bulk_copy_once(scales + Shape::kScaleBytes, static_cast<const char*>(p.zero_points) + scale_at, scale_bytes,
                       full + slot);
      }
    }
    next += groups_n;
    weight += static_cast<int64_t>(groups_n) * chunks * 512;
    scale_at += static_cast<int64_t>(groups_n) * groups * 32;
  };
#pragma unroll 1
  for (int i = 0; i < Shape::kEarly; ++i) copy_next(i);
#pragma unroll 1
  for (int i = 0; i < Shape::kStages; ++i) {
    for (int at = scale_bytes + lane * 4; at < Shape::kScaleBytes; at += 128) {
      char* const scales = ring + i * Shape::kStageBytes + Shape::kWeightBytes + at;
      *reinterpret_cast<uint32_t*>(scales) = 0;
      if constexpr (ZeroPoints) *reinterpret_cast<uint32_t*>(scales + Shape::kScaleBytes) = 0;
    }
  }
  __syncwarp();

  uint32_t x[kChunks][Tiles][4][2];
  if constexpr (!Shape::kSharedInput) {
    wait_for_previous_grid();
    load_stationary<T>(static_cast<const T*>(p.input) + static_cast<int64_t>(begin) * kChunk, p.input_stride, m, count,
                       base + plan.sums_at + warp * Shape::kScratchBytes, x);
  } else {
    const int first_chunk = slice * kUnit;
    if (warp == 0) {
      wait_for_previous_grid();
      const int bytes = (min((slice + slice_units) * kUnit, chunks) - first_chunk) * kChunk * 2;
      order_bulk_copies();
      if (lane == 0) barrier_expect(x_arrived, m * bytes);
      __syncwarp();
      if (lane < m) {
        bulk_copy_input(
            base + plan.sums_at + lane * plan.x_pitch,
            static_cast<const T*>(p.input) + lane * p.input_stride + static_cast<int64_t>(first_chunk) * kChunk, bytes,
            x_arrived);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = Shape::kEarly; i < Shape::kStages; ++i) copy_next(i);
    barrier_wait(x_arrived, 0);
    load_shared_input(base + plan.sums_at + (begin - first_chunk) * (kChunk * 2), plan.x_pitch, m, count, x);
  }
  uint2* const group_sums = reinterpret_cast<uint2*>(ring + Shape::kStages * Shape::kStageBytes) + lane;
  if constexpr (ZeroPoints) {
    scale_raw_input<T>(x);
    sum_groups<T, GroupK, Shape::kGroupQuads>(x, group_sums);
  }
  if (Tiles > 1) __syncthreads();  // the sums take the place of x
  if (shift > 0) cluster_wait();   // the owners' barriers are made

  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int phase = 0; phase < rows; phase += plan.phase_rows) {
    const int phase_end = min(phase + plan.phase_rows, rows);
#pragma unroll 1
    for (int row = phase + group_n; row < phase_end; row += groups_n) {
      const char* const stage = ring + slot * Shape::kStageBytes;
      barrier_wait(full + slot, parity);
      float totals[Tiles][4] = {};
      float products[Tiles][4];
      const char* const scales = stage + Shape::kWeightBytes;
      const auto rows_pair = [&](const char* group) {
        return __half22float2(as_f16(*reinterpret_cast<const uint32_t*>(group + lane / 4 * 4)));
      };
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 raw = load16(stage + c * 512 + lane * 16);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (c % kUnit == 0) {
#pragma unroll
            for (int i = 0; i < 4 * Tiles; ++i) products[i / 4][i % 4] = 0.0f;
          }
#pragma unroll
          for (int j = s * 4 / kSteps; j < (s + 1) * 4 / kSteps; ++j) {
            uint32_t a[4];
            if constexpr (ZeroPoints) {
              UndecodedInt4<T>::fragment(words[j], a);
            } else {
              Int4Decoder<T>::fragment(words[j], a);
            }
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
              mma_m16n8k16<T>(products[tile], a, x[c][tile][j][0], x[c][tile][j][1]);
            }
          }
          if (c % kUnit < kUnit - 1) continue;
          const int group = GroupK == 32 ? 2 * c + s : kUnit == 2 ? c / 2 : (c + odd) >> kGroupShift;
          const float2 factor = rows_pair(scales + group * 32);
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              totals[tile][e] = fmaf(e < 2 ? factor.x : factor.y, products[tile][e], totals[tile][e]);
            }
          }
        }
      }
      if constexpr (ZeroPoints) {
#pragma unroll
        for (int quad = 0; quad < Shape::kGroupQuads; ++quad) {
          const int group = 4 * quad + lane % 4;
          float2 zero_point = make_float2(0.0f, 0.0f);
          if (Shape::kGroups % 4 == 0 || group < Shape::kGroups) {
            zero_point = rows_pair(scales + Shape::kScaleBytes + group * 32);
          }
          const uint32_t low = __float_as_uint(zero_point.x * UndecodedInt4<T>::kLow);
          const uint32_t high = __float_as_uint(zero_point.y * UndecodedInt4<T>::kHigh);
          const uint32_t a[4] = {low, high, low, high};
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) {
            mma_m16n8k8_tf32(totals[tile], a, group_sums[(quad * Tiles + tile) * 32]);
          }
        }
      }
      __syncwarp();
      copy_next(slot);
      if (++slot == Shape::kStages) slot = 0, parity ^= 1;
      float4* const target = sums + ((row - phase) * warps_k + warp_k) * kVectors + lane;
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
      const float4* const parts = sums + (row - phase) * warps_k * kVectors + place;
      float total[4] = {};
#pragma unroll 4
      for (int w = 0; w < warps_k; ++w) {
        const float4 part = parts[w * kVectors];
        total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
      }
      if (shift == 0) {
        epilogue_fragment<T, ZeroPoints>(p, epilogue, first_row + row, place / 32, total);
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
      epilogue_fragment<T, ZeroPoints>(p, epilogue, first_row + (row << shift) + rank, place / 32, total);
    }
  }
#endif
}

}  // namespace quantized
}  // namespace nvb
