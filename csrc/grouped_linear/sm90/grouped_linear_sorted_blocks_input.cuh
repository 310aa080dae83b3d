// x of grouped_linear_sorted_blocks.cuh: the tokens in the order of their experts, as F16 numbers below 2^15, which a
// kernel of its own makes once for all blocks of the product.
//
// numbers [place][unit][256] and records [unit][place], one behind the other in the workspace, so that a tile of tokens
// is a box of the one and a row of the other. Of a step's 16 elements those that a quad's lane t has of W, 4 t ..+3,
// lie where the instruction wants them: pairs 0, 2, 4, 6 first, then 1, 3, 5, 7. A record has the sums of a unit's
// steps over 32, as F16 and what that leaves, in the order of block_product_staged.cuh, and the inverse of the unit's
// power of two.
#pragma once

#include "../../common/block_product_staged.cuh"
#include "../grouped_linear.h"

namespace nvb {
namespace grouped {

inline constexpr int kRecordBytes = 80;  // an odd number of 16, so that eight records begin in different banks
inline constexpr int kInverseAt = 64;

struct SortedInput {
  uint8_t* numbers;
  uint8_t* records;
  int64_t bytes;

  __host__ __device__ __forceinline__ SortedInput(void* workspace, int64_t rows, int64_t units) {
    numbers = static_cast<uint8_t*>(workspace);
    const int64_t number_bytes = rows * units * 2 * quantized::kUnit;
    records = numbers + number_bytes;
    bytes = number_bytes + rows * units * kRecordBytes;
  }
};

inline constexpr int kSortedInputWarps = 8;

// A warp has a unit of a place.
template <typename T>
__global__ void __launch_bounds__(32 * kSortedInputWarps)
    stage_sorted_input(const __grid_constant__ nvb_grouped_linear_params p, int units, bool vectors) {
  namespace blocks = quantized::blocks;
  begin_overlapped();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kSortedInputWarps + threadIdx.x / 32;
  const int64_t place = index / units, unit = index % units;
  if (place >= p.expert_offsets[p.experts]) return;
  const SortedInput staged(p.workspace, p.rows, units);
  const int lane = threadIdx.x % 32;
  const int64_t row = p.order[place];
  const int64_t input_row = p.input_rows != p.rows ? row / p.used : row;
  blocks::InputPart<T> part;
  part.load(static_cast<const T*>(p.input) + input_row * p.input_stride + unit * quantized::kUnit + 8 * lane, vectors);
  const blocks::UnitNumbers<15> numbers(part);
  const float(&values)[8] = numbers.values;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = blocks::pair_of(values[2 * i], values[2 * i + 1]);
  uint8_t* const at = staged.numbers + (place * units + unit) * 2 * quantized::kUnit + lane / 2 * 32 + lane % 2 * 8;
  *reinterpret_cast<uint2*>(at) = make_uint2(pairs[0], pairs[2]);
  *reinterpret_cast<uint2*>(at + 16) = make_uint2(pairs[1], pairs[3]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i += 4) sum += (values[i] + values[i + 1]) + (values[i + 2] + values[i + 3]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum *= 1.0f / blocks::kSumsOver;
  const int step = lane / 2;
  const __half half = __float2half_rn(sum);
  uint8_t* const record = staged.records + (unit * p.rows + place) * kRecordBytes;
  __half* const to = reinterpret_cast<__half*>(record) + step % 8 / 2 * 8 + step / 8 * 2 + step % 2;
  if (lane % 2 == 0) {
    to[0] = half;
  } else {
    to[4] = __float2half_rn(sum - __half2float(half));
  }
  if (lane == 0) *reinterpret_cast<float*>(record + kInverseAt) = numbers.inverse;
}

}  // namespace grouped
}  // namespace nvb
