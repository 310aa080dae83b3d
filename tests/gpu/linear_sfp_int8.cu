#include "linear/sm90/linear_quantized_decode.cuh"
#include "linear_sfp.h"

cudaError_t decode_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  using namespace nvb::quantized;
  return launch_decode_tokens<ByteStage<NVB_INT8, Scales::kRows, 2>, __nv_bfloat16>(params, launch);
}
