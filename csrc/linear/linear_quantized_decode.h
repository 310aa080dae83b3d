// Products of 1 ≤ m ≤ 16 tokens with quantised weights on compute capability 9.0, for the dispatcher of
// nvb_cuda_linear_quantized. Parameters are valid, x of dtype T in 16-byte aligned rows, k a multiple of 64.
#pragma once

#include "linear_quantized.h"

namespace nvb {
namespace quantized {

// Whether the functions below take the product, given what is said above.
inline bool fits_decode(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return launch.capability == 90 && params.m <= 16 && params.k <= int64_t{1} << 20;
}

template <typename T>
cudaError_t launch_decode_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch);
template <typename T>
cudaError_t launch_decode_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch);
template <typename T>
cudaError_t launch_decode_fp8(const nvb_linear_quantized_params& params, const nvb_launch& launch);

}  // namespace quantized
}  // namespace nvb
