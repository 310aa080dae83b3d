// Elements of the blocks of GGUF as f32, four neighbours of a row at a time: the one dequantiser of all kernels that
// read blocks as a file has them. src/weight/blocks has the same formulas for the host, in the same order and with the
// same roundings, so that the values are the same bits.
//
// Blocks are even in size and lie at even addresses (of MXFP4 neither), so that they are read 16 bits at a time. Four
// neighbours from a multiple of four on share their scale in every format, and lie in four neighbouring bytes or half
// bytes of four.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "quantized.h"

namespace nvb {

__device__ __forceinline__ float block_half(const uint8_t* at) {
  return __half2float(*reinterpret_cast<const __half*>(at));
}

// Four bytes from an even address on, the first in the low one.
__device__ __forceinline__ uint32_t block_word(const uint8_t* at) {
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(at);
  return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

// The values that the 4 bits of IQ4_NL and IQ4_XS stand for, four to a word.
__device__ __forceinline__ float nonlinear_value(uint32_t q) {
  constexpr uint32_t kWords[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
  const uint32_t word = q < 8 ? (q < 4 ? kWords[0] : kWords[1]) : (q < 12 ? kWords[2] : kWords[3]);
  return static_cast<float>(static_cast<int8_t>(word >> (q % 4 * 8) & 0xffu));
}

// Twice the number of E2M1.
__device__ __forceinline__ float twice_e2m1(uint32_t q) {
  const float magnitude = static_cast<float>(0xc8643210u >> (q % 8 * 4) & 15u);
  return q < 8 ? magnitude : -magnitude;
}

// The 6-bit scale and minimum of group j of Q4_K and Q5_K.
__device__ __forceinline__ float2 k_scale_and_minimum(const uint8_t* packed, int j) {
  if (j < 4) return make_float2(packed[j] & 63, packed[j + 4] & 63);
  return make_float2((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4);
}

template <uint32_t Format>
struct BlockElement;

// A format of 32 elements whose byte i holds q[i] and q[i + 16]. `Nibbles`: where those 16 bytes begin.
template <int Bytes, int Nibbles>
struct SmallBlock {
  static constexpr int kElements = 32;
  static constexpr int kBytes = Bytes;

  static __device__ __forceinline__ void quants(const uint8_t* block, int i, uint32_t (&q)[4]) {
    const uint32_t word = block_word(block + Nibbles + i % 16) >> (i / 16 * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) q[j] = word >> (8 * j) & 15u;
  }

  // With fifth bits, of which bit i of four bytes is that of element i.
  static __device__ __forceinline__ void five_bits(const uint8_t* block, int high, int i, uint32_t (&q)[4]) {
    quants(block, i, q);
    const uint32_t bits = block_word(block + high) >> i;
#pragma unroll
    for (int j = 0; j < 4; ++j) q[j] |= (bits >> j & 1u) << 4;
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q4_0> : SmallBlock<18, 2> {
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    uint32_t q[4];
    quants(block, i, q);
    const float d = block_half(block);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = d * (static_cast<float>(q[j]) - 8.0f);
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q4_1> : SmallBlock<20, 4> {
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    uint32_t q[4];
    quants(block, i, q);
    const float d = block_half(block), m = block_half(block + 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = __fadd_rn(__fmul_rn(d, static_cast<float>(q[j])), m);
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q5_0> : SmallBlock<22, 6> {
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    uint32_t q[4];
    five_bits(block, 2, i, q);
    const float d = block_half(block);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = d * (static_cast<float>(q[j]) - 16.0f);
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q5_1> : SmallBlock<24, 8> {
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    uint32_t q[4];
    five_bits(block, 4, i, q);
    const float d = block_half(block), m = block_half(block + 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = __fadd_rn(__fmul_rn(d, static_cast<float>(q[j])), m);
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q8_0> {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 34;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const uint32_t word = block_word(block + 2 + i);
    const float d = block_half(block);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = d * static_cast<float>(static_cast<int8_t>(word >> (8 * j) & 0xffu));
  }
};

template <>
struct BlockElement<NVB_BLOCKS_IQ4_NL> : SmallBlock<18, 2> {
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    uint32_t q[4];
    quants(block, i, q);
    const float d = block_half(block);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = d * nonlinear_value(q[j]);
  }
};

template <>
struct BlockElement<NVB_BLOCKS_MXFP4> {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 17;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const uint32_t exponent = block[0];
    // Half of 2^(exponent - 127), which for the smallest two is below the normal numbers.
    const float half_scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = half_scale * twice_e2m1(block[1 + i % 16 + j] >> (i / 16 * 4) & 15u);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q2_K> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 84;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const uint32_t scales = block[i / 16];
    const float scale = __fmul_rn(block_half(block + 80), static_cast<float>(scales & 15u));
    const float minimum = __fmul_rn(block_half(block + 82), static_cast<float>(scales >> 4));
    const uint32_t word = block_word(block + 16 + i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = __fsub_rn(__fmul_rn(scale, static_cast<float>(word >> (8 * j) & 3u)), minimum);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q3_K> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 110;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const int group = i / 16;
    const int low = block[96 + group % 8] >> (group / 8 * 4) & 15;
    const int high = block[104 + group % 4] >> (group / 4 * 2) & 3;
    const float scale = __fmul_rn(block_half(block + 108), static_cast<float>((low | high << 4) - 32));
    const uint32_t word = block_word(block + 32 + i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2);
    const uint32_t third = block_word(block + i % 32) >> (i / 32);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t q = (word >> (8 * j) & 3u) | (third >> (8 * j) & 1u) << 2;
      values[j] = scale * (static_cast<float>(q) - 4.0f);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q4_K> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 144;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const float2 packed = k_scale_and_minimum(block + 4, i / 32);
    const float scale = __fmul_rn(block_half(block), packed.x);
    const float minimum = __fmul_rn(block_half(block + 2), packed.y);
    const uint32_t word = block_word(block + 16 + i / 64 * 32 + i % 32) >> (i % 64 / 32 * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = __fsub_rn(__fmul_rn(scale, static_cast<float>(word >> (8 * j) & 15u)), minimum);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q5_K> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 176;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const float2 packed = k_scale_and_minimum(block + 4, i / 32);
    const float scale = __fmul_rn(block_half(block), packed.x);
    const float minimum = __fmul_rn(block_half(block + 2), packed.y);
    const uint32_t word = block_word(block + 48 + i / 64 * 32 + i % 32) >> (i % 64 / 32 * 4);
    const uint32_t fifth = block_word(block + 16 + i % 32) >> (i / 32);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t q = (word >> (8 * j) & 15u) | (fifth >> (8 * j) & 1u) << 4;
      values[j] = __fsub_rn(__fmul_rn(scale, static_cast<float>(q)), minimum);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_Q6_K> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 210;

  // Halves of 128 elements, each of four quarters of 32.
  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
    const float scale =
        __fmul_rn(block_half(block + 208), static_cast<float>(static_cast<int8_t>(block[192 + i / 16])));
    const uint32_t low = block_word(block + half * 64 + quarter % 2 * 32 + at) >> (quarter / 2 * 4);
    const uint32_t high = block_word(block + 128 + half * 32 + at) >> (quarter * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t q = (low >> (8 * j) & 15u) | (high >> (8 * j) & 3u) << 4;
      values[j] = scale * (static_cast<float>(q) - 32.0f);
    }
  }
};

template <>
struct BlockElement<NVB_BLOCKS_IQ4_XS> {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 136;

  static __device__ __forceinline__ void load_four(const uint8_t* block, int i, float (&values)[4]) {
    const int group = i / 32;
    const int low = block[4 + group / 2] >> (group % 2 * 4) & 15;
    const int high = (block[2] | block[3] << 8) >> (2 * group) & 3;
    const float scale = __fmul_rn(block_half(block), static_cast<float>((low | high << 4) - 32));
    const uint32_t word = block_word(block + 8 + group * 16 + i % 16) >> (i % 32 / 16 * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = scale * nonlinear_value(word >> (8 * j) & 15u);
  }
};

// Calls `call` with the format as an std::integral_constant.
template <typename Call>
cudaError_t with_block_format(uint32_t format, Call&& call) {
  switch (format) {
    case NVB_BLOCKS_Q4_0:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q4_0>());
    case NVB_BLOCKS_Q4_1:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q4_1>());
    case NVB_BLOCKS_Q5_0:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q5_0>());
    case NVB_BLOCKS_Q5_1:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q5_1>());
    case NVB_BLOCKS_Q8_0:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q8_0>());
    case NVB_BLOCKS_Q2_K:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q2_K>());
    case NVB_BLOCKS_Q3_K:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q3_K>());
    case NVB_BLOCKS_Q4_K:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q4_K>());
    case NVB_BLOCKS_Q5_K:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q5_K>());
    case NVB_BLOCKS_Q6_K:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_Q6_K>());
    case NVB_BLOCKS_IQ4_NL:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_IQ4_NL>());
    case NVB_BLOCKS_IQ4_XS:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_IQ4_XS>());
    case NVB_BLOCKS_MXFP4:
      return call(std::integral_constant<uint32_t, NVB_BLOCKS_MXFP4>());
    default:
      return cudaErrorInvalidValue;
  }
}

// Elements i .. i + 3 of a row of blocks; i is a multiple of 4.
template <uint32_t Format>
__device__ __forceinline__ void load_four_of_blocks(const void* row, int64_t i, float (&values)[4]) {
  using Element = BlockElement<Format>;
  const uint8_t* const blocks = static_cast<const uint8_t*>(row);
  Element::load_four(blocks + i / Element::kElements * Element::kBytes, static_cast<int>(i % Element::kElements),
                     values);
}

}  // namespace nvb
