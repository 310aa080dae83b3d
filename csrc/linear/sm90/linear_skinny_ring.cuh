// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 8 tokens t on compute capability 9.0, on tensor cores, in
// one wave, W by way of shared memory.
//
// linear_skinny reads x again for every 16 rows of W and ends in a wave that is partly empty. Here, as in
// linear_gemv_ring, each multiprocessor has one block, each block an equal share of neighbouring rows, and each warp a
// part of k, of which it keeps x in registers. The tokens are rows of mma m16n8k16 and W its second operand: a step is
// 8 rows of W, the last one of a block fewer, so that shares need not be whole steps. A product does not change when
// both operands permute k alike: a lane takes 16 neighbouring bytes of its token and of its row as the fragments of two
// instructions.
//
// A ring of slots of one step each, which bulk copies fill, is the block's or, with Own, each warp's for its part of k.
// The parts' sums of some steps meet in shared memory and are added in their order, while the copies of the next ones
// are on their way. Where x would not fit the registers, the two blocks of a cluster share the rows and divide k; each
// sends its sums to the block that finishes them.
//
// H200, BF16, weights rotated past L2, launches overlapping in a graph, µs; before: linear_gemv at 2 rows, else
// linear_skinny. Three slots, or two where three do not fit:
//   n x k                  14336 x 4096          20480 x 2560, gated     262144 x 2560      2560 x 10240
//   rows                 2      4      8          2      4      8        2     4     8      2      4      8
//   before             31.8   33.2   33.0       26.2   29.4   29.5     300   349   336    15.7   16.0   16.9
//   a ring a warp      30.2   30.3   30.5       26.0   26.4   26.6     365   370   369      -      -      -
//   a ring a block     30.6   30.4   30.8       28.1   28.0   27.9     301   303   305    15.4   15.7   16.0
// 2560 x 10240 in clusters of two. Where k fits one block, these gain 2 % at most (14336 x 4096) and lose much at
// 262144 x 2560, 334 to 451 at 4 rows. Clusters of four took 32.0, 32.4 and 32.6 where 3840 x 15360 had 31.3, 34.6
// and 32.8. A ring a block asks for one slot before x: with both, 2560 x 10240 took 16.9 at 8 rows. Smaller weights
// lose (4096 x 2560 at 4 rows: 8.2 where it had 7.8; 6144 x 4096: 16.4, 15.5) or gain nothing (13824 x 1152). 16 rows
// gained 3 to 5 % in three shapes of eight, each with another plan.
//
// Shapes: x [m, k], W [n, k] of dtype T (f16 or bf16), k a multiple of 8 from 256 to 10,240 as far as make_plan finds
// room for it, all rows 16-byte aligned, any n. A token's order of sums depends on k alone.
//
// Shared memory: SkinnyRingPlan. Registers: Units vectors of x.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../common/bulk_copy.cuh"
#include "../../common/linear_epilogue.cuh"
#include "../../common/mma.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/vector.cuh"
#include "../linear_kernels.h"

