// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 8 tokens t, on tensor cores, with W straight into registers.
//
// From 3 tokens on, the f32 units would have to convert and multiply faster than memory delivers W. Here W is the first
// operand of mma m16n8k16 (16 rows of W) and the tokens are its 8 columns. A product does not change when both operands
// permute k alike, so a lane loads 16 neighbouring bytes of its row and calls their four words the fragments of two
// instructions: no shared memory, no shuffle, no barrier before the end, and every byte of W is loaded once.
//
// Shapes: x [m, k], W [n, k] of dtype T (f16 or bf16), k a multiple of 8, all rows 16-byte aligned. Compute capability
// 8.0. A block is kWarps warps that interleave over k for the same 16 rows of W; their sums meet in shared memory
// (kWarps * 16 * kTokens floats, 4 KiB) and are added in a fixed order.
// Registers: 2 * kUnroll vectors of W and kUnroll of x (48), 4 sums.
#pragma once

#include "../../common/linear_epilogue.cuh"
#include "../../common/mma.cuh"
#include "../../common/vector.cuh"
#include "../linear_kernels.h"

namespace nvb {
namespace skinny {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;   // of W, the m of the instruction
constexpr int kTokens = 8;  // the n of the instruction
constexpr int kStep = 32;   // of k: 4 lanes of a row, 8 elements each; two instructions
constexpr int kUnroll = 4;  // steps a batch: 256 neighbouring bytes of each row
constexpr int kBatch = kStep * kUnroll;

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) linear_skinny(const nvb_linear_params p, const LinearEpilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  __shared__ float partial[kWarps][kTokens][kRows];
  const int warp = threadIdx.x / 32;
  const int group = threadIdx.x % 32 / 4;
  const int quad = threadIdx.x % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;

  // Rows and tokens past the end repeat the last one, whose sums are dropped at the store.
  const T* weight = static_cast<const T*>(p.weight);
  const T* low_row = weight + min(first_row + group, p.n - 1) * p.weight_stride;
  const T* high_row = weight + min(first_row + group + 8, p.n - 1) * p.weight_stride;
  const T* token = static_cast<const T*>(p.input) + min(static_cast<int64_t>(group), p.m - 1) * p.input_stride;

  float sums[4] = {};
  const auto multiply = [&](const uint4& low, const uint4& high, const uint4& x) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_m16n8k16<T>(sums, first, x.x, x.y);
    mma_m16n8k16<T>(sums, second, x.z, x.w);
  };

  // Whole batches: all loads are issued before the first is used.
  int64_t k = warp * kBatch + quad * 8;
  const int64_t whole = p.k - (p.k % kBatch);
  for (; k < whole; k += kWarps * kBatch) {
    uint4 low[kUnroll], high[kUnroll], x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      low[u] = load16_streaming(low_row + k + u * kStep);
      high[u] = load16_streaming(high_row + k + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) x[u] = load16(token + k + u * kStep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) multiply(low[u], high[u], x[u]);
  }
  // The last part of k falls to the warp whose turn it is, all of whose lanes take part in every instruction.
  for (; k - quad * 8 < p.k; k += kStep) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool inside = k < p.k;
    multiply(inside ? load16_streaming(low_row + k) : zero, inside ? load16_streaming(high_row + k) : zero,
             inside ? load16(token + k) : zero);
  }

  // Sum over the warps. sums[0, 1]: row group, tokens 2 quad and 2 quad + 1; sums[2, 3]: row group + 8.
  partial[warp][2 * quad][group] = sums[0];
  partial[warp][2 * quad + 1][group] = sums[1];
  partial[warp][2 * quad][group + 8] = sums[2];
  partial[warp][2 * quad + 1][group + 8] = sums[3];
  __syncthreads();

  // One thread finishes one (gate, up) pair of columns of one token.
  constexpr int kPairs = kRows / 2;
  static_assert(kPairs * kTokens <= kThreads, "one pair a thread");
  const int pair = threadIdx.x % kPairs;
  const int row = threadIdx.x / kPairs;
  const int64_t column = first_row + 2 * pair;
  if (row >= p.m || column >= p.n) return;
  float pair_sums[2] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    pair_sums[0] += partial[w][row][2 * pair];
    pair_sums[1] += partial[w][row][2 * pair + 1];
  }
  float bias[2];
  load_bias(epilogue, column, bias);
  store_columns(epilogue, row, column, pair_sums, bias);
#endif
}

}  // namespace skinny

template <typename T>
cudaError_t launch_linear_skinny(const nvb_linear_params& params, const nvb_launch& launch) {
  const unsigned blocks = static_cast<unsigned>((params.n + skinny::kRows - 1) / skinny::kRows);
  skinny::linear_skinny<T><<<blocks, skinny::kThreads, 0, launch.stream>>>(params, make_epilogue(params, params.n));
  return cudaPeekAtLastError();
}

}  // namespace nvb
