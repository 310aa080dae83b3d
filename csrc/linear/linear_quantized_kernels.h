// The host side of each family of quantised products, for the dispatcher in linear_quantized.cu. Parameters are valid.
#pragma once

#include "linear_quantized.h"

namespace nvb {
namespace quantized {

// Whether kernels for compute capability 9.0 alone run: this build has them, and choices are made for such a device.
// (The build makes 9.0a of 9.0.)
inline bool is_hopper(const nvb_launch& launch) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  for (int architecture : kArchitectures) {
    if (architecture == 900) return launch.capability == 90;
  }
  return false;
}

// Tensor-core kernels for up to this many tokens (a block, for kMma64, which takes any number). All kMma… add in one
// order.
enum class Tokens { kSkinny8, kSkinny16, kMma16, kMma32, kMma64 };

// linear_quantized_skinny.cuh and linear_quantized_mma.cuh: x of dtype T in aligned rows, k a multiple of 64, compute
// capability 8.0.
template <typename T>
cudaError_t launch_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_int4_offsets(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_fp8_e4m3(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);
template <typename T>
cudaError_t launch_fp8_e5m2(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens);

// linear_quantized_plain.cu: everything.
cudaError_t launch_plain(const nvb_linear_quantized_params& params, const nvb_launch& launch);

}  // namespace quantized
}  // namespace nvb
