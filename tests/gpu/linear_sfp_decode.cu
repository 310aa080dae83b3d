#include "linear/sm90/linear_quantized_decode.cuh"
#include "linear_sfp.h"

cudaError_t decode_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return nvb::quantized::launch_decode_sfp<__nv_bfloat16>(params, launch);
}
