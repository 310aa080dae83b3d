// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for few tokens with W in blocks of GGUF as a file has them, on tensor
// cores from compute capability 8.0 on: the block of such a product, of a whole weight (linear_quantized_blocks.cuh) or
// of one expert's rows (grouped_linear_blocks.cuh).
//
// The codes of a block are whole numbers of at most eight bits, so they are the first operand of mma m16n8k32 (or k16)
// over bytes as they are, sums are exact, and a group's scale multiplies its sum in f32. A product with a matrix whose
// elements are all -offset takes the offset off, and one with ones gives the sum of x that a minimum multiplies. Of the
// K formats, whose minima are small whole numbers, the sums of x lie in shared memory, and one mma over F16 multiplies
// them for a whole unit: 20480 x 2560 in Q4_K takes 2 % less with one token and 11 % with eight. Offsets of Q6_K taken
// off that way gained nothing with one token.
//
// x: each unit of 256 elements of a token becomes whole numbers below 2^22 of one step, which is 2^-22 of the power of
// two above the largest, and these become three signed bytes, each in a column of the second operand. One token costs
// no more than a column would, because an mma has eight. x lies in shared memory, all of it, for the block's life.
//
// W: a team of warps has 16 rows at a time; its warps divide the units and copy them, 16 bytes at a time, into rings of
// their own, the units of the next rows too. A unit's place in the ring is an odd number of 16 bytes, so that the eight
// rows that a load of a warp touches lie in different banks. Shared memory: x, a scale for each unit and column, the
// warps' parts of sums and their rings, as block_product_plan.cuh adds up. Registers: 80 a thread, 168 for many
// columns.
//
// On an H200 the same kernel with F16 codes issued 5.3 instructions for each weight of 20480 x 2560 in Q4_0 where an
// mma over bytes takes 3.6.
#pragma once

#include <type_traits>

#include "block_product_copy.cuh"
#include "block_product_input.cuh"
#include "linear_epilogue.cuh"
#include "mma.cuh"
#include "mma_bytes.cuh"
#include "quantized_nonfinite.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// What a block multiplies: `tokens` rows of x from input_row on, and the rows of W from weight_row on, of which there
// are as many as columns of the epilogue; p.n counts all rows of W. The sums go to rows of y from output_row on.
struct ProductPart {
  int64_t weight_row;
  int64_t input_row;
  int64_t output_row;
  int tokens;
};

// A warp's place: the team and its member.
struct TeamPlace {
  int warp, team, member;
  int first_block;  // of 16 rows, that the team has first
  int blocks;       // from one to its next

  __device__ __forceinline__ explicit TeamPlace(const Plan& plan)
      : warp(threadIdx.x / 32),
        team(warp / plan.team),
        member(warp % plan.team),
        first_block(blockIdx.x * plan.teams + team),
        blocks(gridDim.x * plan.teams) {}
};

// A sum of bytes' products as f32: whole numbers below 2^22 that begin at kRaised are the low bits of f32 numbers from
// 1.5 * 2^23 on.
constexpr int kRaised = 0x4b400000;
__device__ __forceinline__ float lowered(int sum) {
  return __int_as_float(sum) - 12582912.0f;
}

// Sums of one group of 16 or 32 elements with rows g and g + 8: `products` of the codes less their offset, with columns
// 2 t and 2 t + 1, and `totals` of x alone, where a group's minimum wants them. Both begin at `Begin`.
template <typename Codes, int Begin>
struct GroupSums {
  static constexpr bool kTakesTotals = Codes::kMinimum && !Codes::kStepMinima;
  int products[4];
  int totals[4];

  __device__ __forceinline__ void take32(const uint32_t (&a)[4], uint2 b) {
    constexpr int kBegin[4] = {Begin, Begin, Begin, Begin};
    constexpr uint32_t kOffset = (256u - Codes::kOffset) % 256 * 0x01010101u;
    constexpr uint32_t kOffsets[4] = {kOffset, kOffset, kOffset, kOffset};
    constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    if constexpr (Codes::kOffset != 0) {
      int offsets[4];
      mma_m16n8k32_bytes<true>(offsets, kOffsets, b.x, b.y, kBegin);
      mma_m16n8k32_bytes<Codes::kSigned>(products, a, b.x, b.y, offsets);
    } else {
      mma_m16n8k32_bytes<Codes::kSigned>(products, a, b.x, b.y, kBegin);
    }
    if constexpr (kTakesTotals) mma_m16n8k32_bytes<false>(totals, kOnes, b.x, b.y, kBegin);
  }

  __device__ __forceinline__ void take16(uint32_t upper, uint32_t lower, uint32_t b) {
    constexpr int kBegin[4] = {Begin, Begin, Begin, Begin};
    constexpr uint32_t kOffset = (256u - Codes::kOffset) % 256 * 0x01010101u, kOnes = 0x01010101u;
    if constexpr (Codes::kOffset != 0) {
      int offsets[4];
      mma_m16n8k16_bytes<true>(offsets, kOffset, kOffset, b, kBegin);
      mma_m16n8k16_bytes<Codes::kSigned>(products, upper, lower, b, offsets);
    } else {
      mma_m16n8k16_bytes<Codes::kSigned>(products, upper, lower, b, kBegin);
    }
    if constexpr (kTakesTotals) mma_m16n8k16_bytes<false>(totals, kOnes, kOnes, b, kBegin);
  }
};

