// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for few tokens with W in blocks of GGUF as a file has them, on tensor
// cores from compute capability 8.0 on.
//
// The codes of a block are whole numbers of at most eight bits, so they are the first operand of mma m16n8k32 (or k16)
// over bytes as they are, sums are exact, and a group's scale multiplies its sum in f32. A product with a matrix whose
// elements are all -offset takes the offset off, and one with ones gives the sum of x that a minimum multiplies.
//
// x: each unit of 256 elements of a token becomes whole numbers below 2^22 of one step, which is 2^-22 of the power of
// two above the largest, and these become three signed bytes, each in a column of the second operand. One token costs
// no more than a column would, because an mma has eight. x lies in shared memory, all of it, for the block's life.
//
// W: a team of warps has 16 rows at a time; its warps divide the units and copy them, 16 bytes at a time, into rings of
// their own, the units of the next rows too. A unit's place in the ring is an odd number of 16 bytes, so that the eight
// rows that a load of a warp touches lie in different banks. Before the grid in front has ended the first rows' units
// are fetched into L2 and no further: should that grid write W, L2 has it.
//
// On an H200 the same kernel with F16 codes issued 5.3 instructions for each weight of 20480 x 2560 in Q4_0 where an
// mma over bytes takes 3.6.
#pragma once

#include <type_traits>

#include "../../common/linear_epilogue.cuh"
#include "../../common/mma_bytes.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "linear_quantized_block_input.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// Copies units of 16 rows to a warp's ring. A lane copies of rows lane / 4 and lane / 4 + 8, which are those that it
// multiplies.
template <uint32_t Format>
struct UnitCopy {
  static constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  const uint8_t* weight;
  int64_t stride;
  int last_row;
  int row_bytes;
  int chunks;
  int place;
  const uint8_t* rows[2];
  bool at_end;  // a whole copy of the last of the rows could pass the end of W

  __device__ __forceinline__ UnitCopy(const nvb_linear_quantized_params& p, const Plan& plan)
      : weight(static_cast<const uint8_t*>(p.weight)),
        stride(p.weight_stride),
        last_row(static_cast<int>(p.n - 1)),
        chunks(plan.chunks),
        place(plan.place) {
    row_bytes = static_cast<int>(p.k / BlockElement<Format>::kElements) * BlockElement<Format>::kBytes;
  }

  __device__ __forceinline__ void set_rows(int row_block) {
    const int row = row_block * kRows + threadIdx.x % 32 / 4;
    // A copy may pass the end of its own row, by less than it has bytes at most.
    at_end = (last_row - (row_block * kRows + kRows - 1)) * stride < 16 * kMostChunks<Format>;
    rows[0] = weight + min(row, last_row) * stride;
    rows[1] = weight + min(row + 8, last_row) * stride;
  }

  // Asks for the unit's lines, a quarter of a row each lane.
  __device__ __forceinline__ void fetch_to_l2(int unit) const {
    const int begin = unit * kBytes;
    const int at = min(begin + static_cast<int>(threadIdx.x % 4) * ((kBytes + 3) / 4), row_bytes - 1);
    prefetch_l2(rows[0] + at);
    prefetch_l2(rows[1] + at);
  }

  // What lies in the place behind the row's last block is 0, or the next row's.
  __device__ __forceinline__ void start(uint8_t* to, int unit) const {
    const int first = 16 * (threadIdx.x % 4), begin = unit * kBytes;
    uint8_t* const lane_to = to + threadIdx.x % 32 / 4 * place + first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const from = rows[r] + begin;
      const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15u);
      const uint8_t* const aligned = from - past + first;
      const int left = row_bytes - begin + past - first;
#pragma unroll
      for (int chunk = 0; chunk < kMostChunks<Format>; chunk += 4) {
        if (chunk * 16 + first >= 16 * chunks) break;
        uint8_t* const chunk_to = lane_to + 8 * r * place + 16 * chunk;
        if (at_end) {
          cp_async16_part(chunk_to, aligned + 16 * chunk, max(min(left - 16 * chunk, 16), 0));
        } else {
          cp_async16(chunk_to, aligned + 16 * chunk);
        }
      }
    }
  }
};

// A sum of bytes' products as f32: whole numbers below 2^22 that begin at kRaised are the low bits of f32 numbers from
// 1.5 * 2^23 on.
constexpr int kRaised = 0x4b400000;
__device__ __forceinline__ float lowered(int sum) {
  return __int_as_float(sum) - 12582912.0f;
}

