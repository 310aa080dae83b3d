// y[m][n] = act(Σ_k x[m][k] W[n][k] + bias[n]) on tensor cores, for F16 and BF16 from compute capability 8.0 on.
//
// The Ampere recipe: cp.async fills a ring of kStages tiles in shared memory, ldmatrix feeds mma.sync m16n8k16, f32
// accumulators stay in registers. Tiles for few tokens are narrow, so that every multiprocessor streams a part of W,
// and their warps split k instead of the tile.
//
// Shapes: x [m, k], W [n, k], any m and n; k a multiple of 8 and all rows 16-byte aligned. Past the end of m, n and k
// the copies write zeros.
//
// Shared memory: kStages * (kBlockM + kBlockN) * kBlockK * 2 bytes, at most 96 KiB, reused by the epilogue for the f32
// tile of each k-warp. A row of a tile is kBlockK elements in 16-byte pieces, piece c stored at c ^ (row % 8): the
// eight rows of an 8x8 matrix then lie in different banks, for the copies and for ldmatrix. Registers: (kWarpM / 16) *
// (kWarpN / 8) * 4 accumulators (64 in the largest tile).
#pragma once

#include <algorithm>

#include "../../common/linear_epilogue.cuh"
#include "../../common/mma.cuh"
#include "../../common/vector.cuh"
#include "../linear_kernels.h"

namespace nvb {
namespace mma {

template <int BlockM, int BlockN, int BlockK, int WarpsM, int WarpsN, int WarpsK, int Stages, int BlocksPerSm>
struct Tile {
  static constexpr int kBlockM = BlockM, kBlockN = BlockN, kBlockK = BlockK;
  static constexpr int kWarpsM = WarpsM, kWarpsN = WarpsN, kWarpsK = WarpsK;
  static constexpr int kStages = Stages;
  static constexpr int kBlocksPerSm = BlocksPerSm;
  static constexpr int kThreads = 32 * WarpsM * WarpsN * WarpsK;
  static constexpr int kWarpM = BlockM / WarpsM, kWarpN = BlockN / WarpsN;
  static constexpr int kPieces = BlockK / 8;  // 16-byte pieces of a row
  static constexpr int kStageElements = (BlockM + BlockN) * BlockK;
  static constexpr int kResultPitch = BlockN + 8;  // floats; 8 mod 32, so that the rows of a fragment miss each other
  static constexpr int kRingBytes = Stages * kStageElements * 2;
  static constexpr int kResultBytes = WarpsK * BlockM * kResultPitch * 4;
  static constexpr int kSharedBytes = std::max(kRingBytes, kResultBytes);

  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp loads W fragments two n8 tiles at a time");
  static_assert(BlockN % 32 == 0, "the result pitch is 8 mod 32");
  static_assert(kPieces % 8 == 0, "the swizzle permutes groups of eight pieces");
  static_assert(kThreads % kPieces == 0, "a thread keeps its column of pieces");
  static_assert(BlockM * kPieces % kThreads == 0 && BlockN * kPieces % kThreads == 0, "equal copies for every thread");
  static_assert(BlockK / 16 % WarpsK == 0, "every k-warp has the same number of instructions");
  static_assert(kThreads % (BlockN / 8) == 0, "a thread of the epilogue keeps its columns");
  static_assert(kSharedBytes <= 99 * 1024, "fits a block of compute capability 8.6");
};

// The narrow tiles wait on W, so their rings are deep: (kStages - 1) * kBlockN rows of kBlockK, 40 to 56 KiB of W in
// flight a block. The wide ones wait on mma; fewer stages let two or three blocks share a multiprocessor.
using Tile16x32 = Tile<16, 32, 128, 1, 1, 4, 8, 2>;
using Tile32x32 = Tile<32, 32, 128, 1, 1, 4, 6, 2>;
using Tile64x64 = Tile<64, 64, 64, 2, 2, 1, 4, 3>;
using Tile128x128 = Tile<128, 128, 64, 2, 4, 1, 3, 2>;

// For few tokens with k in one piece: a sum is formed step by step, exactly as in the two tiles above, so that a
// token's result is the same to the bit in all three.
using Tile16x32Ordered = Tile<16, 32, 64, 1, 2, 1, 8, 3>;
static_assert(Tile16x32Ordered::kWarpsK == 1 && Tile64x64::kWarpsK == 1 && Tile128x128::kWarpsK == 1 &&
                  Tile16x32Ordered::kBlockK == Tile64x64::kBlockK && Tile64x64::kBlockK == Tile128x128::kBlockK,
              "batch-invariant products take these three for one another");

// This thread's share of copying Rows rows of a [rows, columns] matrix, one kBlockK-wide tile after the other.
template <typename TileShape, int Rows, typename T>
class TileCopy {
  static constexpr int kPieces = TileShape::kPieces;
  static constexpr int kRowStep = TileShape::kThreads / kPieces;
  static_assert(kRowStep % 8 == 0, "all rows of a thread have the same row % 8, hence the same swizzle");