// Multiplies one unit of 16 rows by x: adds to `sums` those of rows g and g + 8 with columns 2 t and 2 t + 1 of each
// tile. `x`: the lane's bytes of its column, from its first element of the unit on, and `step_sums` bytes behind them
// those of its steps' sums. What a unit lacks of 256 elements is 0 on both sides.
template <uint32_t Format, int Tiles>
__device__ __forceinline__ void multiply_unit(const uint8_t* upper, const uint8_t* lower, int quad,
                                              const uint8_t* const (&x)[Tiles], int step_sums, const float* inverses,
                                              float (&sums)[Tiles][4]) {
  using Codes = BlockCodes<Format>;
  constexpr bool kWhole = Codes::kWholeScales;
  using Sum = std::conditional_t<kWhole, int, float>;
  const typename Codes::Unit units[2] = {{upper, quad}, {lower, quad}};
  const typename Codes::Scales scales[2] = {typename Codes::Scales(units[0]), typename Codes::Scales(units[1])};
  Sum unit_sums[Tiles][4] = {};
  const auto add_group = [&](int group, const GroupSums<Codes, kWhole ? 0 : kRaised>(&groups)[Tiles]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Sum scale = scales[r].scale(group);
      float minimum = 0.0f;
      if constexpr (Codes::kMinimum && !kWhole) minimum = scales[r].minimum(group);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Sum& sum = unit_sums[tile][2 * r + c];
          if constexpr (kWhole) {
            sum += scale * groups[tile].products[2 * r + c];
          } else {
            sum = fmaf(scale, lowered(groups[tile].products[2 * r + c]), sum);
            if constexpr (Codes::kMinimum) sum = fmaf(-minimum, lowered(groups[tile].totals[c]), sum);
          }
        }
      }
    }
  };
#pragma unroll
  for (int group32 = 0; group32 < kUnit / 32; ++group32) {
    const uint32_t a[4] = {Codes::codes(units[0], 2 * group32), Codes::codes(units[1], 2 * group32),
                           Codes::codes(units[0], 2 * group32 + 1), Codes::codes(units[1], 2 * group32 + 1)};
    uint2 b[Tiles];
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) b[tile] = *reinterpret_cast<const uint2*>(x[tile] + 32 * group32);
    GroupSums<Codes, kWhole ? 0 : kRaised> groups[Tiles];
    if constexpr (Codes::kGroupSteps == 2) {
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) groups[tile].take32(a, b[tile]);
      add_group(group32, groups);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
          groups[tile].take16(a[2 * half], a[2 * half + 1], half == 0 ? b[tile].x : b[tile].y);
        }
        add_group(2 * group32 + half, groups);
      }
    }
  }
  uint32_t minima[4] = {};
  if constexpr (Codes::kStepMinima) {
    minima[0] = scales[0].template step_minima<false>(), minima[1] = scales[1].template step_minima<false>();
    minima[2] = scales[0].template step_minima<true>(), minima[3] = scales[1].template step_minima<true>();
  }
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    const float2 inverse = *reinterpret_cast<const float2*>(inverses + 8 * tile);
    float minima_sums[4] = {};
    if constexpr (Codes::kStepMinima) {
      const uint2 step = *reinterpret_cast<const uint2*>(x[tile] + step_sums);
      mma_m16n8k16<__half>(minima_sums, minima, step.x, step.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = static_cast<float>(unit_sums[tile][i]);
      if constexpr (kWhole) {
        sum *= scales[i / 2].scale_factor;
        if constexpr (Codes::kMinimum) sum = fmaf(-scales[i / 2].minimum_factor, minima_sums[i], sum);
      }
      sums[tile][i] = fmaf(i % 2 ? inverse.y : inverse.x, sum, sums[tile][i]);
    }
  }
}

// Of a token of the part and two rows of its weight.
template <uint32_t Format>
__device__ __forceinline__ void finish(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                       const ProductPart& part, int token, int64_t row, float (&sums)[2]) {
  const int64_t input_row = part.input_row + token, weight_row = part.weight_row + row;
  if (p.input_dtype == NVB_F32) {
    repair_sums<true, float, Format>(p, input_row, weight_row, sums);
  } else if (p.input_dtype == NVB_F16) {
    repair_sums<true, __half, Format>(p, input_row, weight_row, sums);
  } else {
    repair_sums<true, __nv_bfloat16, Format>(p, input_row, weight_row, sums);
  }
  float bias[2];
  load_bias(epilogue, row, bias, part.weight_row);
  store_columns(epilogue, part.output_row + token, row, sums, bias);
}

