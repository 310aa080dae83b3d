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
  // Of a token: 16 elements of x each, and the groups' sums to their last stage.
  const int threads = std::max(chunks * 4, static_cast<int>(sums * kStageGroups * params.group / 16));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 1;
  attributes[1].val.clusterDim.y = static_cast<unsigned>(splits);
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  if constexpr (kHasFactors<T>) {
    config.gridDim = static_cast<unsigned>(params.m);
    config.blockDim = static_cast<unsigned>(std::min((threads + 31) / 32 * 32, 1024));
    error = cudaLaunchKernelEx(&config, linear_quantized_scale_input<Weight, T, Tokens>, params,
                               static_cast<char*>(params.workspace), chunks);
  } else {
    config.gridDim = dim3(static_cast<unsigned>((threads + 127) / 128), static_cast<unsigned>(params.m));
    config.blockDim = 128;
    error = cudaLaunchKernelEx(&config, linear_quantized_arrange_input<Weight, T, Tokens>, params,
                               static_cast<char*>(params.workspace), chunks, sums);
  }
  if (error != cudaSuccess) return error;
  config.gridDim = dim3(static_cast<unsigned>((params.n + Shape::kRows - 1) / Shape::kRows),
                        static_cast<unsigned>(splits), static_cast<unsigned>((params.m + Tokens - 1) / Tokens));
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.numAttrs = splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, make_epilogue(params, params.n),
                            static_cast<const char*>(params.workspace), share);
}

template <typename Weight, int GroupK, typename T>
cudaError_t launch_wgmma_plan(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                              const WgmmaPlan& plan) {
  if constexpr (!kScaled<T>) {
    if constexpr (!Weight::kOffsets) {
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

template <bool Offsets, typename T>
cudaError_t launch_wgmma_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                              const WgmmaPlan& plan) {
  using Fine = Int4Weight<Scales::kGroups32, Offsets>;
  if constexpr (kScaled<T>) {
    return launch_wgmma_plan<Fine, 32, T>(params, launch, plan);
  } else {
    using Coarse = Int4Weight<Scales::kGroups64, Offsets>;
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
cudaError_t launch_wgmma_int4_offsets(const nvb_linear_quantized_params& params, const nvb_launch& launch,
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
    } else {
      return launch_wgmma_plan<ByteWeight<Encoding, Scales::kBlocks>, 128, T>(params, launch, plan);
    }
  }
}

}  // namespace quantized
}  // namespace nvb