namespace nvb {
namespace skinny_ring {

constexpr int kTokens = 8;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStepRows = 8;  // of W, the n of the instruction
constexpr int kUnit = 32;     // of k: 4 lanes of a row, 8 elements each; two instructions
constexpr int kUnitBytes = 64;
constexpr int kPhaseSteps = 4;  // between two meetings of the warps
constexpr int kPhasePairs = kPhaseSteps * kStepRows / 2;
constexpr int kPitch = kPhaseSteps * kStepRows + 8;  // floats of a token's sums
constexpr int kSums = kWarps * kTokens * kPitch;     // of a phase
static_assert(kPitch % 32 == 8, "four tokens of a store are in different banks");

// How a product is divided, and where in a block's shared memory things lie: rings, two phases of sums, pairs received
// from the cluster, barriers.
struct SkinnyRingPlan {
  int cluster;    // blocks that divide k: 1 or 2
  int slots;      // of a ring
  int row_bytes;  // from one row of a slot to the next
  int sums_at, received_at, barriers_at, bytes;
  unsigned grid;
};

// Lays a product out with rings of so many slots; false if it does not fit. Units: of k, at most, that a warp takes.
template <int Units, bool Own>
bool make_plan(const nvb_linear_params& p, const nvb_launch& launch, int slots, SkinnyRingPlan& plan) {
  const int units = static_cast<int>((p.k + kUnit - 1) / kUnit);
  const int cluster = units <= kWarps * Units ? 1 : 2;
  const int slice = (units + cluster - 1) / cluster;
  const int warp_units = (slice + kWarps - 1) / kWarps;
  if (warp_units > Units || units < kWarps || p.m > kTokens) return false;
  const int64_t pairs = (p.n + 1) / 2;
  const int64_t clusters = std::min<int64_t>(pairs, std::max(1, launch.multiprocessors / cluster));
  const int64_t own_pairs = ((pairs + clusters - 1) / clusters + cluster - 1) / cluster;
  const int64_t received = cluster == 1 ? 0 : own_pairs * cluster * p.m * static_cast<int>(sizeof(float2));
  plan.cluster = cluster;
  plan.slots = slots;
  plan.row_bytes = ((Own ? warp_units : slice) | 1) * kUnitBytes;  // odd: neighbours are in different banks
  plan.sums_at = (Own ? kWarps : 1) * slots * kStepRows * plan.row_bytes;
  plan.received_at = plan.sums_at + 2 * kSums * static_cast<int>(sizeof(float));
  const int64_t barriers_at = plan.received_at + (received + 15) / 16 * 16;
  const int64_t bytes = barriers_at + ((Own ? kWarps : 2) * slots + 1) * int64_t{sizeof(uint64_t)};
  if (bytes > launch.shared_bytes_per_block) return false;
  plan.barriers_at = static_cast<int>(barriers_at);
  plan.bytes = static_cast<int>(bytes);
  plan.grid = static_cast<unsigned>(clusters * cluster);
  return true;
}

// Arrives, and announces nothing.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Stores a pair into another block's shared memory and completes it on a barrier there.
__device__ __forceinline__ void cluster_store_pair(uint32_t address, const float (&values)[2], uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(values[0]), "f"(values[1]), "r"(barrier)
               : "memory");
#endif
}

template <typename T, int Units, bool Own>
__global__ void __launch_bounds__(kThreads, 2)
    linear_skinny_ring(const __grid_constant__ nvb_linear_params p, const __grid_constant__ LinearEpilogue epilogue,
                       const __grid_constant__ SkinnyRingPlan plan) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char base[];
  // The shuffle tells the compiler that a warp agrees on its number.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int cluster = plan.cluster;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int m = static_cast<int>(p.m);

  // The cluster's rows, whole (gate, up) pairs, and the warp's columns.
  const int64_t pairs = (p.n + 1) / 2;
  const int64_t clusters = gridDim.x / cluster, place = blockIdx.x / cluster;
  const int64_t first_row = 2 * (pairs * place / clusters);
  const int rows = static_cast<int>(min(2 * (pairs * (place + 1) / clusters), p.n) - first_row);
  const int steps = (rows + kStepRows - 1) / kStepRows;
  const int units = static_cast<int>((p.k + kUnit - 1) / kUnit);
  const int slice = units * rank / cluster, slice_units = units * (rank + 1) / cluster - slice;
  const int begin = slice + slice_units * warp / kWarps;
  const int count = slice + slice_units * (warp + 1) / kWarps - begin;
  const int columns = min(count * kUnit, static_cast<int>(p.k) - begin * kUnit);
  const uint32_t warp_bytes = columns * static_cast<uint32_t>(sizeof(T));
  // What a ring holds of a row: the warp's part, or the block's.
  const int ring_begin = Own ? begin : slice;
  const uint32_t bytes =
      Own ? warp_bytes : 2 * static_cast<uint32_t>(min(slice_units * kUnit, static_cast<int>(p.k) - slice * kUnit));
  const T* const weight = static_cast<const T*>(p.weight) + first_row * p.weight_stride + ring_begin * kUnit;

