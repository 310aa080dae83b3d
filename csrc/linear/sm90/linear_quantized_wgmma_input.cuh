// x as linear_quantized_wgmma.cuh wants it, and the small kernels that write it to a workspace: copies that also
// reorder move 4 bytes each, and there are too many of them. Afterwards a stage of x is one bulk copy.
//
// An operand's rows are tokens, 128 bytes each with 16-byte piece i at i ^ (token % 8), in the order in which a lane of
// the first operand holds its k (Weight::x_offset): the order of k is free as long as both operands share it.
//
// __half, __nv_bfloat16: a stage is two chunks of 64 k.
//
// Bf16AsTwoFp8: bf16 as two numbers of FP8, whose products with FP8 weights the tensor cores make from these as they
// are. The four leading bits of x's significand are the first part, the other four the second one, both E4M3; a power
// of two for each token puts its largest element into [128, 256). Nothing is lost from there down to 2^-2, below that
// what is less than 2^-10: 2^-17 of the token's largest element. A stage is all 128 k of the first parts, then of the
// second ones.
//
// The tensor cores add FP8 products with about 14 bits, so that sums are taken over by f32 every 128 k.
//
// Bf16AsScaledF16: bf16 times a power of two for each token, which puts its largest element into [2^14, 2^15), as f16.
// Nothing is lost down to 2^-14, below that what is less than 2^-25. A stage is as that of __half.
//
// With sums (of x over groups, which meet the zero points) further stages follow: second operands of wgmma in tf32.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "../../common/quantized_encode.cuh"
#include "linear_quantized_undecoded.cuh"
#include "linear_quantized_wgmma.h"

