// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 8 tokens t and an Int4 W with zero points, W = s q + o, on
// compute capability 9.0.
//
// Like linear_quantized_skinny: W passes through registers, every byte of it loaded once, x comes through L1, and the
// warps of a block divide k among themselves for the same 16 rows. That kernel takes 72 to 90 registers with zero
// points, which leaves a multiprocessor one block of 16 warps; what differs makes room for two:
// - Quantised values are multiplied as they lie (UndecodedInt4), so that Σ s q x takes a mask for each pair of them.
// - Σ x of every group comes from the tensor cores too, as x times a column of ones, a column for each group, so that
//   the sums of a batch of chunks share four registers.
// - Σ o Σ x is one more product of a batch, in tf32, the sums of x in two parts. Its operands lie as the sums of x do:
//   lane 4 g + t takes the zero points of chunk t of the batch alone. Scales are loaded the same way and shuffled.
//
// The first batch of W is on its way before griddepcontrol.wait: W and its scales and zero points may not be written by
// the grid before.
//
// H200, bf16, groups of 32, µs at 1, 4 and 8 tokens, by linear_quantized_skinny and by this kernel: 2560 x 2048 4.62
// 4.93 5.73 and 2.82 3.04 3.72; 4096 x 2560 6.06 6.32 6.92 and 4.08 4.45 5.07; 2560 x 10240 13.76 14.34 15.31 and 8.20
// 8.96 10.54.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, k a multiple of 64. Registers in flight: a batch of four
// chunks. Shared memory: 512 bytes of sums a warp.
#pragma once

#include "../../common/linear_epilogue.cuh"
#include "linear_quantized_undecoded.cuh"

#include "../../common/quantized_nonfinite.cuh"

namespace nvb {
namespace quantized {

inline constexpr int kZeroPointsWarps = 16;

template <Scales Kind, typename T>
__global__ void __launch_bounds__(32 * kZeroPointsWarps, 2)
    linear_quantized_zero_points(const __grid_constant__ nvb_linear_quantized_params p,
                                 const __grid_constant__ LinearEpilogue epilogue) {
#if __CUDA_ARCH__ == 900
  constexpr int kDepth = 4;  // chunks of a batch: each of the lanes 4 g + t takes the zero points of one
  constexpr int kSteps = Kind == Scales::kGroups32 ? 2 : 1;
  __shared__ __align__(16) float partial[kZeroPointsWarps * 128];
  // The shuffle tells the compiler that a warp agrees on its number.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int m = static_cast<int>(p.m);
  const int chunks = static_cast<int>(p.k / kChunk);
  const int begin = warp * chunks / kZeroPointsWarps, end = (warp + 1) * chunks / kZeroPointsWarps;
  const int64_t tile_row = blockIdx.x;

  const int group_shift = p.group == 128 ? 1 : 0;
  const int groups = kSteps == 2 ? 2 * chunks : (chunks + group_shift) >> group_shift;
  const char* weight = static_cast<const char*>(p.weight) + (tile_row * chunks + begin) * 512 + lane * 16;
  // Where the scales and zero points of chunk `quad` of a batch lie.
  int64_t scale_at = (tile_row * groups + ((begin + quad) * kSteps >> group_shift)) * 32 + group * 4;
  // Tokens past the end repeat the last one, whose sums are dropped.
  const T* token = static_cast<const T*>(p.input) + min(group, m - 1) * p.input_stride + begin * kChunk + 4 * quad;

  allow_next_grid();

  uint32_t words[kDepth][4], scales[kSteps], zero_points[kSteps];
  const auto load = [&](int left) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      uint4 raw = make_uint4(0u, 0u, 0u, 0u);
      if (i < left) raw = load16_streaming(weight + i * 512);
      words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
    }
    weight += kDepth * 512;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      scales[s] = zero_points[s] = 0;
      if (quad < left) {
        scales[s] = load4_cached(static_cast<const char*>(p.scales) + scale_at + s * 32);
        zero_points[s] = load4_cached(static_cast<const char*>(p.zero_points) + scale_at + s * 32);
      }
    }
    scale_at += kDepth * kSteps * 32 >> group_shift;
  };

  if (begin < end) load(end - begin);
  wait_for_previous_grid();
  float sums[4] = {};
