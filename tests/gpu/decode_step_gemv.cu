// The product of one token for decode_step.cu that linear.cu chooses for short rows and large weights.
#include "linear/linear_gemv.cuh"

cudaError_t launch_gemv(const nvb_linear_params& params, const nvb_launch& launch) {
  return nvb::gemv::launch_tokens<__nv_bfloat16, __nv_bfloat16, 1, true>(params, launch);
}
