// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 8 tokens t and an Int4 W with offsets, W = s q + o, on
// compute capability 9.0.
//
// Like linear_quantized_skinny: W passes through registers, every byte of it loaded once, and the warps of a block (and
// of the blocks of a cluster) divide k among themselves for the same 16 rows. That kernel takes 72 to 90 registers with
// offsets, which leaves a multiprocessor one block of 16 warps; what differs makes room for two:
// - Codes are multiplied as they lie (RawInt4), so that Σ s q x takes a mask for each pair of codes.
// - Σ x of every group comes from the tensor cores too, as x times a column of ones, a column for each group, so that
//   the sums of a batch of chunks share four registers.
// - Σ o Σ x is one more product of a batch, in tf32, the sums of x in two parts. Its operands lie as the sums of x do:
//   lane 4 g + t takes the offsets of chunk t of the batch alone. Scales are loaded the same way and shuffled.
//
// x comes through L1 or, Shared, a batch at once through shared memory: its latency is then waited for once.
//
// The first batch of W is on its way before griddepcontrol.wait: W and its scales and offsets may not be written by the
// grid before.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64. Registers in flight: a batch of Depth
// chunks. Shared memory: 512 bytes of sums a warp, in the first block of a cluster for all of them; x of a batch.
#pragma once

#include "../common/cluster.cuh"
#include "linear_epilogue.cuh"
#include "linear_quantized_raw.cuh"
#include "linear_quantized_special.cuh"

namespace nvb {
namespace quantized {

// Bytes of a token's part of a batch in shared memory: half a warp reads four tokens from all banks.
inline constexpr int kBatchPitch = 4 * kChunk * 2 + 32;

template <Scales Kind, typename T, int Warps, int Depth, int BlocksPerSm, bool Cluster, bool Shared>
__global__ void __launch_bounds__(32 * Warps, BlocksPerSm)
    linear_quantized_offsets(const __grid_constant__ nvb_linear_quantized_params p,
                             const __grid_constant__ LinearEpilogue epilogue, const int cluster_shift) {
#if __CUDA_ARCH__ == 900
  static_assert(Depth <= 4, "a lane of four takes the offsets of a chunk");
  constexpr int kSteps = Kind == Scales::kGroups32 ? 2 : 1;
  constexpr int kMaxCluster = Cluster ? 4 : 1;
  __shared__ __align__(16) float partial[kMaxCluster * Warps * 128];
  __shared__ uint64_t all_received;
  extern __shared__ uint4 batches[];
  // The shuffle tells the compiler that a warp agrees on its number.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int shift = Cluster ? cluster_shift : 0;
  const int rank = Cluster ? static_cast<int>(cluster_rank()) : 0;
  const int part = rank * Warps + warp, parts = Warps << shift;
  const int m = static_cast<int>(p.m);
  const int chunks = static_cast<int>(p.k / kChunk);
  const int begin = part * chunks / parts, end = (part + 1) * chunks / parts;
  const int64_t tile_row = blockIdx.x >> shift;

  const int group_shift = p.group == 128 ? 1 : 0;
  const int groups = kSteps == 2 ? 2 * chunks : (chunks + group_shift) >> group_shift;
  const char* weight = static_cast<const char*>(p.weight) + (tile_row * chunks + begin) * 512 + lane * 16;
  const int64_t scale_at = tile_row * groups * 32 + group * 4;
  // Tokens past the end repeat the last one, whose sums are dropped.
  const T* const token = static_cast<const T*>(p.input) + min(group, m - 1) * p.input_stride + 4 * quad;

  allow_next_grid();
  if constexpr (Cluster) {
    if (threadIdx.x == 0 && rank == 0) {
      barrier_init(&all_received, 1);
      barrier_init_fence();
      barrier_expect(&all_received, parts * 8 * (m + 1 >> 1) * 16);  // of the lanes that hold a token
    }
    __syncwarp();
    cluster_arrive();
  }

  uint32_t words[Depth][4], scales[kSteps], offsets[kSteps];
  const auto load = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
      uint4 raw = make_uint4(0u, 0u, 0u, 0u);
      if (chunk + i < end) raw = load16_streaming(weight + i * 512);
      words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
    }
    weight += Depth * 512;
    // Of chunk `quad`; 0 past the end, and for the lanes that have none.
    const int index = kSteps == 2 ? 2 * (chunk + quad) : chunk + quad >> group_shift;
    const int64_t at = scale_at + static_cast<int64_t>(index) * 32;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      scales[s] = offsets[s] = 0;
      if (quad < Depth && chunk + quad < end) {
        scales[s] = load4_cached(static_cast<const char*>(p.scales) + at + s * 32);
        offsets[s] = load4_cached(static_cast<const char*>(p.offsets) + at + s * 32);
      }
    }
  };
  // x of a batch on its way to shared memory, a lane 16 bytes of each token.
  char* const own = reinterpret_cast<char*>(batches) + warp * m * kBatchPitch;
  const auto copy_x = [&](int chunk) {
    const T* source = static_cast<const T*>(p.input) + chunk * kChunk + lane * 8;
    if (lane / 8 < Depth && chunk + lane / 8 < end) {
#pragma unroll 1
      for (int t = 0; t < m; ++t, source += p.input_stride) copy_async<16>(own + t * kBatchPitch + lane * 16, source);
    }
    cp_async_commit();
  };
  const char* const shared_token = own + min(group, m - 1) * kBatchPitch + 8 * quad;

  if (begin < end) load(begin);
  wait_for_previous_grid();
  if (Shared && begin < end) copy_x(begin);
  float sums[4] = {};
