// How kernels over [rows, columns] tensors divide their work, and sums and maxima over one row.
//
// Two shapes. A *row block* gives a whole row to blockDim.x threads, because the row's values meet in a reduction; rows
// that one warp can hold share a block, one warp (threadIdx.y) each. A *tile* is for operations whose elements never
// meet: blockDim.x threads along the columns and blockDim.y rows, so that short rows fill a block too.
#pragma once

#include <cuda_runtime_api.h>

#include "reduce.cuh"

namespace nvb {

inline constexpr int kWarpRowsPerBlock = 4;
inline constexpr int kTileThreads = 256;

inline int64_t ceiling_divide(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

// Threads for rows of `columns` elements with at most `values` of them in one thread, a multiple of `width`.
inline dim3 row_block_shape(int64_t columns, int width, int values) {
  const int64_t vectors = ceiling_divide(columns, width);
  const int64_t threads = ceiling_divide(ceiling_divide(vectors, values / width), 32) * 32;
  return dim3(static_cast<unsigned>(threads), threads == 32 ? kWarpRowsPerBlock : 1);
}

// A launch over tiles: `column_tiles` blocks beside each other in a row, `blocks` in all.
struct tile_grid {
  dim3 block;
  uint32_t column_tiles;
  int64_t blocks;
};

// Tiles of `vectors_per_thread` vectors along the columns, blockDim.x vectors apart.
inline tile_grid make_tile_grid(int64_t rows, int64_t columns, int width, int vectors_per_thread) {
  const int64_t vectors = ceiling_divide(columns, width);
  unsigned threads = 1;
  while (threads < kTileThreads && threads < vectors) threads *= 2;
  const dim3 block(threads, kTileThreads / threads);
  const int64_t column_tiles = ceiling_divide(vectors, static_cast<int64_t>(threads) * vectors_per_thread);
  return {block, static_cast<uint32_t>(column_tiles), column_tiles * ceiling_divide(rows, block.y)};
}

// Grid dimensions in x end at 2^31 - 1.
inline bool fits_grid(int64_t blocks) {
  return blocks <= 0x7fffffff;
}

// Over the blockDim.x threads of a row; each receives the result. `scratch` is 32 floats of shared memory that no other
// reduction of the kernel uses, which saves the barrier in front. With one warp a row there is no barrier at all, so
// the warps of a block need not stay together.
__device__ __forceinline__ float row_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (blockDim.x > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
  }
  return value;
}

__device__ __forceinline__ float row_max(float value, float* scratch) {
  value = warp_max(value);
  if (blockDim.x > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_max(lane < blockDim.x / 32 ? scratch[lane] : -CUDART_INF_F);
  }
  return value;
}

}  // namespace nvb