namespace nvb {
namespace quantized {

constexpr int kStageChunks = 2;
constexpr int kStageK = kStageChunks * kChunk;
constexpr int kChunkGroups = kStageGroups / kStageChunks;

template <typename T>
inline constexpr bool kAsTwoFp8 = std::is_same_v<T, Bf16AsTwoFp8>;
template <typename T>
inline constexpr bool kAsScaledF16 = std::is_same_v<T, Bf16AsScaledF16>;
// Whether sums wait for a factor of their token.
template <typename T>
inline constexpr bool kHasFactors = kAsTwoFp8<T> || kAsScaledF16<T>;
// What x is in memory.
template <typename T>
using Element = std::conditional_t<kHasFactors<T>, __nv_bfloat16, T>;

// What the tensor cores take W as.
template <uint32_t Encoding, typename T>
struct OperandOf {
  using Type = T;
};
template <uint32_t Encoding>
struct OperandOf<Encoding, Bf16AsScaledF16> {
  using Type = __half;
};
template <uint32_t Encoding>
struct OperandOf<Encoding, Bf16AsTwoFp8> {
  using Type = std::conditional_t<Encoding == NVB_FP8_E5M2, __nv_fp8_e5m2, __nv_fp8_e4m3>;
};
// x as the stages hold it: [block of Tokens tokens][stage][chunk or part][token].
template <int Tokens>
struct InputStage {
  static constexpr int kChunkBytes = Tokens * 128;
  static constexpr int kBytes = kStageChunks * kChunkBytes;
};

template <typename T>
__device__ __forceinline__ float2 pair_to_floats(uint32_t pair) {
  if constexpr (kIsBf16<T>) {
    return __bfloat1622float2(as_bf16(pair));
  } else {
    return __half22float2(as_f16(pair));
  }
}

// A row of sums is an instruction's 8 k after the other's, of which k = t is the leading part of group 4 i + t, k = t +
// 4 the rest. Groups past the end are 0.
template <int Tokens>
__device__ __forceinline__ void store_group_sum(char* stages, int row, int group, float sum) {
  const uint32_t leading = __float_as_uint(sum) & 0xffffe000u;
  char* const sums = stages + group / kChunkGroups * InputStage<Tokens>::kChunkBytes + row * 128 + group % 4 * 4;
  const int piece = group % kChunkGroups / 4 * 2;
  *reinterpret_cast<uint32_t*>(sums + (piece ^ (row % 8)) * 16) = leading;
  *reinterpret_cast<float*>(sums + ((piece + 1) ^ (row % 8)) * 16) = sum - __uint_as_float(leading);
}

// A thread writes the two pieces of a token that meet one instruction of the first operand. With zero points it is one
// of the neighbours that sum a group, too.
template <typename Weight, typename T, int Tokens>
__global__ void __launch_bounds__(128)
    linear_quantized_arrange_input(const nvb_linear_quantized_params p, char* __restrict__ arranged, const int chunks,
                                   const int sum_stages) {
#if __CUDA_ARCH__ == 900
  allow_next_grid();
  const int index = blockIdx.x * 128 + threadIdx.x;
  const int instruction = index % 4;
  const int64_t token = blockIdx.y;
  const int chunk = index / 4;
  const int row = static_cast<int>(token % Tokens);
  const int64_t first_chunk = token / Tokens * (chunks + sum_stages * kStageChunks);
  char* const target = arranged + (first_chunk + chunk) * InputStage<Tokens>::kChunkBytes + row * 128;
  const T* const source =
      static_cast<const T*>(p.input) + token * p.input_stride + static_cast<int64_t>(chunk) * kChunk;
  wait_for_previous_grid();
  if (!Weight::kZeroPoints && chunk >= chunks) return;
  uint2 words[4] = {};
  if (static_cast<int64_t>(chunk) * kChunk < p.k) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint2 raw = *reinterpret_cast<const uint2*>(source + Weight::x_offset(instruction, t));
      words[t] =
          Weight::kWords == 4 ? raw : make_uint2(__byte_perm(raw.x, raw.y, 0x5410), __byte_perm(raw.x, raw.y, 0x7632));
    }
  }
  if constexpr (Weight::kZeroPoints) {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 first = pair_to_floats<T>(words[t].x), second = pair_to_floats<T>(words[t].y);
      sum += (first.x + first.y) + (second.x + second.y);
      words[t] = make_uint2(UndecodedInt4<T>::scale_input(words[t].x), UndecodedInt4<T>::scale_input(words[t].y));
    }
    // Whole warps leave below: there are 64 threads or more for the groups of a stage.
    const int lanes = static_cast<int>(p.group) / 16;  // of a group
    const int stage_group = index / lanes;
    if (stage_group >= sum_stages * kStageGroups) return;
    for (int lane = 1; lane < lanes; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (index % lanes == 0) {
      store_group_sum<Tokens>(arranged + (first_chunk + chunks) * InputStage<Tokens>::kChunkBytes, row, stage_group,
                              sum);
    }
    if (chunk >= chunks) return;
  }
  store16(target + ((2 * instruction) ^ (row % 8)) * 16, make_uint4(words[0].x, words[1].x, words[2].x, words[3].x));
  store16(target + ((2 * instruction + 1) ^ (row % 8)) * 16,
          make_uint4(words[0].y, words[1].y, words[2].y, words[3].y));
#endif
}

// Four f32 as E4M3, the first in the lowest byte.
__device__ __forceinline__ uint32_t to_e4m3(float x, float y, float z, float w) {
  return encode_pair<NVB_FP8_E4M3>(x, y) | encode_pair<NVB_FP8_E4M3>(z, w) << 16;
}
__device__ __forceinline__ float2 from_e4m3(uint32_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3)));
}

