// Quantised weights as the first operand of mma m16n8k16: one warp's view of 16 rows, in chunks of 64 along k.
//
// A chunk is four instructions. Lane 4 g + t holds of it `kWords` words of W (rows g and g + 8) and kScaleWords words
// of scales, loaded straight into registers or copied asynchronously to a slot of shared memory that only this lane
// reads (so that neither way needs a barrier). `fragment` turns the words of instruction j into the exact values of q
// in T, and `x_offset` says which four neighbouring elements of x meet them: the order of k inside a chunk is free as
// long as both operands share it. Scales are applied to f32 sums: a chunk has kSteps of them, each 4 / kSteps
// instructions.
#pragma once

#include "mma.cuh"
#include "programmatic_launch.cuh"
#include "quantized_element.cuh"
#include "quantized_product.h"
#include "vector.cuh"

namespace nvb {
namespace quantized {

constexpr int kChunk = 64;
constexpr int kTileRows = 16;

enum class Scales {
  kRows,      // one f32 a row, applied in the epilogue
  kGroups32,  // f16
  kGroups64,  // f16, groups of 64 or 128
  kBlocks,    // f32, 128 x 128
};

template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global),
                 "n"(Bytes)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ uint2 load8_streaming(const void* address) {
  uint2 raw;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "l"(address));
  return raw;
}

// Read-only words that neighbouring warps want a moment later. Volatile: issued with the loads of W, in program order.
__device__ __forceinline__ uint32_t load4_cached(const void* address) {
  uint32_t raw;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(raw) : "l"(address));
  return raw;
}

