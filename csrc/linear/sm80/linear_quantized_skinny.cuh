// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 16 tokens t and W in 8 or 4 bits, on tensor cores.
//
// W is the first operand of mma m16n8k16 (16 rows of W) and the tokens are its 8 columns; W passes through registers in
// the order of quantized_weight.cuh, so that every byte of it is loaded once, 16 at a time, and no two lanes
// share any. x comes through L1. A block's warps divide k among themselves for the same 16 rows; their sums meet in
// shared memory and are added in a fixed order.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64. Compute capability 8.0; with
// Hopper code for 9.0 alone.
//
// In flight a lane has Depth chunks in registers, one batch of loads after the other. Shared memory: the sums.
#pragma once

#include "../../common/linear_epilogue.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "../../common/quantized_weight.cuh"

namespace nvb {
namespace quantized {

// The words of x that meet the chunk of a lane: tokens 8 * tile + lane / 4.
template <typename Weight, typename T, int Tiles>
__device__ __forceinline__ void load_tokens(const T* const (&tokens)[Tiles], int chunk, uint32_t (&x)[Tiles][4][2]) {
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    const T* const token = tokens[tile] + chunk * kChunk;
    if constexpr (Weight::kInputPiece == 8) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint4 raw = load16(token + Weight::x_offset(j, 0));
        x[tile][j][0] = raw.x, x[tile][j][1] = raw.y, x[tile][j + 1][0] = raw.z, x[tile][j + 1][1] = raw.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 raw = *reinterpret_cast<const uint2*>(token + Weight::x_offset(j, 0));
        x[tile][j][0] = raw.x, x[tile][j][1] = raw.y;
      }
    }
  }
}

template <typename Weight, typename T, int Tiles, int Warps, int Depth, int BlocksPerSm, bool Hopper>
__global__ void __launch_bounds__(32 * Warps, BlocksPerSm)
    linear_quantized_skinny(const __grid_constant__ nvb_linear_quantized_params p,
                            const __grid_constant__ LinearEpilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  if (Hopper && __CUDA_ARCH__ != 900) return;
  constexpr int kTokens = 8 * Tiles;
  constexpr int kScaleWords = Weight::kScaleWords > 0 ? Weight::kScaleWords : 1;
  __shared__ float partial[Warps * kTokens * kTileRows];
  const int warp = threadIdx.x / 32;
  const int group = threadIdx.x % 32 / 4;
  const int quad = threadIdx.x % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const Weight weight(p, first_row);

  // Tokens past the end repeat the last one, whose sums are dropped at the store.
  const T* tokens[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    tokens[tile] = static_cast<const T*>(p.input) +
                   min(static_cast<int64_t>(8 * tile + group), p.m - 1) * p.input_stride + Weight::x_offset(0, quad);
  }

  allow_next_grid();
  const int chunks = static_cast<int>(p.k / kChunk);
  const int begin = warp * chunks / Warps, end = (warp + 1) * chunks / Warps;
  float sums[Tiles][4] = {};
  const auto multiply = [&](const uint32_t(&words)[Weight::kWords], const uint32_t(&scales)[kScaleWords], int chunk) {
    uint32_t x[Tiles][4][2];
    load_tokens<Weight>(tokens, chunk, x);
    multiply_chunk<Weight, T>(weight, words, scales, chunk, x, sums);
  };

  for (int chunk = begin; chunk < end; chunk += Depth) {
    uint32_t words[Depth][Weight::kWords], scales[Depth][kScaleWords];
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
      if (chunk + i < end) weight.load(chunk + i, words[i], scales[i]);
    }
    if (chunk == begin) {
      // The scales of rows, which nobody has read before: a miss of L2 would stand between the last sum and the store.
      if constexpr (Weight::kScales == Scales::kRows) {
        if (threadIdx.x < 2 && first_row + threadIdx.x * 8 < p.n) {
          prefetch_l2(static_cast<const float*>(p.scales) + first_row + threadIdx.x * 8);
        }
      }
      wait_for_previous_grid();
    }
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
      if (chunk + i < end) multiply(words[i], scales[i], chunk + i);
    }
  }

  // Lay the sums of every warp out in shared memory: sums[0, 1] row group, tokens 2 quad and 2 quad + 1; [2, 3] row
  // + 8.
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    float* const address = partial + (warp * kTokens + 8 * tile + 2 * quad) * kTileRows + group;
    address[0] = sums[tile][0];
    address[kTileRows] = sums[tile][1];
    address[8] = sums[tile][2];
    address[kTileRows + 8] = sums[tile][3];
  }
  __syncthreads();
  if (epilogue.residual != nullptr) wait_for_previous_grid();  // warps without a chunk have not

  // A thread finishes (gate, up) pairs of columns of one token.
  constexpr int kPairs = kTileRows / 2;
  for (int i = threadIdx.x; i < kPairs * kTokens; i += 32 * Warps) {
    const int pair = i % kPairs;
    const int token = i / kPairs;
    const int64_t column = first_row + 2 * pair;
    if (token >= p.m || column >= p.n) continue;
    float pair_sums[2] = {};
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(partial + (w * kTokens + token) * kTileRows + 2 * pair);
      pair_sums[0] += part.x, pair_sums[1] += part.y;
    }
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

template <typename Weight, typename T, int Tiles, int Warps, int Depth, int BlocksPerSm, bool Hopper>
cudaError_t launch_skinny(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  const auto kernel = linear_quantized_skinny<Weight, T, Tiles, Warps, Depth, BlocksPerSm, Hopper>;
  const unsigned blocks = static_cast<unsigned>((params.n + kTileRows - 1) / kTileRows);
  return launch_overlapped(kernel, dim3(blocks), dim3(32 * Warps), 0, &launch, params, make_epilogue(params, params.n));
}

}  // namespace quantized
}  // namespace nvb
