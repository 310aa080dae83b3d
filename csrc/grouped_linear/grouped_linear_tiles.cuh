// Which tokens a block of a grouped product takes, and the elements of its weights.
#pragma once

#include "../common/linear_epilogue.cuh"
#include "../common/quantized_element.cuh"
#include "../common/quantized_product.h"
#include "grouped_linear.h"

namespace nvb {
namespace grouped {

// Kinds of weight besides the nvb_encoding_code: floats, by dtype.
inline constexpr uint32_t kFloat = 0x100;

template <uint32_t Kind>
struct float_element {
  using type = float;
};
template <>
struct float_element<kFloat | NVB_F16> {
  using type = __half;
};
template <>
struct float_element<kFloat | NVB_BF16> {
  using type = __nv_bfloat16;
};

struct grouped_weight {
  nvb_quantized_matrix matrix;
  int64_t stride;  // of floats, in elements
};

inline grouped_weight make_weight(const nvb_grouped_linear_params& p) {
  const nvb_quantized_matrix matrix = {p.weight,        p.scales,   p.zero_points, p.n * p.experts, p.k,
                                       p.weight_stride, p.encoding, p.scale_kind,  p.group,         0};
  return {matrix, p.weight_stride};
}

// All experts' rows as one product of all tokens; what is stored is the epilogue's business.
inline nvb_linear_quantized_params make_whole(const nvb_grouped_linear_params& p) {
  nvb_linear_quantized_params whole = {};
  whole.input = p.input;
  whole.weight = p.weight;
  whole.scales = p.scales;
  whole.zero_points = p.zero_points;
  whole.m = p.rows;
  whole.n = p.n * p.experts;
  whole.k = p.k;
  whole.input_stride = p.input_stride;
  whole.weight_stride = p.weight_stride;
  whole.input_dtype = p.input_dtype;
  whole.encoding = p.encoding;
  whole.scale_kind = p.scale_kind;
  whole.group = p.group;
  return whole;
}

// Elements k .. k + 3 of a row; k is a multiple of 4 and inside the row, what lies past its end is 0 or met by zeros.
template <uint32_t Kind>
__device__ __forceinline__ void load_weight(const grouped_weight& weight, int64_t row, int64_t k, float (&values)[4]) {
  if constexpr (Kind >= kFloat) {
    using Element = typename float_element<Kind>::type;
    const Element* data = static_cast<const Element*>(weight.matrix.data) + row * weight.stride + k;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = k + i < weight.matrix.columns ? to_float(data[i]) : 0.0f;
  } else {
    load_four<Kind>(weight.matrix, row, k, values);
  }
}

// The tokens [begin, end) of tile `tile` and their expert; -1 past the last tile. Tiles of `Side` tokens are counted
// expert by expert, the last of each may be short. All lanes of a warp call it together.
struct token_tile {
  int64_t begin;
  int64_t end;
  int32_t expert;
};

template <int Side>
__device__ __forceinline__ token_tile find_tile(const int32_t* expert_offsets, int32_t experts, int64_t rows,
                                                int64_t tile) {
  const int lane = threadIdx.x % 32;
  int64_t base = 0;
  for (int32_t first = 0; first < experts; first += 32) {
    const int32_t expert = first + lane;
    int64_t begin = 0;
    int64_t end = 0;
    if (expert < experts) {
      begin = max(static_cast<int64_t>(expert_offsets[expert]), int64_t{0});
      end = min(static_cast<int64_t>(expert_offsets[expert + 1]), rows);
    }
    const int64_t tiles = end > begin ? (end - begin + Side - 1) / Side : 0;
    int64_t through = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, through, offset);
      if (lane >= offset) through += other;
    }
    const uint32_t reaching = __ballot_sync(0xffffffffu, base + through > tile);
    if (reaching != 0) {
      const int owner = __ffs(static_cast<int>(reaching)) - 1;
      const int64_t inside =
          tile - base - (__shfl_sync(0xffffffffu, through, owner) - __shfl_sync(0xffffffffu, tiles, owner));
      const int64_t start = __shfl_sync(0xffffffffu, begin, owner) + inside * Side;
      const int64_t stop = min(start + Side, __shfl_sync(0xffffffffu, end, owner));
      return {start, stop, first + owner};
    }
    base += __shfl_sync(0xffffffffu, through, 31);
  }
  return {0, 0, -1};
}

// One row of y as a tile, and the expert that it names.
__device__ __forceinline__ token_tile find_row(const nvb_grouped_linear_params& p, int64_t row) {
  if (row >= p.rows) return {0, 0, -1};
  const int32_t expert = p.expert_ids[row / p.used * p.token_stride + row % p.used * p.used_stride];
  return {row, row + 1, expert < p.experts ? expert : -1};
}

// Tiles of `side` tokens that `rows` tokens can make, whatever the expert_offsets: each expert with a token ends in one
// that may be short.
inline int64_t most_tiles(const nvb_grouped_linear_params& p, int64_t side) {
  const int64_t short_tiles = p.experts < p.rows ? p.experts : p.rows;
  return p.rows / side + short_tiles;
}

cudaError_t launch_mma_bf16(const nvb_grouped_linear_params& p, const nvb_launch& launch);
cudaError_t launch_mma_f16(const nvb_grouped_linear_params& p, const nvb_launch& launch);

}  // namespace grouped
}  // namespace nvb