__device__ __forceinline__ __nv_bfloat162 as_bf16(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ __half2 as_f16(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
template <typename Pair>
__device__ __forceinline__ uint32_t bits_of(Pair pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
inline constexpr bool kIsBf16 = kDtype<T> == NVB_BF16;

template <typename T>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  if constexpr (kIsBf16<T>) {
    return bits_of(__hadd2(as_bf16(a), as_bf16(b)));
  } else {
    return bits_of(__hadd2(as_f16(a), as_f16(b)));
  }
}
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  if constexpr (kIsBf16<T>) {
    return bits_of(__hmul2(as_bf16(a), as_bf16(b)));
  } else {
    return bits_of(__hmul2(as_f16(a), as_f16(b)));
  }
}

// (a & mask) | bits in one instruction: it has room for one constant, so the other has to be in a register, which the
// compiler does not choose by itself.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// 1.0 twice.
template <typename T>
inline constexpr uint32_t kOnes = kIsBf16<T> ? 0x3f803f80u : 0x3c003c00u;

// Four 8-bit elements → two pairs of T with the same value. FP8 codes are those of numbers (src/weight/byte_rows.rs
// refuses others). The smallest values of SFP are no numbers of F16.
template <uint32_t Encoding, typename T>
__device__ __forceinline__ void decode_bytes(uint32_t word, uint32_t& first, uint32_t& second) {
  if constexpr (Encoding == NVB_SFP) {
    static_assert(kIsBf16<T>, "SFP is BF16 in a byte");
    const uint2 parts = split_sfp(word);
    first = __byte_perm(parts.x, 0, 0x4140) * 16u + __byte_perm(parts.y, 0, 0x1404);
    second = __byte_perm(parts.x, 0, 0x4342) * 16u + __byte_perm(parts.y, 0, 0x3424);
  } else if constexpr (Encoding == NVB_INT8 && kIsBf16<T>) {
    // 128 + the low seven bits, plus -128 or -256 by the sign bit: both are multiples of a bf16's last place there.
    const uint32_t low = __byte_perm(word, 0, 0x4140), high = __byte_perm(word, 0, 0x4342);
    first = add_pairs<T>(and_or(low, 0x007f007fu, 0x43004300u), and_or(low, 0x00800080u, 0xc300c300u));
    second = add_pairs<T>(and_or(high, 0x007f007fu, 0x43004300u), and_or(high, 0x00800080u, 0xc300c300u));
  } else if constexpr (Encoding == NVB_INT8) {
    // 1024 + (q + 128) has q + 128 for its low byte.
    const uint32_t biased = word ^ 0x80808080u;
    first = add_pairs<T>(__byte_perm(biased, 0x64646464u, 0x4140), 0xe480e480u);
    second = add_pairs<T>(__byte_perm(biased, 0x64646464u, 0x4342), 0xe480e480u);
  } else {
    // The sign goes to the top, exponent and mantissa to the top of T's mantissa; then one multiplication by a power of
    // two corrects the exponent, exactly, subnormals included.
    constexpr bool kE4m3 = Encoding == NVB_FP8_E4M3;
    const uint32_t low = __byte_perm(word, 0, 0x1404), high = __byte_perm(word, 0, 0x3424);
    if constexpr (!kE4m3 && !kIsBf16<T>) {
      first = low, second = high;
    } else {
      constexpr int kShift = kIsBf16<T> ? (kE4m3 ? 4 : 3) : 1;
      constexpr uint32_t kMask = (0x7f00u >> kShift) * 0x10001u;
      constexpr uint32_t kFactor = kIsBf16<T> ? (kE4m3 ? 0x7b807b80u : 0x77807780u) : 0x5c005c00u;
      first = multiply_pairs<T>(and_or(low, 0x80008000u, (low >> kShift) & kMask), kFactor);
      second = multiply_pairs<T>(and_or(high, 0x80008000u, (high >> kShift) & kMask), kFactor);
    }
  }
}

// Int4 in fragment tiles. With ZeroPoints each group has one besides its scale: the value that q = 0 stands for, as a
// GGUF block's minimum is.
template <Scales Kind, bool ZeroPoints>
class Int4Weight {
  static_assert(Kind == Scales::kGroups32 || Kind == Scales::kGroups64, "Int4 has group scales");

 public:
  static constexpr uint32_t kEncoding = NVB_INT4;
  static constexpr Scales kScales = Kind;
  static constexpr bool kFp8 = false;
  static constexpr bool kZeroPoints = ZeroPoints;
  static constexpr int kSteps = Kind == Scales::kGroups32 ? 2 : 1;
  static constexpr int kWords = 4;
  static constexpr int kScaleWords = kSteps * (ZeroPoints ? 2 : 1);
  static constexpr int kSlotBytes = 32 * 4 * (kWords + kScaleWords);
  static constexpr int kInputPiece = 4;  // neighbouring elements of x that a lane loads at once

  Int4Weight() = default;
  __device__ __forceinline__ Int4Weight(const nvb_linear_quantized_params& p, int64_t first_row) {
    const int lane = threadIdx.x % 32;
    const int64_t tile_row = min(first_row, (p.n - 1) / kTileRows * kTileRows) / kTileRows;
    const int64_t chunks = (p.k + kChunk - 1) / kChunk;
    const int64_t groups = Kind == Scales::kGroups32 ? 2 * chunks : (p.k + p.group - 1) / p.group;
    weight_ = static_cast<const uint4*>(p.weight) + tile_row * chunks * 32 + lane;
    scales_ = static_cast<const uint32_t*>(p.scales) + tile_row * groups * 8 + lane / 4;
    zero_points_ = static_cast<const uint32_t*>(p.zero_points) + tile_row * groups * 8 + lane / 4;
    shift_ = p.group == 128 ? 1 : 0;
  }

  __device__ __forceinline__ void load(int chunk, uint32_t (&words)[kWords], uint32_t (&scales)[kScaleWords]) const {
    const uint4 raw = load16_streaming(weight_ + static_cast<int64_t>(chunk) * 32);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      scales[s] = load4_cached(scales_ + group(chunk, s));
      if constexpr (ZeroPoints) scales[kSteps + s] = load4_cached(zero_points_ + group(chunk, s));
    }
  }
  __device__ __forceinline__ void copy(int chunk, char* slot) const {
    const int lane = threadIdx.x % 32;
    copy_async<16>(slot + lane * 16, weight_ + static_cast<int64_t>(chunk) * 32);
    char* const scales = slot + 512 + lane * 4;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      copy_async<4>(scales + s * 128, scales_ + group(chunk, s));
      if constexpr (ZeroPoints) copy_async<4>(scales + (kSteps + s) * 128, zero_points_ + group(chunk, s));
    }
  }
  __device__ __forceinline__ void read(const char* slot, uint32_t (&words)[kWords],
                                       uint32_t (&scales)[kScaleWords]) const {
    const int lane = threadIdx.x % 32;
    const uint4 raw = load16(slot + lane * 16);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
#pragma unroll
    for (int s = 0; s < kScaleWords; ++s) {
      scales[s] = *reinterpret_cast<const uint32_t*>(slot + 512 + s * 128 + lane * 4);
    }
  }

  static __device__ __forceinline__ int x_offset(int j, int quad) { return 16 * j + 4 * quad; }
  // Where a row of x in shared memory keeps its 16-byte pieces: piece i at i ^ swizzle(token).
  static __device__ __forceinline__ int swizzle(int token) { return 2 * (token % 4); }

  template <typename T>
  static __device__ __forceinline__ void fragment(const uint32_t (&words)[kWords], int j, uint32_t (&a)[4]) {
    // 128 + q (1024 + q in f16) by or-ing q under the exponent, then -8 exactly.
    constexpr uint32_t kExponent = kIsBf16<T> ? 0x43004300u : 0x64006400u;
    constexpr uint32_t kMinusEight = kIsBf16<T> ? 0xc308c308u : 0xe408e408u;
#pragma unroll
    for (int p = 0; p < 4; ++p) a[p] = add_pairs<T>(and_or(words[j] >> (4 * p), 0x000f000fu, kExponent), kMinusEight);
  }

  // The scales of rows g and g + 8 in step s.
  __device__ __forceinline__ float2 scale(const uint32_t (&scales)[kScaleWords], int, int s) const {
    return __half22float2(as_f16(scales[s]));
  }
  // What a sum of x adds to the sums, because `fragment` subtracts 8 from q.
  __device__ __forceinline__ float2 zero_point(const uint32_t (&scales)[kScaleWords], int s) const {
    const float2 scale = __half22float2(as_f16(scales[s]));
    const float2 zero_point = __half22float2(as_f16(scales[kScaleWords / 2 + s]));
    return make_float2(fmaf(8.0f, scale.x, zero_point.x), fmaf(8.0f, scale.y, zero_point.y));
  }

 private:
  __device__ __forceinline__ int64_t group(int chunk, int s) const {
    return Kind == Scales::kGroups32 ? static_cast<int64_t>(chunk) * 16 + s * 8
                                     : static_cast<int64_t>(chunk >> shift_) * 8;
  }

  const uint4* weight_;
  const uint32_t* scales_;
  const uint32_t* zero_points_;
  int shift_;
};

