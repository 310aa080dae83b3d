// One 64 x 64 tile of a product of 16-bit matrices on the tensor cores, operands from anywhere.
//
// A block of 128 threads: four warps, 32 x 32 each, mma m16n8k16. What an operand is (its address, encoding) is its
// loader's business: `loader(row, k)` gives the eight elements k .. k + 7 of a row as 16 bytes, of an operand that lies
// transposed the elements k of rows row .. row + 7, zeros past the end. The next step's elements are fetched into
// registers while the tensor cores work on this one's, which lie in shared memory as in the tensor, [row][k] or
// [k][row], with 16 bytes more between lines so that ldmatrix, transposing or not, meets every bank once.
// Shared memory: 18 KiB. Compute capability 8.0 on.
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

static_assert(kTileSide == kTileDepth, "a tile has the same lines and vectors either way it lies");

// Vector `item` of a tile: the line that it is in, and its first element there.
struct tile_place {
  int line;
  int first;
};
__device__ __forceinline__ tile_place place_of(int item) {
  constexpr int kVectors = kTileDepth / 8;
  return {item / kVectors, item % kVectors * 8};
}

// The fragment of 16 rows from `row` on and 16 k from `k` on: matrices 0 and 1 are rows 0 to 7 and 8 to 15 of the first
// eight k, 2 and 3 those of the next eight.
template <bool Transposed, typename T>
__device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], const T* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  if constexpr (Transposed) {
    ldmatrix_x4_trans(fragment, &tile[(k + lane / 16 * 8 + lane % 8) * kTilePitch + row + lane / 8 % 2 * 8]);
  } else {
    ldmatrix_x4(fragment, &tile[(row + lane % 16) * kTilePitch + k + lane / 16 * 8]);
  }
}

// sums[i][j]: the fragment of rows 16 i and columns 8 j of this warp's 32 x 32; `depth` is the number of k.
template <typename T, bool TransposedA, bool TransposedB, typename LoaderA, typename LoaderB>
__device__ __forceinline__ void multiply_tile(product_tile_shared<T>& shared, int64_t depth, const LoaderA& load_a,
                                              const LoaderB& load_b, float (&sums)[2][4][4]) {
  constexpr int kItems = kTileSide * kTileDepth / 8 / kTileThreadCount;
  const int warp = threadIdx.x / 32;
  const int row = warp / 2 * 32;
  const int column = warp % 2 * 32;
  uint4 next_a[kItems];
  uint4 next_b[kItems];
  const auto fetch = [&](int64_t k) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const tile_place place = place_of(i * kTileThreadCount + static_cast<int>(threadIdx.x));
      next_a[i] = TransposedA ? load_a(place.first, k + place.line) : load_a(place.line, k + place.first);
      next_b[i] = TransposedB ? load_b(place.first, k + place.line) : load_b(place.line, k + place.first);
    }
  };
  fetch(0);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const tile_place place = place_of(i * kTileThreadCount + static_cast<int>(threadIdx.x));
      store16(&shared.a[place.line * kTilePitch + place.first], next_a[i]);
      store16(&shared.b[place.line * kTilePitch + place.first], next_b[i]);
    }
    __syncthreads();
    if (k + kTileDepth < depth) fetch(k + kTileDepth);
#pragma unroll
    for (int step = 0; step < kTileDepth; step += 16) {
      uint32_t a[2][4];
      uint32_t b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_fragment<TransposedA>(a[i], shared.a, row + 16 * i, step);
        load_fragment<TransposedB>(b[i], shared.b, column + 16 * i, step);
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
