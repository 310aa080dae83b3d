// Products of 1 ≤ m ≤ 16 tokens with quantised weights on compute capability 9.0, for the dispatcher of
// nvb_cuda_linear_quantized. Parameters are valid, x of dtype T in 16-byte aligned rows, k a multiple of 64
// and at most 2^20.
#pragma once

#include "../linear_quantized.h"

namespace nvb {
namespace quantized {

template <typename T>
cudaError_t launch_decode_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch);
template <typename T>
cudaError_t launch_decode_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch);
template <typename T>
cudaError_t launch_decode_fp8(const nvb_linear_quantized_params& params, const nvb_launch& launch);
// x in BF16 alone.
template <typename T>
cudaError_t launch_decode_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);

}  // namespace quantized
}  // namespace nvb