// Int8, FP8 and SFP, row-major. A lane takes 16 neighbouring k of each of its rows, with groups of 32 two times 8, so
// that an instruction stays inside a group.
template <uint32_t Encoding, Scales Kind>
class ByteWeight {
 public:
  static constexpr uint32_t kEncoding = Encoding;
  static constexpr Scales kScales = Kind;
  static constexpr bool kFp8 = Encoding == NVB_FP8_E4M3 || Encoding == NVB_FP8_E5M2;
  static constexpr bool kZeroPoints = false;
  static constexpr int kSteps = Kind == Scales::kGroups32 ? 2 : 1;
  static constexpr int kWords = 8;  // four of row g, four of row g + 8
  static constexpr int kScaleWords = Kind == Scales::kRows ? 0 : Kind == Scales::kBlocks ? 1 : 2;
  static constexpr int kSlotBytes = 32 * 4 * (kWords + kScaleWords);
  static constexpr int kInputPiece = 8;

  ByteWeight() = default;
  __device__ __forceinline__ ByteWeight(const nvb_linear_quantized_params& p, int64_t first_row) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const int64_t low = min(first_row + group, p.n - 1), high = min(first_row + group + 8, p.n - 1);
    const uint8_t* const weight = static_cast<const uint8_t*>(p.weight) + quad * (kHalves ? 8 : 16);
    low_ = weight + low * p.weight_stride;
    high_ = weight + high * p.weight_stride;
    shift_ = p.group == 128 ? 1 : 0;
    if constexpr (kHasGroups) {
      const int64_t groups = (p.k + p.group - 1) / p.group;
      low_group_ = low * groups;
      high_group_ = high * groups;
      scales_ = p.scales;
    } else if constexpr (Kind == Scales::kBlocks) {
      scales_ = static_cast<const float*>(p.scales) + min(first_row, p.n - 1) / 128 * ((p.k + 127) / 128);
    }
  }

  template <int Count>
  __device__ __forceinline__ void load(int chunk, uint32_t (&words)[kWords], uint32_t (&scales)[Count]) const {
    const int64_t k = static_cast<int64_t>(chunk) * kChunk;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const row = (r == 0 ? low_ : high_) + k;
      if constexpr (kHalves) {
        const uint2 first = load8_streaming(row), second = load8_streaming(row + 32);
        words[4 * r] = first.x, words[4 * r + 1] = first.y, words[4 * r + 2] = second.x, words[4 * r + 3] = second.y;
      } else {
        const uint4 raw = load16_streaming(row);
        words[4 * r] = raw.x, words[4 * r + 1] = raw.y, words[4 * r + 2] = raw.z, words[4 * r + 3] = raw.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) scales[i] = load4_cached(scale_address(chunk, i));
  }
  __device__ __forceinline__ void copy(int chunk, char* slot) const {
    const int lane = threadIdx.x % 32;
    const int64_t k = static_cast<int64_t>(chunk) * kChunk;
    if constexpr (kHalves) {
      copy_async<8>(slot + lane * 8, low_ + k);
      copy_async<8>(slot + 256 + lane * 8, low_ + k + 32);
      copy_async<8>(slot + 512 + lane * 8, high_ + k);
      copy_async<8>(slot + 768 + lane * 8, high_ + k + 32);
    } else {
      copy_async<16>(slot + lane * 16, low_ + k);
      copy_async<16>(slot + 512 + lane * 16, high_ + k);
    }
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) copy_async<4>(slot + 1024 + i * 128 + lane * 4, scale_address(chunk, i));
  }
  template <int Count>
  __device__ __forceinline__ void read(const char* slot, uint32_t (&words)[kWords], uint32_t (&scales)[Count]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kHalves) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint2 raw = *reinterpret_cast<const uint2*>(slot + (2 * r + h) * 256 + lane * 8);
          words[4 * r + 2 * h] = raw.x, words[4 * r + 2 * h + 1] = raw.y;
        }
      } else {
        const uint4 raw = load16(slot + r * 512 + lane * 16);
        words[4 * r] = raw.x, words[4 * r + 1] = raw.y, words[4 * r + 2] = raw.z, words[4 * r + 3] = raw.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) {
      scales[i] = *reinterpret_cast<const uint32_t*>(slot + 1024 + i * 128 + lane * 4);
    }
  }

  static __device__ __forceinline__ int x_offset(int j, int quad) {
    return kHalves ? 32 * (j / 2) + 8 * quad + 4 * (j % 2) : 16 * quad + 4 * j;
  }
  static __device__ __forceinline__ int swizzle(int token) { return (kHalves ? 4 : 1) * (token % 2); }

  template <typename T>
  static __device__ __forceinline__ void fragment(const uint32_t (&words)[kWords], int j, uint32_t (&a)[4]) {
    decode_bytes<Encoding, T>(words[j], a[0], a[2]);
    decode_bytes<Encoding, T>(words[4 + j], a[1], a[3]);
  }

  template <int Count>
  __device__ __forceinline__ float2 scale(const uint32_t (&scales)[Count], int chunk, int s) const {
    if constexpr (Kind == Scales::kBlocks) {
      return make_float2(__uint_as_float(scales[0]), __uint_as_float(scales[0]));
    } else if constexpr (Kind == Scales::kGroups32) {
      const float2 low = __half22float2(as_f16(scales[0])), high = __half22float2(as_f16(scales[1]));
      return s == 0 ? make_float2(low.x, high.x) : make_float2(low.y, high.y);
    } else {
      const float2 low = __half22float2(as_f16(scales[0])), high = __half22float2(as_f16(scales[1]));
      const int64_t group = chunk >> shift_;
      return make_float2((low_group_ + group) & 1 ? low.y : low.x, (high_group_ + group) & 1 ? high.y : high.x);
    }
  }

 private:
  static constexpr bool kHalves = Kind == Scales::kGroups32;
  static constexpr bool kHasGroups = Kind == Scales::kGroups32 || Kind == Scales::kGroups64;

  // The aligned word that holds a group's scale; with groups of 32 both groups of the chunk, as k is a multiple of 64.
  __device__ __forceinline__ const void* scale_address(int chunk, int i) const {
    if constexpr (Kind == Scales::kBlocks) {
      return static_cast<const float*>(scales_) + (chunk >> 1);
    } else {
      const int64_t group = (i == 0 ? low_group_ : high_group_) + (kHalves ? 2 * chunk : chunk >> shift_);
      return static_cast<const uint16_t*>(scales_) + (group & ~int64_t{1});
    }
  }

  const uint8_t* low_;
  const uint8_t* high_;
  const void* scales_;
  int64_t low_group_;
  int64_t high_group_;
  int shift_;
};