// Until all warps of a team have come.
__device__ __forceinline__ void team_barrier(int team, int warps) {
  if (warps == 1) return __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(32 * warps) : "memory");
}

// The product of one part. The rows of `copy` are those of the team's first block; what the grid in front has written
// may be read.
template <uint32_t Format, int Tiles>
__device__ __forceinline__ void multiply_part(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                              const Plan& plan, const ProductPart& part, UnitCopy<Format>& copy) {
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr int kPartFloats = 8 * Tiles * kRows;
  constexpr bool kHasSums = BlockCodes<Format>::kStepMinima;
  const TeamPlace at(plan);
  const int stage_bytes = kRows * plan.place;
  const int lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  const int warp = at.warp, team = at.team, member = at.member, warps = plan.team * plan.teams;
  const int first_block = at.first_block, blocks = at.blocks, tokens = part.tokens;
  uint8_t* const x = shared;
  float* const inverses = reinterpret_cast<float*>(x + plan.columns * kDigits * plan.tokens);
  float* const parts = inverses + plan.units * 8 * Tiles;
  uint8_t* const ring = reinterpret_cast<uint8_t*>(parts + warps * kPartFloats) + warp * kStages * stage_bytes;
  float* const team_parts = parts + team * plan.team * kPartFloats;

  int next_block = first_block, next_unit = member;
  int filled = 0;
  const auto fill = [&] {
    if (next_block < plan.row_blocks) copy.start(ring + filled * stage_bytes, next_unit);
    cp_async_commit();
    next_unit += plan.team;
    if (next_unit >= plan.units) {
      next_unit = member, next_block += blocks;
      copy.set_rows(next_block);
    }
    filled ^= 1;
  };

  if (p.input_dtype == NVB_F32) {
    stage_x<kHasSums, 8 * Tiles, float>(p, plan, part.input_row, tokens, warp, warps, x, inverses, fill);
  } else if (p.input_dtype == NVB_F16) {
    stage_x<kHasSums, 8 * Tiles, __half>(p, plan, part.input_row, tokens, warp, warps, x, inverses, fill);
  } else {
    stage_x<kHasSums, 8 * Tiles, __nv_bfloat16>(p, plan, part.input_row, tokens, warp, warps, x, inverses, fill);
  }
  __syncthreads();

  // Lanes without a column have the last, and nobody reads their sums.
  const uint8_t* columns[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    columns[tile] = x + min(8 * tile + row, tokens * kDigits - 1) * plan.columns + 8 * quad;
  }
  const uint32_t addresses = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(copy.weight));
  int stage = 0;
  for (int row_block = first_block; row_block < plan.row_blocks; row_block += blocks) {
    // Where the lane's rows begin within 16 bytes.
    uint32_t begins[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begins[r] = addresses + static_cast<uint32_t>(
                                  min(static_cast<int64_t>(row_block) * kRows + row + 8 * r, epilogue.columns - 1)) *
                                  static_cast<uint32_t>(p.weight_stride);
    }
    float sums[Tiles][4] = {};
    for (int unit = member; unit < plan.units; unit += plan.team) {
      cp_async_wait<0>();
      __syncwarp();  // the unit is there, and its predecessor has been read by all
      fill();
      const uint8_t* const place = ring + stage * stage_bytes + row * plan.place;
      const uint32_t offset = unit * BlockCodes<Format>::kUnitBytes;
      const uint8_t* lane_x[Tiles];
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) lane_x[tile] = columns[tile] + unit * kUnit;
      multiply_unit<Format, Tiles>(
          place + ((begins[0] + offset) & 15u), place + 8 * plan.place + ((begins[1] + offset) & 15u), quad, lane_x,
          plan.units * kUnit - unit * (kUnit - kStepSumBytes), inverses + unit * 8 * Tiles + 2 * quad, sums);
      stage ^= 1;
    }

    // team_parts[member][column][row]
    team_barrier(team, plan.team);  // the parts before have been read
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * tile + 2 * quad + i % 2;
        team_parts[member * kPartFloats + column * kRows + row + i / 2 * 8] = sums[tile][i];
      }
    }
    team_barrier(team, plan.team);
    for (int i = member * 32 + lane; i < kRows / 2 * tokens; i += 32 * plan.team) {
      const int token = i / (kRows / 2), pair = i % (kRows / 2);
      const float* from = team_parts + token * kDigits * kRows + 2 * pair;
      float both[2] = {};
      for (int other = 0; other < plan.team; ++other, from += kPartFloats) {
        for (int digit = kDigits - 1; digit >= 0; --digit) {
          const float2 sum = *reinterpret_cast<const float2*>(from + digit * kRows);
          both[0] += sum.x, both[1] += sum.y;
        }
      }
      const int64_t column = static_cast<int64_t>(row_block) * kRows + 2 * pair;
      if (column < epilogue.columns) finish<Format>(p, epilogue, part, token, column, both);
    }
  }
  cp_async_wait<0>();
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
