// The codes of GGUF's blocks as a matrix instruction wants them (block_product.cuh): of each format the whole numbers
// that its elements are, sixteen elements of a row at a time, apart from the scales, which multiply sums.
// src/weight/blocks and common/block_element.cuh have the same formulas for single elements.
//
// A unit is 256 elements of a row: one block of the K formats, eight of the others. It has four quarters of four steps,
// and a step has 16 elements, of which the quad's lane t has 4 t ..+3, whose codes are the bytes of one word. Every
// format stores four neighbours in four neighbouring bytes or fields of four, so a word of codes is one or two words of
// the block, shifted and masked. Quarters look alike, so that a kernel may loop over them: only the
// number of a step in its quarter has to be known when the code is compiled.
//
//   value = scale(group) * (code - kOffset) - minimum(step),  a group being kGroupSteps steps
//
// The K formats and IQ4_XS have whole numbers for scales and minima, which multiply sums of whole numbers, and two
// factors for the unit: value = scale_factor * scale(group) * (code - kOffset) - minimum_factor * minimum(step). What a
// step's elements of x sum up to meets the step's minimum: the minima of a row are the first operand of one mma over
// F16, which holds them exactly.
//
// Codes are bytes without a sign, or with one where kSigned says so.
#pragma once

#include <cuda_fp16.h>

#include "block_element.cuh"

namespace nvb {
namespace quantized {

constexpr int kUnit = 256;
constexpr int kStep = 16;

// One unit of a row in shared memory, as one lane reads it. `Halves`: it may begin between multiples of four bytes.
template <bool Halves>
struct BlockUnit {
  const uint8_t* bytes;
  const uint32_t* words;  // from the multiple of four at or before the unit
  uint32_t shift;         // bits of the first word that are not the unit's
  int quad;

  __device__ __forceinline__ BlockUnit(const uint8_t* unit, int quad_lane) : bytes(unit), quad(quad_lane) {
    const uint32_t past = Halves ? reinterpret_cast<uintptr_t>(unit) & 3u : 0u;
    words = reinterpret_cast<const uint32_t*>(unit - past);
    shift = 8 * past;
  }

  // Four bytes from byte `base` + `at` on: a multiple of four, and what is known when the code is compiled.
  __device__ __forceinline__ uint32_t word(int base, int at) const { return word_from(words + base / 4, at); }
  // The lane's: those 4 t bytes behind.
  __device__ __forceinline__ uint32_t own_word(int base, int at) const {
    return word_from(words + quad + base / 4, at);
  }
  __device__ __forceinline__ float half(int at) const { return block_half(bytes + at); }
  // The lane's of two bytes in a row from byte `at` on.
  __device__ __forceinline__ uint32_t own_bytes(int at) const {
    return *reinterpret_cast<const uint16_t*>(bytes + at + 2 * quad);
  }

 private:
  __device__ __forceinline__ uint32_t word_from(const uint32_t* from, int at) const {
    if constexpr (Halves) return __funnelshift_rc(from[at / 4], from[at / 4 + 1], at % 4 * 8 + shift);
    if (at % 4 == 0) return from[at / 4];
    return __funnelshift_r(from[at / 4], from[at / 4 + 1], at % 4 * 8);
  }
};

// The four low bits of `bits`, one to a byte.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits) {
  return (bits & 15u) * 0x00204081u & 0x01010101u;
}

// The bytes that the half bytes of `codes` stand for, low halves for Low and high ones else, in a table of 16 bytes.
template <bool Low>
__device__ __forceinline__ uint32_t look_up(const uint32_t (&table)[4], uint32_t codes) {
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t four = codes >> (16 * i) & 0xffffu, entry = four & 0x7777u;
    const uint32_t first = __byte_perm(table[0], table[1], entry), second = __byte_perm(table[2], table[3], entry);
    pairs[i] = __byte_perm(first, second, 0x3210u | (four & 0x8888u) >> 1);
  }
  return __byte_perm(pairs[0], pairs[1], Low ? 0x6420 : 0x7531);
}

