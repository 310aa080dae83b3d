// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for 1 ≤ m ≤ 8 tokens t, on the ordinary f32 units.
//
// Decoding reads every weight once and does 2m operations with it, so the only thing that counts is how many bytes are
// in flight. Each lane keeps kRows * kUnroll independent 16-byte loads of W outstanding; x comes through L1, where W
// does not allocate, and each piece of it serves kRows rows.
//
// Shapes: x [m, k], W [n, k]; strides in elements. Weight: f32, f16, bf16; Input: the same or f32. Aligned: k a
// multiple of a 16-byte vector of W and all rows 16-byte aligned; otherwise elements are loaded one by one.
//
// A block is kWarps warps: kWarps / split groups of kRows rows, each shared by `split` warps that interleave over k.
// Partial sums meet in shared memory (kWarps * kRows * Tokens floats, at most 1 KiB) and are added in a fixed order.
// Registers: kRows * kUnroll raw vectors (at most 32), kRows * Tokens sums (at most 32), one vector of x per token.
#pragma once

#include <type_traits>

#include "../common/linear_epilogue.cuh"
#include "../common/programmatic_launch.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "linear_kernels.h"

namespace nvb {
namespace gemv {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 4;
// Pieces of each row in one batch of loads; eight tokens leave registers for one.
template <int Tokens>
constexpr int kUnroll = Tokens == 8 ? 1 : 2;
static_assert(kRows % 2 == 0, "a group holds whole (gate, up) pairs");

// Resident blocks a multiprocessor, as many as leave enough registers for no spill in the loop.
template <typename Input, int Tokens>
constexpr int kBlocksPerSm = Tokens == 1 && sizeof(Input) == 2 ? 4
                             : Tokens <= 2                     ? 3
                                                               : 2;

// What one lane loads of one row at a time: a 16-byte vector, or a single element.
template <typename Weight, bool Aligned>
struct Piece {
  static constexpr int kElements = Aligned ? kVector<Weight> : 1;
  using Raw = std::conditional_t<Aligned, uint4, Weight>;

  static __device__ __forceinline__ Raw load(const Weight* address) {
    if constexpr (Aligned) {
      return load16_streaming(address);
    } else {
      return *address;
    }
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&values)[kElements]) {
    if constexpr (Aligned) {
      unpack16<Weight>(raw, values);
    } else {
      values[0] = to_float(raw);
    }
  }
};

// One load of x: a 16-byte vector, or a single element.
template <int Elements, typename Input>
__device__ __forceinline__ void load_input(const Input* address, float (&values)[Elements]) {
  if constexpr (Elements == 1) {
    values[0] = to_float(*address);
  } else {
    load16_as_float(address, values);
  }
}

template <typename Weight, typename Input, int Tokens, bool Aligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Input, Tokens>)
    linear_gemv(const nvb_linear_params p, const LinearEpilogue epilogue, const int split) {
  using WeightPiece = Piece<Weight, Aligned>;
  constexpr int kElements = WeightPiece::kElements;
  constexpr int kInputElements = Aligned ? kVector<Input> : 1;
  static_assert(kElements % kInputElements == 0, "a piece of W meets whole loads of x");
  constexpr int kSums = kRows * Tokens, kBatch = kUnroll<Tokens>;
  static_assert(kSums <= 32, "transpose_sum leaves one sum a lane");
  __shared__ float partial[kWarps][kSums];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int groups = kWarps / split;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * groups + warp / split) * kRows;

  // Rows and tokens past the end repeat the last one, whose sums are dropped at the store.
  const Weight* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = static_cast<const Weight*>(p.weight) + min(first_row + r, p.n - 1) * p.weight_stride;
  }
  const Input* tokens[Tokens];
