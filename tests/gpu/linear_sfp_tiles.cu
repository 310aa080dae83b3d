#include "linear/linear_quantized_plain.cuh"
#include "linear/sm80/linear_quantized_bytes.cuh"
#include "linear_sfp.h"

namespace {

using namespace nvb::quantized;

cudaError_t tiles(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  return launch_sfp<__nv_bfloat16>(params, launch, tokens);
}

}  // namespace

cudaError_t skinny8_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return tiles(params, launch, Tokens::kSkinny8);
}
cudaError_t skinny16_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return tiles(params, launch, Tokens::kSkinny16);
}
cudaError_t mma64_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return tiles(params, launch, Tokens::kMma64);
}
cudaError_t plain_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return launch_plain_encoding<NVB_SFP>(params, launch);
}
