// Which wgmma kernel a quantised product takes, by its shape.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "../../common/cluster_places.h"
#include "linear_quantized_wgmma.h"

namespace nvb {
namespace quantized {
namespace {

constexpr int kStageK = 128;

// Tokens that a block multiplies. For weights with zero points there is no kernel of 16, which others serve mostly.
int tile_tokens(const nvb_linear_quantized_params& params) {
  return params.m <= 16 && params.zero_points == nullptr ? 16 : params.m <= 32 ? 32 : 64;
}

int64_t stages(const nvb_linear_quantized_params& params) {
  return (params.k + kStageK - 1) / kStageK;
}

// The division with the least time by a model fitted to an H200, in units of 1/8 µs: a stage takes 1/4 µs for each 64
// rows, and 1/4 µs more for the sums of 64 tokens in groups of 32; a block takes 2 µs and 3/8 µs for each 64 rows
// besides its stages, a block of a cluster 1/2 µs and 1/8 µs for each block to meet the others. A stage of zero points,
// which has as many bytes, counts as one of W for 64 tokens without such sums; that is not fitted. With 32 tokens a
// stage takes 1/8 µs for each 64 rows, and 1/4 µs more for values that are no FP8.
//
// The best division of all is faster on average by 0.1 % in Int4 and 0.5 % in Int8 for 126 shapes from 1152 x 1024 to
// 8192 x 28672 with 64 tokens; for 32 shapes from 6912 x 1152 to 57344 x 8192 with 32 tokens by 0.1 % in Int4, with
// zero points or without, 0.3 % in Int8 and 0.6 % in FP8; with zero points and 64 tokens by 0.5 %.
WgmmaPlan choose_plan(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  WgmmaPlan best = {tile_tokens(params), 2, 1};
  const int twice = 2 * launch.multiprocessors;  // places of the blocks for 16 tokens, which share multiprocessors
  const bool is_int4 = params.encoding == NVB_INT4;
  const int64_t scaling = best.tokens == 64 && is_int4 && params.group == 32 && !rounds_finer(params) ? 2 : 0;
  int64_t best_cost = INT64_MAX;
  for (int row_tiles = 2; row_tiles <= 4; ++row_tiles) {
    if (row_tiles == 3 && best.tokens != 64) continue;
    if (row_tiles > 2 && best.tokens == 16) continue;
    const int64_t tiles = (params.n + 64 * row_tiles - 1) / (64 * row_tiles);
    const int64_t most = std::min<int64_t>(most_splits(best.tokens, row_tiles), stages(params));
    for (int splits = 1; splits <= most; ++splits) {
      const int64_t room = best.tokens == 16 ? std::max(splits == 1 ? twice : twice * 85 / 100, 1)
                                             : splits * cluster_places(launch, splits);
      const int64_t waves = (tiles * splits + room - 1) / room;
      const int64_t steps = (stages(params) + splits - 1) / splits;
      const int64_t sums = (sum_stages(params) + splits - 1) / splits;
      const int64_t step = best.tokens == 32 ? row_tiles + (is_fp8(params) ? 0 : 2) : 2 * row_tiles + scaling;
      const int64_t cost =
          waves * (steps * step + sums * 2 * row_tiles + 16 + 3 * row_tiles) + (splits == 1 ? 0 : 4 + splits);
      if (cost < best_cost) {
        best_cost = cost;
        best.row_tiles = row_tiles;
        best.splits = splits;
      }
    }
  }
  return best;
}

// What x is to weights of each kind.
template <typename Int4, typename Int8, typename Fp8>
cudaError_t launch_wgmma_as(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  const WgmmaPlan plan = choose_plan(params, launch);
  switch (params.encoding) {
    case NVB_INT4:
      return params.zero_points == nullptr ? launch_wgmma_encoding<NVB_INT4, Int4>(params, launch, plan)
                                           : launch_wgmma_int4_zero_points<Int4>(params, launch, plan);
    case NVB_INT8:
      return launch_wgmma_encoding<NVB_INT8, Int8>(params, launch, plan);
    case NVB_SFP:
      if constexpr (std::is_same_v<Int8, __nv_bfloat16>) {
        return launch_wgmma_encoding<NVB_SFP, Int8>(params, launch, plan);
      }
      return cudaErrorInvalidValue;
    case NVB_FP8_E4M3:
      return launch_wgmma_encoding<NVB_FP8_E4M3, Fp8>(params, launch, plan);
    default:
      return launch_wgmma_encoding<NVB_FP8_E5M2, Fp8>(params, launch, plan);
  }
}

}  // namespace

size_t wgmma_workspace(const nvb_linear_quantized_params& params) {
  const int64_t all_stages = stages(params) + sum_stages(params);
  const size_t tokens = tile_tokens(params);
  return tokens * all_stages * kStageK * 2 + (rounds_finer(params) ? tokens * sizeof(float) : 0);
}

cudaError_t launch_wgmma(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  if (params.workspace == nullptr) return cudaErrorInvalidValue;
  if (rounds_finer(params)) return launch_wgmma_as<Bf16AsScaledF16, __nv_bfloat16, Bf16AsTwoFp8>(params, launch);
  return params.input_dtype == NVB_BF16 ? launch_wgmma_as<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(params, launch)
                                        : launch_wgmma_as<__half, __half, __half>(params, launch);
}

}  // namespace quantized
}  // namespace nvb
