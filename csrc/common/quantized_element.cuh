// Elements of a quantised matrix as f32, four neighbours of a row at a time, for kernels that are not built around a
// tensor core's fragments.
#pragma once

#include "block_element.cuh"
#include "quantized.h"
#include "vector.cuh"

namespace nvb {

// The value of an FP8 code: the fields moved into an f32, and the exponent's bias put right by an exact product.
template <uint32_t Encoding>
__device__ __forceinline__ float decode_fp8(uint32_t code) {
  constexpr bool kE4m3 = Encoding == NVB_FP8_E4M3;
  const uint32_t magnitude = code & 0x7fu;
  const float value = __uint_as_float((code & 0x80u) << 24 | magnitude << (kE4m3 ? 20 : 21)) *
                      __uint_as_float((kE4m3 ? 127u + 120u : 127u + 112u) << 23);
  if (kE4m3) return magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : value;
  if (magnitude < 0x7cu) return value;
  return __uint_as_float(magnitude == 0x7cu ? 0x7f800000u | (code & 0x80u) << 24 : 0x7fc00000u);
}

// Four SFP codes as two words of bytes, of which 16 * x + 256 * y are BF16 numbers. Six bits of a code without its sign
// are exponent and mantissa: with bit 6 clear 4 and 2 from 2^-23 on, else 3 and 3 from 2^-7 on, so that a code once
// more to the left has the fields of the other kind. Code 0 is zero. All of it byte by byte, without carries; products
// of few rows wait for these operations, and minima of pairs of 16 bits took 7 % longer on an H200.
__device__ __forceinline__ uint2 split_sfp(uint32_t codes) {
  const uint32_t size = codes & 0x7f7f7f7fu;
  const uint32_t large = codes >> 6 & 0x01010101u;
  const uint32_t some = (size + 0x7f7f7f7fu) >> 7 & 0x01010101u;
  return make_uint2(2u * size - (size & large * 0xffu), large * 4u + (some * 0x34u + (codes & 0x80808080u)));
}

// Where the f16 scale of a row's group lies; beside fragment tiles rows g and g + 8 are neighbours.
template <uint32_t Encoding>
__device__ __forceinline__ int64_t group_scale_index(int64_t row, int64_t group, int64_t groups) {
  if (Encoding != NVB_INT4) return row * groups + group;
  return (row / 16 * groups + group) * 16 + row % 8 * 2 + row % 16 / 8;
}

// The 32-bit word of an Int4 matrix that holds columns k .. k + 3 of a row and of its partner eight rows away, shifted
// so that the row's nibbles 0, 2, 4 and 6 are columns k, k + 2, k + 1 and k + 3.
__device__ __forceinline__ uint32_t load_int4_word(const nvb_quantized_matrix& matrix, int64_t row, int64_t k) {
  const int64_t tile = row / 16 * ((matrix.columns + 63) / 64) + k / 64;
  const int64_t word = tile * 128 + (row % 8 * 4 + k % 16 / 4) * 4 + k % 64 / 16;
  return static_cast<const uint32_t*>(matrix.data)[word] >> (row % 16 / 8 * 4);
}

// The codes of columns k .. k + 3 of a row in one word; k is a multiple of 4. Past the last column a row is padded.
template <uint32_t Encoding>
__device__ __forceinline__ uint32_t load_four_codes(const nvb_quantized_matrix& matrix, int64_t row, int64_t k) {
  if constexpr (Encoding == NVB_INT4) {
    return load_int4_word(matrix, row, k);
  } else {
    return *reinterpret_cast<const uint32_t*>(static_cast<const char*>(matrix.data) + row * matrix.row_bytes + k);
  }
}

// The scale and zero point of element (row, k); value = scale * q + zero point, with Int4's q counted from 0.
template <uint32_t Encoding>
__device__ __forceinline__ float2 load_scale(const nvb_quantized_matrix& matrix, int64_t row, int64_t k) {
  if (Encoding != NVB_INT4 && matrix.scale_kind == NVB_SCALES_ROWS) {
    return make_float2(static_cast<const float*>(matrix.scales)[row], 0.0f);
  }
  if (Encoding != NVB_INT4 && Encoding != NVB_INT8) {
    return make_float2(static_cast<const float*>(matrix.scales)[row / 128 * ((matrix.columns + 127) / 128) + k / 128],
                       0.0f);
  }
  const int shift = __ffs(matrix.group) - 1;
  const int64_t groups = (matrix.columns + matrix.group - 1) >> shift;
  const int64_t index = group_scale_index<Encoding>(row, k >> shift, groups);
  const float scale = __half2float(static_cast<const __half*>(matrix.scales)[index]);
  if constexpr (Encoding != NVB_INT4) return make_float2(scale, 0.0f);
  if (matrix.zero_points == nullptr) return make_float2(scale, -8.0f * scale);
  return make_float2(scale, __half2float(static_cast<const __half*>(matrix.zero_points)[index]));
}

// Int4 without zero points is one exact product and one rounding: fma(scale, q, -8 scale) = scale (q - 8).
template <uint32_t Encoding>
__device__ __forceinline__ void decode_four(uint32_t codes, float2 scale, float (&values)[4]) {
  if constexpr (Encoding == NVB_INT4) {
    constexpr int kShifts[4] = {0, 16, 8, 24};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = fmaf(scale.x, static_cast<float>((codes >> kShifts[i]) & 15u), scale.y);
    }
  } else if constexpr (Encoding == NVB_SFP) {
    const uint2 parts = split_sfp(codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t fields = parts.x >> (8 * i) & 0xffu, bias = parts.y >> (8 * i);
      values[i] = scale.x * __uint_as_float((fields << 20) + (bias << 24));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = codes >> (8 * i) & 0xffu;
      if constexpr (Encoding == NVB_INT8) {
        values[i] = scale.x * static_cast<float>(static_cast<int8_t>(code));
      } else {
        values[i] = scale.x * decode_fp8<Encoding>(code);
      }
    }
  }
}

template <uint32_t Encoding>
__device__ __forceinline__ void load_four(const nvb_quantized_matrix& matrix, int64_t row, int64_t k,
                                          float (&values)[4]) {
  if constexpr (nvb_is_blocks(Encoding)) {
    load_four_of_blocks<Encoding>(static_cast<const char*>(matrix.data) + row * matrix.row_bytes, k, values);
  } else {
    decode_four<Encoding>(load_four_codes<Encoding>(matrix, row, k), load_scale<Encoding>(matrix, row, k), values);
  }
}

}  // namespace nvb