// Sums of one group of 16 or 32 elements with rows g and g + 8: `products` of the codes less their offset, with columns
// 2 t and 2 t + 1, and `totals` of x alone, where a minimum wants them. Both begin at `Begin`.
template <typename Codes, int Begin>
struct GroupSums {
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
    if constexpr (Codes::kMinimum) mma_m16n8k32_bytes<false>(totals, kOnes, b.x, b.y, kBegin);
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
    if constexpr (Codes::kMinimum) mma_m16n8k16_bytes<false>(totals, kOnes, kOnes, b, kBegin);
  }
};

// Multiplies one unit of 16 rows by x: adds to `sums` those of rows g and g + 8 with columns 2 t and 2 t + 1 of each
// tile. `x`: the lane's bytes of its column, from its first element of the unit on. What a unit lacks of 256 elements
// is 0 on both sides.
template <uint32_t Format, int Tiles>
__device__ __forceinline__ void multiply_unit(const uint8_t* upper, const uint8_t* lower, int quad,
                                              const uint8_t* const (&x)[Tiles], const float* inverses,
                                              float (&sums)[Tiles][4]) {
  using Codes = BlockCodes<Format>;
  constexpr bool kWhole = Codes::kWholeScales;
  using Sum = std::conditional_t<kWhole, int, float>;
  const typename Codes::Unit units[2] = {{upper, quad}, {lower, quad}};
  const typename Codes::Scales scales[2] = {typename Codes::Scales(units[0]), typename Codes::Scales(units[1])};
  Sum unit_sums[Tiles][4] = {}, unit_minima[Tiles][4] = {};
  const auto add_group = [&](int group, const GroupSums<Codes, kWhole ? 0 : kRaised>(&groups)[Tiles]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Sum scale = scales[r].scale(group);
      Sum minimum = 0;
      if constexpr (Codes::kMinimum) minimum = scales[r].minimum(group);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Sum& sum = unit_sums[tile][2 * r + c];
          if constexpr (kWhole) {
            sum += scale * groups[tile].products[2 * r + c];
            if constexpr (Codes::kMinimum) unit_minima[tile][2 * r + c] += minimum * groups[tile].totals[c];
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
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    const float2 inverse = *reinterpret_cast<const float2*>(inverses + 8 * tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = static_cast<float>(unit_sums[tile][i]);
      if constexpr (kWhole) {
        sum *= scales[i / 2].scale_factor;
        if constexpr (Codes::kMinimum) {
          sum = fmaf(-scales[i / 2].minimum_factor, static_cast<float>(unit_minima[tile][i]), sum);
        }
      }
      sums[tile][i] = fmaf(i % 2 ? inverse.y : inverse.x, sum, sums[tile][i]);
    }
  }
}

template <uint32_t Format>
__device__ __forceinline__ void finish(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                       int64_t token, int64_t row, float (&sums)[2]) {
  if (p.input_dtype == NVB_F32) {
    repair_sums<true, float, Format>(p, token, row, sums);
  } else if (p.input_dtype == NVB_F16) {
    repair_sums<true, __half, Format>(p, token, row, sums);
  } else {
    repair_sums<true, __nv_bfloat16, Format>(p, token, row, sums);
  }
  float bias[2];
  load_bias(epilogue, row, bias);
  store_columns(epilogue, token, row, sums, bias);
}

// Until all warps of a team have come.
__device__ __forceinline__ void team_barrier(int team, int warps) {
  if (warps == 1) return __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(32 * warps) : "memory");
}

