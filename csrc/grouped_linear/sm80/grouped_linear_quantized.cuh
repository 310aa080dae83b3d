// The grouped product with W in 8 or 4 bits on tensor cores: a block a tile of tokens of one expert and 64 or more rows
// of its weight, multiplied as quantized_mma.cuh does, so that W is read as it lies and every value is exact.
//
// x in F16 or BF16 with 16-byte aligned rows, k a multiple of 64, n of Int4 a multiple of 16; compute capability 8.0. A
// tile has 8 tokens where an expert has few, as in decoding, else 64. The grid has as many tiles as any routing can
// make; those past the last leave at once.
#pragma once

#include "../../common/quantized_mma.cuh"
#include "grouped_linear_quantized.h"

namespace nvb {
namespace grouped {

template <typename Weight, typename T, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages>
__global__ void __launch_bounds__(32 * WarpsN * WarpsK, 2)
    grouped_linear_quantized(const __grid_constant__ nvb_linear_quantized_params p, const int32_t* const expert_offsets,
                             const int32_t experts, const __grid_constant__ LinearEpilogue epilogue) {
  using Shape = quantized::MmaShape<Weight, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  const token_tile tile = find_tile<Shape::kTokens>(expert_offsets, experts, p.m, blockIdx.y);
  if (tile.expert < 0) return;
  const int64_t weight_row = tile.expert * epilogue.columns;
  quantized::multiply_block<Weight, T, Tiles, RowTiles, WarpsN, WarpsK, Stages>(
      p, epilogue, {tile.begin, tile.end, static_cast<int64_t>(blockIdx.x) * Shape::kRows, weight_row});
}

template <typename Weight, typename T, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages>
cudaError_t launch_tiles(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  using Shape = quantized::MmaShape<Weight, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  const auto kernel = grouped_linear_quantized<Weight, T, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = most_tiles(p, Shape::kTokens);
  if (tiles > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((p.n + Shape::kRows - 1) / Shape::kRows), static_cast<unsigned>(tiles));
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, launch.stream>>>(make_whole(p), p.expert_offsets, p.experts,
                                                                        make_epilogue_alone(p, p.n));
  return cudaPeekAtLastError();
}

// Tiles of 8 tokens read W once for each tile, from L2 after the first; a tile of 64 multiplies padding where an expert
// has fewer.
template <typename Weight, typename T>
cudaError_t launch_weight(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  constexpr int kFewStages = Weight::kSlotBytes > 1024 ? 4 : 6;
  constexpr int kManyStages = Weight::kSlotBytes > 1024 ? 3 : 4;
  const bool few = p.rows <= 12 * static_cast<int64_t>(p.all_experts) && most_tiles(p, 8) <= 65535;
  return few ? launch_tiles<Weight, T, 1, 1, 4, 2, kFewStages>(p, launch)
             : launch_tiles<Weight, T, 8, 2, 2, 2, kManyStages>(p, launch);
}

}  // namespace grouped
}  // namespace nvb
