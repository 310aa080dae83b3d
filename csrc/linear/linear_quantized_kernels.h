// The host side of each family of quantised products, for the dispatcher in linear_quantized.cu. Parameters are valid.
#pragma once

#include "linear_quantized.h"

namespace nvb {
namespace quantized {

// Tensor-core kernels for up to this many tokens (a block, for kMma64, which takes any number). All kMma… add in one
// order.
enum class Tokens { kSkinny8, kSkinny16, kMma16, kMma32, kMma64 };

// linear_quantized_skinny.cuh and linear_quantized_mma.cuh: x of dtype T in aligned rows, k a multiple of 64, compute
// capability 8.0.
template <typename T>
cudaError_t launch_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_int4_zero_points(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_fp8_e4m3(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_fp8_e5m2(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
// x in BF16 alone.
template <typename T>
cudaError_t launch_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);

// linear_quantized_plain.cuh: every input, of one encoding.
template <uint32_t Encoding>
cudaError_t launch_plain_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// linear_quantized_plain.cu: everything.
cudaError_t launch_plain(const nvb_linear_quantized_params& params, const nvb_launch& launch);

}  // namespace quantized
}  // namespace nvb
