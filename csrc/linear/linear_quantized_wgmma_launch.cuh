// The instantiations of linear_quantized_wgmma.cuh for one encoding and T, with the most stages that were of use on an
// H200.
#pragma once

#include "linear_quantized_wgmma.cuh"
#include "linear_quantized_wgmma.h"

namespace nvb {
namespace quantized {

template <typename Weight, int GroupK, typename T>
cudaError_t launch_wgmma_plan(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                              const WgmmaPlan& plan) {
  if (plan.tokens == 16) return launch_wgmma_shape<Weight, T, 16, GroupK, 2, 5, 2>(params, launch, plan.splits);
  if (plan.tokens == 32) {
    return plan.warpgroups == 4 ? launch_wgmma_shape<Weight, T, 32, GroupK, 4, 4, 1>(params, launch, plan.splits)
                                : launch_wgmma_shape<Weight, T, 32, GroupK, 2, 8, 1>(params, launch, plan.splits);
  }
  return plan.warpgroups == 4   ? launch_wgmma_shape<Weight, T, 64, GroupK, 4, 5, 1>(params, launch, plan.splits)
         : plan.warpgroups == 3 ? launch_wgmma_shape<Weight, T, 64, GroupK, 3, 5, 1>(params, launch, plan.splits)
                                : launch_wgmma_shape<Weight, T, 64, GroupK, 2, 6, 1>(params, launch, plan.splits);
}

template <uint32_t Encoding, typename T>
cudaError_t launch_wgmma_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                                  const WgmmaPlan& plan) {
  if constexpr (Encoding == NVB_INT4) {
    using Fine = Int4Weight<Scales::kGroups32, false>;
    using Coarse = Int4Weight<Scales::kGroups64, false>;
    switch (params.group) {
      case 32:
        return launch_wgmma_plan<Fine, 32, T>(params, launch, plan);
      case 64:
        return launch_wgmma_plan<Coarse, 64, T>(params, launch, plan);
      default:
        return launch_wgmma_plan<Coarse, 128, T>(params, launch, plan);
    }
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