// sums[tile] += scale * (16 rows of one chunk) * x, with x[tile][j] the two words that meet instruction j.
template <typename Weight, typename T, int Tiles, int ScaleWords>
__device__ __forceinline__ void multiply_chunk(const Weight& weight, const uint32_t (&words)[Weight::kWords],
                                               const uint32_t (&scales)[ScaleWords], int chunk,
                                               const uint32_t (&x)[Tiles][4][2], float (&sums)[Tiles][4]) {
  constexpr int kInstructions = 4 / Weight::kSteps;
#pragma unroll
  for (int s = 0; s < Weight::kSteps; ++s) {
    float products[Tiles][4] = {};
    float inputs[Tiles][4] = {};
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      const int j = s * kInstructions + i;
      uint32_t a[4];
      Weight::template fragment<T>(words, j, a);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        if constexpr (Weight::kScales == Scales::kRows) {
          mma_m16n8k16<T>(sums[tile], a, x[tile][j][0], x[tile][j][1]);
        } else {
          mma_m16n8k16<T>(products[tile], a, x[tile][j][0], x[tile][j][1]);
        }
        if constexpr (Weight::kZeroPoints) {
          const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
          mma_m16n8k16<T>(inputs[tile], ones, x[tile][j][0], x[tile][j][1]);
        }
      }
    }
    if constexpr (Weight::kScales != Scales::kRows) {
      const float2 scale = weight.scale(scales, chunk, s);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        sums[tile][0] = fmaf(scale.x, products[tile][0], sums[tile][0]);
        sums[tile][1] = fmaf(scale.x, products[tile][1], sums[tile][1]);
        sums[tile][2] = fmaf(scale.y, products[tile][2], sums[tile][2]);
        sums[tile][3] = fmaf(scale.y, products[tile][3], sums[tile][3]);
      }
      if constexpr (Weight::kZeroPoints) {
        const float2 zero_point = weight.zero_point(scales, s);
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
          sums[tile][0] = fmaf(zero_point.x, inputs[tile][0], sums[tile][0]);
          sums[tile][1] = fmaf(zero_point.x, inputs[tile][1], sums[tile][1]);
          sums[tile][2] = fmaf(zero_point.y, inputs[tile][2], sums[tile][2]);
          sums[tile][3] = fmaf(zero_point.y, inputs[tile][3], sums[tile][3]);
        }
      }
    }
  }
}

}  // namespace quantized
}  // namespace nvb
