// A unit of W times x as F16, for block_product.cuh: codes less their offset are whole numbers that F16 holds, and the
// first operand of mma m16n8k16, whose sums a group's scale multiplies in f32.
#pragma once

#include "block_product_plan.cuh"
#include "block_product_sums.cuh"
#include "mma.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// d = a * b for 16 rows, 8 columns and 16 k in F16.
__device__ __forceinline__ void begin_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
      "%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#endif
}

// Four codes as F16 less their offset: 1024 and a byte without a sign, less 1024 and the offset.
template <typename Codes>
__device__ __forceinline__ uint2 halves_of_codes(uint32_t codes) {
  if constexpr (Codes::kSigned) codes ^= 0x80808080u;
  constexpr uint32_t kLess = 0x64006400u + (Codes::kOffset + (Codes::kSigned ? 128 : 0)) * 0x00010001u;
  const auto less = [](uint32_t raised) {
    const uint32_t both = kLess;
    const __half2 halves =
        __hsub2(*reinterpret_cast<const __half2*>(&raised), *reinterpret_cast<const __half2*>(&both));
    return *reinterpret_cast<const uint32_t*>(&halves);
  };
  return make_uint2(less(__byte_perm(codes, 0x64646464u, 0x4140)), less(__byte_perm(codes, 0x64646464u, 0x4342)));
}

// As for bytes, with x in F16.
template <uint32_t Format, int Tiles, typename Unit>
__device__ __forceinline__ void multiply_unit(DigitsOf<Digits::kHalves>, const Unit (&units)[2],
                                              const uint8_t* const (&x)[Tiles], int step_sums, const float* inverses,
                                              float (&sums)[Tiles][4]) {
  using Codes = BlockCodes<Format>;
  using Scales = typename Codes::template Scales<Unit>;
  const Scales scales[2] = {Scales(units[0]), Scales(units[1])};
  float unit_sums[Tiles][4] = {};
  // A loop: with all quarters written out, two tiles of columns spilled registers.
#pragma unroll 1
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint4 b[Tiles];
    float products[Tiles][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint2 first = halves_of_codes<Codes>(Codes::codes(units[0], quarter, step));
      const uint2 second = halves_of_codes<Codes>(Codes::codes(units[1], quarter, step));
      const uint32_t a[4] = {first.x, second.x, first.y, second.y};
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        if (step % 2 == 0) b[tile] = *reinterpret_cast<const uint4*>(x[tile] + 128 * quarter + 32 * step);
        const uint32_t b0 = step % 2 == 0 ? b[tile].x : b[tile].z, b1 = step % 2 == 0 ? b[tile].y : b[tile].w;
        if (step % Codes::kGroupSteps == 0) {
          begin_mma(products[tile], a, b0, b1);
        } else {
          mma_m16n8k16<__half>(products[tile], a, b0, b1);
        }
      }
      if ((step + 1) % Codes::kGroupSteps != 0) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = static_cast<float>(scales[r].scale(quarter, step / Codes::kGroupSteps));
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; ++c)
            unit_sums[tile][c] = fmaf(scale, products[tile][c], unit_sums[tile][c]);
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
      const uint4 step = *reinterpret_cast<const uint4*>(x[tile] + step_sums);
      begin_mma(minima_sums, minima, step.z, step.w);
      mma_m16n8k16<__half>(minima_sums, minima, step.x, step.y);
    }
    add_unit<Codes>(scales, unit_sums[tile], minima_sums, kSumsOver,
                    *reinterpret_cast<const float2*>(inverses + 8 * tile), sums[tile]);
  }
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
