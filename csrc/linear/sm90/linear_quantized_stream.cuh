// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 16 tokens t and W in 8 or 4 bits, where the time is that of
// reading W: compute capability 9.0.
//
// Persistent blocks, alone or in clusters whose members divide k among themselves, so that each keeps its slice of x in
// shared memory from the start, in the order in which the second operand of mma m16n8k16 wants it. A block's warps
// divide the slice (warps_k ways) and the blocks of 16 rows of W. Each warp streams its part of W through a ring of
// Stages stages of its own (linear_quantized_stage.cuh), across blocks of rows, without any barrier between warps. The
// sums of a block of rows go to the shared memory of the member that owns it, and are added there in a fixed order.
//
// The rings are filled before griddepcontrol.wait: W and its scales and zero points may not be written by the grid
// before. Grids launched back to back overlap, as two blocks fit a multiprocessor.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64. Shared memory: StreamPlan.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/linear_epilogue.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "linear_quantized_stage.cuh"

namespace nvb {
namespace quantized {

constexpr int kMaxStreamWarps = 16;  // of a block, so that two blocks leave 64 registers a thread

// How a product is divided, and where in a block's shared memory things lie: rings, x, sums, the sums' barrier.
struct StreamPlan {
  int cluster_shift;   // log2 of the blocks of a cluster
  int warps;           // of a block
  int warps_k;         // of them share a block of rows
  int cluster_blocks;  // blocks of rows that a cluster takes
  int x_pitch;         // bytes of a token's slice
  int x_at, sums_at, barrier_at, bytes;
  unsigned grid;
};

// Piece i of 4 elements of a chunk of x lies at 8-byte slot x_slot(i): 16 bytes hold what a lane needs for two
// instructions.
template <typename Weight>
__device__ __forceinline__ int x_slot(int piece) {
  if constexpr (Weight::kInputPiece == 4) return piece / 8 * 8 + piece % 4 * 2 + piece / 4 % 2;
  if constexpr (Weight::kInputPiece == 8 && Weight::kSteps == 2) return piece;
  if constexpr (Weight::kInputPiece == 8 && Weight::kSteps == 1) return piece % 4 / 2 * 8 + piece / 4 * 2 + piece % 2;
}
// How many slots further the next piece lies, for an even one.
template <typename Weight>
inline constexpr int kSecondSlot = Weight::kInputPiece == 4 ? 2 : 1;

// Copies chunks begin .. end of every token into shared memory.
template <typename Weight, typename T>
__device__ __forceinline__ void stage_input(const nvb_linear_quantized_params& p, int begin, int end, char* x,
                                            int pitch) {
  constexpr int kBatch = 4;
  const int pieces = (end - begin) * 8;  // of 16 bytes, a token
  const int total = pieces * static_cast<int>(p.m);
  const T* const input = static_cast<const T*>(p.input) + begin * kChunk;
  int piece = threadIdx.x, token = 0;
  for (int first = threadIdx.x; first < total; first += kBatch * blockDim.x) {
    uint4 raw[kBatch];
    char* targets[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      while (piece >= pieces) piece -= pieces, ++token;
      if (token < p.m) raw[i] = load16(input + token * p.input_stride + piece * 8);
      targets[i] = token < p.m ? x + token * pitch + piece / 8 * 128 + x_slot<Weight>(piece % 8 * 2) * 8 : nullptr;
      piece += blockDim.x;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (targets[i] == nullptr) break;
      *reinterpret_cast<uint2*>(targets[i]) = make_uint2(raw[i].x, raw[i].y);
      *reinterpret_cast<uint2*>(targets[i] + kSecondSlot<Weight> * 8) = make_uint2(raw[i].z, raw[i].w);
    }
  }
}

// A lane's part of a chunk of x, which `tokens` point at.
template <int Tiles>
__device__ __forceinline__ void load_input(const char* const (&tokens)[Tiles], int chunk, uint32_t (&x)[Tiles][4][2]) {
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint4 raw = load16(tokens[tile] + chunk * 128 + j * 32);
      x[tile][j][0] = raw.x, x[tile][j][1] = raw.y, x[tile][j + 1][0] = raw.z, x[tile][j + 1][1] = raw.w;
    }
  }
}

