// The tensor-core kernels of grouped products with x in BF16.
#include "grouped_linear_mma.cuh"

cudaError_t nvb::grouped::launch_mma_bf16(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return launch_mma<__nv_bfloat16>(p, launch);
}
