// Scales and values of the 8-bit encodings, as src/weight/quantize.rs has them.
#pragma once

#include <math_constants.h>

#include "quantized.h"

namespace nvb {

__device__ __forceinline__ float inverse_of(float scale) {
  const float inverse = 1.0f / scale;
  return fabsf(inverse) < CUDART_INF_F ? inverse : 0.0f;
}

// The scale with which the values of an 8-bit encoding reach `most`.
template <uint32_t Encoding>
__device__ __forceinline__ float scale_for(float most) {
  return most / (Encoding == NVB_INT8 ? 127.0f : Encoding == NVB_FP8_E4M3 ? 448.0f : 57344.0f);
}

// To nearest, ties to even; saturates.
template <uint32_t Encoding>
__device__ __forceinline__ uint32_t encode_byte(float value) {
  if constexpr (Encoding == NVB_INT8) {
    return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f))) & 0xffu;
  } else {
    constexpr bool kE4m3 = Encoding == NVB_FP8_E4M3;
    constexpr int kDropped = kE4m3 ? 20 : 21;  // bits of an f32's mantissa
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80u;
    const float magnitude = fabsf(value);
    if (magnitude != magnitude) return sign | 0x7fu;
    if (magnitude >= (kE4m3 ? 448.0f : 57344.0f)) return sign | (kE4m3 ? 0x7eu : 0x7bu);
    // Below the smallest normal number a code counts steps of 2^-9 or 2^-16.
    if (magnitude < (kE4m3 ? 0x1p-6f : 0x1p-14f)) {
      return sign | static_cast<uint32_t>(__float2int_rn(magnitude * (kE4m3 ? 0x1p9f : 0x1p16f)));
    }
    // A carry out of the mantissa raises the exponent, as it should.
    const uint32_t bits = __float_as_uint(magnitude);
    const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1u + (bits >> kDropped & 1u);
    return sign | ((rounded >> kDropped) - (kE4m3 ? 120u << 3 : 112u << 2));
  }
}

// Two neighbours, the first in the low byte. From compute capability 8.9 on one instruction makes both codes of E4M3;
// of NaN it makes 0x7f, whatever the sign.
template <uint32_t Encoding>
__device__ __forceinline__ uint32_t encode_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  if constexpr (Encoding == NVB_FP8_E4M3) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
  }
#endif
  return encode_byte<Encoding>(first) | encode_byte<Encoding>(second) << 8;
}

}  // namespace nvb