#pragma unroll
  for (int t = 0; t < Tokens; ++t) {
    tokens[t] = static_cast<const Input*>(p.input) + min(static_cast<int64_t>(t), p.m - 1) * p.input_stride;
  }

  float sums[kSums] = {};
  const auto accumulate = [&](const typename WeightPiece::Raw(&raw)[kRows], int k) {
    float w[kRows][kElements];
#pragma unroll
    for (int r = 0; r < kRows; ++r) WeightPiece::unpack(raw[r], w[r]);
#pragma unroll
    for (int part = 0; part < kElements; part += kInputElements) {
#pragma unroll
      for (int t = 0; t < Tokens; ++t) {
        float x[kInputElements];
        load_input(tokens[t] + k + part, x);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < kInputElements; ++e) {
            sums[r * Tokens + t] = fmaf(w[r][part + e], x[e], sums[r * Tokens + t]);
          }
        }
      }
    }
  };

  const int step = 32 * kElements * split;
  const int columns = static_cast<int>(p.k);
  int k = (warp % split * 32 + lane) * kElements;

  // W is on its way to L2 while the grid before this one writes x. (Into L2 and no further: should that grid write W as
  // well, L2 has it.)
  allow_next_grid();
  if constexpr (Aligned) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (k + u * step < columns) prefetch_l2(rows[r] + k + u * step);
      }
    }
  }
  wait_for_previous_grid();

  // Main pass: all loads of a batch are issued before the first is used.
  for (; k + (kBatch - 1) * step < columns; k += kBatch * step) {
    typename WeightPiece::Raw raw[kBatch][kRows];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) raw[u][r] = WeightPiece::load(rows[r] + k + u * step);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) accumulate(raw[u], k + u * step);
  }
  for (; k < columns; k += step) {
    typename WeightPiece::Raw raw[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw[r] = WeightPiece::load(rows[r] + k);
    accumulate(raw, k);
  }

  // Sum over the lanes, then over the warps of a group.
  const float sum = transpose_sum(sums);
  constexpr int kLanesPerSum = 32 / kSums;
  if (lane % kLanesPerSum == 0) partial[warp][lane / kLanesPerSum] = sum;
  __syncthreads();

  // One thread finishes one (gate, up) pair of columns of one token.
  constexpr int kPairs = kRows / 2;
  for (int i = threadIdx.x; i < groups * kPairs * Tokens; i += kThreads) {
    const int pair = i % kPairs;
    const int group = i / kPairs % groups;
    const int token = i / (kPairs * groups);
    const int64_t column = (static_cast<int64_t>(blockIdx.x) * groups + group) * kRows + 2 * pair;
    if (token >= p.m || column >= p.n) continue;
    float pair_sums[2] = {};
    for (int s = 0; s < split; ++s) {
      pair_sums[0] += partial[group * split + s][(2 * pair) * Tokens + token];
      pair_sums[1] += partial[group * split + s][(2 * pair + 1) * Tokens + token];
    }
    float bias[2];
    load_bias(epilogue, column, bias);
    store_columns(epilogue, token, column, pair_sums, bias);
  }
}

// Warps that share a row: 1, 2, 4 or 8. More of them while the device is short of warps and each lane would still have
// a full batch of loads.
template <typename Weight, int Tokens>
int choose_split(const nvb_linear_params& params, const nvb_launch& launch) {
  const int64_t groups = (params.n + kRows - 1) / kRows;
  const int64_t wanted = static_cast<int64_t>(launch.multiprocessors) * 32;
  const int64_t batch = static_cast<int64_t>(32) * kVector<Weight> * kUnroll<Tokens>;
  int split = 1;
  while (split < kWarps && groups * split < wanted && batch * split * 2 <= params.k) split *= 2;
  return split;
}

template <typename Weight, typename Input, int Tokens, bool Aligned>
cudaError_t launch_tokens(const nvb_linear_params& params, const nvb_launch& launch) {
  const int split = choose_split<Weight, Tokens>(params, launch);
  const int64_t rows_per_block = static_cast<int64_t>(kWarps / split) * kRows;
  const unsigned blocks = static_cast<unsigned>((params.n + rows_per_block - 1) / rows_per_block);
  return launch_overlapped(linear_gemv<Weight, Input, Tokens, Aligned>, dim3(blocks), dim3(kThreads), 0, &launch,
                           params, make_epilogue(params, params.n), split);
}

template <typename Weight, typename Input>
cudaError_t launch_input(const nvb_linear_params& params, const nvb_launch& launch) {
  if (!linear_gemv_is_aligned(params)) {
    return params.m == 1 ? launch_tokens<Weight, Input, 1, false>(params, launch)
                         : launch_tokens<Weight, Input, 8, false>(params, launch);
  }
  if (params.m == 1) return launch_tokens<Weight, Input, 1, true>(params, launch);
  if (params.m == 2) return launch_tokens<Weight, Input, 2, true>(params, launch);
  if (params.m <= 4) return launch_tokens<Weight, Input, 4, true>(params, launch);
  return launch_tokens<Weight, Input, 8, true>(params, launch);
}

}  // namespace gemv

template <typename Weight>
cudaError_t launch_linear_gemv(const nvb_linear_params& params, const nvb_launch& launch) {
  if (params.input_dtype == kDtype<Weight>) return gemv::launch_input<Weight, Weight>(params, launch);
  return gemv::launch_input<Weight, float>(params, launch);
}

}  // namespace nvb