#pragma unroll 1
  for (int left = end - begin; left > 0;) {
    // Column 2 i + s: the sums of x over step s of chunk i, a part of them in row t of token t, the rest in row t + 8.
    float inputs[4] = {};
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i > 0 && i >= left) break;
      uint32_t x[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 raw = *reinterpret_cast<const uint2*>(token + i * kChunk + 16 * j);
        x[j][0] = UndecodedInt4<T>::scale_input(raw.x), x[j][1] = UndecodedInt4<T>::scale_input(raw.y);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float products[4] = {};
        const uint32_t column = group == 2 * i + s ? kOnes<T> : 0;
#pragma unroll
        for (int j = s * 4 / kSteps; j < (s + 1) * 4 / kSteps; ++j) {
          uint32_t a[4];
          UndecodedInt4<T>::fragment(words[i][j], a);
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
      const float sum = (inputs[s] + inputs[s + 2]) * (UndecodedInt4<T>::kLow / UndecodedInt4<T>::kInputFactor);
      const float leading = __uint_as_float(__float_as_uint(sum) & 0xffffe000u);
      const float2 zero_point = __half22float2(as_f16(zero_points[s]));
      const uint32_t low = __float_as_uint(zero_point.x);
      const uint32_t high = __float_as_uint(zero_point.y * (UndecodedInt4<T>::kHigh / UndecodedInt4<T>::kLow));
      const uint32_t a[4] = {low, high, low, high};
      mma_m16n8k8_tf32(sums, a, make_uint2(__float_as_uint(leading), __float_as_uint(sum - leading)));
    }
    token += kDepth * kChunk;
    left -= kDepth;
    if (left > 0) load(left);
  }

  // The sums of every warp: [warp][lane][4], as the instruction leaves them.
  if (2 * quad < m) {
    *reinterpret_cast<float4*>(partial + warp * 128 + lane * 4) = make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
  __syncthreads();

  // A thread finishes a (gate, up) pair of columns of one token.
  constexpr int kPairs = kTileRows / 2;
  for (int i = threadIdx.x; i < kPairs * m; i += 32 * kZeroPointsWarps) {
    const int pair = i % kPairs, index = i / kPairs;
    const int64_t column = tile_row * kTileRows + 2 * pair;
    if (column >= p.n) continue;
    // Row 2 pair is at lane 4 (row % 8) + token / 2, element 2 (row / 8) + token % 2; the next row four lanes on.
    const float* source = partial + (8 * (pair % 4) + index / 2) * 4 + pair / 4 * 2 + index % 2;
    float pair_sums[2] = {};
#pragma unroll
    for (int w = 0; w < kZeroPointsWarps; ++w, source += 128) pair_sums[0] += source[0], pair_sums[1] += source[16];
    const float factor = pair < 4 ? UndecodedInt4<T>::kLowFactor : UndecodedInt4<T>::kHighFactor;
    pair_sums[0] *= factor, pair_sums[1] *= factor;
    repair_sums<true, T>(p, index, column, pair_sums);
    float bias[2];
    load_bias(epilogue, column, bias);
    store_columns(epilogue, index, column, pair_sums, bias);
  }
#endif
}

template <Scales Kind, typename T>
cudaError_t launch_zero_points(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  const dim3 grid(static_cast<unsigned>((params.n + kTileRows - 1) / kTileRows));
  return launch_overlapped(linear_quantized_zero_points<Kind, T>, grid, dim3(32 * kZeroPointsWarps), 0, &launch, params,
                           make_epilogue(params, params.n));
}

}  // namespace quantized
}  // namespace nvb
