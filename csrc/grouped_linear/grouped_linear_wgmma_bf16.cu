// The wgmma kernels of grouped products in BF16.
#include "grouped_linear_wgmma.cuh"

cudaError_t nvb::grouped::launch_wgmma_bf16(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return launch_wgmma<Operands::kBf16>(p, launch);
}
