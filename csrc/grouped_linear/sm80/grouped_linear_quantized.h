// The launchers of grouped_linear_quantized.cuh, one for each encoding, for the dispatcher in grouped_linear.cu.
#pragma once

#include "../grouped_linear_tiles.cuh"

namespace nvb {
namespace grouped {

cudaError_t launch_int4(const nvb_grouped_linear_params& p, const nvb_launch& launch);
cudaError_t launch_int8(const nvb_grouped_linear_params& p, const nvb_launch& launch);
cudaError_t launch_fp8_e4m3(const nvb_grouped_linear_params& p, const nvb_launch& launch);
cudaError_t launch_fp8_e5m2(const nvb_grouped_linear_params& p, const nvb_launch& launch);

}  // namespace grouped
}  // namespace nvb
