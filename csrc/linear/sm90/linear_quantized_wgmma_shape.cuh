// How blocks of linear_quantized_wgmma.cuh divide a product, and their shared memory: the ring of stages, the other
// blocks' sums, the tokens' factors, the barriers.
#pragma once

#include "linear_quantized_wgmma_bytes.cuh"
#include "linear_quantized_wgmma_int4.cuh"

namespace nvb {
namespace quantized {

constexpr int kEarlyStages = 2;  // of W before x

// How the blocks of a cluster divide k, the groups' sums and the tokens.
struct WgmmaShare {
  int splits;
  int tokens;     // that a block finishes, the last ones fewer
  int steps;      // of kStageK
  int more;       // the first blocks take one step more
  int sum_steps;  // of kStageGroups
  int more_sums;  // the last blocks take one step more
};

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Tiles, int MostStages,
          int BlocksPerSm>
struct WgmmaShape {
  using Input = InputStage<Tokens>;
  static constexpr int kRows = 64 * Warpgroups * Tiles;
  using Weights = WeightStage<Weight, T, GroupK, kRows>;
  static constexpr int kConsumers = 128 * Warpgroups;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kStageBytes = (Input::kBytes + Weights::kBytes + 1023) / 1024 * 1024;
  // Sums from the other blocks of a cluster have memory of their own: nobody need ask when the ring is free.
  static constexpr int kMostSplits = most_splits(Tokens, Warpgroups* Tiles);
  static constexpr int kExchangeBytes = most_foreign(Tokens, kMostSplits) * kRows * 4;
  static constexpr int kFactorBytes = kHasFactors<T> ? Tokens * 4 : 0;
  static constexpr int kMostBytes = (BlocksPerSm == 2 ? 113 : 227) * 1024;
  static constexpr int kFixedBytes = 1024 + kExchangeBytes + kFactorBytes + 8;  // the ring aligns itself to 1024
  static constexpr int kRoom = (kMostBytes - kFixedBytes) / (kStageBytes + 16);
  static constexpr int kStages = kRoom < MostStages ? kRoom : MostStages;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kFixedBytes + kRingBytes + 2 * kStages * 8;
  static constexpr int kResultPitch = kRows + 4;  // floats; spreads a store's four quads over the banks
  // Threads have whole eights of the 65,536 registers: what the producers leave goes to the consumers.
  static constexpr int kProducerRegisters = BlocksPerSm == 2 ? 40 : 56;
  static constexpr int kConsumerRegisters = BlocksPerSm == 2 ? 96 : Warpgroups == 3 ? 152 : 224;
  static_assert(Warpgroups == 2 || (Warpgroups == 3 && BlocksPerSm == 1), "register counts are for these");
  static_assert(Tiles == 1 || Tiles == 2, "two products take turns");
  static_assert(kStages >= 2, "copies overlap products");
  static_assert(Tokens * kResultPitch * 4 <= kRingBytes, "the sums lie where the ring was");
};

}  // namespace quantized
}  // namespace nvb
