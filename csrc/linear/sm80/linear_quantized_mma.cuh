// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for any number of tokens t and W in 8 or 4 bits, on tensor cores
// (mma.sync): blocks of up to 64 tokens as quantized_mma.cuh multiplies them, which has the shapes and the order of
// sums.
#pragma once

#include "../../common/quantized_mma.cuh"

namespace nvb {
namespace quantized {

template <typename Weight, typename T, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages, int BlocksPerSm>
__global__ void __launch_bounds__(32 * WarpsN * WarpsK, BlocksPerSm)
    linear_quantized_mma(const __grid_constant__ nvb_linear_quantized_params p,
                         const __grid_constant__ LinearEpilogue epilogue) {
  using Shape = MmaShape<Weight, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  multiply_block<Weight, T, Tiles, RowTiles, WarpsN, WarpsK, Stages>(
      p, epilogue,
      {static_cast<int64_t>(blockIdx.y) * Shape::kTokens, p.m, static_cast<int64_t>(blockIdx.x) * Shape::kRows, 0});
}

template <typename Weight, typename T, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages, int BlocksPerSm>
cudaError_t launch_mma(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  using Shape = MmaShape<Weight, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  const auto kernel = linear_quantized_mma<Weight, T, Tiles, RowTiles, WarpsN, WarpsK, Stages, BlocksPerSm>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((params.n + Shape::kRows - 1) / Shape::kRows),
                  static_cast<unsigned>((params.m + Shape::kTokens - 1) / Shape::kTokens));
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, launch.stream>>>(params, make_epilogue(params, params.n));
  return cudaPeekAtLastError();
}

}  // namespace quantized
}  // namespace nvb