// sums[tile] += scale * W * x of one chunk.
template <typename Stage, typename T, int Tiles>
__device__ __forceinline__ void multiply_stream(const Stage& source, const uint32_t (&words)[Stage::Weight::kWords],
                                                const uint32_t (&scales)[Stage::kScaleWords], int chunk,
                                                const uint32_t (&x)[Tiles][4][2], float (&sums)[Tiles][4]) {
  using Weight = typename Stage::Weight;
  constexpr int kInstructions = 4 / Weight::kSteps;
#pragma unroll
  for (int s = 0; s < Weight::kSteps; ++s) {
    float products[Tiles][4] = {};
    float inputs[Tiles][4] = {};
#pragma unroll
    for (int j = s * kInstructions; j < (s + 1) * kInstructions; ++j) {
      uint32_t a[4];
      Weight::template fragment<T>(words, j, a);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        float(&target)[4] = Weight::kScales == Scales::kRows ? sums[tile] : products[tile];
        mma_m16n8k16<T>(target, a, x[tile][j][0], x[tile][j][1]);
        if constexpr (Weight::kZeroPoints) {
          const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
          mma_m16n8k16<T>(inputs[tile], ones, x[tile][j][0], x[tile][j][1]);
        }
      }
    }
    if constexpr (Weight::kScales != Scales::kRows) {
      const float2 scale = source.scale(scales, chunk, s);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[tile][e] = fmaf(e < 2 ? scale.x : scale.y, products[tile][e], sums[tile][e]);
        }
      }
    }
    if constexpr (Weight::kZeroPoints) {
      const float2 zero_point = source.zero_point(scales, s);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[tile][e] = fmaf(e < 2 ? zero_point.x : zero_point.y, inputs[tile][e], sums[tile][e]);
        }
      }
    }
  }
}