#pragma unroll 1
  for (int chunk = begin; chunk < end;) {
    if constexpr (Shared) {
      cp_async_wait<0>();
      __syncwarp();
    }
    // Column 2 i + s: the sums of x over step s of chunk i, a part of them in row t of token t, the rest in row t + 8.
    float inputs[4] = {};
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
      if (i > 0 && chunk + i >= end) break;
      uint32_t x[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const void* const source = Shared ? static_cast<const void*>(shared_token + i * kChunk * 2 + 32 * j)
                                          : token + (chunk + i) * kChunk + 16 * j;
        const uint2 raw = *static_cast<const uint2*>(source);
        x[j][0] = RawInt4<T>::scale_input(raw.x), x[j][1] = RawInt4<T>::scale_input(raw.y);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float products[4] = {};
        const uint32_t column = group == 2 * i + s ? kOnes<T> : 0;
#pragma unroll
        for (int j = s * 4 / kSteps; j < (s + 1) * 4 / kSteps; ++j) {
          uint32_t a[4];
          RawInt4<T>::fragment(words[i][j], a);
          mma_m16n8k16<T>(products, a, x[j][0], x[j][1]);
          if (j % 2 == 0) continue;
          const uint32_t rows[4] = {x[j - 1][0], x[j - 1][1], x[j][0], x[j][1]};
          mma_m16n8k16<T>(inputs, rows, column, column);
        }
        const float2 scale = __half22float2(as_f16(__shfl_sync(0xffffffffu, scales[s], (lane & 28) + i)));
        sums[0] = fmaf(scale.x, products[0], sums[0]);
        sums[1] = fmaf(scale.x, products[1], sums[1]);
        sums[2] = fmaf(scale.y, products[2], sums[2]);
        sums[3] = fmaf(scale.y, products[3], sums[3]);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float sum = (inputs[s] + inputs[s + 2]) * (RawInt4<T>::kLow / RawInt4<T>::kInputFactor);
      const float leading = __uint_as_float(__float_as_uint(sum) & 0xffffe000u);
      const float2 offset = __half22float2(as_f16(offsets[s]));
      const uint32_t low = __float_as_uint(offset.x);
      const uint32_t high = __float_as_uint(offset.y * (RawInt4<T>::kHigh / RawInt4<T>::kLow));
      const uint32_t a[4] = {low, high, low, high};
      mma_m16n8k8_tf32(sums, a, make_uint2(__float_as_uint(leading), __float_as_uint(sum - leading)));
    }
    chunk += Depth;
    if (chunk < end) {
      load(chunk);
      if constexpr (Shared) {
        __syncwarp();
        copy_x(chunk);
      }
    }
  }

  // The sums of every warp: [warp][lane][4], as the instruction leaves them.
  float* const target = partial + part * 128 + lane * 4;
  if constexpr (Cluster) {
    cluster_wait();  // the first block's barrier is made
    if (2 * quad < m) cluster_store(cluster_address(target, 0), sums, cluster_address(&all_received, 0));
    if (rank > 0) return;
    barrier_wait(&all_received, 0);
  } else {
    if (2 * quad < m) *reinterpret_cast<float4*>(target) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
  }

  // A thread finishes a (gate, up) pair of columns of one token.
  constexpr int kPairs = kTileRows / 2;
  for (int i = threadIdx.x; i < kPairs * m; i += 32 * Warps) {
    const int pair = i % kPairs, index = i / kPairs;
    const int64_t column = tile_row * kTileRows + 2 * pair;
    if (column >= p.n) continue;
    // Row 2 pair is at lane 4 (row % 8) + token / 2, element 2 (row / 8) + token % 2; the next row four lanes on.
    const float* source = partial + (8 * (pair % 4) + index / 2) * 4 + pair / 4 * 2 + index % 2;
    float pair_sums[2] = {};
#pragma unroll Warps
    for (int w = 0; w < parts; ++w, source += 128) pair_sums[0] += source[0], pair_sums[1] += source[16];
    const float factor = pair < 4 ? RawInt4<T>::kLowFactor : RawInt4<T>::kHighFactor;
    pair_sums[0] *= factor, pair_sums[1] *= factor;
    repair_sums<true, T>(p, index, column, pair_sums);
    float bias[2];
    load_bias(epilogue, column, bias);
    store_columns(epilogue, index, column, pair_sums, bias);
  }
#endif
}

template <Scales Kind, typename T, int Warps, int Depth, int BlocksPerSm, bool Cluster, bool Shared>
cudaError_t launch_offsets(const nvb_linear_quantized_params& params, const nvb_launch& launch, int cluster_shift) {
  const auto kernel = linear_quantized_offsets<Kind, T, Warps, Depth, BlocksPerSm, Cluster, Shared>;
  if constexpr (Shared) {
    // The same for every shape, so that threads with different ones do not lower each other's.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Warps * 8 * kBatchPitch);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 1u << cluster_shift;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>((params.n + kTileRows - 1) / kTileRows) << cluster_shift;
  config.blockDim = 32 * Warps;
  config.dynamicSmemBytes = Shared ? Warps * static_cast<int>(params.m) * kBatchPitch : 0;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = Cluster ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, make_epilogue(params, params.n), cluster_shift);
}

}  // namespace quantized
}  // namespace nvb
