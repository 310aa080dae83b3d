// The grouped product with a float W on tensor cores: a block a tile of 64 tokens of one expert and 64 rows of its
// weight (product_tile.cuh).
//
// x in F16 or BF16, 16-byte aligned rows, k a multiple of 8; W in x's dtype, likewise aligned. The grid has as many
// tiles as any routing can make; those past the last leave at once.
#pragma once

#include "../../common/product_tile.cuh"
#include "../grouped_linear_tiles.cuh"

namespace nvb {
namespace grouped {

template <typename T>
__global__ void __launch_bounds__(kTileThreadCount)
    grouped_linear_mma(const nvb_grouped_linear_params p, const LinearEpilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  __shared__ product_tile_shared<T> shared;
  const token_tile tile = find_tile<kTileSide>(p.expert_offsets, p.experts, p.rows, blockIdx.y);
  if (tile.expert < 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTileSide;
  const int64_t first_row = tile.expert * p.n;

  // The product.
  const auto load_tokens = [&](int row, int64_t k) {
    const int64_t token = tile.begin + row;
    if (token >= tile.end || k >= p.k) return make_uint4(0, 0, 0, 0);
    return load16(static_cast<const T*>(p.input) + token * p.input_stride + k);
  };
  const auto load_weights = [&](int row, int64_t k) {
    const int64_t column = first_column + row;
    if (column >= p.n || k >= p.k) return make_uint4(0, 0, 0, 0);
    return load16(static_cast<const T*>(p.weight) + (first_row + column) * p.weight_stride + k);
  };
  float sums[2][4][4] = {};
  multiply_tile<T, false, false>(shared, p.k, load_tokens, load_weights, sums);

  // Bias, activation, store.
  visit_tile(sums, [&](int row, int column, const float(&pair)[2]) {
    const int64_t token = tile.begin + row;
    if (token >= tile.end || first_column + column >= p.n) return;
    float bias[2] = {};
    if (epilogue.bias != nullptr) {
      bias[0] = load_element(epilogue.bias, epilogue.bias_dtype, first_row + first_column + column);
      if (first_column + column + 1 < p.n) {
        bias[1] = load_element(epilogue.bias, epilogue.bias_dtype, first_row + first_column + column + 1);
      }
    }
    store_columns<2>(epilogue, token, first_column + column, pair, bias);
  });
#endif
}

template <typename T>
cudaError_t launch_mma(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const int64_t tiles = most_tiles(p, kTileSide);
  if (tiles > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((p.n + kTileSide - 1) / kTileSide), static_cast<unsigned>(tiles));
  grouped_linear_mma<T><<<grid, kTileThreadCount, 0, launch.stream>>>(p, make_epilogue_alone(p, p.n));
  return cudaPeekAtLastError();
}

}  // namespace grouped
}  // namespace nvb
