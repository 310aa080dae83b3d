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

template <uint32_t Format>
__global__ void __launch_bounds__(32 * quantized::blocks::kMaxWarps,
                                  quantized::blocks::resident_warps(1) / quantized::blocks::kMaxWarps)
    grouped_linear_blocks(const __grid_constant__ nvb_grouped_linear_params p,
                          const __grid_constant__ nvb_linear_quantized_params whole,
                          const __grid_constant__ LinearEpilogue epilogue,
                          const __grid_constant__ quantized::blocks::Plan plan) {
  namespace blocks = quantized::blocks;
  begin_overlapped();
  const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int32_t expert = find_row(p, row).expert;
  if (expert < 0) return;
  const int64_t input_row = p.input_rows != p.rows ? row / p.used : row, weight_row = expert * p.n;
  blocks::UnitCopy<Format> copy(whole, plan, weight_row, p.n);
  copy.set_rows(blocks::TeamPlace(plan).first_block);
  blocks::multiply_part<Format, 1>(whole, epilogue, plan, {weight_row, input_row, row, 1}, copy);
}

// The addresses of all experts are aligned as the first one's, because their rows are.
template <uint32_t Format>
bool supports_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  quantized::blocks::Plan plan;
  const uint64_t addresses = reinterpret_cast<uintptr_t>(p.weight) | static_cast<uint64_t>(p.weight_stride);
  return launch.capability >= 80 && p.k > 0 && p.k <= int64_t{1} << 30 && p.n <= int64_t{1} << 30 &&
         addresses % (quantized::BlockCodes<Format>::kHalves ? 2 : 4) == 0 && make_row_plan<Format>(p, launch, plan);
}

template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  quantized::blocks::Plan plan;
  if (!make_row_plan<Format>(p, launch, plan)) return cudaErrorInvalidValue;
  const auto kernel = grouped_linear_blocks<Format>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes_per_block - 1024);
  if (error != cudaSuccess) return error;
  const int64_t height = std::min<int64_t>(p.rows, 65535), depth = (p.rows + height - 1) / height;
  if (depth > 65535) return cudaErrorInvalidValue;
  const dim3 grid(plan.grid, static_cast<unsigned>(height), static_cast<unsigned>(depth));
  return launch_overlapped(kernel, grid, dim3(32 * plan.team * plan.teams), plan.bytes, &launch, p, make_whole(p),
                           make_epilogue_alone(p, p.n), plan);
}

}  // namespace grouped
}  // namespace nvb
