// Sums and maxima over a warp and over a block, in a fixed order, so that equal inputs give equal bits.
//
// A maximum ignores NaN (fmaxf); a kernel that must propagate NaN does so through the sum that follows it.
#pragma once

#include <math_constants.h>
#include <stdint.h>

namespace nvb {

// Over `Width` neighbouring lanes (a power of two); every lane receives the result. All 32 lanes take part.
template <int Width = 32>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <int Width = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Sums `Count` values (a power of two) over Width = 2 * Offset >= Count neighbouring lanes in Count - 1 + log2(Width /
// Count) shuffles instead of log2(Width) * Count: each exchange halves the values that a lane still carries. Lane l of
// the Width returns the sum of value l / (Width / Count). Recursive, so that every index is a constant and the values
// stay in registers.
template <int Offset = 16, int Count>
__device__ __forceinline__ float transpose_sum(const float (&values)[Count]) {
  if constexpr (Count == 1) {
    return warp_sum<2 * Offset>(values[0]);
  } else {
    const bool upper = threadIdx.x & Offset;
    float kept[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float sent = upper ? values[i] : values[i + Count / 2];
      kept[i] = (upper ? values[i + Count / 2] : values[i]) + __shfl_xor_sync(0xffffffffu, sent, Offset);
    }
    return transpose_sum<Offset / 2>(kept);
  }
}

// Over a one-dimensional block of `Threads` threads; every thread receives the result. `scratch` is shared memory of
// Threads / 32 floats. The leading barrier lets calls follow each other on the same scratch.
template <int Threads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  static_assert(Threads % 32 == 0 && Threads <= 1024, "a block is whole warps, at most 32 of them");
  constexpr int kWarps = Threads / 32;
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < kWarps ? scratch[lane] : 0.0f);
}

template <int Threads>
__device__ __forceinline__ float block_max(float value, float* scratch) {
  static_assert(Threads % 32 == 0 && Threads <= 1024, "a block is whole warps, at most 32 of them");
  constexpr int kWarps = Threads / 32;
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_max(lane < kWarps ? scratch[lane] : -CUDART_INF_F);
}

}  // namespace nvb
