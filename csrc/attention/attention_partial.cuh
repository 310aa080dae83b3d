// Partial results of attention over shares of the keys: how they are added, and which block of several that share keys
// is the last to come, and so has what all of them wrote.
#pragma once

#include "softmax.cuh"

namespace nvb {

// Four columns of an output that is not yet divided by the sum of its weights, which are powers of two over `maximum`.
struct Merged {
  float maximum, sum;
  float4 output;

  static __device__ __forceinline__ Merged none() {
    return Merged{-CUDART_INF_F, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  }

  // Adds parts with the weights 2^(their maximum - the largest); `states` are maxima and sums. A part that is none has
  // a maximum of -inf.
  template <int Count>
  __device__ __forceinline__ void add(const float2 (&states)[Count], const float4 (&outputs)[Count]) {
    float most = maximum;
#pragma unroll
    for (int i = 0; i < Count; ++i) most = fmaxf(most, states[i].x);
    const float base = exponent_base(most);
    const float rescale = exp2_fast(maximum - base);
    maximum = most;
    sum *= rescale, output.x *= rescale, output.y *= rescale, output.z *= rescale, output.w *= rescale;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float weight = exp2_fast(states[i].x - base);
      sum += weight * states[i].y;
      output.x += weight * outputs[i].x, output.y += weight * outputs[i].y;
      output.z += weight * outputs[i].z, output.w += weight * outputs[i].w;
    }
  }
};

// Counts a block in, and whether it is the last: what the blocks before it have written is then visible to this thread,
// and behind a barrier to its block. A thread of each block calls it behind a barrier of the block; `others` is how
// many blocks there are beside this one, and wraps the counter to 0 for the next launch.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, uint32_t others) {
  uint32_t before = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(others) : "memory");
#endif
  return before == others;
}

}  // namespace nvb
