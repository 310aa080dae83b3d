// One 64 x 64 tile of a product of 16-bit matrices on the tensor cores, operands from anywhere.
//
// A block of 128 threads: four warps, 32 x 32 each, mma m16n8k16. What an operand is (its address, transposition,
// encoding) is its loader's business: `loader(row, k)` gives the eight elements k .. k + 7 of a row as 16 bytes, zeros
// past the end. The next step's elements are fetched into registers while the tensor cores work on this one's, which
// lie in shared memory, rows padded by 16 bytes so that ldmatrix meets every bank once. Shared memory: 18 KiB. Compute
// capability 8.0 on.
#pragma once

#include "mma.cuh"
#include "vector.cuh"

namespace nvb {

inline constexpr int kTileThreadCount = 128;
inline constexpr int kTileSide = 64;
inline constexpr int kTileDepth = 64;
inline constexpr int kTilePitch = kTileDepth + 8;

template <typename T>
struct product_tile_shared {
  __align__(16) T a[kTileSide * kTilePitch];
  __align__(16) T b[kTileSide * kTilePitch];
};

// The place of vector `item` of a tile: neighbouring threads take neighbouring k, or, where the operand lies transposed
// in memory, neighbouring rows.
template <bool Transposed>
__device__ __forceinline__ int2 tile_place(int item) {
  constexpr int kVectors = kTileDepth / 8;
  return Transposed ? make_int2(item % kTileSide, item / kTileSide * 8)
                    : make_int2(item / kVectors, item % kVectors * 8);
}

// sums[i][j]: the fragment of rows 16 i and columns 8 j of this warp's 32 x 32; `depth` is the number of k.
template <typename T, bool TransposedA, bool TransposedB, typename LoaderA, typename LoaderB>
__device__ __forceinline__ void multiply_tile(product_tile_shared<T>& shared, int64_t depth, const LoaderA& load_a,
                                              const LoaderB& load_b, float (&sums)[2][4][4]) {
  constexpr int kItems = kTileSide * kTileDepth / 8 / kTileThreadCount;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = warp / 2 * 32;
  const int column = warp % 2 * 32;
  uint4 next_a[kItems];
  uint4 next_b[kItems];
  const auto fetch = [&](int64_t k) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * kTileThreadCount + static_cast<int>(threadIdx.x);
      const int2 a = tile_place<TransposedA>(item);
      const int2 b = tile_place<TransposedB>(item);
      next_a[i] = load_a(a.x, k + a.y);
      next_b[i] = load_b(b.x, k + b.y);
    }
  };
  fetch(0);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * kTileThreadCount + static_cast<int>(threadIdx.x);
      const int2 a = tile_place<TransposedA>(item);
      const int2 b = tile_place<TransposedB>(item);
      store16(&shared.a[a.x * kTilePitch + a.y], next_a[i]);
      store16(&shared.b[b.x * kTilePitch + b.y], next_b[i]);
    }
    __syncthreads();
    if (k + kTileDepth < depth) fetch(k + kTileDepth);
#pragma unroll
    for (int step = 0; step < kTileDepth; step += 16) {
      uint32_t a[2][4];
      uint32_t b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of the first eight k, 2 and 3 those of the next eight.
        ldmatrix_x4(a[i], &shared.a[(row + 16 * i + lane % 16) * kTilePitch + step + lane / 16 * 8]);
        ldmatrix_x4(b[i], &shared.b[(column + 16 * i + lane % 16) * kTilePitch + step + lane / 16 * 8]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          mma_m16n8k16<T>(sums[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
        }
      }
    }
  }
}

// Calls visit(row, column, two sums) for the tile's elements, row and column counted from the tile's first.
template <typename Visit>
__device__ __forceinline__ void visit_tile(const float (&sums)[2][4][4], Visit visit) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
        visit(warp / 2 * 32 + 16 * i + 8 * half + lane / 4, warp % 2 * 32 + 8 * j + lane % 4 * 2, pair);
      }
    }
  }
}

}  // namespace nvb
