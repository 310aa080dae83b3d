// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) with W in 8 or 4 bits or in blocks of a file on the ordinary f32 units:
// x in F32, which is not rounded, and whatever the tensor-core kernels cannot take (compute capability 7.5, odd k,
// unaligned rows).
//
// Shapes: x [m, k], any sizes, strides and alignment. A warp computes two rows of W, a (gate, up) pair, for eight
// tokens; a lane takes four neighbouring k of every 128, of which it decodes W once and meets all tokens, two such at a
// time. More tokens are further blocks, which find W in L2. Long rows are divided among the four warps of a block,
// because a matrix of 2,560 rows is 1,280 warps otherwise, ten a multiprocessor, which wait for memory most of the
// time. The division depends on k alone, so a token's sums do not depend on the tokens beside it. Shared memory: 256
// bytes.
#pragma once

#include <algorithm>

#include "../common/linear_epilogue.cuh"
#include "../common/quantized_element.cuh"
#include "../common/reduce.cuh"
#include "linear_quantized_kernels.h"

namespace nvb {
namespace quantized {
namespace plain {

constexpr int kWarps = 4;
constexpr int kTokens = 8;
constexpr int kRows = 2;
constexpr int kStep = 32 * 4;
constexpr int kSteps = 2;  // whose weights are asked for together
constexpr int64_t kLongRow = 1024;

template <typename T>
__device__ __forceinline__ void load_four_inputs(const T* row, int64_t k, int64_t columns, bool vectors,
                                                 float (&values)[4]) {
  if (vectors && k + 4 <= columns) {
    if constexpr (sizeof(T) == 4) {
      load16_as_float(row + k, values);
    } else {
      const uint2 raw = *reinterpret_cast<const uint2*>(row + k);
      const float2 low = unpack_pair<T>(raw.x), high = unpack_pair<T>(raw.y);
      values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = k + i < columns ? to_float(row[k + i]) : 0.0f;
}

template <uint32_t Encoding, typename T>
__global__ void __launch_bounds__(32 * kWarps)
    linear_quantized_plain(const T* const input, const int64_t input_stride, const int64_t m,
                           const nvb_quantized_matrix weight, const LinearEpilogue epilogue, const bool vectors,
                           const bool divided) {
  __shared__ float parts[kWarps][kTokens][kRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = (divided ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kRows;
  if (row >= weight.rows) return;
  const int64_t rows[kRows] = {row, min(row + 1, weight.rows - 1)};
  const int64_t first_k = 4 * lane + (divided ? warp * kStep : 0), stride = divided ? kWarps * kStep : kStep;
  float bias[kRows];
  load_bias(epilogue, row, bias);

  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kTokens; first < m;
       first += static_cast<int64_t>(gridDim.y) * kTokens) {
    float sums[kTokens][kRows] = {};
    for (int64_t k = first_k; k < weight.columns; k += kSteps * stride) {
      float w[kSteps][kRows][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (k + s * stride >= weight.columns) break;
#pragma unroll
        for (int r = 0; r < kRows; ++r) load_four<Encoding>(weight, rows[r], k + s * stride, w[s][r]);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (first + t >= m) break;
        const T* const token = input + (first + t) * input_stride;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (k + s * stride >= weight.columns) break;
          float x[4];
          load_four_inputs(token, k + s * stride, weight.columns, vectors, x);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[t][r] = fmaf(x[i], w[s][r][i], sums[t][r]);
          }
        }
      }
    }

    // Every lane receives every sum; lane t finishes token t.
    float finished[kRows] = {};
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = warp_sum(sums[t][r]);
        if (lane == t) finished[r] = sum;
      }
    }
    if (divided) {
      // All warps have the same row, so all come here.
      __syncthreads();  // the tokens before have been read
      if (lane < kTokens) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) parts[warp][lane][r] = finished[r];
      }
      __syncthreads();
      if (warp != 0) continue;
      if (lane < kTokens) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          finished[r] = 0.0f;
          for (int part = 0; part < kWarps; ++part) finished[r] += parts[part][lane][r];
        }
      }
    }
    if (lane < kTokens && first + lane < m) store_columns(epilogue, first + lane, row, finished, bias);
  }
}

template <uint32_t Encoding, typename T>
cudaError_t launch_input(const nvb_linear_quantized_params& p, const nvb_launch& launch) {
  const nvb_quantized_matrix weight = {p.weight,        p.scales,   p.zero_points, p.n,     p.k,
                                       p.weight_stride, p.encoding, p.scale_kind,  p.group, 0};
  const int64_t pairs = (p.n + kRows - 1) / kRows;
  const bool divided = p.k >= kLongRow;
  const dim3 grid(static_cast<unsigned>(divided ? pairs : (pairs + kWarps - 1) / kWarps),
                  static_cast<unsigned>(std::min<int64_t>((p.m + kTokens - 1) / kTokens, 65535)));
  const uint64_t addresses = reinterpret_cast<uintptr_t>(p.input) | static_cast<uint64_t>(p.input_stride * sizeof(T));
  linear_quantized_plain<Encoding, T>
      <<<grid, 32 * kWarps, 0, launch.stream>>>(static_cast<const T*>(p.input), p.input_stride, p.m, weight,
                                                make_epilogue(p, p.n), addresses % (4 * sizeof(T)) == 0, divided);
  return cudaPeekAtLastError();
}

}  // namespace plain

template <uint32_t Encoding>
cudaError_t launch_plain_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  if (params.input_dtype == NVB_F16) return plain::launch_input<Encoding, __half>(params, launch);
  if (params.input_dtype == NVB_BF16) return plain::launch_input<Encoding, __nv_bfloat16>(params, launch);
  return plain::launch_input<Encoding, float>(params, launch);
}

}  // namespace quantized
}  // namespace nvb
