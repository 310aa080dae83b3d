// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for few tokens with W in blocks of GGUF as a file has them, on tensor
// cores from compute capability 8.0 on: the block of such a product, of a whole weight (linear_quantized_blocks.cuh) or
// of one expert's rows (grouped_linear_blocks.cuh).
//
// The codes of a block are whole numbers of at most eight bits, and a group's scale multiplies its sum with x. x lies
// in shared memory as what an mma takes: for one or two tokens as three bytes of whole numbers
// (block_product_bytes.cuh), with which a product of bytes is exact and takes the codes as they are; for more as F16,
// of F32 two numbers (block_product_halves.cuh), which need fewer columns of the eight that an mma has, and which a
// kernel in front has made (block_product_staged.cuh). One token costs no more than a column would. Each unit of 256
// elements of a token has a power of two of its own, which puts the largest of them where the numbers end. Of formats
// with minima, the sums of x lie there too, and one mma over F16 multiplies them for a whole unit. Of long rows, x lies
// there a slice of its units at a time.
//
// W: a team of warps has 16 rows at a time; its warps divide the units and have them copied into rings of their own
// (block_product_copy.cuh), the units of the next rows too. A unit's place in the ring is an odd number of 16 bytes, so
// that the eight rows that a load of a warp touches lie in different banks. What the warps of a team have summed up for
// several times 16 rows waits in shared memory until all of them have come. Shared memory: x, a scale for each unit and
// column, the sums and the rings, as block_product_plan.cuh adds up. Registers: 80 a thread, of up to 16 columns 128,
// of more 168.
#pragma once

#include "block_product_bytes.cuh"
#include "block_product_copy.cuh"
#include "block_product_halves.cuh"
#include "block_product_input.cuh"
#include "block_product_staged.cuh"
#include "linear_epilogue.cuh"
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

// The order in which a warp takes its units: of some rows a slice, of the next rows the same slice, and after so many
// rows as there are slots the next slice.
struct Walk {
  int batch;  // of its first rows
  int slice;  // its first unit
  int end;    // and that behind it
  int slot;
  int unit;

  __device__ __forceinline__ Walk(const Plan& plan, const TeamPlace& at)
      : batch(at.first_block), slice(0), end(min(plan.slice, plan.units)), slot(0), unit(at.member) {}
  __device__ __forceinline__ int row_block(const TeamPlace& at) const { return batch + slot * at.blocks; }
  __device__ __forceinline__ bool is_over(const Plan& plan) const { return batch >= plan.row_blocks; }
  // To the warp's next unit; whether that is one of other rows.
  __device__ __forceinline__ bool advance(const Plan& plan, const TeamPlace& at) {
    unit += plan.team;
    if (unit < end) return false;
    do {
      if (++slot == plan.slots || row_block(at) >= plan.row_blocks) {
        slot = 0, slice += plan.slice;
        if (slice >= plan.units) slice = 0, batch += plan.slots * at.blocks;
        end = min(slice + plan.slice, plan.units);
      }
      unit = slice + at.member;
    } while (unit >= end && !is_over(plan));
    return true;
  }
};

// Adds the sums of 16 rows with all columns to those of a slot, [token][row], or puts them there: a lane's of row `row`
// and the eighth behind it, which `slot` begins at. A token's columns become one.
template <Digits Kind, int Tiles>
__device__ __forceinline__ void store_sums(const float (&sums)[Tiles][4], float* slot, bool first, int digits,
                                           int tokens, int quad) {
  const auto store = [&](int token, float upper, float lower) {
    if (token >= tokens) return;
    float* const to = slot + token * kRows;
    if (!first) upper += to[0], lower += to[8];
    to[0] = upper, to[8] = lower;
  };
  if constexpr (Kind == Digits::kBytes) {
    static_assert(Tiles == 1, "a tile has room for the columns of two tokens");
    // Columns 0 to 2 are one token's and 3 to 5 the other's; a quad's lane t has 2 t and 2 t + 1.
    float totals[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first_column = sums[0][2 * r], second = sums[0][2 * r + 1], both = first_column + second;
      const float next_first = __shfl_down_sync(~0u, first_column, 1), next_both = __shfl_down_sync(~0u, both, 1);
      totals[r] = quad == 0 ? both + next_first : second + next_both;
    }
    store(quad, totals[0], totals[1]);
  } else {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      const float(&sum)[4] = sums[tile];
      if (digits == 2) {
        store(4 * tile + quad, sum[0] + sum[1], sum[2] + sum[3]);
      } else {
        store(8 * tile + 2 * quad, sum[0], sum[2]);
        store(8 * tile + 2 * quad + 1, sum[1], sum[3]);
      }
    }
  }
}

