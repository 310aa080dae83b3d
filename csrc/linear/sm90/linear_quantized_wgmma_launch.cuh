// The instantiations of linear_quantized_wgmma.cuh for one encoding and T, with the most stages that were of use on an
// H200.
#pragma once

#include <algorithm>

#include "linear_quantized_wgmma.cuh"
#include "linear_quantized_wgmma.h"

namespace nvb {
namespace quantized {

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Tiles, int MostStages,
          int BlocksPerSm>
cudaError_t launch_wgmma_shape(const nvb_linear_quantized_params& params, const nvb_launch& launch, int splits) {
  using Shape = WgmmaShape<Weight, T, Tokens, GroupK, Warpgroups, Tiles, MostStages, BlocksPerSm>;
  const auto kernel = linear_quantized_wgmma<Weight, T, Tokens, GroupK, Warpgroups, Tiles, MostStages, BlocksPerSm>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int chunks = static_cast<int>((params.k + kStageK - 1) / kStageK * kStageChunks);
  const int steps = chunks / kStageChunks;
  const int sums = static_cast<int>(sum_stages(params));
  const WgmmaShare share = {splits,       (Tokens + splits - 1) / splits, steps / splits, steps % splits, sums / splits,
                            sums % splits};
  // Each thread arranges 16 elements of a token's x; some go on to the last stage of the groups' sums.
  const int threads = std::max(chunks * 4, static_cast<int>(sums * kStageGroups * params.group / 16));
  char* const arranged = static_cast<char*>(params.workspace);
  if constexpr (kHasFactors<T>) {
    error = launch_overlapped(linear_quantized_scale_input<Weight, T, Tokens>, dim3(static_cast<unsigned>(params.m)),
                              dim3(static_cast<unsigned>(std::min((threads + 31) / 32 * 32, 1024))), 0, &launch, params,
                              arranged, chunks);
  } else {
    const dim3 grid(static_cast<unsigned>((threads + 127) / 128), static_cast<unsigned>(params.m));
    error = launch_overlapped(linear_quantized_arrange_input<Weight, T, Tokens>, grid, dim3(128), 0, &launch, params,
                              arranged, chunks, sums);
  }
  if (error != cudaSuccess) return error;
  const unsigned parts = static_cast<unsigned>(splits);
  const dim3 grid(static_cast<unsigned>((params.n + Shape::kRows - 1) / Shape::kRows), parts,
                  static_cast<unsigned>((params.m + Tokens - 1) / Tokens));
  return launch_overlapped_clusters(kernel, grid, dim3(1, parts), dim3(Shape::kThreads), Shape::kSharedBytes, &launch,
                                    params, make_epilogue(params, params.n), arranged, share);
}

template <typename Weight, int GroupK, typename T>
cudaError_t launch_wgmma_plan(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                              const WgmmaPlan& plan) {
  if constexpr (!kAsScaledF16<T>) {
    if constexpr (!Weight::kZeroPoints) {
      if (plan.tokens == 16) return launch_wgmma_shape<Weight, T, 16, GroupK, 2, 1, 5, 2>(params, launch, plan.splits);
    }
    if (plan.tokens == 32) {
      return plan.row_tiles == 4 ? launch_wgmma_shape<Weight, T, 32, GroupK, 2, 2, 4, 1>(params, launch, plan.splits)
                                 : launch_wgmma_shape<Weight, T, 32, GroupK, 2, 1, 8, 1>(params, launch, plan.splits);
    }
  }
  return plan.row_tiles == 4   ? launch_wgmma_shape<Weight, T, 64, GroupK, 2, 2, 5, 1>(params, launch, plan.splits)
         : plan.row_tiles == 3 ? launch_wgmma_shape<Weight, T, 64, GroupK, 3, 1, 5, 1>(params, launch, plan.splits)
                               : launch_wgmma_shape<Weight, T, 64, GroupK, 2, 1, 6, 1>(params, launch, plan.splits);
}

template <bool ZeroPoints, typename T>
cudaError_t launch_wgmma_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                              const WgmmaPlan& plan) {
  using Fine = Int4Weight<Scales::kGroups32, ZeroPoints>;
  if constexpr (kAsScaledF16<T>) {
    return launch_wgmma_plan<Fine, 32, T>(params, launch, plan);
  } else {
    using Coarse = Int4Weight<Scales::kGroups64, ZeroPoints>;
    switch (params.group) {
      case 32:
        return launch_wgmma_plan<Fine, 32, T>(params, launch, plan);
      case 64:
        return launch_wgmma_plan<Coarse, 64, T>(params, launch, plan);
      default:
        return launch_wgmma_plan<Coarse, 128, T>(params, launch, plan);
    }
  }
}

template <typename T>
cudaError_t launch_wgmma_int4_zero_points(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                          const WgmmaPlan& plan) {
  return launch_wgmma_int4<true, T>(params, launch, plan);
}

template <uint32_t Encoding, typename T>
cudaError_t launch_wgmma_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                  const WgmmaPlan& plan) {
  if constexpr (Encoding == NVB_INT4) {
    return launch_wgmma_int4<false, T>(params, launch, plan);
  } else {
    if (params.scale_kind == NVB_SCALES_ROWS) {
      return launch_wgmma_plan<ByteWeight<Encoding, Scales::kRows>, 0, T>(params, launch, plan);
    }
    if constexpr (Encoding == NVB_INT8) {
      using Fine = ByteWeight<Encoding, Scales::kGroups32>;
      using Coarse = ByteWeight<Encoding, Scales::kGroups64>;
      switch (params.group) {
        case 32:
          return launch_wgmma_plan<Fine, 32, T>(params, launch, plan);
        case 64:
          return launch_wgmma_plan<Coarse, 64, T>(params, launch, plan);
        default:
          return launch_wgmma_plan<Coarse, 128, T>(params, launch, plan);
      }
    } else if constexpr (Encoding == NVB_SFP) {
      return cudaErrorInvalidValue;  // SFP has no other scales
    } else {
      return launch_wgmma_plan<ByteWeight<Encoding, Scales::kBlocks>, 128, T>(params, launch, plan);
    }
  }
}

}  // namespace quantized
}  // namespace nvb
