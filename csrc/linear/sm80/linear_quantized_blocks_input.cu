// x of the products of several rows by blocks: the kernel in front of those of linear_quantized_blocks.cuh, which makes
// its numbers in the workspace.
#include "../../common/block_product_staged.cuh"
#include "linear_quantized_blocks.h"

namespace nvb {
namespace quantized {
namespace {

int64_t units_of(const nvb_linear_quantized_params& p) {
  return (p.k + kUnit - 1) / kUnit;
}

template <typename T>
cudaError_t stage_as(const nvb_linear_quantized_params& p, const nvb_launch& launch) {
  const int64_t units = units_of(p), blocks = (p.m * units + 3) / 4;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_overlapped(blocks::stage_numbers<T>, dim3(static_cast<unsigned>(blocks)), dim3(128), 0, &launch, p,
                           static_cast<int>(units), is_aligned16(p.input, p.input_stride, sizeof(T)));
}

}  // namespace

cudaError_t stage_blocks_input(const nvb_linear_quantized_params& p, const nvb_launch& launch) {
  if (p.input_dtype == NVB_F32) return stage_as<float>(p, launch);
  return p.input_dtype == NVB_F16 ? stage_as<__half>(p, launch) : stage_as<__nv_bfloat16>(p, launch);
}

size_t blocks_workspace(const nvb_linear_quantized_params& p) {
  if (p.m <= blocks::kMostBytesTokens) return 0;
  const int64_t columns = p.m * blocks::columns_of(blocks::Digits::kHalves, p.input_dtype);
  return static_cast<size_t>(blocks::Staged(nullptr, columns, units_of(p)).bytes);
}

}  // namespace quantized
}  // namespace nvb
