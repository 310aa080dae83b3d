// Int8, FP8 and SFP weights by their scales; each .cu instantiates one function for one dtype of x, so that they
// compile in parallel.
#pragma once

#include "linear_quantized_launch.cuh"

namespace nvb {
namespace quantized {

template <typename T>
cudaError_t launch_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  if (params.scale_kind == NVB_SCALES_ROWS) {
    return launch_tokens<ByteWeight<NVB_INT8, Scales::kRows>, T>(params, launch, tokens);
  }
  if (params.group == 32) return launch_tokens<ByteWeight<NVB_INT8, Scales::kGroups32>, T>(params, launch, tokens);
  return launch_tokens<ByteWeight<NVB_INT8, Scales::kGroups64>, T>(params, launch, tokens);
}

template <uint32_t Encoding, typename T>
cudaError_t launch_fp8(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  if (params.scale_kind == NVB_SCALES_ROWS) {
    return launch_tokens<ByteWeight<Encoding, Scales::kRows>, T>(params, launch, tokens);
  }
  return launch_tokens<ByteWeight<Encoding, Scales::kBlocks>, T>(params, launch, tokens);
}

template <typename T>
cudaError_t launch_fp8_e4m3(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  return launch_fp8<NVB_FP8_E4M3, T>(params, launch, tokens);
}

template <typename T>
cudaError_t launch_fp8_e5m2(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  return launch_fp8<NVB_FP8_E5M2, T>(params, launch, tokens);
}

template <typename T>
cudaError_t launch_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  return launch_tokens<ByteWeight<NVB_SFP, Scales::kRows>, T>(params, launch, tokens);
}

}  // namespace quantized
}  // namespace nvb