template <typename Stage, typename T, int Tiles, int Stages, bool Cluster>
__global__ void __launch_bounds__(32 * kMaxStreamWarps, 2)
    linear_quantized_stream(const __grid_constant__ nvb_linear_quantized_params p,
                            const __grid_constant__ LinearEpilogue epilogue, const __grid_constant__ StreamPlan plan) {
#if __CUDA_ARCH__ == 900
  using Weight = typename Stage::Weight;
  constexpr int kDepth = Stage::kDepth;
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps_k = plan.warps_k, warp_k = warp % warps_k;
  const int warp_n = warp / warps_k, warps_n = plan.warps / warps_k;
  const int shift = Cluster ? plan.cluster_shift : 0;
  const int rank = Cluster ? static_cast<int>(cluster_rank()) : 0;
  const int m = static_cast<int>(p.m);
  const int chunks = static_cast<int>(p.k / kChunk);
  const int slice = rank * chunks >> shift, slice_end = (rank + 1) * chunks >> shift;
  const int begin = slice + (slice_end - slice) * warp_k / warps_k;
  const int end = slice + (slice_end - slice) * (warp_k + 1) / warps_k;
  const int first_block = static_cast<int>(blockIdx.x >> shift) * plan.cluster_blocks;
  const int blocks = min(plan.cluster_blocks, static_cast<int>((p.n + kTileRows - 1) / kTileRows) - first_block);
  const int owned = (blocks - rank + (1 << shift) - 1) >> shift;
  const int parts = warps_k << shift;
  char* const ring = base + warp * Stages * Stage::kBytes;
  char* const x = base + plan.x_at;
  // The sums of part i of an owned block of rows: [tile][lane][4], as the instruction leaves them.
  float* const parts_sums = reinterpret_cast<float*>(base + plan.sums_at);
  constexpr int kPartFloats = Tiles * 128;
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(base + plan.barrier_at);

  allow_next_grid();
  if constexpr (Cluster) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
      int lanes = 0;  // that hold a token
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) lanes += 8 * (min(max(m - 8 * tile, 0), 8) + 1 >> 1);
      barrier_expect(barrier, owned * parts * lanes * 16);
    }
    __syncwarp();
    cluster_arrive();
  }

  // Fill the ring; each stage is a group of copies, an empty one past the end.
  Stage source(p);
  int next_block = begin < end ? warp_n : blocks, next_chunk = begin;
  if (next_block < blocks) source.seek(first_block + next_block);
  const auto copy_next = [&](char* slot) {
    if (next_block < blocks) {
      source.copy(slot, next_chunk, min(kDepth, end - next_chunk));
      next_chunk += kDepth;
      if (next_chunk >= end) {
        next_chunk = begin;
        next_block += warps_n;
        if (next_block < blocks) source.seek(first_block + next_block);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < Stages; ++i) copy_next(ring + i * Stage::kBytes);

  // The scales of rows, which nobody has read before: a miss of L2 would stand between the last sum and the store. They
  // are asked for behind W, whose loads a miss of their page would hold up.
  if constexpr (Weight::kScales == Scales::kRows) {
    const int64_t row = static_cast<int64_t>(first_block) * kTileRows + threadIdx.x * 8;
    if (threadIdx.x * 8 < blocks * kTileRows && row < p.n) prefetch_l2(static_cast<const float*>(p.scales) + row);
  }

  wait_for_previous_grid();
  stage_input<Weight, T>(p, slice, slice_end, x, plan.x_pitch);
  __syncthreads();
  if constexpr (Cluster) cluster_wait();  // the owners' barriers are made

  // Tokens past the end repeat the last one, whose sums are dropped.
  const char* tokens[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    tokens[tile] = x + min(8 * tile + lane / 4, m - 1) * plan.x_pitch + lane % 4 * 16;
  }
  char* slot = ring;
  for (int block = warp_n; block < blocks; block += warps_n) {
    float sums[Tiles][4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += kDepth) {
      uint32_t words[kDepth][Weight::kWords], scales[kDepth][Stage::kScaleWords];
      cp_async_wait<Stages - 1>();
      __syncwarp();
      source.load(slot, chunk, words, scales);
      __syncwarp();
      copy_next(slot);
      slot = slot == ring + (Stages - 1) * Stage::kBytes ? ring : slot + Stage::kBytes;
      const auto multiply = [&](int i) {
        uint32_t inputs[Tiles][4][2];
        load_input(tokens, chunk - slice + i, inputs);
        multiply_stream<Stage, T, Tiles>(source, words[i], scales[i], chunk + i, inputs, sums);
      };
      if (chunk + kDepth <= end) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) multiply(i);
      } else {
#pragma unroll
        for (int i = 0; i < kDepth - 1; ++i) {
          if (chunk + i < end) multiply(i);
        }
      }
    }
    const int part = (block >> shift) * parts + rank * warps_k + warp_k;
    float* const target = parts_sums + part * kPartFloats + lane * 4;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      if (8 * tile + lane % 4 * 2 >= m) continue;
      if constexpr (Cluster) {
        const uint32_t owner = block & ((1 << shift) - 1);
        cluster_store(cluster_address(target + tile * 128, owner), sums[tile], cluster_address(barrier, owner));
      } else {
        *reinterpret_cast<float4*>(target + tile * 128) =
            make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]);
      }
    }
  }

  // A thread finishes (gate, up) pairs of columns of one token.
  constexpr int kPairs = kTileRows / 2;
  const auto column_of = [&](int i) {
    return static_cast<int64_t>(first_block + (i / kPairs / m << shift) + rank) * kTileRows + 2 * (i % kPairs);
  };
  if constexpr (Cluster) {
    barrier_wait(barrier, 0);
  } else {
    __syncthreads();
  }
  for (int i = threadIdx.x; i < owned * m * kPairs; i += blockDim.x) {
    const int pair = i % kPairs, token = i / kPairs % m, local = i / kPairs / m;
    const int64_t column = column_of(i);
    if (column >= p.n) continue;
    // Row 2 pair is at lane 4 (row % 8) + token % 8 / 2, element 2 (row / 8) + token % 2; the next row four lanes on.
    const float* part = parts_sums + local * parts * kPartFloats + token / 8 * 128 +
                        (8 * (pair % 4) + token % 8 / 2) * 4 + pair / 4 * 2 + token % 2;
    float pair_sums[2] = {};
    for (int j = 0; j < parts; ++j, part += kPartFloats) pair_sums[0] += part[0], pair_sums[1] += part[16];
    if constexpr (Weight::kScales == Scales::kRows) {
      const float* const scales = static_cast<const float*>(p.scales) + column;
      pair_sums[0] *= scales[0];
      pair_sums[1] *= column + 1 < p.n ? scales[1] : 0.0f;
    }
    repair_sums<Weight::kZeroPoints, T>(p, token, column, pair_sums);
    float bias[2];
    load_bias(epilogue, column, bias);
    store_columns(epilogue, token, column, pair_sums, bias);
  }
#endif
}

}  // namespace quantized
}  // namespace nvb
