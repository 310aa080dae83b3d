// The product of each row of y with the expert that it names, W in blocks of GGUF as a file has them: a block has some
// rows of W of one expert and one row of x, which it multiplies as common/block_product.cuh does.
//
// x of any float dtype, [rows, k] or a row for each token; units that begin at the addresses that BlockUnit wants. The
// grid is the plan's blocks by rows of y, and the plan fills the device with all of them together. Numbers of experts
// are what an earlier grid has written, so nothing of W is fetched before that one has ended. Rows without an expert
// are not written. Shared memory and registers: as there, for one token.
#pragma once

#include <algorithm>

#include "../../common/block_product.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/shared_limit.h"
#include "../grouped_linear_tiles.cuh"
#include "grouped_linear_blocks.h"

namespace nvb {
namespace grouped {

template <uint32_t Format>
bool make_row_plan(const nvb_grouped_linear_params& p, const nvb_launch& launch, quantized::blocks::Plan& plan) {
  nvb_linear_quantized_params one = make_whole(p);
  one.m = 1, one.n = p.n;
  return quantized::blocks::make_plan<Format>(one, launch, plan, p.rows);
}

template <uint32_t Format, quantized::blocks::Copies Copy>
__global__ void __launch_bounds__(32 * quantized::blocks::max_warps(1),
                                  quantized::blocks::resident_warps(1) / quantized::blocks::max_warps(1))
    grouped_linear_blocks(const __grid_constant__ nvb_grouped_linear_params p,
                          const __grid_constant__ nvb_linear_quantized_params whole,
                          const __grid_constant__ LinearEpilogue epilogue,
                          const __grid_constant__ quantized::blocks::Plan plan,
                          const __grid_constant__ CUtensorMap map) {
  namespace blocks = quantized::blocks;
  if constexpr (blocks::is_made<Copy>()) {
    begin_overlapped();
    const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int32_t expert = find_row(p, row).expert;
    if (expert < 0) return;
    const int64_t input_row = p.input_rows != p.rows ? row / p.used : row, weight_row = expert * p.n;
    blocks::UnitCopy<Format, Copy> copy(whole, plan, &map, weight_row, p.n);
    copy.set_rows(blocks::TeamPlace(plan).first_block);
    blocks::multiply_part<Format, blocks::Digits::kBytes, 1, Copy>(whole, epilogue, plan,
                                                                   {weight_row, input_row, row, 1}, copy);
  }
}

// The addresses of all experts are aligned as the first one's, because their rows are.
template <uint32_t Format>
bool supports_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  quantized::blocks::Plan plan;
  const uint64_t addresses = reinterpret_cast<uintptr_t>(p.weight) | static_cast<uint64_t>(p.weight_stride);
  return launch.capability >= 80 && p.k > 0 && p.k <= int64_t{1} << 30 && p.n <= int64_t{1} << 30 &&
         addresses % (quantized::BlockCodes<Format>::kUnitBytes % 4 != 0 ? 2 : 4) == 0 &&
         make_row_plan<Format>(p, launch, plan);
}

template <uint32_t Format, quantized::blocks::Copies Copy>
cudaError_t launch_copies(const nvb_grouped_linear_params& p, const nvb_launch& launch,
                          const quantized::blocks::Plan& plan) {
  const auto kernel = grouped_linear_blocks<Format, Copy>;
  cudaError_t error =
      nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), launch.shared_bytes_per_block - 1024);
  if (error != cudaSuccess) return error;
  const int64_t height = std::min<int64_t>(p.rows, 65535), depth = (p.rows + height - 1) / height;
  if (depth > 65535) return cudaErrorInvalidValue;
  const nvb_linear_quantized_params whole = make_whole(p);
  CUtensorMap map = {};
  if constexpr (Copy == quantized::blocks::Copies::kTensor) {
    error = quantized::blocks::make_row_map<Format>(map, whole.weight, whole.weight_stride, plan.row_bytes, whole.n,
                                                    plan.place, quantized::blocks::kRows);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(plan.grid, static_cast<unsigned>(height), static_cast<unsigned>(depth));
  return launch_overlapped(kernel, grid, dim3(32 * plan.team * plan.teams), plan.bytes, &launch, p, whole,
                           make_epilogue_alone(p, p.n), plan, map);
}

template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  using quantized::blocks::Copies;
  quantized::blocks::Plan plan;
  if (!make_row_plan<Format>(p, launch, plan)) return cudaErrorInvalidValue;
  return plan.copies == Copies::kTensor ? launch_copies<Format, Copies::kTensor>(p, launch, plan)
                                        : launch_copies<Format, Copies::kAsync>(p, launch, plan);
}

}  // namespace grouped
}  // namespace nvb
