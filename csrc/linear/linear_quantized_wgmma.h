// The host side of linear_quantized_wgmma.cuh, for the dispatcher of nvb_cuda_linear_quantized: compute capability 9.0,
// m up to 64, with offsets from 17 on. Parameters are valid, x in BF16 or F16 in 16-byte aligned rows, k a multiple
// of 64.
#pragma once

#include "linear_quantized.h"

namespace nvb {
namespace quantized {

constexpr int kStageGroups = 32;

// Steps of kStageGroups groups, whose sums of x meet the offsets; 0 without offsets.
inline int64_t sum_stages(const nvb_linear_quantized_params& params) {
  if (params.offsets == nullptr) return 0;
  const int64_t groups = (params.k + params.group - 1) / params.group;
  return (groups + kStageGroups - 1) / kStageGroups;
}

// Bytes of workspace: x in the kernels' own order, and its groups' sums.
size_t wgmma_workspace(const nvb_linear_quantized_params& params);

// Two kernels, each of which may start during the one before it.
cudaError_t launch_wgmma(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// How a product is divided: 64 * warpgroups rows of W a block, `splits` blocks along k, up to `tokens` tokens.
struct WgmmaPlan {
  int tokens;
  int warpgroups;
  int splits;
};

// There is room for so many blocks' sums beside the ring of copies.
constexpr int most_splits(int tokens, int warpgroups) {
  return tokens < 64 || warpgroups == 2 ? 8 : warpgroups == 3 ? 4 : 2;
}

// Tokens times senders: the sums that a block gets from the others of its cluster, at most.
constexpr int most_foreign(int tokens, int most_splits) {
  int most = 0;
  for (int splits = 2; splits <= most_splits; ++splits) {
    const int foreign = (splits - 1) * ((tokens + splits - 1) / splits);
    most = foreign > most ? foreign : most;
  }
  return most;
}

// One translation unit for each encoding and T.
template <uint32_t Encoding, typename T>
cudaError_t launch_wgmma_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                  const WgmmaPlan& plan);
template <typename T>
cudaError_t launch_wgmma_int4_offsets(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                      const WgmmaPlan& plan);

}  // namespace quantized
}  // namespace nvb