  const int slot_bytes = kStepRows * plan.row_bytes;
  char* const ring = base + (Own ? warp * plan.slots * slot_bytes : 0);
  char* const part = ring + (begin - ring_begin) * kUnitBytes;
  float* const sums = reinterpret_cast<float*>(base + plan.sums_at);            // [2][warps][tokens][kPitch]
  float2* const received = reinterpret_cast<float2*>(base + plan.received_at);  // [cluster][m][own_pairs]
  uint64_t* const full = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + (Own ? warp * plan.slots : 0);
  uint64_t* const empty = full + plan.slots;  // of a shared ring
  uint64_t* const all_received = reinterpret_cast<uint64_t*>(base + plan.barriers_at) + (Own ? kWarps : 2) * plan.slots;

  // Block r finishes own_pairs of the cluster's pairs, from r * own_pairs on; the last may have fewer.
  const int cluster_pairs = (rows + 1) / 2;
  const int own_pairs = (cluster_pairs + cluster - 1) / cluster;
  const int owned = max(min(own_pairs, cluster_pairs - rank * own_pairs), 0);

  // W is on its way to L2 while the grid before this one writes x. (Into L2 and no further: should that grid write W as
  // well, L2 has it.)
  allow_next_grid();
  if (Own || warp == 0) {
    for (int row = lane; row < min(plan.slots * kStepRows, rows); row += 32) {
      bulk_prefetch_l2(weight + row * p.weight_stride, bytes);
    }
  }
  if (lane == 0 && (Own || warp == 0)) {
    for (int slot = 0; slot < plan.slots; ++slot) {
      barrier_init(full + slot, 1);
      if (!Own) barrier_init(empty + slot, kWarps);
    }
    if (cluster > 1 && warp == 0) barrier_init(all_received, 1);
    barrier_init_fence();
    if (cluster > 1 && warp == 0) barrier_expect(all_received, owned * cluster * m * static_cast<int>(sizeof(float2)));
  }
  __syncwarp();
  if (cluster > 1) cluster_arrive();
  // Behind the last column, where no copy writes, the last unit is 0.
  const int vectors = count * (kUnitBytes / 16), tail = vectors - static_cast<int>(warp_bytes / 16);
  for (int i = lane; i < tail * plan.slots * kStepRows; i += 32) {
    store16(part + i / tail * plan.row_bytes + (vectors - 1 - i % tail) * 16, make_uint4(0, 0, 0, 0));
  }
  if (!Own) __syncthreads();
  wait_for_previous_grid();

  const auto fetch = [&](int step, int slot) {
    const int step_rows = min(kStepRows, rows - step * kStepRows);
    if (lane == 0) barrier_expect(full + slot, step_rows * bytes);
    __syncwarp();
    if (lane < step_rows) {
      bulk_copy_once(ring + slot * slot_bytes + lane * plan.row_bytes,
                     weight + (step * kStepRows + lane) * p.weight_stride, bytes, full + slot);
    }
  };
  // No proxy fence: all that the grid before has written is visible to this one behind its wait.
  const int filled = min(plan.slots, steps), early = Own ? filled : min(1, filled);
#pragma unroll 1
  for (int step = 0; step < early; ++step) {
    if (Own || warp == 0) fetch(step, step);
  }

  // x as first operands, tokens and columns past the end 0. The operands' rows 8 to 15 are the same tokens with the
  // other half of their vectors: one operand for both instructions, of each of which half the sums count.
  uint32_t x[Units][4];
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    const int column = u * kUnit + quad * 8;
    uint4 input = make_uint4(0, 0, 0, 0);
    if (group < m && column < columns) {
      input = load16(static_cast<const T*>(p.input) + group * p.input_stride + begin * kUnit + column);
    }
    x[u][0] = input.x, x[u][1] = input.z, x[u][2] = input.y, x[u][3] = input.w;
  }
#pragma unroll 1
  for (int step = early; step < filled; ++step) {
    if (Own || warp == 0) fetch(step, step);
  }
  if (cluster > 1) cluster_wait();  // the owners' barriers are made

  int slot = 0;
  uint32_t parity = 0;
  float* phase_sums = sums;
