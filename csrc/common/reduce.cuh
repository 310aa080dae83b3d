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
