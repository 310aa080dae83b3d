// Products of few tokens with a weight in blocks of GGUF: passes of as many tokens as an mma has columns for, each
// divided among blocks as common/block_product.cuh says, which has the formula and the shapes.
//
// Before the grid in front has ended the first rows' units are fetched into L2 and no further: should that grid write
// W, L2 has it. Shared memory and registers: as there.
#pragma once

#include "../../common/block_product.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/shared_limit.h"
#include "linear_quantized_blocks.h"

namespace nvb {
namespace quantized {
namespace blocks {

template <uint32_t Format, Digits Kind, int Tiles, Copies Copy>
__global__ void __launch_bounds__(32 * max_warps(Tiles), resident_warps(Tiles) / max_warps(Tiles))
    linear_quantized_blocks(const __grid_constant__ nvb_linear_quantized_params p,
                            const __grid_constant__ LinearEpilogue epilogue, const __grid_constant__ Plan plan,
                            const __grid_constant__ CUtensorMap map) {
  if constexpr (is_made<Copy>()) {
    const TeamPlace place(plan);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * plan.tokens;
    const int tokens = static_cast<int>(min(p.m - first, static_cast<int64_t>(plan.tokens)));
    UnitCopy<Format, Copy> copy(p, plan, &map, 0, epilogue.columns);
    allow_next_grid();
    if (place.first_block < plan.row_blocks) {
      copy.set_rows(place.first_block);
      for (int unit = place.member; unit < plan.units; unit += plan.team) copy.fetch_to_l2(unit);
    }
    wait_for_previous_grid();
    multiply_part<Format, Kind, Tiles, Copy>(p, epilogue, plan, {0, first, first, tokens}, copy);
  }
}

template <uint32_t Format, Digits Kind, int Tiles, Copies Copy>
cudaError_t launch_copies(const nvb_linear_quantized_params& p, const nvb_launch& launch, const Plan& plan) {
  const auto kernel = linear_quantized_blocks<Format, Kind, Tiles, Copy>;
  cudaError_t error =
      nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), launch.shared_bytes_per_block - 1024);
  if (error != cudaSuccess) return error;
  CUtensorMap map = {};
  if constexpr (Copy == Copies::kTensor) {
    error = make_row_map<Format>(map, p.weight, p.weight_stride, plan.row_bytes, p.n, plan.place, kRows);
  }
  if (error != cudaSuccess) return error;
  const unsigned passes = static_cast<unsigned>((p.m + plan.tokens - 1) / plan.tokens);
  return launch_overlapped(kernel, dim3(plan.grid, passes), dim3(32 * plan.team * plan.teams), plan.bytes, &launch, p,
                           make_epilogue(p, p.n), plan, map);
}

template <uint32_t Format, Digits Kind, int Tiles>
cudaError_t launch_tiles(const nvb_linear_quantized_params& p, const nvb_launch& launch, const Plan& plan) {
  return plan.copies == Copies::kTensor ? launch_copies<Format, Kind, Tiles, Copies::kTensor>(p, launch, plan)
                                        : launch_copies<Format, Kind, Tiles, Copies::kAsync>(p, launch, plan);
}

}  // namespace blocks

// Units begin at the addresses that BlockUnit wants.
template <uint32_t Format>
bool supports_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  blocks::Plan plan;
  const uint64_t addresses = reinterpret_cast<uintptr_t>(params.weight) | static_cast<uint64_t>(params.weight_stride);
  return launch.capability >= 80 && params.k > 0 && params.n <= (1 << 30) &&
         addresses % (BlockCodes<Format>::kUnitBytes % 4 != 0 ? 2 : 4) == 0 &&
         blocks::make_plan<Format>(params, launch, plan);
}

template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  blocks::Plan plan;
  if (!blocks::make_plan<Format>(params, launch, plan)) return cudaErrorInvalidValue;
  using blocks::Digits;
  if (plan.kind == Digits::kBytes) return blocks::launch_tiles<Format, Digits::kBytes, 1>(params, launch, plan);
  const cudaError_t error = stage_blocks_input(params, launch);
  if (error != cudaSuccess) return error;
  const int columns = plan.tokens * plan.digits;
  if (columns <= 8) return blocks::launch_tiles<Format, Digits::kHalves, 1>(params, launch, plan);
  if (columns <= 16) return blocks::launch_tiles<Format, Digits::kHalves, 2>(params, launch, plan);
  return blocks::launch_tiles<Format, Digits::kHalves, 4>(params, launch, plan);
}

}  // namespace quantized
}  // namespace nvb
