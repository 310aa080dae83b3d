// The host side of linear_quantized_wgmma.cuh, for the dispatcher of nvb_cuda_linear_quantized: compute capability 9.0,
// m up to 64. Parameters are valid, x in BF16 or F16 in 16-byte aligned rows, k a multiple
// of 64.
#pragma once

#include "../linear_quantized.h"

namespace nvb {
namespace quantized {

constexpr int kStageGroups = 32;

// In the place of T: bf16 that meets FP8 weights in two parts (linear_quantized_wgmma_input.cuh).
struct Bf16AsTwoFp8 {};
// bf16 as f16 times a power of two for each token, for Int4 values that meet their scales before the product.
struct Bf16AsScaledF16 {};

inline bool is_fp8(const nvb_linear_quantized_params& params) {
  return params.encoding == NVB_FP8_E4M3 || params.encoding == NVB_FP8_E5M2;
}

// Outputs in bf16 do not show that the tensor cores round sums of FP8 products, nor that Int4 elements are rounded to
// f16. On an H200 this takes, for 64 tokens, in µs:
//   n x k                               14336 x 4096   20480 x 2560   2560 x 10240   4096 x 2560   2560 x 2048
//   FP8                 from - to       23.8   21.1    21.7   19.4    16.8   14.0     9.0    8.5    6.9    6.7
//   Int4, groups of 32                  24.0   22.0    21.7   19.4    16.0   16.1     8.5    8.8    6.6    7.2
//   with zero points                        24.6   22.9    23.7   20.0    16.9   16.5     9.4    8.9    7.6    7.2
// With longer groups, which are scaled less often, Int4 loses, and so it does with up to 32 tokens.
inline bool rounds_finer(const nvb_linear_quantized_params& params) {
  if (params.input_dtype != NVB_BF16 || params.output_dtype != NVB_BF16) return false;
  if (is_fp8(params)) return true;
  if (params.encoding != NVB_INT4) return false;
  return params.m > 32 && params.group == 32 && (params.zero_points != nullptr || params.n >= 12288);
}

// Steps of kStageGroups groups, whose sums of x meet the zero points; 0 without zero points.
inline int64_t sum_stages(const nvb_linear_quantized_params& params) {
  if (params.zero_points == nullptr || rounds_finer(params)) return 0;
  const int64_t groups = (params.k + params.group - 1) / params.group;
  return (groups + kStageGroups - 1) / kStageGroups;
}

// Bytes of workspace: x in the kernels' own order, its groups' sums or its tokens' factors.
size_t wgmma_workspace(const nvb_linear_quantized_params& params);

// Two kernels, each of which may start during the one before it.
cudaError_t launch_wgmma(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// How a product is divided: 64 * row_tiles rows of W a block, `splits` blocks along k, up to `tokens` tokens.
struct WgmmaPlan {
  int tokens;
  int row_tiles;
  int splits;
};

// There is room for so many blocks' sums beside the ring of copies.
constexpr int most_splits(int tokens, int row_tiles) {
  return tokens < 64 || row_tiles == 2 ? 8 : row_tiles == 3 ? 4 : 2;
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
cudaError_t launch_wgmma_int4_zero_points(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                          const WgmmaPlan& plan);

}  // namespace quantized
}  // namespace nvb
