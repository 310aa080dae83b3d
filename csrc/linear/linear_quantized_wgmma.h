// The host side of linear_quantized_wgmma.cuh, for the dispatcher. Parameters are valid.
#pragma once

#include "linear_quantized.h"

namespace nvb {

// Whether the wgmma kernels take this product: compute capability 9.0, x in BF16 or F16 with 8-byte aligned rows,
// m up to 64, k a multiple of 64, no offsets.
bool linear_quantized_wgmma_supports(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// Bytes of device memory, 16-byte aligned, that the product wants for x in the kernels' own order.
size_t linear_quantized_wgmma_workspace(const nvb_linear_quantized_params& params);

// Two kernels, the second launched so that it may start during the first. With `overlap` the first may start during
// the grid before it on the stream.
cudaError_t launch_linear_quantized_wgmma(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                          void* workspace, bool overlap);

namespace quantized {

// How a product is divided: 64 * warpgroups rows of W a block, `splits` blocks along k, up to `tokens` tokens.
struct WgmmaPlan {
  int tokens;
  int warpgroups;
  int splits;
};

// One translation unit for each encoding and T.
template <uint32_t Encoding, typename T>
cudaError_t launch_wgmma_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch, void* workspace,
                                  const WgmmaPlan& plan, bool overlap);

}  // namespace quantized
}  // namespace nvb