 public:
  __device__ TileCopy(const T* matrix, int64_t stride, int64_t first_row, int64_t rows, int64_t columns)
      : matrix_(matrix), columns_(columns), row_step_(kRowStep * stride) {
    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    const int64_t rows_left = rows - first_row - row;
    valid_ = static_cast<int>(min(max((rows_left + kRowStep - 1) / kRowStep, int64_t{0}), int64_t{Rows / kRowStep}));
    column_ = piece * 8;
    source_ = matrix + (first_row + row) * stride + column_;
    target_ = (row * kPieces + (piece ^ (row % 8))) * 8;
  }

  // Queues the copies of the next tile.
  __device__ __forceinline__ void copy_next(T* tile) {
    const bool inside = column_ < columns_;
    const T* source = source_;
#pragma unroll
    for (int i = 0; i < Rows / kRowStep; ++i) {
      const bool valid = inside && i < valid_;
      cp_async16(tile + target_ + i * kRowStep * TileShape::kBlockK, valid ? source : matrix_, valid);
      source += row_step_;
    }
    source_ += TileShape::kBlockK;
    column_ += TileShape::kBlockK;
  }

 private:
  const T* matrix_;
  const T* source_;
  int64_t columns_;
  int64_t column_;
  int64_t row_step_;
  int target_;
  int valid_;  // how many of this thread's rows exist
};

template <typename T, typename TileShape>
__global__ void __launch_bounds__(TileShape::kThreads, TileShape::kBlocksPerSm)
    linear_mma(const nvb_linear_params p, const LinearEpilogue epilogue, const int tiles_m, const int tiles_n) {
#if __CUDA_ARCH__ >= 800
  constexpr int kBlockM = TileShape::kBlockM, kBlockN = TileShape::kBlockN, kBlockK = TileShape::kBlockK;
  constexpr int kStages = TileShape::kStages;
  constexpr int kFragmentsM = TileShape::kWarpM / 16, kFragmentsN = TileShape::kWarpN / 8;
  extern __shared__ uint4 shared[];
  T* const ring = reinterpret_cast<T*>(shared);

  // Blocks that run together share rows of x and of W: bands of kBand row tiles, column by column.
  constexpr int kBand = 8;
  const int band = blockIdx.x / (kBand * tiles_n);
  const int band_rows = min(kBand, tiles_m - band * kBand);
  const int in_band = blockIdx.x - band * kBand * tiles_n;
  const int64_t first_m = static_cast<int64_t>(band * kBand + in_band % band_rows) * kBlockM;
  const int64_t first_n = static_cast<int64_t>(in_band / band_rows) * kBlockN;

  TileCopy<TileShape, kBlockM, T> copy_x(static_cast<const T*>(p.input), p.input_stride, first_m, p.m, p.k);
  TileCopy<TileShape, kBlockN, T> copy_w(static_cast<const T*>(p.weight), p.weight_stride, first_n, p.n, p.k);
  const int tiles_k = static_cast<int>((p.k + kBlockK - 1) / kBlockK);
  const auto copy_stage = [&](int tile_k) {
    if (tile_k < tiles_k) {
      T* const stage = ring + tile_k % kStages * TileShape::kStageElements;
      copy_x.copy_next(stage);
      copy_w.copy_next(stage + kBlockM * kBlockK);
    }
    cp_async_commit();
  };

  // The tile of this warp: rows and columns of the block's tile, and which k16 steps of a stage.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp % TileShape::kWarpsM * TileShape::kWarpM;
  const int warp_n = warp / TileShape::kWarpsM % TileShape::kWarpsN * TileShape::kWarpN;
  const int warp_k = warp / (TileShape::kWarpsM * TileShape::kWarpsN);

  // ldmatrix rows: x matrices are (rows, k) = (low, low), (high, low), (low, high), (high, high) for a[0..3]; W
  // matrices are (low, low), (low, high), (high, low), (high, high) for b0, b1 of two n8 tiles. Piece 2 * step + half
  // of a row lies at (2 * step) ^ (half ^ row % 8), and row % 8 is lane % 8 in all of them.
  const int x_row = (warp_m + lane % 16) * kBlockK;
  const int x_swizzle = (lane / 16) ^ (lane % 8);
  const int w_row = (kBlockM + warp_n + lane % 8 + lane / 16 * 8) * kBlockK;
  const int w_swizzle = (lane / 8 % 2) ^ (lane % 8);

  // Fill the ring but for one stage, which the loop fills while it computes.
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_stage(stage);

  float sums[kFragmentsM][kFragmentsN][4] = {};
  for (int tile_k = 0; tile_k < tiles_k; ++tile_k) {
    // The barrier shows everybody's copies of this stage, and that everybody has left the stage refilled next.
    cp_async_wait<kStages - 2>();
    __syncthreads();
    copy_stage(tile_k + kStages - 1);

    const T* const stage = ring + tile_k % kStages * TileShape::kStageElements;
#pragma unroll
    for (int i = 0; i < kBlockK / 16 / TileShape::kWarpsK; ++i) {
      const int step = i * TileShape::kWarpsK + warp_k;
      uint32_t x[kFragmentsM][4];
      uint32_t w[kFragmentsN / 2][4];
#pragma unroll
      for (int f = 0; f < kFragmentsM; ++f) {
        ldmatrix_x4(x[f], stage + x_row + f * 16 * kBlockK + ((2 * step) ^ x_swizzle) * 8);
      }
#pragma unroll
      for (int f = 0; f < kFragmentsN / 2; ++f) {
        ldmatrix_x4(w[f], stage + w_row + f * 16 * kBlockK + ((2 * step) ^ w_swizzle) * 8);
      }
#pragma unroll
      for (int fm = 0; fm < kFragmentsM; ++fm) {
#pragma unroll
        for (int fn = 0; fn < kFragmentsN; ++fn) {
          mma_m16n8k16<T>(sums[fm][fn], x[fm], w[fn / 2][fn % 2 * 2], w[fn / 2][fn % 2 * 2 + 1]);
        }
      }
    }
  }

  // Lay the sums of every k-warp out in shared memory, once no copy and no ldmatrix uses it.
  cp_async_wait<0>();
  __syncthreads();
  constexpr int kPitch = TileShape::kResultPitch;
  float* const result = reinterpret_cast<float*>(shared);
  {
    float* const warp_result = result + (warp_k * kBlockM + warp_m + lane / 4) * kPitch + warp_n + lane % 4 * 2;
#pragma unroll
    for (int fm = 0; fm < kFragmentsM; ++fm) {
#pragma unroll
      for (int fn = 0; fn < kFragmentsN; ++fn) {
        float* const address = warp_result + fm * 16 * kPitch + fn * 8;
        *reinterpret_cast<float2*>(address) = make_float2(sums[fm][fn][0], sums[fm][fn][1]);
        *reinterpret_cast<float2*>(address + 8 * kPitch) = make_float2(sums[fm][fn][2], sums[fm][fn][3]);
      }
    }
  }
  __syncthreads();

  // Each thread finishes 8 columns of every kRowStep-th row.
  constexpr int kColumnGroups = kBlockN / 8;
  constexpr int kRowStep = TileShape::kThreads / kColumnGroups;
  const int local_column = threadIdx.x % kColumnGroups * 8;
  const int64_t column = first_n + local_column;
  if (column >= p.n) return;
  float bias[8];
  load_bias(epilogue, column, bias);
#pragma unroll 1
  for (int row = threadIdx.x / kColumnGroups; row < kBlockM && first_m + row < p.m; row += kRowStep) {
    float values[8] = {};
#pragma unroll
    for (int k = 0; k < TileShape::kWarpsK; ++k) {
      const float4* const address =
          reinterpret_cast<const float4*>(result + (k * kBlockM + row) * kPitch + local_column);
      const float4 low = address[0], high = address[1];
      values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
      values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
    }
    store_columns(epilogue, first_m + row, column, values, bias);
  }
#endif
}

template <typename T, typename TileShape>
cudaError_t launch_tile(const nvb_linear_params& params, const nvb_launch& launch) {
  // A host call that costs no synchronisation; the attribute belongs to the device, so it is set at every launch.
  const cudaError_t error = cudaFuncSetAttribute(linear_mma<T, TileShape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 TileShape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int tiles_m = static_cast<int>((params.m + TileShape::kBlockM - 1) / TileShape::kBlockM);
  const int tiles_n = static_cast<int>((params.n + TileShape::kBlockN - 1) / TileShape::kBlockN);
  linear_mma<T, TileShape>
      <<<static_cast<unsigned>(tiles_m) * tiles_n, TileShape::kThreads, TileShape::kSharedBytes, launch.stream>>>(
          params, make_epilogue(params, params.n), tiles_m, tiles_n);
  return cudaPeekAtLastError();
}

}  // namespace mma

template <typename T>
cudaError_t launch_linear_mma(const nvb_linear_params& params, const nvb_launch& launch, MmaTile tile) {
  switch (tile) {
    case MmaTile::k16x32:
      return mma::launch_tile<T, mma::Tile16x32>(params, launch);
    case MmaTile::k16x32Ordered:
      return mma::launch_tile<T, mma::Tile16x32Ordered>(params, launch);
    case MmaTile::k32x32:
      return mma::launch_tile<T, mma::Tile32x32>(params, launch);
    case MmaTile::k64x64:
      return mma::launch_tile<T, mma::Tile64x64>(params, launch);
    case MmaTile::k128x128:
      return mma::launch_tile<T, mma::Tile128x128>(params, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvb
