// The launchers of grouped_linear_wgmma.cuh, for the dispatcher in grouped_linear.cu.
#pragma once

#include "../grouped_linear_tiles.cuh"

namespace nvb {
namespace grouped {

// Whether the product can be done. Rows that the tensor cores read are aligned, k and n are multiples of 8.
bool supports_wgmma(const nvb_grouped_linear_params& p, const nvb_launch& launch);

cudaError_t launch_wgmma_bf16(const nvb_grouped_linear_params& p, const nvb_launch& launch);
cudaError_t launch_wgmma_f16(const nvb_grouped_linear_params& p, const nvb_launch& launch);

}  // namespace grouped
}  // namespace nvb