// The product of one part. The rows of `copy` are those of the team's first block; what the grid in front has written
// may be read.
template <uint32_t Format, Digits Kind, int Tiles, Copies Copy>
__device__ __forceinline__ void multiply_part(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                              const Plan& plan, const ProductPart& part, UnitCopy<Format, Copy>& copy) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr bool kHasSums = BlockCodes<Format>::kMinimum;
  using Unit = typename UnitCopy<Format, Copy>::Unit;
  const TeamPlace at(plan);
  const int lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  const int warp = at.warp, warps = plan.team * plan.teams, tokens = part.tokens, columns = tokens * plan.digits;
  uint8_t* const ring = shared + warp * kStages * plan.stage_bytes;
  uint8_t* const x = shared + warps * kStages * plan.stage_bytes;
  float* const inverses = reinterpret_cast<float*>(x + plan.columns * plan.digits * plan.tokens);
  float* const parts = inverses + plan.slice * 8 * Tiles;
  const int slot_floats = plan.tokens * kRows, member_floats = plan.slots * slot_floats;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(parts + warps * member_floats) + warp * kStages;
  float* const team_parts = parts + at.team * plan.team * member_floats;  // [member][slot][token][row]
  float* const own_parts = team_parts + at.member * member_floats;

  Walk next(plan, at);
  int filled = 0;
  const auto fill = [&] {
    if (!next.is_over(plan)) {
      copy.start(ring + filled * plan.stage_bytes, barriers + filled, next.unit);
      if (next.advance(plan, at)) copy.set_rows(next.row_block(at));
    }
    copy.commit();
    if (++filled == kStages) filled = 0;
  };
  const auto stage = [&](int first_unit) {
    if constexpr (Kind == Digits::kHalves) {
      const Staged staged(p.workspace, p.m * plan.digits, plan.units);
      copy_staged<kHasSums, 8 * Tiles>(staged, plan, part.input_row * plan.digits, columns, first_unit, warp, warps, x,
                                       inverses);
      cp_async_commit();
      cp_async_wait<0>();
    } else if (p.input_dtype == NVB_F32) {
      stage_x<kHasSums, 8 * Tiles, float>(p, plan, part.input_row, tokens, first_unit, warp, warps, x, inverses);
    } else if (p.input_dtype == NVB_F16) {
      stage_x<kHasSums, 8 * Tiles, __half>(p, plan, part.input_row, tokens, first_unit, warp, warps, x, inverses);
    } else {
      stage_x<kHasSums, 8 * Tiles, __nv_bfloat16>(p, plan, part.input_row, tokens, first_unit, warp, warps, x,
                                                  inverses);
    }
    __syncthreads();
  };
  copy.make_barriers(barriers);
  for (int i = 0; i < kStages - 1; ++i) fill();
  stage(0);

  // Lanes without a column have the last, and nobody reads their sums.
  const uint8_t* lane_columns[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    lane_columns[tile] = x + min(8 * tile + row, columns - 1) * plan.columns + lane_bytes(Kind) * quad;
  }
  const bool has_slices = plan.slice < plan.units;
  int place = 0, first_rows = at.first_block;
  uint32_t parity = 0;
  for (int batch = 0; batch < plan.batches; ++batch, first_rows += plan.slots * at.blocks) {
    for (int slice = 0; slice < plan.units; slice += plan.slice) {
      if (has_slices && batch + slice > 0) {
        __syncthreads();  // all have read the slice before
        stage(slice);
      }
      const int end = min(slice + plan.slice, plan.units);
      for (int slot = 0; slot < plan.slots; ++slot) {
        const int row_block = first_rows + slot * at.blocks;
        if (row_block >= plan.row_blocks) break;
        float sums[Tiles][4] = {};
        for (int unit = slice + at.member; unit < end; unit += plan.team) {
          copy.wait(barriers + place, parity);
          __syncwarp();  // the unit is there, and its predecessor has been read by all
          fill();
          const uint8_t* rows[2];
          copy.find(ring + place * plan.stage_bytes, row_block, unit, rows);
          const Unit units[2] = {{rows[0], quad}, {rows[1], quad}};
          const int in_slice = unit - slice;
          const uint8_t* lane_x[Tiles];
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) lane_x[tile] = lane_columns[tile] + in_slice * unit_bytes(Kind);
          const int step_sums = plan.slice * unit_bytes(Kind) - in_slice * (unit_bytes(Kind) - step_sum_bytes(Kind));
          multiply_unit<Format, Tiles>(DigitsOf<Kind>(), units, lane_x, step_sums,
                                       inverses + in_slice * 8 * Tiles + 2 * quad, sums);
          if (++place == kStages) place = 0, parity ^= 1;
        }
        store_sums<Kind, Tiles>(sums, own_parts + slot * slot_floats + row, slice == 0, plan.digits, tokens, quad);
      }
    }
    team_barrier(at.team, plan.team);
    const int in_slot = kRows / 2 * tokens;
    for (int i = at.member * 32 + lane; i < plan.slots * in_slot; i += 32 * plan.team) {
      const int slot = i / in_slot, token = i % in_slot / (kRows / 2), pair = i % (kRows / 2);
      const int64_t column = static_cast<int64_t>(first_rows + slot * at.blocks) * kRows + 2 * pair;
      if (column >= epilogue.columns) continue;
      const float* from = team_parts + slot * slot_floats + token * kRows + 2 * pair;
      float both[2] = {};
      for (int other = 0; other < plan.team; ++other, from += member_floats) {
        const float2 sum = *reinterpret_cast<const float2*>(from);
        both[0] += sum.x, both[1] += sum.y;
      }
      finish<Format>(p, epilogue, part, token, column, both);
    }
    team_barrier(at.team, plan.team);  // the parts have been read
  }
  cp_async_wait<0>();
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