__device__ __forceinline__ uint8_t byte_of(uint32_t word, int i) {
  return static_cast<uint8_t>(word >> (8 * i));
}
__device__ __forceinline__ float low_half(uint32_t word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
}

// The lowest two bytes as F16: 1024 and each, less 1024.
__device__ __forceinline__ uint32_t halves_of_bytes(uint32_t bytes) {
  const uint32_t raised = __byte_perm(bytes, 0x64646464u, 0x4140), less = 0x64006400u;
  const __half2 halves = __hsub2(*reinterpret_cast<const __half2*>(&raised), *reinterpret_cast<const __half2*>(&less));
  return *reinterpret_cast<const uint32_t*>(&halves);
}

template <uint32_t Format>
struct BlockCodes;

// What the formats of 32 elements share. `Nibbles`: where the 16 bytes begin of which byte i has the codes of elements
// i and i + 16.
template <uint32_t Format, int Offset, int Nibbles, bool Minimum = false>
struct SmallBlockCodes {
  static constexpr int kBytes = BlockElement<Format>::kBytes;
  static constexpr int kUnitBytes = 8 * kBytes;
  static constexpr bool kMinimum = Minimum;
  static constexpr bool kSigned = false;
  static constexpr bool kWholeScales = false;
  static constexpr int kGroupSteps = 2;
  static constexpr int kOffset = Offset;

  // A block's minimum is what is added.
  template <typename Unit>
  struct Scales {
    static constexpr float minimum_factor = -1.0f;
    const uint8_t* unit;
    int quad;
    __device__ __forceinline__ explicit Scales(const Unit& u) : unit(u.bytes), quad(u.quad) {}
    __device__ __forceinline__ float scale(int quarter, int group) const {
      return block_half(unit + (2 * quarter + group) * kBytes);
    }
    template <bool Upper>
    __device__ __forceinline__ uint32_t step_minima() const {
      return *reinterpret_cast<const uint16_t*>(unit + (Upper ? quad + 4 : quad) * kBytes + 2) * 0x00010001u;
    }
  };

