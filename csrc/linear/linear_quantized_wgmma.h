// The host side of linear_quantized_wgmma.cuh, for the dispatcher of nvb_cuda_linear_quantized: compute capability 9.0,
// m up to 64, no offsets. Parameters are valid, x in BF16 or F16 in 16-byte aligned rows, k a multiple of 64.
#pragma once

#include "linear_quantized.h"

namespace nvb {
namespace quantized {

// Bytes of workspace: x in the kernels' own order.
size_t wgmma_workspace(const nvb_linear_quantized_params& params);

// Two kernels, each of which may start during the one before it.
cudaError_t launch_wgmma(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// How a product is divided: 64 * warpgroups rows of W a block, 2^log_splits blocks along k, up to `tokens` tokens.
struct WgmmaPlan {
  int tokens;
  int warpgroups;
  int log_splits;
};

// Blocks of a cluster have eight tokens or more to finish, and room for one another's sums beside the ring.
constexpr int most_splits(int tokens, int warpgroups) {
  const int room = warpgroups == 2 ? 8 : warpgroups == 3 ? 4 : 2;
  return room < tokens / 8 ? room : tokens / 8;
}

// One translation unit for each encoding and T.
template <uint32_t Encoding, typename T>
cudaError_t launch_wgmma_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                  const WgmmaPlan& plan);

}  // namespace quantized
}  // namespace nvb
