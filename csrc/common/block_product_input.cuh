// x of block_product.cuh for one or two tokens: from memory to the bytes in shared memory that an mma multiplies.
// block_product_staged.cuh has that of more tokens, and shares a unit's first steps.
#pragma once

#include <math_constants.h>

#include "block_product_plan.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// Eight neighbours of x, a lane's part of a unit, as they lie in memory.
template <typename T>
struct InputPart {
  static constexpr int kLoads = 8 / kVector<T>;
  uint4 raw[kLoads];

  __device__ __forceinline__ void load(const T* from, bool vectors) {
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    T* const elements = reinterpret_cast<T*>(raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = from[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ float value(int i) const { return to_float(reinterpret_cast<const T*>(raw)[i]); }
};

// The power of two that puts `maximum`, the bits of the largest finite size of a unit, just below 2^Top, and its
// inverse.
template <int Top>
__device__ __forceinline__ float2 unit_scales(uint32_t maximum) {
  const uint32_t exponent = max(maximum >> 23, static_cast<uint32_t>(Top));
  return make_float2(__uint_as_float((253u + Top - exponent) << 23), __uint_as_float((exponent + 1u - Top) << 23));
}

// A lane's eight numbers of a unit, times its power of two; 0 where one of the unit's is not finite.
template <int Top>
struct UnitNumbers {
  float values[8];
  float inverse;  // NaN for those

  template <typename T>
  __device__ __forceinline__ explicit UnitNumbers(const InputPart<T>& part) {
    uint32_t maximum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) maximum = max(maximum, __float_as_uint(part.value(i)) & 0x7fffffffu);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      maximum = max(maximum, __shfl_xor_sync(~0u, maximum, distance));
    }
    const bool finite = maximum < 0x7f800000u;
    const float2 scales = unit_scales<Top>(finite ? maximum : 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = finite ? part.value(i) * scales.x : 0.0f;
    inverse = finite ? scales.y : CUDART_NAN_F;
  }
};

// The sum of a step's bytes, at most 2048 and so exact, as F16: of a unit's 16 those that a quad's lane t needs, of
// steps 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, are neighbours. A lane has half a step.
__device__ __forceinline__ void store_byte_sum(uint8_t* sums, const uint32_t (&words)[2]) {
  int sum = __dp4a(static_cast<int>(words[0]), 0x01010101, __dp4a(static_cast<int>(words[1]), 0x01010101, 0));
  sum += __shfl_xor_sync(~0u, sum, 1);
  const int lane = threadIdx.x % 32, step = lane / 2, place = step % 8 / 2 * 4 + step / 8 * 2 + step % 2;
  if (lane % 2 == 0) reinterpret_cast<__half*>(sums)[place] = __int2half_rn(sum);
}

// Puts one unit of a token into shared memory, as three bytes with a sign of whole numbers below 2^22: of 32 elements
// those that a quad's lane t needs, 4 t ..+3 and 16 + 4 t ..+3, are neighbours. Of a unit with a number that is not
// finite nothing but NaN comes, for which the sums of the token are taken again. `sums`: where the steps' sums of the
// first digit begin, for formats that want them.
template <bool HasSums, typename T>
__device__ __forceinline__ void store_unit(const InputPart<T>& part, uint8_t* x, uint8_t* sums, int columns,
                                           float* inverses) {
  constexpr int kDigits = columns_of(Digits::kBytes, kDtype<T>);
  const UnitNumbers<22> unit(part);
  // The bytes of a number plus 0x80 in each place but the first, and 0x80 less each, are its digits with a sign.
  constexpr uint32_t kSigns = 0x8080u;
  uint32_t numbers[8], words[kDigits][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) numbers[i] = (static_cast<uint32_t>(__float2int_rn(unit.values[i])) + kSigns) ^ kSigns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t* const four = numbers + 4 * half;
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const uint32_t pair = digit | (digit + 4) << 4;  // byte `digit` of each
      words[digit][half] =
          __byte_perm(__byte_perm(four[0], four[1], pair), __byte_perm(four[2], four[3], pair), 0x5410);
    }
  }
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  uint8_t* const at = x + lane / 4 * 32 + quarter % 2 * 16 + quarter / 2 * 4;
  float weight = unit.inverse;
#pragma unroll
  for (int digit = 0; digit < kDigits; ++digit) {
    *reinterpret_cast<uint32_t*>(at + digit * columns) = words[digit][0];
    *reinterpret_cast<uint32_t*>(at + digit * columns + 8) = words[digit][1];
    if constexpr (HasSums) store_byte_sum(sums + digit * columns, words[digit]);
    if (lane == digit) inverses[digit] = weight;
    weight *= 256.0f;
  }
}

// Puts a slice of the pass's units of x into shared memory: those from `warp` on in steps of `warps`, two of them on
// their way at a time. `inverses` has Columns for each unit of the slice.
template <bool HasSums, int Columns, typename T>
__device__ __forceinline__ void stage_x(const nvb_linear_quantized_params& p, const Plan& plan, int64_t first,
                                        int tokens, int first_unit, int warp, int warps, uint8_t* x, float* inverses) {
  constexpr Digits kKind = Digits::kBytes;
  constexpr int kBatch = 2, kColumns = columns_of(kKind, kDtype<T>);
  const int lane = threadIdx.x % 32, units = min(plan.slice, plan.units - first_unit);
  const int64_t first_element = static_cast<int64_t>(first_unit) * kUnit + 8 * lane;
  const T* const input = static_cast<const T*>(p.input) + first * p.input_stride + first_element;
  InputPart<T> parts[kBatch];
  int tokens_of[kBatch], units_of[kBatch], token = 0, unit = warp;
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      while (unit >= units) unit -= units, ++token;
      tokens_of[i] = token, units_of[i] = unit;
      if (token < tokens && first_element + unit * kUnit < p.k) {
        parts[i].load(input + token * p.input_stride + unit * kUnit, plan.vectors);
      } else {
        parts[i].clear();
      }
      unit += warps;
    }
  };
  for (;;) {
    load();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (tokens_of[i] >= tokens) return;
      uint8_t* const row = x + tokens_of[i] * kColumns * plan.columns;
      store_unit<HasSums>(parts[i], row + units_of[i] * unit_bytes(kKind),
                          row + plan.slice * unit_bytes(kKind) + units_of[i] * step_sum_bytes(kKind), plan.columns,
                          inverses + units_of[i] * Columns + tokens_of[i] * kColumns);
    }
  }
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
