// Int4 weights by their scales; each .cu instantiates one function for one dtype of x, so that they compile in
// parallel.
#pragma once

#include "linear_quantized_launch.cuh"

namespace nvb {
namespace quantized {

template <typename T>
cudaError_t launch_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  if (params.group == 32) return launch_tokens<Int4Weight<Scales::kGroups32, false>, T>(params, launch, tokens);
  return launch_tokens<Int4Weight<Scales::kGroups64, false>, T>(params, launch, tokens);
}

template <typename T>
cudaError_t launch_int4_zero_points(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                    Tokens tokens) {
  if (params.group == 32) return launch_tokens<Int4Weight<Scales::kGroups32, true>, T>(params, launch, tokens);
  return launch_tokens<Int4Weight<Scales::kGroups64, true>, T>(params, launch, tokens);
}

}  // namespace quantized
}  // namespace nvb