#pragma unroll 1
  for (int phase = 0; phase < steps; phase += kPhaseSteps) {
    const int phase_end = min(phase + kPhaseSteps, steps);
#pragma unroll 1
    for (int step = phase; step < phase_end; ++step) {
      const char* const row = part + slot * slot_bytes + group * plan.row_bytes + quad * 16;
      barrier_wait(full + slot, parity);
      float totals[2][4] = {};
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        const uint4 w = u < count ? load16(row + u * kUnitBytes) : make_uint4(0, 0, 0, 0);
        mma_m16n8k16<T>(totals[0], x[u], w.x, w.y);
        mma_m16n8k16<T>(totals[1], x[u], w.z, w.w);
      }
      // The whole warp has read the slot.
      __syncwarp();
      if (Own) {
        if (step + plan.slots < steps) fetch(step + plan.slots, slot);
      } else if (step + plan.slots < steps) {
        if (lane == 0) barrier_arrive(empty + slot);
        if (warp == step % kWarps) {
          barrier_wait(empty + slot, parity);
          fetch(step + plan.slots, slot);
        }
      }
      if (++slot == plan.slots) slot = 0, parity ^= 1;
      float* const target = phase_sums + (warp * kTokens + group) * kPitch + (step - phase) * kStepRows + 2 * quad;
      *reinterpret_cast<float2*>(target) = make_float2(totals[0][0] + totals[1][2], totals[0][1] + totals[1][3]);
    }
    __syncthreads();

    // One thread adds the parts of one pair of rows for one token.
#pragma unroll 1
    for (int i = threadIdx.x; i < kPhasePairs * m; i += kThreads) {
      const int token = i / kPhasePairs, phase_pair = i % kPhasePairs;
      const int pair = phase * (kStepRows / 2) + phase_pair;
      if (pair >= cluster_pairs) continue;
      const float* const parts = phase_sums + token * kPitch + 2 * phase_pair;
      float pair_sums[2] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(parts + w * (kTokens * kPitch));
        pair_sums[0] += part.x, pair_sums[1] += part.y;
      }
      if (cluster == 1) {
        float bias[2];
        load_bias(epilogue, first_row + 2 * pair, bias);
        store_columns(epilogue, token, first_row + 2 * pair, pair_sums, bias);
      } else {
        const int owner = pair / own_pairs;
        const float2* const target = received + (rank * m + token) * own_pairs + pair % own_pairs;
        cluster_store_pair(cluster_address(target, owner), pair_sums, cluster_address(all_received, owner));
      }
    }
    // The warps are one phase ahead of these sums at most: the next meeting is behind this reading.
    phase_sums = phase_sums == sums ? sums + kSums : sums;
  }

  if (cluster > 1) {
    barrier_wait(all_received, 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < owned * m; i += kThreads) {
      const int token = i / owned, pair = i % owned;
      float pair_sums[2] = {};
      for (int r = 0; r < cluster; ++r) {
        const float2 part = received[(r * m + token) * own_pairs + pair];
        pair_sums[0] += part.x, pair_sums[1] += part.y;
      }
      const int64_t column = first_row + 2 * (rank * own_pairs + pair);
      float bias[2];
      load_bias(epilogue, column, bias);
      store_columns(epilogue, token, column, pair_sums, bias);
    }
  }
#endif
}

template <typename T, int Units, bool Own>
cudaError_t launch_plan(const nvb_linear_params& params, const nvb_launch& launch, const SkinnyRingPlan& plan) {
  const auto kernel = linear_skinny_ring<T, Units, Own>;
  // The limit is one for all shapes, so that threads with different shapes do not lower each other's.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes_per_block);
  if (error != cudaSuccess) return error;
  return launch_overlapped_clusters(kernel, dim3(plan.grid), dim3(plan.cluster), dim3(kThreads), plan.bytes, &launch,
                                    params, make_epilogue(params, params.n), plan);
}

}  // namespace skinny_ring
}  // namespace nvb
