// The kernel of a weight class for a number of tokens: warps, depth and blocks as they were fastest on an H200 among
// those that also fit the 99 KiB of shared memory of compute capability 8.6 and 8.9.
#pragma once

#include "../linear_quantized_kernels.h"
#include "linear_quantized_mma.cuh"
#include "linear_quantized_skinny.cuh"

namespace nvb {
namespace quantized {

template <typename Weight, typename T>
cudaError_t launch_tokens(const nvb_linear_quantized_params& params, const nvb_launch& launch, Tokens tokens) {
  // A chunk of an 8-bit weight is twice the bytes of an Int4 one, and groups of 32 cost registers.
  constexpr bool kInt4 = Weight::kWords == 4;
  constexpr int kDepth = kInt4 ? 8 : 4;
  constexpr int kBlocks = Weight::kSteps == 2 || Weight::kZeroPoints ? 2 : 3;
  constexpr int kStages = Weight::kSlotBytes > 1024 ? 3 : 4;
  // The number of warps that share a sum fixes its order: batch-invariant products take the three for one another.
  constexpr int kWarpsK = 2;
  switch (tokens) {
    case Tokens::kSkinny8:
      return launch_skinny<Weight, T, 1, 8, kDepth, kBlocks, false>(params, launch);
    case Tokens::kSkinny16:
      return launch_skinny<Weight, T, 2, 8, kDepth / 2, kBlocks, false>(params, launch);
    case Tokens::kMma16:
      return launch_mma<Weight, T, 2, 1, 2, kWarpsK, 6, 2>(params, launch);
    case Tokens::kMma32:
      return launch_mma<Weight, T, 4, 1, 4, kWarpsK, kStages, 2>(params, launch);
    case Tokens::kMma64:
      return launch_mma<Weight, T, 8, 2, 2, kWarpsK, kStages, 2>(params, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace quantized
}  // namespace nvb
