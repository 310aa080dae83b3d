// What the warps of attention_decode_ring.cuh read from shared memory: queries, keys and values as fragments of
// mma.sync (mma.cuh). Elements of 8 bits become F16 on the way, and queries over them too.
//
// ldmatrix reads rows of eight copies at once, so the eight keys of a matrix are the same token of each of the eight
// runs. Keys and columns may be taken in any order as long as both operands agree. Where elements have 8 bits a matrix
// of 8 x 8 pairs holds 8 x 16 of them: a lane gets four columns in a row of K where the instruction wants two pairs 8
// columns apart, and two columns side by side of V where it wants them 8 apart; q and the output are permuted likewise.
#pragma once

#include <cuda_fp8.h>

#include "../../common/mma.cuh"
#include "attention_decode_ring_work.cuh"

namespace nvb::decode_ring {

// Two elements of 8 bits, exactly.
template <typename Element>
__device__ __forceinline__ uint32_t widen_pair(uint32_t two) {
  uint32_t pair = 0;
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
  }
#endif
  return pair;
}

// value = high + rest, each a 16-bit T.
template <typename T>
__device__ __forceinline__ void split_pair(float first, float second, uint32_t& high, uint32_t& rest) {
  high = pack_pair<T>(first, second);
  const float2 rounded = unpack_pair<T>(high);
  rest = pack_pair<T>(first - rounded.x, second - rounded.y);
}

// Calls use with the queries' dtype.
template <typename Use>
__device__ __forceinline__ void with_query(uint32_t dtype, const Use& use) {
  if (dtype == NVB_F32) {
    use(float());
  } else if (dtype == NVB_F16) {
    use(__half());
  } else {
    use(__nv_bfloat16());
  }
}

// The power of two of each item's largest element, so that its queries fit F16 whatever their dtype.
template <typename Tile>
__device__ __forceinline__ void find_query_scales(const unsigned char* raw, uint32_t dtype, int items, float* scales) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  with_query(dtype, [&](auto element) {
    using Query = decltype(element);
    for (int item = warp; item < items; item += Tile::kWarps) {
      float most = 0.0f;
      for (int column = lane; column < Tile::kHeadDim; column += 32) {
        most = fmaxf(most, fabsf(to_float(reinterpret_cast<const Query*>(raw)[item * Tile::kHeadDim + column])));
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
      // The exponent's bits alone; a row of zeros, infinities or numbers near either end stays as it is.
      const uint32_t exponent = __float_as_uint(most) & 0x7f800000u;
      if (lane == 0) scales[item] = exponent == 0 || exponent >= 0x7e800000u ? 1.0f : __uint_as_float(exponent);
    }
  });
}

// Q as [step][item][quad] of {high, rest, high, rest}: row `group` of the first operand is the high half of item
// `group`, row group + 8 the rest.
template <typename T, typename Tile>
__device__ __forceinline__ void make_query_fragments(const unsigned char* raw, uint32_t dtype, int items,
                                                     const float* scales, uint4* fragments) {
  constexpr bool kNarrow = sizeof(typename Tile::Element) == 1;
  constexpr int kFirst = kNarrow ? 4 : 2, kSecond = kNarrow ? 2 : 8;
  with_query(dtype, [&](auto element) {
    using Query = decltype(element);
    for (int index = threadIdx.x; index < items * Tile::kSteps * 4; index += 32 * Tile::kWarps) {
      const int item = index / 4 % items;
      const int column = index / (4 * items) * 16 + index % 4 * kFirst;
      const Query* const q = reinterpret_cast<const Query*>(raw) + item * Tile::kHeadDim + column;
      float scale = 1.0f;
      if constexpr (kNarrow) scale = 1.0f / scales[item];  // exact
      uint4 fragment;
      split_pair<T>(to_float(q[0]) * scale, to_float(q[1]) * scale, fragment.x, fragment.y);
      split_pair<T>(to_float(q[kSecond]) * scale, to_float(q[kSecond + 1]) * scale, fragment.z, fragment.w);
      fragments[index] = fragment;
    }
  });
}

// Calls use(step, b): b[0], b[1] the second operand of S for eight keys, b[2], b[3] for the eight tokens after them.
// `tile` is the lane's row of the stage.
template <typename Tile, typename Use>
__device__ __forceinline__ void for_each_key_fragment(const unsigned char* tile, const Use& use) {
  using Element = typename Tile::Element;
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      uint32_t b[4];
      ldmatrix_x4(b, tile + k * 32);
      use(k, b);
    }
  } else {
#pragma unroll
    for (int k = 0; k < Tile::kSteps; k += 2) {
      uint32_t raw[4];
      ldmatrix_x4(raw, tile + k * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t b[4] = {widen_pair<Element>(raw[i]), widen_pair<Element>(raw[i] >> 16),
                               widen_pair<Element>(raw[i + 2]), widen_pair<Element>(raw[i + 2] >> 16)};
        use(k + i, b);
      }
    }
  }
}

// Calls use(step, a): the first operand of O^T for 16 columns of the same keys.
template <typename Tile, typename Use>
__device__ __forceinline__ void for_each_value_fragment(const unsigned char* tile, const Use& use) {
  using Element = typename Tile::Element;
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int m = 0; m < Tile::kSteps; ++m) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, tile + m * 32);
      use(m, a);
    }
  } else {
#pragma unroll
    for (int m = 0; m < Tile::kSteps; m += 2) {
      uint32_t raw[4];
      ldmatrix_x4_trans(raw, tile + m * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Columns c and c + 1 of two keys: the two keys of a column come together.
        const uint32_t first = __byte_perm(raw[i], 0, 0x3120), second = __byte_perm(raw[i + 2], 0, 0x3120);
        const uint32_t a[4] = {widen_pair<Element>(first), widen_pair<Element>(first >> 16),
                               widen_pair<Element>(second), widen_pair<Element>(second >> 16)};
        use(m + i, a);
      }
    }
  }
}

// The column, of 16, of row `group` (half 0) or group + 8 (half 1) of O^T.
template <typename Tile>
__device__ __forceinline__ int output_column(int group, int half) {
  return sizeof(typename Tile::Element) == 1 ? 2 * group + half : group + 8 * half;
}

}  // namespace nvb::decode_ring
