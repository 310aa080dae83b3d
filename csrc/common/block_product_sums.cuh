// The end of a unit of W times x, which block_product_bytes.cuh and block_product_halves.cuh share: what a step's
// minimum takes off, the unit's factors, and the token's power of two.
#pragma once

#include <stdint.h>

namespace nvb {
namespace quantized {
namespace blocks {

// The first operand of the mma that multiplies the sums of x: the minima of the steps of rows g and g + 8.
template <typename Codes, typename Scales>
__device__ __forceinline__ void load_minima(const Scales (&scales)[2], uint32_t (&minima)[4]) {
  if constexpr (Codes::kMinimum) {
    minima[0] = scales[0].template step_minima<false>(), minima[1] = scales[1].template step_minima<false>();
    minima[2] = scales[0].template step_minima<true>(), minima[3] = scales[1].template step_minima<true>();
  }
}

// Adds a unit's sums with two columns, and those that its minima have, which are `less` times as much.
template <typename Codes, typename Scales, typename Sum>
__device__ __forceinline__ void add_unit(const Scales (&scales)[2], const Sum (&unit_sums)[4],
                                         const float (&minima_sums)[4], float less, float2 inverse, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = static_cast<float>(unit_sums[i]);
    if constexpr (Codes::kWholeScales) sum *= scales[i / 2].scale_factor;
    if constexpr (Codes::kMinimum) sum = fmaf(-less * scales[i / 2].minimum_factor, minima_sums[i], sum);
    sums[i] = fmaf(i % 2 ? inverse.y : inverse.x, sum, sums[i]);
  }
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
