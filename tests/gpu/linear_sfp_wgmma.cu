#include "linear/sm90/linear_quantized_wgmma_launch.cuh"
#include "linear_sfp.h"

cudaError_t wgmma_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  const nvb::quantized::WgmmaPlan plan = {params.m <= 16 ? 16 : params.m <= 32 ? 32 : 64, 2, 1};
  return nvb::quantized::launch_wgmma_encoding<NVB_SFP, __nv_bfloat16>(params, launch, plan);
}
