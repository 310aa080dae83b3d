// Tiles of linear_wgmma.cuh: their size, their order, and what a block keeps of one in shared memory.
#pragma once

#include "../../common/linear_epilogue.cuh"
#include "../../common/wgmma_ss.cuh"

namespace nvb {
namespace linear_wgmma {

constexpr int kRows = 128;     // tokens a block
constexpr int kColumns = 256;  // rows of W
constexpr int kDepthBytes = 128;
constexpr int kStages = 4;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kBlocks = 2;  // a cluster

// Part of a warp's results on their way to the output: 16 rows of 64 columns. The pitch spreads the pairs of a fragment
// over all banks.
constexpr int kPartColumns = 64;
constexpr int kPartPitch = 72;
constexpr int kWarps = 4 * kConsumers;

struct Shared {
  uint8_t input[kStages][kRows * kDepthBytes];
  uint8_t weight[kStages][kColumns * kDepthBytes];
  uint16_t parts[kWarps][16 * kPartPitch];
  float bias[kConsumers][kColumns];
  float scales[kConsumers][kColumns];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};
static_assert(sizeof(Shared) <= 227 * 1024, "what a block can have");

struct Tiles {
  int64_t down;    // clusters' tiles along m
  int64_t across;  // tiles along n
  int64_t count;
};

// Tiles are walked in bands, so that those in flight together share what they read in L2.
constexpr int64_t kBand = 8;

__host__ __device__ inline Tiles tiles_of(int64_t m, int64_t n) {
  const int64_t down = (m + kBlocks * kRows - 1) / (kBlocks * kRows), across = (n + kColumns - 1) / kColumns;
  return {down, across, down * across};
}

// The place of a tile: (along m, along n).
__device__ __forceinline__ void place_of(const Tiles& tiles, int64_t tile, int64_t& down, int64_t& across) {
  const int64_t band = tile / (kBand * tiles.across);
  const int64_t height = min(kBand, tiles.down - band * kBand);
  const int64_t rest = tile - band * kBand * tiles.across;
  down = band * kBand + rest % height;
  across = rest / height;
}

struct Arguments {
  CUtensorMap input;
  CUtensorMap weight;
  LinearEpilogue epilogue;
  const float* row_scales;
  const float* column_scales;
  int64_t m;
  int64_t n;
  int32_t steps;  // along k
};

}  // namespace linear_wgmma
}  // namespace nvb
