// A unit of W times x as bytes of whole numbers, for block_product.cuh: a block's codes are the first operand of mma
// m16n8k32 (or k16) over bytes as they are, and sums are exact. A product with a matrix whose elements are all -offset
// takes the offset off.
//
// On an H200 the same with F16 codes issued 5.3 instructions for each weight of 20480 x 2560 in Q4_0 where an mma over
// bytes took 3.6.
#pragma once

#include "block_product_plan.cuh"
#include "block_product_sums.cuh"
#include "mma.cuh"
#include "mma_bytes.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// A sum of bytes' products as f32: whole numbers below 2^22 that begin at kRaised are the low bits of f32 numbers from
// 1.5 * 2^23 on.
constexpr int kRaised = 0x4b400000;
__device__ __forceinline__ float lowered(int sum) {
  return __int_as_float(sum) - 12582912.0f;
}

// Sums of one group of 16 or 32 elements with rows g and g + 8, of the codes less their offset, with columns 2 t and
// 2 t + 1. They begin at `Begin`.
template <typename Codes, int Begin>
struct GroupSums {
  int products[4];

  __device__ __forceinline__ void take32(const uint32_t (&a)[4], uint2 b) {
    constexpr int kBegin[4] = {Begin, Begin, Begin, Begin};
    constexpr uint32_t kOffset = (256u - Codes::kOffset) % 256 * 0x01010101u;
    constexpr uint32_t kOffsets[4] = {kOffset, kOffset, kOffset, kOffset};
    if constexpr (Codes::kOffset != 0) {
      int offsets[4];
      mma_m16n8k32_bytes<true>(offsets, kOffsets, b.x, b.y, kBegin);
      mma_m16n8k32_bytes<Codes::kSigned>(products, a, b.x, b.y, offsets);
    } else {
      mma_m16n8k32_bytes<Codes::kSigned>(products, a, b.x, b.y, kBegin);
    }
  }

  __device__ __forceinline__ void take16(uint32_t upper, uint32_t lower, uint32_t b) {
    constexpr int kBegin[4] = {Begin, Begin, Begin, Begin};
    constexpr uint32_t kOffset = (256u - Codes::kOffset) % 256 * 0x01010101u;
    if constexpr (Codes::kOffset != 0) {
      int offsets[4];
      mma_m16n8k16_bytes<true>(offsets, kOffset, kOffset, b, kBegin);
      mma_m16n8k16_bytes<Codes::kSigned>(products, upper, lower, b, offsets);
    } else {
      mma_m16n8k16_bytes<Codes::kSigned>(products, upper, lower, b, kBegin);
    }
  }
};

// Multiplies one unit of 16 rows by x: adds to `sums` those of rows g and g + 8 with columns 2 t and 2 t + 1 of each
// tile. `x`: the lane's bytes of its column, from its first element of the unit on, and `step_sums` bytes behind them
// those of its steps' sums. What a unit lacks of 256 elements is 0 on both sides.
template <uint32_t Format, int Tiles, typename Unit>
__device__ __forceinline__ void multiply_unit(DigitsOf<Digits::kBytes>, const Unit (&units)[2],
                                              const uint8_t* const (&x)[Tiles], int step_sums, const float* inverses,
                                              float (&sums)[Tiles][4]) {
  using Codes = BlockCodes<Format>;
  constexpr bool kWhole = Codes::kWholeScales;
  using Sum = std::conditional_t<kWhole, int, float>;
  using Group = GroupSums<Codes, kWhole ? 0 : kRaised>;
  using Scales = typename Codes::template Scales<Unit>;
  const Scales scales[2] = {Scales(units[0]), Scales(units[1])};
  Sum unit_sums[Tiles][4] = {};
  const auto add_group = [&](int quarter, int group, const Group(&groups)[Tiles]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Sum scale = scales[r].scale(quarter, group);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          Sum& sum = unit_sums[tile][i];
          if constexpr (kWhole) {
            sum += scale * groups[tile].products[i];
          } else {
            sum = fmaf(scale, lowered(groups[tile].products[i]), sum);
          }
        }
      }
    }
  };
  // All quarters, because a loop over them took one row longer: an instruction of one hides behind those of another.
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int step = 2 * half;
      const uint32_t a[4] = {Codes::codes(units[0], quarter, step), Codes::codes(units[1], quarter, step),
                             Codes::codes(units[0], quarter, step + 1), Codes::codes(units[1], quarter, step + 1)};
      uint2 b[Tiles];
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        b[tile] = *reinterpret_cast<const uint2*>(x[tile] + 64 * quarter + 32 * half);
      }
      Group groups[Tiles];
      if constexpr (Codes::kGroupSteps == 2) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) groups[tile].take32(a, b[tile]);
        add_group(quarter, half, groups);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) {
            groups[tile].take16(a[2 * i], a[2 * i + 1], i == 0 ? b[tile].x : b[tile].y);
          }
          add_group(quarter, step + i, groups);
        }
      }
    }
  }
  uint32_t minima[4] = {};
  load_minima<Codes>(scales, minima);
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    float minima_sums[4] = {};
    if constexpr (Codes::kMinimum) {
      const uint2 step = *reinterpret_cast<const uint2*>(x[tile] + step_sums);
      mma_m16n8k16<__half>(minima_sums, minima, step.x, step.y);
    }
    add_unit<Codes>(scales, unit_sums[tile], minima_sums, 1.0f, *reinterpret_cast<const float2*>(inverses + 8 * tile),
                    sums[tile]);
  }
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
