// The kernel of a product of up to 16 tokens on compute capability 9.0, by the tables of linear_quantized_choices.h.
//
// Three kernels take turns. linear_quantized_skinny with W in registers has nothing to set up, which wins on small
// weights, and on Int4 as long as few tokens leave x in L1; for Int4 with zero points and up to 8 tokens it is
// linear_quantized_zero_points that does so. linear_quantized_stream wins where there is much to read:
// it needs 28 to 32 warps a multiprocessor to hide what it computes, so two blocks of 14 to 16 warps.
// linear_quantized_stationary computes least for an Int4 weight and takes longest to set up: large weights, or long
// rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear_quantized_choices.h"
#include "linear_quantized_decode.h"
#include "linear_quantized_zero_points.cuh"

#include "../../common/shared_limit.h"
#include "../sm80/linear_quantized_skinny.cuh"
#include "linear_quantized_stationary.cuh"
#include "linear_quantized_stream.cuh"

namespace nvb {
namespace quantized {

// Lays a product out over the device's multiprocessors, choice.blocks_per_sm blocks on each; false if it does not fit.
template <typename Stage, int Tiles, int Stages>
bool make_stream_plan(const nvb_linear_quantized_params& p, const nvb_launch& launch, const DecodeChoice& choice,
                      StreamPlan& plan) {
  constexpr int kReservedBytes = 1024;  // of shared memory, by the system for each block
  const int cluster = 1 << choice.cluster_shift;
  const int row_blocks = static_cast<int>((p.n + kTileRows - 1) / kTileRows);
  const int slice = (static_cast<int>(p.k / kChunk) + cluster - 1) / cluster;
  const int bytes = (launch.shared_bytes_per_block + kReservedBytes) / choice.blocks_per_sm - kReservedBytes;
  plan.cluster_shift = choice.cluster_shift;
  plan.warps = choice.warps;
  plan.warps_k = choice.warps_k;
  plan.x_pitch = slice * 128 + 64;  // eight lanes read from two tokens at once: from all banks
  plan.x_at = choice.warps * Stages * Stage::kBytes;
  plan.sums_at = plan.x_at + static_cast<int>(p.m) * plan.x_pitch;
  plan.barrier_at = plan.sums_at;
  const int block_bytes = choice.warps_k * Tiles * 512;  // of sums, in all members together
  const int most = (bytes - static_cast<int>(sizeof(uint64_t)) - plan.sums_at) / (block_bytes * cluster) * cluster;
  if (most <= 0) return false;
  // More clusters than run at once follow one another.
  const int clusters = std::max(1, launch.multiprocessors * choice.blocks_per_sm / cluster);
  const int waves = (row_blocks + clusters * most - 1) / (clusters * most);
  plan.cluster_blocks = (row_blocks + clusters * waves - 1) / (clusters * waves);
  plan.barrier_at += (plan.cluster_blocks + cluster - 1) / cluster * cluster * block_bytes;
  plan.bytes = plan.barrier_at + static_cast<int>(sizeof(uint64_t));
  plan.grid = static_cast<unsigned>((row_blocks + plan.cluster_blocks - 1) / plan.cluster_blocks * cluster);
  return true;
}

template <typename Plan>
cudaError_t launch_plan(void (*kernel)(nvb_linear_quantized_params, LinearEpilogue, Plan),
                        const nvb_linear_quantized_params& params, const nvb_launch& launch, const Plan& plan) {
  // The limit is one for all shapes, so that threads with others do not lower each other's. The kernels have no other
  // shared memory.
  const cudaError_t error =
      nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), launch.shared_bytes_per_block);
  if (error != cudaSuccess) return error;
  return launch_overlapped_clusters(kernel, dim3(plan.grid), dim3(1u << plan.cluster_shift), dim3(32 * plan.warps),
                                    plan.bytes, &launch, params, make_epilogue(params, params.n), plan);
}

template <int Size>
using Group = std::integral_constant<int, Size>;