template <uint32_t Format, int Tiles>
__global__ void __launch_bounds__(32 * kMaxWarps, resident_warps(Tiles) / kMaxWarps)
    linear_quantized_blocks(const __grid_constant__ nvb_linear_quantized_params p,
                            const __grid_constant__ LinearEpilogue epilogue, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr int kPartFloats = 8 * Tiles * kRows;
  const int stage_bytes = kRows * plan.place;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, row = lane / 4;
  const int team = warp / plan.team, member = warp % plan.team, warps = plan.team * plan.teams;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * plan.tokens;
  const int tokens = static_cast<int>(min(p.m - first, static_cast<int64_t>(plan.tokens)));
  uint8_t* const x = shared;
  float* const inverses = reinterpret_cast<float*>(x + plan.columns * kDigits * plan.tokens);
  float* const parts = inverses + plan.units * 8 * Tiles;
  uint8_t* const ring = reinterpret_cast<uint8_t*>(parts + warps * kPartFloats) + warp * kStages * stage_bytes;
  float* const team_parts = parts + team * plan.team * kPartFloats;

  const int first_block = blockIdx.x * plan.teams + team, blocks = gridDim.x * plan.teams;
  UnitCopy<Format> copy(p, plan);
  int next_block = first_block, next_unit = member;
  allow_next_grid();
  if (next_block < plan.row_blocks) {
    copy.set_rows(next_block);
    for (int unit = member; unit < plan.units; unit += plan.team) copy.fetch_to_l2(unit);
  }
  wait_for_previous_grid();
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
    stage_x<8 * Tiles, float>(p, plan, first, tokens, warp, warps, x, inverses, fill);
  } else if (p.input_dtype == NVB_F16) {
    stage_x<8 * Tiles, __half>(p, plan, first, tokens, warp, warps, x, inverses, fill);
  } else {
    stage_x<8 * Tiles, __nv_bfloat16>(p, plan, first, tokens, warp, warps, x, inverses, fill);
  }
  __syncthreads();

  // Lanes without a column have the last, and nobody reads their sums.
  const uint8_t* columns[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    columns[tile] = x + min(8 * tile + row, tokens * kDigits - 1) * plan.columns + 8 * quad;
  }
  const uint32_t addresses = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p.weight));
  int stage = 0;
  for (int row_block = first_block; row_block < plan.row_blocks; row_block += blocks) {
    // Where the lane's rows begin within 16 bytes.
    uint32_t begins[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begins[r] =
          addresses + static_cast<uint32_t>(min(static_cast<int64_t>(row_block) * kRows + row + 8 * r, p.n - 1)) *
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
      multiply_unit<Format, Tiles>(place + ((begins[0] + offset) & 15u),
                                   place + 8 * plan.place + ((begins[1] + offset) & 15u), quad, lane_x,
                                   inverses + unit * 8 * Tiles + 2 * quad, sums);
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
      for (int part = 0; part < plan.team; ++part, from += kPartFloats) {
        for (int digit = kDigits - 1; digit >= 0; --digit) {
          const float2 sum = *reinterpret_cast<const float2*>(from + digit * kRows);
          both[0] += sum.x, both[1] += sum.y;
        }
      }
      const int64_t column = static_cast<int64_t>(row_block) * kRows + 2 * pair;
      if (column < p.n) finish<Format>(p, epilogue, first + token, column, both);
    }
  }
  cp_async_wait<0>();
}

template <uint32_t Format, int Tiles>
cudaError_t launch_tiles(const nvb_linear_quantized_params& p, const nvb_launch& launch, const Plan& plan) {
  const auto kernel = linear_quantized_blocks<Format, Tiles>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes_per_block - 1024);
  if (error != cudaSuccess) return error;
  const unsigned passes = static_cast<unsigned>((p.m + plan.tokens - 1) / plan.tokens);
  return launch_overlapped(kernel, dim3(plan.grid, passes), dim3(32 * plan.team * plan.teams), plan.bytes, &launch, p,
                           make_epilogue(p, p.n), plan);
}

}  // namespace blocks

// Units begin at the addresses that BlockUnit wants.
template <uint32_t Format>
bool supports_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  blocks::Plan plan;
  const uint64_t addresses = reinterpret_cast<uintptr_t>(params.weight) | static_cast<uint64_t>(params.weight_stride);
  return launch.capability >= 80 && params.k > 0 && params.n <= (1 << 30) &&
         addresses % (BlockCodes<Format>::kHalves ? 2 : 4) == 0 && blocks::make_plan<Format>(params, launch, plan);
}

template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  blocks::Plan plan;
  if (!blocks::make_plan<Format>(params, launch, plan)) return cudaErrorInvalidValue;
  const int columns = plan.tokens * blocks::kDigits;
  if (columns <= 8) return blocks::launch_tiles<Format, 1>(params, launch, plan);
  if (columns <= 16) return blocks::launch_tiles<Format, 2>(params, launch, plan);
  return blocks::launch_tiles<Format, 4>(params, launch, plan);
}

}  // namespace quantized
}  // namespace nvb
