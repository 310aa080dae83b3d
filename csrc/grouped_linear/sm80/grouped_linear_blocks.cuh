// The product of each row of y with the expert that it names, W in blocks of GGUF as a file has them: a block has some
// rows of W of one expert and one row of x, which it multiplies as common/block_product.cuh does.
//
// x of any float dtype, [rows, k] or a row for each token; units that begin at the addresses that BlockUnit wants. The
// grid is the plan's blocks by rows of y, and the plan fills the device with all of them together; of a second product
// like this one, whose rows stand behind in the grid, too. Numbers of experts are what an earlier grid has written, so
// nothing of W is fetched before that one has ended. Rows without an expert are not written. Shared memory and
// registers: as there, for one token.
#pragma once

#include <algorithm>

#include "../../common/block_product.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/shared_limit.h"
#include "../grouped_linear_tiles.cuh"
#include "grouped_linear_blocks.h"

namespace nvb {
namespace grouped {

inline int64_t products_of(const nvb_grouped_linear_params& p) {
  return p.second_weight != nullptr ? 2 * p.rows : p.rows;
}

template <uint32_t Format>
bool make_row_plan(const nvb_grouped_linear_params& p, const nvb_launch& launch, quantized::blocks::Plan& plan) {
  nvb_linear_quantized_params one = make_whole(p);
  one.m = 1, one.n = p.n;
  return quantized::blocks::make_plan<Format>(one, launch, plan, products_of(p));
}

// One of the products: its weight with all experts, what becomes of sums, and the weight's map where the copy engine
// reads it.
struct BlocksProduct {
  nvb_linear_quantized_params whole;
  LinearEpilogue epilogue;
  CUtensorMap map;
};
template <bool Two>
struct BlocksProducts {
  BlocksProduct product[Two ? 2 : 1];
};

template <uint32_t Format, quantized::blocks::Copies Copy, bool Two>
__global__ void __launch_bounds__(32 * quantized::blocks::max_warps(1),
                                  quantized::blocks::resident_warps(1) / quantized::blocks::max_warps(1))
    grouped_linear_blocks(const __grid_constant__ nvb_grouped_linear_params p,
                          const __grid_constant__ BlocksProducts<Two> products,
                          const __grid_constant__ quantized::blocks::Plan plan) {
  namespace blocks = quantized::blocks;
  if constexpr (blocks::is_made<Copy>()) {
    begin_overlapped();
    int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const bool second = Two && row >= p.rows;
    if (second) row -= p.rows;
    const BlocksProduct& product = products.product[second ? 1 : 0];
    const int32_t expert = find_row(p, row).expert;
    if (expert < 0) return;
    const int64_t input_row = p.input_rows != p.rows ? row / p.used : row, weight_row = expert * p.n;
    blocks::UnitCopy<Format, Copy> copy(product.whole, plan, &product.map, weight_row, p.n);
    copy.set_rows(blocks::TeamPlace(plan).first_block);
    blocks::multiply_part<Format, blocks::Digits::kBytes, 1, Copy>(product.whole, product.epilogue, plan,
                                                                   {weight_row, input_row, row, 1}, copy);
  }
}

// The addresses of all experts are aligned as the first one's, because their rows are, and those of a second weight as
// those of the first.
template <uint32_t Format>
bool supports_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  quantized::blocks::Plan plan;
  const uint64_t weight = reinterpret_cast<uintptr_t>(p.weight),
                 addresses = weight | static_cast<uint64_t>(p.weight_stride);
  if (p.second_weight != nullptr && (reinterpret_cast<uintptr_t>(p.second_weight) - weight) % 16 != 0) return false;
  return launch.capability >= 80 && p.k > 0 && p.k <= int64_t{1} << 30 && p.n <= int64_t{1} << 30 &&
         addresses % (quantized::BlockCodes<Format>::kUnitBytes % 4 != 0 ? 2 : 4) == 0 &&
         make_row_plan<Format>(p, launch, plan);
}

template <uint32_t Format, quantized::blocks::Copies Copy, bool Two>
cudaError_t launch_copies(const nvb_grouped_linear_params& p, const nvb_launch& launch,
                          const quantized::blocks::Plan& plan) {
  const auto kernel = grouped_linear_blocks<Format, Copy, Two>;
  cudaError_t error =
      nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), launch.shared_bytes_per_block - 1024);
  if (error != cudaSuccess) return error;
  const int64_t count = products_of(p);
  const int64_t height = std::min<int64_t>(count, 65535), depth = (count + height - 1) / height;
  if (depth > 65535) return cudaErrorInvalidValue;
  BlocksProducts<Two> products = {};
  for (int i = 0; i < (Two ? 2 : 1); ++i) {
    nvb_grouped_linear_params one = p;
    if (i == 1) one.weight = p.second_weight, one.output = p.second_output;
    BlocksProduct& product = products.product[i];
    product.whole = make_whole(one), product.epilogue = make_epilogue_alone(one, p.n);
    if constexpr (Copy == quantized::blocks::Copies::kTensor) {
      error = quantized::blocks::make_row_map<Format>(product.map, one.weight, p.weight_stride, plan.row_bytes,
                                                      product.whole.n, plan.place, quantized::blocks::kRows);
      if (error != cudaSuccess) return error;
    }
  }
  const dim3 grid(plan.grid, static_cast<unsigned>(height), static_cast<unsigned>(depth));
  return launch_overlapped(kernel, grid, dim3(32 * plan.team * plan.teams), plan.bytes, &launch, p, products, plan);
}

template <uint32_t Format, bool Two>
cudaError_t launch_products(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  using quantized::blocks::Copies;
  quantized::blocks::Plan plan;
  if (!make_row_plan<Format>(p, launch, plan)) return cudaErrorInvalidValue;
  return plan.copies == Copies::kTensor ? launch_copies<Format, Copies::kTensor, Two>(p, launch, plan)
                                        : launch_copies<Format, Copies::kAsync, Two>(p, launch, plan);
}

template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return p.second_weight != nullptr ? launch_products<Format, true>(p, launch)
                                    : launch_products<Format, false>(p, launch);
}

}  // namespace grouped
}  // namespace nvb
