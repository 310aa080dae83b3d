// Int4 values of a weight with zero points as the first operand of mma and wgmma, without an instruction that converts
// them.
#pragma once

#include "../../common/quantized_weight.cuh"

namespace nvb {
namespace quantized {

// q in T, times 2^-133 or 2^-24 in the rows of kLow and sixteen times that in the eight rows of kHigh: masked in place,
// a value is the subnormal number of that many last places, or continues them with the least exponent. bf16 products
// would leave the range of f32, so x is multiplied by a power of two first; what overflows there is not finite in the
// end either, and is summed again from the elements.
template <typename T>
struct UndecodedInt4 {
  // A product in these units, and what gives back its size.
  static constexpr float kLow = kIsBf16<T> ? 0x1p-43f : 0x1p-24f, kHigh = kIsBf16<T> ? 0x1p-39f : 0x1p-20f;
  static constexpr float kLowFactor = 1.0f / kLow, kHighFactor = 1.0f / kHigh;
  static constexpr float kInputFactor = kIsBf16<T> ? 0x1p90f : 1.0f;

  static __device__ __forceinline__ void fragment(uint32_t word, uint32_t (&a)[4]) {
    const uint32_t upper = word >> 8;
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = upper & 0x000f000fu;
    a[3] = upper & 0x00f000f0u;
  }
  // Two elements of x.
  static __device__ __forceinline__ uint32_t scale_input(uint32_t pair) {
    return kIsBf16<T> ? multiply_pairs<T>(pair, 0x6c806c80u) : pair;
  }
};

}  // namespace quantized
}  // namespace nvb