// A block takes a token, and writes behind all stages what makes its sums whole again: a power of two. Where it splits
// x, elements that are not finite are NaN in both parts, and a token that has any has a negative factor.
template <typename Weight, typename T, int Tokens>
__global__ void __launch_bounds__(1024)
    linear_quantized_scale_input(const nvb_linear_quantized_params p, char* __restrict__ arranged, const int chunks) {
#if __CUDA_ARCH__ == 900
  allow_next_grid();
  __shared__ uint32_t of_warps[32];
  const int64_t token = blockIdx.x;
  const int row = static_cast<int>(token % Tokens);
  char* const stages = arranged + token / Tokens * chunks * InputStage<Tokens>::kChunkBytes;
  const __nv_bfloat16* const source = static_cast<const __nv_bfloat16*>(p.input) + token * p.input_stride;
  const int pieces = static_cast<int>(p.k / 16);
  const auto load = [&](int index, uint2(&words)[4]) {
    const __nv_bfloat16* const chunk = source + static_cast<int64_t>(index / 4) * kChunk;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      words[t] = *reinterpret_cast<const uint2*>(chunk + Weight::x_offset(index % 4, t));
    }
  };
  wait_for_previous_grid();

  // Exponents and 1, of infinities and NaN 0.
  uint32_t largest = 0, least = 0xffffffffu;
  uint2 words[4] = {};
  for (int index = threadIdx.x; index < pieces; index += blockDim.x) {
    load(index, words);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t first = ((words[t].x & 0x7f807f80u) + 0x00800080u) & 0x7f807f80u;
      const uint32_t second = ((words[t].y & 0x7f807f80u) + 0x00800080u) & 0x7f807f80u;
      largest = __vmaxu2(largest, __vmaxu2(first, second));
      least = __vminu2(least, __vminu2(first, second));
    }
  }
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, max(largest >> 16, largest & 0xffffu) >> 7);
  const uint32_t special_of_warp = __reduce_max_sync(0xffffffffu, least >> 16 == 0 || (least & 0xffffu) == 0);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = special_of_warp << 16 | of_warp;
  __syncthreads();
  const uint32_t other = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0;
  const bool special = __reduce_max_sync(0xffffffffu, other) >> 16 != 0;
  constexpr uint32_t kLargest =
      kAsTwoFp8<T> ? 7 : 14;  // exponent of the largest element; both numbers below are normal
  const uint32_t exponent = max(__reduce_max_sync(0xffffffffu, other & 0xffffu), kLargest + 2);
  const float scale = __uint_as_float((255 + kLargest - exponent) << 23);
  const float factor = __uint_as_float((exponent - 1 - kLargest) << 23);

  for (int index = threadIdx.x; index < chunks * 4; index += blockDim.x) {
    if (chunks * 4 > blockDim.x) {
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] = make_uint2(0, 0);
      if (index < pieces) load(index, words);
    }
    char* const stage = stages + static_cast<int64_t>(index / 8) * InputStage<Tokens>::kBytes + row * 128;
    if constexpr (kAsScaledF16<T>) {
      uint32_t pairs[2][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float2 first = pair_to_floats<__nv_bfloat16>(words[t].x);
        const float2 second = pair_to_floats<__nv_bfloat16>(words[t].y);
        pairs[0][t] = pack_pair<__half>(first.x * scale, first.y * scale);
        pairs[1][t] = pack_pair<__half>(second.x * scale, second.y * scale);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store16(stage + index % 8 / 4 * InputStage<Tokens>::kChunkBytes + ((2 * (index % 4) + half) ^ (row % 8)) * 16,
                make_uint4(pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]));
      }
    } else {
      uint32_t parts[2][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float2 first = pair_to_floats<__nv_bfloat16>(words[t].x),
                     second = pair_to_floats<__nv_bfloat16>(words[t].y);
        float x[4] = {first.x * scale, first.y * scale, second.x * scale, second.y * scale};
        if (special) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] += x[i] - x[i];  // inf becomes NaN
        }
        parts[0][t] = to_e4m3(x[0], x[1], x[2], x[3]);
        const float2 low = from_e4m3(parts[0][t] & 0xffffu), high = from_e4m3(parts[0][t] >> 16);
        parts[1][t] = to_e4m3(x[0] - low.x, x[1] - low.y, x[2] - high.x, x[3] - high.y);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        store16(stage + part * InputStage<Tokens>::kChunkBytes + ((index % 8) ^ (row % 8)) * 16,
                make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]));
      }
    }
  }
  if (threadIdx.x == 0) {
    const int64_t blocks = gridDim.x / Tokens + (gridDim.x % Tokens != 0);
    float* const factors = reinterpret_cast<float*>(arranged + blocks * chunks * InputStage<Tokens>::kChunkBytes);
    factors[token] = kAsTwoFp8<T> && special ? -factor : factor;
  }
#endif
}

}  // namespace quantized
}  // namespace nvb
