// y = act(scales * (x Wᵀ) + bias) by wgmma, both operands brought by bulk tensor copies.
//
// Two blocks make a cluster and take two tiles of 128 tokens over the same 256 rows of W, of which each block copies
// half into both. A block has one warp that copies and two warpgroups that multiply, 64 tokens each. Blocks stay and
// walk over the tiles, and the copies for the next one run while the sums of the last are finished. (Warpgroups that
// take turns at tiles of 64 tokens hide that entirely, but write and read more shared memory than it can do at once.)
//
// Shapes: x [m, k], W [n, k], rows 16-byte aligned; tiles past the ends are filled with zeros and not stored.
// Shared memory: 4 stages of 128 bytes of 128 rows of x and of 256 rows of W, 192 KiB together, and 22 KiB for the
// epilogue. Registers: 240 a thread of the warpgroups that multiply, 128 of them sums; 24 for the others.
#pragma once

#include <algorithm>

#include "../../common/tensor_map.h"
#include "../linear_wgmma.h"
#include "linear_wgmma_epilogue.cuh"

namespace nvb {
namespace linear_wgmma {

template <Operands Kind>
__global__ void __launch_bounds__(kThreads, 1) linear_wgmma(const __grid_constant__ Arguments arguments) {
#ifdef NVB_WGMMA
  using Traits = OperandTraits<Kind>;
  using Sum = std::conditional_t<Traits::kIntegers, int32_t, float>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t rank = cluster_rank();
  // All lanes of a warp have one value, and the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Tiles tiles = tiles_of(arguments.m, arguments.n);
  const int64_t cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;

  // Barriers: a stage is full once its bytes are there, empty once both warpgroups of both blocks have read it.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], kBlocks * kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  RingPlace<kStages> place;
  if (warpgroup == kConsumers) {
    // Copies.
    setmaxnreg_dec<24>();
    if (threadIdx.x == 128 * kConsumers) {
      prefetch_tensor_map(&arguments.input);
      prefetch_tensor_map(&arguments.weight);
      constexpr int kShare = kColumns / kBlocks;
      for (int64_t tile = cluster; tile < tiles.count; tile += clusters) {
        int64_t down, across;
        place_of(tiles, tile, down, across);
        const int row = static_cast<int>((down * kBlocks + rank) * kRows);
        const int column = static_cast<int>(across * kColumns + rank * kShare);
        for (int step = 0; step < arguments.steps; ++step) {
          uint64_t* const full = &shared.full[place.stage];
          barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
          barrier_expect(full, sizeof shared.input[0] + sizeof shared.weight[0]);
          tensor_copy(shared.input[place.stage], &arguments.input, step * kDepthBytes, row, full);
          tensor_copy_multicast(shared.weight[place.stage] + rank * kShare * kDepthBytes, &arguments.weight,
                                step * kDepthBytes, column, full, (1 << kBlocks) - 1);
          place.advance();
        }
      }
      // A block may not end while the other one still announces that it has read a stage.
      for (int i = 0; i < kStages; ++i) {
        barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
        place.advance();
      }
    }
    __syncwarp();
  } else {
    // Products.
    setmaxnreg_inc<240>();
    const int thread = threadIdx.x % 128;
    const auto release = [&](int stage) {
      if (thread < kBlocks) cluster_barrier_arrive(cluster_address(&shared.empty[stage], thread));
    };
    for (int64_t tile = cluster; tile < tiles.count; tile += clusters) {
      int64_t down, across;
      place_of(tiles, tile, down, across);
      const int64_t first_column = across * kColumns;
      ColumnTerms terms;
      terms.load(arguments, first_column, thread);
      Sum sums[kColumns / 2];
      int previous = 0;
      for (int step = 0; step < arguments.steps; ++step) {
        barrier_wait(&shared.full[place.stage], place.parity);
        const uint64_t a = wgmma_descriptor(shared.input[place.stage] + warpgroup * 64 * kDepthBytes);
        const uint64_t b = wgmma_descriptor(shared.weight[place.stage]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          wgmma_ss<Kind>(sums, a + 2 * part, b + 2 * part, step != 0 || part != 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step != 0) release(previous);
        previous = place.stage;
        place.advance();
      }
      wgmma_wait<0>();
      wgmma_fence_operand(sums);
      release(previous);
      epilogue_block<Traits::kElementBytes == 1>(
          arguments, shared, sums, terms, (down * kBlocks + rank) * kRows + warpgroup * 64, first_column, warpgroup);
    }
  }
  cluster_arrive();
  cluster_wait();
#endif
}

// A map of `rows` rows of `bytes` bytes, in boxes of `box_rows` rows of 128 bytes.
inline cudaError_t make_map(CUtensorMap& map, const void* data, int64_t rows, int64_t bytes, int64_t stride_bytes,
                            int box_rows) {
  const TensorMapEncode encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride_bytes)};
  const cuuint32_t box[2] = {kDepthBytes, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  // Bytes, because zeros are all that the element type decides here.
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <Operands Kind>
cudaError_t launch_kind(const nvb_linear_wgmma_params& params, const nvb_launch& launch) {
  constexpr int kElementBytes = OperandTraits<Kind>::kElementBytes;
  Arguments arguments;
  // A stride that no row follows may be anything.
  const int64_t bytes = params.k * kElementBytes, least = (bytes + 15) / 16 * 16;
  const int64_t input_stride = params.m == 1 ? least : params.input_stride * kElementBytes;
  const int64_t weight_stride = params.n == 1 ? least : params.weight_stride * kElementBytes;
  cudaError_t error = make_map(arguments.input, params.input, params.m, bytes, input_stride, kRows);
  if (error != cudaSuccess) return error;
  error = make_map(arguments.weight, params.weight, params.n, bytes, weight_stride, kColumns / kBlocks);
  if (error != cudaSuccess) return error;
  arguments.epilogue = make_epilogue(params, params.n);
  arguments.row_scales = params.row_scales;
  arguments.column_scales = params.column_scales;
  arguments.m = params.m;
  arguments.n = params.n;
  arguments.steps = static_cast<int32_t>((bytes + kDepthBytes - 1) / kDepthBytes);
  const auto kernel = linear_wgmma<Kind>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const int64_t most = launch.multiprocessors / kBlocks;
  const int64_t clusters = std::min(tiles_of(params.m, params.n).count, most);
  config.gridDim = dim3(static_cast<unsigned>(clusters * kBlocks));
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace linear_wgmma
}  // namespace nvb
