// x of block_product.cuh for more than two tokens: F16 numbers below 2^15, and of F32 what that leaves, which a kernel
// of its own makes once for all blocks. Where each block of 20480 x 2560 made those of 16 tokens for itself, it spent a
// quarter of its instructions on that.
//
// numbers [column][unit][256], steps' sums [column][unit][32], inverses of powers of two [column][unit], one behind the
// other in the workspace. A number of F32 has two columns. Of two steps those elements that a quad's lane t needs, 4 t
// ..+3 of each, are neighbours. A step's sum over 32 lies in the first column, as F16 and what that leaves: those that
// lane t needs, of steps 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, are neighbours, and the rests follow them.
#pragma once

#include "block_product_input.cuh"
#include "mma.cuh"
#include "programmatic_launch.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// Where they lie.
struct Staged {
  uint8_t* numbers;
  uint8_t* sums;
  float* inverses;
  int64_t bytes;

  __host__ __device__ __forceinline__ Staged(void* workspace, int64_t columns, int64_t units) {
    numbers = static_cast<uint8_t*>(workspace);
    sums = numbers + columns * units * unit_bytes(Digits::kHalves);
    uint8_t* const end = sums + columns * units * step_sum_bytes(Digits::kHalves);
    inverses = reinterpret_cast<float*>(end);
    bytes = end - numbers + columns * units * 4;
  }
};

__device__ __forceinline__ uint32_t pair_of(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// What F16 leaves of two numbers, as F16.
__device__ __forceinline__ uint32_t rest_of(uint32_t pair, float first, float second) {
  const float2 halves = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return pair_of(first - halves.x, second - halves.y);
}

// A warp has a unit of a token.
template <typename T>
__global__ void __launch_bounds__(128)
    stage_numbers(const __grid_constant__ nvb_linear_quantized_params p, int units, bool vectors) {
  constexpr int kColumns = columns_of(Digits::kHalves, kDtype<T>);
  begin_overlapped();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int64_t token = index / units, unit = index % units;
  if (token >= p.m) return;
  const Staged staged(p.workspace, p.m * kColumns, units);
  const int lane = threadIdx.x % 32;
  InputPart<T> part;
  if (unit * kUnit + 8 * lane < p.k) {
    part.load(static_cast<const T*>(p.input) + token * p.input_stride + unit * kUnit + 8 * lane, vectors);
  } else {
    part.clear();
  }
  const UnitNumbers<15> numbers(part);
  const float(&values)[8] = numbers.values;
  const int64_t place = token * kColumns * units + unit;
  uint8_t* const at =
      staged.numbers + place * unit_bytes(Digits::kHalves) + lane / 4 * 64 + lane % 2 * 32 + lane / 2 % 2 * 8;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    sum += (values[i] + values[i + 1]) + (values[i + 2] + values[i + 3]);
    const uint2 pairs = make_uint2(pair_of(values[i], values[i + 1]), pair_of(values[i + 2], values[i + 3]));
    *reinterpret_cast<uint2*>(at + 4 * i) = pairs;
    if constexpr (kColumns == 2) {
      *reinterpret_cast<uint2*>(at + 4 * i + units * unit_bytes(Digits::kHalves)) =
          make_uint2(rest_of(pairs.x, values[i], values[i + 1]), rest_of(pairs.y, values[i + 2], values[i + 3]));
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum *= 1.0f / kSumsOver;
  const int step = lane / 2;
  const __half half = __float2half_rn(sum);
  uint8_t* const sums = staged.sums + place * step_sum_bytes(Digits::kHalves);
  __half* const to = reinterpret_cast<__half*>(sums) + step % 8 / 2 * 8 + step / 8 * 2 + step % 2;
  if (lane % 2 == 0) {
    to[0] = half;
  } else {
    to[4] = __float2half_rn(sum - __half2float(half));
  }
  if constexpr (kColumns == 2) {
    if (lane < 16) reinterpret_cast<uint32_t*>(sums + units * step_sum_bytes(Digits::kHalves))[lane] = 0;
  }
  if (lane < kColumns) staged.inverses[place + lane * units] = numbers.inverse;
}

// Puts a slice of the pass's columns into shared memory, a warp's share of it; the copies have been asked for.
template <bool HasSums, int Columns>
__device__ __forceinline__ void copy_staged(const Staged& staged, const Plan& plan, int64_t first_column, int columns,
                                            int first_unit, int warp, int warps, uint8_t* x, float* inverses) {
  constexpr int kBytes = unit_bytes(Digits::kHalves), kSumBytes = step_sum_bytes(Digits::kHalves);
  const int lane = threadIdx.x % 32, units = min(plan.slice, plan.units - first_unit);
  const int64_t first = first_column * plan.units + first_unit;
  int column = 0, unit = warp;
  for (;;) {
    while (unit >= units) unit -= units, ++column;
    if (column >= columns) break;
    cp_async16(x + column * plan.columns + unit * kBytes + lane * 16,
               staged.numbers + (first + column * plan.units + unit) * kBytes + lane * 16);
    unit += warps;
  }
  for (column = warp; column < columns; column += warps) {
    const int64_t from = first + column * plan.units;
    if constexpr (HasSums) {
      uint8_t* const sums = x + column * plan.columns + plan.slice * kBytes;
      for (int at = lane * 16; at < units * kSumBytes; at += 512) {
        cp_async16(sums + at, staged.sums + from * kSumBytes + at);
      }
    }
    for (unit = lane; unit < units; unit += 32) inverses[unit * Columns + column] = staged.inverses[from + unit];
  }
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