// Launches what `choice` says; false if this kernel does not take such weights or the product does not fit.
template <typename Stage, typename T, int Tiles>
bool launch_choice(const nvb_linear_quantized_params& params, const nvb_launch& launch, const DecodeChoice& choice,
                   cudaError_t& result) {
  using Weight = typename Stage::Weight;
  constexpr bool kInt4 = Weight::kWords == 4;
  constexpr int kStages = kInt4 && Tiles == 1 ? 3 : 2;
  // The register kernel has one block less: scales of bytes and zero points spill in what one block more would leave.
  constexpr bool kMoreScales = kInt4 ? Weight::kZeroPoints : Weight::kScales != Scales::kRows;
  constexpr int kWarps = Tiles == 1 ? 16 : 8;
  constexpr int kBlocks = (Tiles == 1 ? 2 : 3) - (kMoreScales ? 1 : 0);
  if (choice.kernel == DecodeKernel::kRegisters) {
    if constexpr (kInt4 && Weight::kZeroPoints && Tiles == 1) {
      result = launch_zero_points<Weight::kScales, T>(params, launch);
    } else {
      result = launch_skinny<Weight, T, Tiles, kWarps, 4, kBlocks, true>(params, launch);
    }
    return true;
  }
  if (choice.kernel == DecodeKernel::kRegisters4) {
    if constexpr (kInt4 && !Weight::kZeroPoints && Tiles == 1) {
      result = launch_skinny<Weight, T, 1, 4, 4, 7, true>(params, launch);
      return true;
    }
    return false;
  }
  if (choice.kernel == DecodeKernel::kStationary) {
    if constexpr (kInt4) {
      StationaryPlan plan;
      const auto launches = [&](auto group) {
        if (!make_stationary_plan<group(), Weight::kZeroPoints, Tiles>(params, launch, choice.cluster_shift,
                                                                       choice.groups, choice.blocks_per_sm, plan)) {
          return false;
        }
        result = launch_plan(linear_quantized_stationary<group(), Weight::kZeroPoints, T, Tiles>, params, launch, plan);
        return true;
      };
      if constexpr (Weight::kScales == Scales::kGroups32) return launches(Group<32>());
      if constexpr (Weight::kScales != Scales::kGroups32) {
        return params.group == 64 ? launches(Group<64>()) : launches(Group<128>());
      }
    }
    return false;
  }
  StreamPlan plan;
  if (choice.kernel == DecodeKernel::kStream3) {
    if constexpr (Tiles == 1 && Weight::kFp8) {
      if (!make_stream_plan<Stage, Tiles, 3>(params, launch, choice, plan)) return false;
      result = launch_plan(linear_quantized_stream<Stage, T, Tiles, 3, true>, params, launch, plan);
      return true;
    }
    return false;
  }
  if (!make_stream_plan<Stage, Tiles, kStages>(params, launch, choice, plan)) return false;
  if constexpr (Tiles == 1) {  // no choice for more than 8 tokens has blocks alone
    if (choice.cluster_shift == 0) {
      result = launch_plan(linear_quantized_stream<Stage, T, Tiles, kStages, false>, params, launch, plan);
      return true;
    }
  }
  result = launch_plan(linear_quantized_stream<Stage, T, Tiles, kStages, true>, params, launch, plan);
  return true;
}

template <typename Stage, typename T, int Tiles>
cudaError_t launch_decode(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  using Weight = typename Stage::Weight;
  const int row_blocks = static_cast<int>((params.n + kTileRows - 1) / kTileRows);
  const int chunks = static_cast<int>(params.k / kChunk);
  const DecodeChoice* choice = Weight::kFp8          ? kFp8Choices.data()
                               : Weight::kWords != 4 ? kInt8Choices.data()
                               : Weight::kZeroPoints ? kInt4ZeroPointsChoices.data()
                                                     : kInt4Choices.data();
  for (;; ++choice) {
    if (params.m > choice->tokens || row_blocks < choice->from || row_blocks >= choice->below ||
        chunks < choice->k_from || chunks >= choice->k_below) {
      continue;
    }
    cudaError_t result = cudaSuccess;
    if (launch_choice<Stage, T, Tiles>(params, launch, *choice, result)) return result;
  }
}

// Stages of two chunks: more registers a lane would halve the blocks of a multiprocessor.
template <typename Stage, typename T>
cudaError_t launch_decode_tokens(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return params.m <= 8 ? launch_decode<Stage, T, 1>(params, launch) : launch_decode<Stage, T, 2>(params, launch);
}

template <typename T>
cudaError_t launch_decode_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  if (params.zero_points != nullptr) {
    return params.group == 32 ? launch_decode_tokens<Int4Stage<Scales::kGroups32, true, 2>, T>(params, launch)
                              : launch_decode_tokens<Int4Stage<Scales::kGroups64, true, 2>, T>(params, launch);
  }
  return params.group == 32 ? launch_decode_tokens<Int4Stage<Scales::kGroups32, false, 2>, T>(params, launch)
                            : launch_decode_tokens<Int4Stage<Scales::kGroups64, false, 2>, T>(params, launch);
}

template <typename T>
cudaError_t launch_decode_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  if (params.scale_kind == NVB_SCALES_ROWS) {
    return launch_decode_tokens<ByteStage<NVB_INT8, Scales::kRows, 2>, T>(params, launch);
  }
  return params.group == 32 ? launch_decode_tokens<ByteStage<NVB_INT8, Scales::kGroups32, 2>, T>(params, launch)
                            : launch_decode_tokens<ByteStage<NVB_INT8, Scales::kGroups64, 2>, T>(params, launch);
}

template <uint32_t Encoding, typename T>
cudaError_t launch_decode_fp8_encoding(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return params.scale_kind == NVB_SCALES_ROWS
             ? launch_decode_tokens<ByteStage<Encoding, Scales::kRows, 2>, T>(params, launch)
             : launch_decode_tokens<ByteStage<Encoding, Scales::kBlocks, 2>, T>(params, launch);
}

template <typename T>
cudaError_t launch_decode_fp8(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return params.encoding == NVB_FP8_E4M3 ? launch_decode_fp8_encoding<NVB_FP8_E4M3, T>(params, launch)
                                         : launch_decode_fp8_encoding<NVB_FP8_E5M2, T>(params, launch);
}

template <typename T>
cudaError_t launch_decode_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return launch_decode_tokens<ByteStage<NVB_SFP, Scales::kRows, 2>, T>(params, launch);
}

}  // namespace quantized
}  // namespace nvb
