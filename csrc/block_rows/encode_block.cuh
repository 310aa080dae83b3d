// Floats into blocks of 32, in the order of operations of src/weight/blocks/encode.rs, so that both make the same
// bytes: products and sums are rounded one by one, and divisions to the nearest.
#pragma once

#include <cuda_fp16.h>
#include <float.h>

#include "../common/block_element.cuh"

namespace nvb {

__device__ __forceinline__ void store_half(uint8_t* to, float value) {
  *reinterpret_cast<__half*>(to) = __float2half_rn(value);
}

__device__ __forceinline__ float inverse_or_zero(float d) {
  return d != 0.0f ? __fdiv_rn(1.0f, d) : 0.0f;
}

// As Rust converts a float to i8 and its bits to u8: truncated, saturated, NaN 0.
__device__ __forceinline__ uint32_t truncated(float value, uint32_t most) {
  if (!(value == value)) return 0;
  const int whole = static_cast<int>(fminf(fmaxf(value, -128.0f), 127.0f));
  const uint32_t byte = static_cast<uint32_t>(whole) & 0xffu;
  return byte < most ? byte : most;
}

// The value with the largest magnitude, the first of several.
template <typename Value>
__device__ __forceinline__ float extreme_of(Value value) {
  float magnitude = 0.0f, extreme = 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float x = value(i);
    if (magnitude < fabsf(x)) {
      magnitude = fabsf(x);
      extreme = x;
    }
  }
  return extreme;
}

template <typename Value>
__device__ __forceinline__ float2 range_of(Value value) {
  float low = FLT_MAX, high = -FLT_MAX;
  for (int i = 0; i < 32; ++i) {
    const float x = value(i);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  return make_float2(low, high);
}

// Stores the pairs of nibbles of 32 codes, and their fifth bits if `high` is not null.
template <typename Code>
__device__ __forceinline__ void store_codes(uint8_t* nibbles, uint8_t* high, Code code) {
  uint32_t fifth = 0;
  for (int i = 0; i < 16; ++i) {
    const uint32_t first = code(i), second = code(i + 16);
    nibbles[i] = static_cast<uint8_t>((first & 15u) | (second & 15u) << 4);
    fifth |= (first >> 4 & 1u) << i | (second >> 4 & 1u) << (i + 16);
  }
  if (high == nullptr) return;
  for (int i = 0; i < 4; ++i) high[i] = static_cast<uint8_t>(fifth >> (8 * i));
}

template <uint32_t Format>
struct EncodeBlock;

// Codes around the middle of a range that the value with the largest magnitude ends.
template <int Middle, typename Value>
__device__ __forceinline__ void store_symmetric(uint8_t* block, uint8_t* nibbles, uint8_t* high, Value value) {
  const float d = __fdiv_rn(extreme_of(value), -static_cast<float>(Middle));
  const float inverse = inverse_or_zero(d);
  store_half(block, d);
  store_codes(nibbles, high,
              [&](int i) { return truncated(__fadd_rn(__fmul_rn(value(i), inverse), Middle + 0.5f), 2 * Middle - 1); });
}

// Codes from the smallest value on.
template <int Most, typename Value>
__device__ __forceinline__ void store_ranged(uint8_t* block, uint8_t* nibbles, uint8_t* high, Value value) {
  const float2 range = range_of(value);
  const float d = __fdiv_rn(__fsub_rn(range.y, range.x), static_cast<float>(Most));
  const float inverse = inverse_or_zero(d);
  store_half(block, d);
  store_half(block + 2, range.x);
  store_codes(nibbles, high, [&](int i) {
    return truncated(__fadd_rn(__fmul_rn(__fsub_rn(value(i), range.x), inverse), 0.5f), Most);
  });
}

template <>
struct EncodeBlock<NVB_BLOCKS_Q4_0> {
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    store_symmetric<8>(block, block + 2, nullptr, value);
  }
};

template <>
struct EncodeBlock<NVB_BLOCKS_Q4_1> {
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    store_ranged<15>(block, block + 4, nullptr, value);
  }
};

template <>
struct EncodeBlock<NVB_BLOCKS_Q5_0> {
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    store_symmetric<16>(block, block + 6, block + 2, value);
  }
};

template <>
struct EncodeBlock<NVB_BLOCKS_Q5_1> {
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    store_ranged<31>(block, block + 8, block + 4, value);
  }
};

template <>
struct EncodeBlock<NVB_BLOCKS_Q8_0> {
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    const float largest = fabsf(extreme_of(value));
    const float factor = largest == 0.0f ? 0.0f : __fdiv_rn(127.0f, largest);
    store_half(block, __fdiv_rn(largest, 127.0f));
    for (int i = 0; i < 32; ++i) {
      const float code = rintf(__fmul_rn(value(i), factor));
      block[2 + i] = static_cast<uint8_t>(code == code ? static_cast<int>(fminf(fmaxf(code, -128.0f), 127.0f)) : 0);
    }
  }
};

template <>
struct EncodeBlock<NVB_BLOCKS_IQ4_NL> {
  // The place in the table of the nearest value, the larger of two that are as near.
  static __device__ __forceinline__ uint32_t nearest(float value) {
    uint32_t above = 0;
    while (above < 16 && !(value < nonlinear_value(above))) ++above;
    if (above == 0) return 0;
    if (above == 16) return 15;
    return value - nonlinear_value(above - 1) < nonlinear_value(above) - value ? above - 1 : above;
  }

  // Least squares of the values, weighted by their squares, to the table's nearest ones.
  template <typename Value>
  static __device__ __forceinline__ void store(uint8_t* block, Value value) {
    const float extreme = extreme_of(value);
    if (fabsf(extreme) < 1e-15f) {
      for (int i = 0; i < 18; ++i) block[i] = 0;
      return;
    }
    const float inverse = __fdiv_rn(1.0f, __fdiv_rn(extreme, -127.0f));
    float product = 0.0f, square = 0.0f;
    for (int i = 0; i < 32; ++i) {
      const float x = value(i), q = nonlinear_value(nearest(__fmul_rn(inverse, x))),
                  weighted = __fmul_rn(__fmul_rn(x, x), q);
      product = __fadd_rn(product, __fmul_rn(weighted, x));
      square = __fadd_rn(square, __fmul_rn(weighted, q));
    }
    store_half(block, square > 0.0f ? __fdiv_rn(product, square) : 0.0f);
    store_codes(block + 2, nullptr, [&](int i) { return nearest(__fmul_rn(inverse, value(i))); });
  }
};

}  // namespace nvb