  // Of a quarter's block, the first or the second.
  template <typename Unit>
  static __device__ __forceinline__ uint32_t own_word(const Unit& unit, int quarter, int step, int at) {
    return unit.own_word(quarter * 2 * kBytes, step / 2 * kBytes + at);
  }
  template <typename Unit>
  static __device__ __forceinline__ uint32_t nibbles(const Unit& unit, int quarter, int step) {
    return own_word(unit, quarter, step, Nibbles) >> (step % 2 * 4) & 0x0f0f0f0fu;
  }
  // The fifth bits, element i's being bit i of the four bytes from `high` of the block on.
  template <typename Unit>
  static __device__ __forceinline__ uint32_t with_fifth_bit(const Unit& unit, int high, int quarter, int step) {
    const uint32_t word = unit.word(quarter * 2 * kBytes, step / 2 * kBytes + high);
    return nibbles(unit, quarter, step) | spread_bits(word >> (step % 2 * 16 + 4 * unit.quad)) << 4;
  }
  template <typename Unit>
  static __device__ __forceinline__ uint32_t entries(const uint32_t (&table)[4], const Unit& unit, int quarter,
                                                     int step) {
    const uint32_t codes = own_word(unit, quarter, step, Nibbles);
    return step % 2 == 0 ? look_up<true>(table, codes) : look_up<false>(table, codes);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q4_0> : SmallBlockCodes<NVB_BLOCKS_Q4_0, 8, 2> {
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return nibbles(unit, quarter, step);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q4_1> : SmallBlockCodes<NVB_BLOCKS_Q4_1, 0, 4, true> {
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return nibbles(unit, quarter, step);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q5_0> : SmallBlockCodes<NVB_BLOCKS_Q5_0, 16, 6> {
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return with_fifth_bit(unit, 2, quarter, step);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q5_1> : SmallBlockCodes<NVB_BLOCKS_Q5_1, 0, 8, true> {
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return with_fifth_bit(unit, 4, quarter, step);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q8_0> : SmallBlockCodes<NVB_BLOCKS_Q8_0, 0, 2> {
  static constexpr bool kSigned = true;
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return own_word(unit, quarter, step, 2 + step % 2 * 16);
  }
};

// Tables of the values that half bytes stand for, of MXFP4 twice the values.
#define NVB_IQ4_NL_TABLE {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}
#define NVB_MXFP4_TABLE {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}

template <>
struct BlockCodes<NVB_BLOCKS_IQ4_NL> : SmallBlockCodes<NVB_BLOCKS_IQ4_NL, 0, 2> {
  static constexpr bool kSigned = true;
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    constexpr uint32_t kTable[4] = NVB_IQ4_NL_TABLE;
    return entries(kTable, unit, quarter, step);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_MXFP4> : SmallBlockCodes<NVB_BLOCKS_MXFP4, 0, 1> {
  static constexpr bool kSigned = true;
  template <typename Unit>
  struct Scales {
    const uint8_t* unit;
    __device__ __forceinline__ explicit Scales(const Unit& u) : unit(u.bytes) {}
    // Half of 2^(exponent - 127), because the table has twice the values.
    __device__ __forceinline__ float scale(int quarter, int group) const {
      const uint32_t exponent = unit[(2 * quarter + group) * kBytes];
      return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
  };
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    constexpr uint32_t kTable[4] = NVB_MXFP4_TABLE;
    // A quarter's 34 bytes are no multiple of four.
    const BlockUnit<true> part(unit.bytes + quarter * 2 * kBytes, unit.quad);
    return entries(kTable, part, 0, step);
  }
};

// What the formats of 256 elements share.
template <uint32_t Format, int GroupSteps, int Offset, bool Minimum>
struct LargeBlockCodes {
  static constexpr int kUnitBytes = BlockElement<Format>::kBytes;
  static constexpr bool kMinimum = Minimum;
  static constexpr bool kSigned = false;
  static constexpr bool kWholeScales = true;
  static constexpr int kGroupSteps = GroupSteps;
  static constexpr int kOffset = Offset;
};

// The scales and minima of Q4_K and Q5_K, 6 bits each, eight of both in twelve bytes.
struct SixBitScales {
  float scale_factor, minimum_factor;
  uint32_t scales[2], minima[2];
  int quad;

  template <typename Unit>
  __device__ __forceinline__ explicit SixBitScales(const Unit& unit) : quad(unit.quad) {
    const uint32_t halves = unit.word(0, 0), first = unit.word(0, 4), second = unit.word(0, 8),
                   third = unit.word(0, 12);
    scale_factor = low_half(halves), minimum_factor = low_half(halves >> 16);
    scales[0] = first & 0x3f3f3f3fu;
    minima[0] = second & 0x3f3f3f3fu;
    scales[1] = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
    minima[1] = (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u);
  }
  __device__ __forceinline__ int scale(int quarter, int group) const {
    return byte_of((quarter < 2 ? scales[0] : scales[1]) >> (quarter % 2 * 16), group);
  }
  // Of steps 2 t and 2 t + 1, which are one group.
  template <bool Upper>
  __device__ __forceinline__ uint32_t step_minima() const {
    return halves_of_bytes(static_cast<uint32_t>(byte_of(minima[Upper], quad)) * 0x101u);
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q4_K> : LargeBlockCodes<NVB_BLOCKS_Q4_K, 2, 0, true> {
  template <typename Unit>
  using Scales = SixBitScales;
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return unit.own_word(quarter * 32, 16 + step % 2 * 16) >> (step / 2 * 4) & 0x0f0f0f0fu;
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q5_K> : LargeBlockCodes<NVB_BLOCKS_Q5_K, 2, 0, true> {
  template <typename Unit>
  using Scales = SixBitScales;
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    const uint32_t low = unit.own_word(quarter * 32, 48 + step % 2 * 16) >> (step / 2 * 4) & 0x0f0f0f0fu;
    return low | (unit.own_word(0, 16 + step % 2 * 16) >> (2 * quarter + step / 2) & 0x01010101u) << 4;
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q2_K> : LargeBlockCodes<NVB_BLOCKS_Q2_K, 1, 0, true> {
  template <typename Unit>
  struct Scales {
    float scale_factor, minimum_factor;
    const Unit& unit;
    __device__ __forceinline__ explicit Scales(const Unit& u) : unit(u) {
      const uint32_t halves = unit.word(0, 80);
      scale_factor = low_half(halves), minimum_factor = low_half(halves >> 16);
    }
    __device__ __forceinline__ int scale(int quarter, int group) const {
      return byte_of(unit.word(4 * quarter, 0), group) & 15;
    }
    template <bool Upper>
    __device__ __forceinline__ uint32_t step_minima() const {
      return halves_of_bytes(unit.own_bytes(8 * Upper) >> 4 & 0x0f0fu);
    }
  };
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    return unit.own_word(quarter / 2 * 32, 16 + step % 2 * 16) >> (quarter % 2 * 4 + step / 2 * 2) & 0x03030303u;
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q3_K> : LargeBlockCodes<NVB_BLOCKS_Q3_K, 1, 4, false> {
  template <typename Unit>
  struct Scales {
    float scale_factor;
    const Unit& unit;
    __device__ __forceinline__ explicit Scales(const Unit& u) : scale_factor(u.half(108)), unit(u) {}
    __device__ __forceinline__ int scale(int quarter, int group) const {
      const uint32_t low = unit.word(quarter % 2 * 4, 96) >> (quarter / 2 * 4) & 0x0f0f0f0fu;
      return byte_of(low | (unit.word(0, 104) >> (2 * quarter) & 0x03030303u) << 4, group) - 32;
    }
  };
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    const uint32_t low = unit.own_word(quarter / 2 * 32, 32 + step % 2 * 16) >> (quarter % 2 * 4 + step / 2 * 2);
    const uint32_t high = unit.own_word(0, step % 2 * 16) >> (2 * quarter + step / 2);
    return (low & 0x03030303u) | (high & 0x01010101u) << 2;
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_Q6_K> : LargeBlockCodes<NVB_BLOCKS_Q6_K, 1, 32, false> {
  template <typename Unit>
  struct Scales {
    float scale_factor;
    const Unit& unit;
    __device__ __forceinline__ explicit Scales(const Unit& u) : scale_factor(u.half(208)), unit(u) {}
    __device__ __forceinline__ int scale(int quarter, int group) const {
      return static_cast<int8_t>(byte_of(unit.word(4 * quarter, 192), group));
    }
  };
  // Halves of 128 elements, each of four runs of 32.
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    const int half = quarter / 2, at = step % 2 * 16;
    const uint32_t low = unit.own_word(half * 64, step / 2 * 32 + at) >> (quarter % 2 * 4) & 0x0f0f0f0fu;
    return low | (unit.own_word(half * 32, 128 + at) >> (quarter % 2 * 4 + step / 2 * 2) & 0x03030303u) << 4;
  }
};

template <>
struct BlockCodes<NVB_BLOCKS_IQ4_XS> : LargeBlockCodes<NVB_BLOCKS_IQ4_XS, 2, 0, false> {
  static constexpr bool kSigned = true;
  template <typename Unit>
  struct Scales {
    float scale_factor;
    uint32_t low, high;
    __device__ __forceinline__ explicit Scales(const Unit& unit) : low(unit.word(0, 4)) {
      const uint32_t first = unit.word(0, 0);
      scale_factor = low_half(first), high = first >> 16;
    }
    __device__ __forceinline__ int scale(int quarter, int group) const {
      const int at = 2 * quarter + group;
      return static_cast<int>((low >> (4 * at) & 15u) | (high >> (2 * at) & 3u) << 4) - 32;
    }
  };
  template <typename Unit>
  static __device__ __forceinline__ uint32_t codes(const Unit& unit, int quarter, int step) {
    constexpr uint32_t kTable[4] = NVB_IQ4_NL_TABLE;
    const uint32_t word = unit.own_word(quarter * 32, 8 + step / 2 * 16);
    return step % 2 == 0 ? look_up<true>(kTable, word) : look_up<false>(kTable, word);
  }
};

#undef NVB_IQ4_NL_TABLE
#undef NVB_MXFP4_TABLE

}  // namespace quantized
}  // namespace nvb
