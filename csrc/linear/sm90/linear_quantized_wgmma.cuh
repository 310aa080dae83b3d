// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for W in 8 or 4 bits and from about 17 tokens t on, with wgmma.
//
// W is the first operand: it passes through registers, a tile of 64 rows at a time, where it becomes what the tensor
// cores take; x is the second one, in shared memory. Four producer warps copy stages of 128 k
// (linear_quantized_wgmma_stage.cuh) into a ring; W needs no other grid's results, so it is on its way before the grid
// waits for the one before. Consumer warpgroups decode a piece of W while the tensor cores multiply the piece before.
// Group scales meet f32 sums: a group's product starts from zero and is added to the total with its scale while the
// next product runs, for there are two, which take turns. They do so between a warpgroup's two tiles or, of one tile,
// between its groups.
//
// x and W meet in T (linear_quantized_wgmma_input.cuh): f16 or bf16 with values that are exact; for bf16 outputs
// Bf16AsTwoFp8 for FP8, whose values need no decoding, or Bf16AsScaledF16 for Int4, whose elements are made before the
// product, with scales and zero points, so that sums need no scales (linear_quantized_wgmma.h says where).
//
// Memory serves requests in turn, and nothing starts without x, which waits for the grid before: so it is asked for
// behind kEarlyStages of W and not behind a whole ring. On an H200 that takes 23.2 µs instead of 24.7 for 64 tokens and
// 14336 x 4096 elements in FP8, 20.0 instead of 20.7 in Int4 with groups of 128. Split x comes later, after two reads
// of it: twice as many stages of 128 rows take 21.1 instead of 21.4.
//
// In f16 and bf16, W = s q + o with zero points is multiplied as q alone, which takes a mask for each pair of values
// (UndecodedInt4), and Σ_groups o Σ x is one more product, in tf32: the zero points, which tf32 holds exactly, with the
// groups' sums of x in two parts of 11 bits. Its stages lie behind those of x and W, in groups of 32 one for every
// eight. What is not finite after that is summed again (quantized_nonfinite.cuh).
//
// The blocks of a cluster share 64 * Warpgroups * Tiles rows of W and divide k and the groups' sums. Each finishes some
// of the tokens: the others store their sums for these into its shared memory, where they are added in an order that
// depends on its rank alone.
//
// The tensor cores keep their sums in registers, so that decoding and multiplying slow each other down: on an H200
// their times nearly add up, whatever the order of the instructions. What counts is the number of instructions. Bulk
// copies of W save a few but take 31 ns each, of whatever size up to 1 KiB: 32 µs instead of 22.
//
// Shapes: x [m, k] of f16 or bf16 with 8-byte aligned rows, Tokens of them a block row; k a multiple of 64.
// Compute capability 9.0a. One or two blocks a multiprocessor.
//
// Tokens past the end are columns of their own, never stored: their x stays what the workspace held.
#pragma once

#include "linear_quantized_wgmma_epilogue.cuh"

namespace nvb {
namespace quantized {

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Tiles, int MostStages,
          int BlocksPerSm>
__global__ void __launch_bounds__(128 * (Warpgroups + 1), BlocksPerSm)
    linear_quantized_wgmma(const __grid_constant__ nvb_linear_quantized_params p, const LinearEpilogue epilogue,
                           const char* __restrict__ arranged, const WgmmaShare share) {
#ifdef NVB_WGMMA
  using Shape = WgmmaShape<Weight, T, Tokens, GroupK, Warpgroups, Tiles, MostStages, BlocksPerSm>;
  using Input = typename Shape::Input;
  using Weights = typename Shape::Weights;
  constexpr int kStages = Shape::kStages;
  constexpr int kEarly = kAsTwoFp8<T> && Shape::kRows == 128 ? 2 * kEarlyStages : kEarlyStages;
  extern __shared__ char unaligned[];
  char* const ring = unaligned + (-shared_address(unaligned) & 1023);
  char* const exchange = ring + Shape::kRingBytes;
  float* const factors = reinterpret_cast<float*>(exchange + Shape::kExchangeBytes);  // of the tokens
  uint64_t* const full = reinterpret_cast<uint64_t*>(exchange + Shape::kExchangeBytes + Shape::kFactorBytes);
  uint64_t* const empty = full + kStages;
  uint64_t* const arrived = empty + kStages;
  constexpr bool kGroupSums = Weight::kZeroPoints && !kAsScaledF16<T>;
  const int rank = blockIdx.y;
  const int64_t block_row = static_cast<int64_t>(blockIdx.x) * Shape::kRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.z) * Tokens;
  const int begin = rank * share.steps + min(rank, share.more);
  const int steps = share.steps + (rank < share.more ? 1 : 0);
  // The groups' sums follow as steps of their own.
  const int sums_begin = kGroupSums ? rank * share.sum_steps + max(0, rank - share.splits + share.more_sums) : 0;
  const int sum_steps = kGroupSums ? share.sum_steps + (rank >= share.splits - share.more_sums ? 1 : 0) : 0;
  const int own_tokens = max(0, min(Tokens - rank * share.tokens, share.tokens));

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s, kProducers + 1);
      barrier_init(empty + s, 4 * Warpgroups);
    }
    barrier_init(arrived, 1);
    barrier_init_fence();
    if (share.splits > 1) barrier_expect(arrived, (share.splits - 1) * own_tokens * Shape::kRows * 4);
  }
  __syncthreads();
  if (share.splits > 1) cluster_arrive();
  allow_next_grid();

  if (threadIdx.x >= Shape::kConsumers) {
    setmaxnreg_dec<Shape::kProducerRegisters>();
    const Weights weights(p, block_row);
    const int64_t input_steps = static_cast<int64_t>(share.steps) * share.splits + share.more;
    const int64_t input_sums = kGroupSums ? static_cast<int64_t>(share.sum_steps) * share.splits + share.more_sums : 0;
    const char* const inputs = arranged + (blockIdx.z * (input_steps + input_sums) + begin) * Input::kBytes;
    uint32_t slot = 0, parity = 1;
    const auto copy_weights = [&](int step) {
      weights.copy(begin + step, ring + slot * Shape::kStageBytes + Input::kBytes);
      barrier_arrive_after_copies(full + slot);
    };
    const auto copy_input = [&](int step, int target) {
      const bool with_factors = kHasFactors<T> && step == 0;
      barrier_expect(full + target, Input::kBytes + (with_factors ? Shape::kFactorBytes : 0));
      if (with_factors) {
        const int64_t stages = gridDim.z * (input_steps + input_sums);
        bulk_copy(factors, arranged + stages * Input::kBytes + blockIdx.z * Shape::kFactorBytes, Shape::kFactorBytes,
                  full + target);
      }
      bulk_copy(ring + target * Shape::kStageBytes, inputs + static_cast<int64_t>(step) * Input::kBytes, Input::kBytes,
                full + target);
    };
    const auto advance = [&] {
      if (++slot == kStages) slot = 0, parity ^= 1;
    };
    // One thread copies x, at first for the whole ring; the barrier keeps the other warps' W behind it.
    const bool copies_input = threadIdx.x == Shape::kThreads - 1;
    const int early = min(kEarly, max(steps / 2, 1));
    for (int step = 0; step < early; ++step) {
      copy_weights(step);
      advance();
    }
    wait_for_previous_grid();
    if (copies_input) {
      fence_before_bulk_copies();
      for (int step = 0; step < min(kStages, steps); ++step) copy_input(step, step);
    }
    __syncwarp();
    producer_barrier();
    for (int step = early; step < steps; ++step) {
      barrier_wait(empty + slot, parity);
      if (copies_input && step >= kStages) copy_input(step, slot);
      copy_weights(step);
      advance();
    }
    if constexpr (kGroupSums) {
      const int64_t first_sums = blockIdx.z * (input_steps + input_sums) + input_steps + sums_begin;
#pragma unroll 1
      for (int step = 0; step < sum_steps; ++step) {
        barrier_wait(empty + slot, parity);
        char* const stage = ring + slot * Shape::kStageBytes;
        if (copies_input) {
          barrier_expect(full + slot, Input::kBytes);
          bulk_copy(stage, arranged + (first_sums + step) * Input::kBytes, Input::kBytes, full + slot);
        }
        weights.copy_zero_points(sums_begin + step, stage + Input::kBytes);
        barrier_arrive_after_copies(full + slot);
        advance();
      }
    }
    __syncwarp();
    if (share.splits > 1) cluster_wait();
    return;
  }

  setmaxnreg_inc<Shape::kConsumerRegisters>();
  if (GroupK == 0 && threadIdx.x < Shape::kRows && block_row + threadIdx.x < p.n) {
    prefetch_l2(static_cast<const float*>(p.scales) + block_row + threadIdx.x);
  }
  const int warp = threadIdx.x / 32;
  const int first_block = warp / 4 * 4 * Tiles + warp % 4;  // of 16 rows, four for each of the warpgroup's tiles
  const Weights weights(p, block_row);
  using Operand = typename OperandOf<Weight::kEncoding, T>::Type;
  constexpr int kSums = Tokens / 2;
  constexpr int kSumK = kAsScaledF16<T>               ? 0
                        : GroupK == 0 && kAsTwoFp8<T> ? kStageK
                                                      : GroupK;  // that the tensor cores add by themselves
  constexpr int kUnitK = kSumK == 0 ? kChunk : kSumK;            // of a tile, before the other one's turn
  constexpr int kUnits = kStageK / kUnitK;
  constexpr int kPieceK = kUnitK == 32 || (Warpgroups == 3 && kSumK != 0 && !kAsTwoFp8<T>) ? 32 : kChunk;
  constexpr int kPieces = kUnitK / kPieceK;
  constexpr int kInstructions = kPieceK / 16;   // of a piece
  constexpr int kParts = kAsTwoFp8<T> ? 2 : 1;  // of x, which meet the same fragment of W
  constexpr int kFragments = kInstructions / kParts;
  static_assert(!kAsTwoFp8<T> || kPieceK == kChunk, "an instruction takes 32 k of one part");
  float total[Tiles][kSums] = {};
  float product[2][kSumK == 0 ? 1 : kSums] = {};
  float2 pending = make_float2(0.0f, 0.0f);  // the scale of the product that runs
  uint32_t a[2][kFragments][4];
  uint32_t words[Tiles][Weight::kWords];
  uint32_t bits[2];
  Weights::constants(bits);
  // Zero before the loop: otherwise ptxas may put it into the loop and make every product wait for the one before.
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) wgmma_fence_operand(total[tile]);
  wgmma_fence_operand(product[0]);
  wgmma_fence_operand(product[1]);
  const auto add_product = [&](int index, int tile) {
    if constexpr (kSumK != 0) {
      wgmma_fence_operand(product[index]);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        total[tile][i] = fmaf(i % 4 < 2 ? pending.x : pending.y, product[index][i], total[tile][i]);
      }
    }
  };

  const auto run_stage = [&](int step, auto first_product) {
    const int slot = step % kStages;
    const char* const stage = ring + slot * Shape::kStageBytes;
    barrier_wait(full + slot, step / kStages & 1);
    const uint64_t inputs = wgmma_descriptor(stage);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        const int turn = unit * Tiles + tile;
        const int current = (first_product.value + turn) % 2;
        const int block = first_block + 4 * tile;
        float2 scale = make_float2(1.0f, 1.0f);
        [[maybe_unused]] typename Weights::GroupScales group_scales;
        if constexpr (kSumK != 0 && GroupK != 0) {
          scale = weights.scale(stage + Input::kBytes, begin + step, block, unit);
          if constexpr (kGroupSums) scale.x *= UndecodedInt4<T>::kLowFactor, scale.y *= UndecodedInt4<T>::kHighFactor;
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int k = unit * kUnitK + piece * kPieceK;
          const int chunk = k / kChunk;
          uint32_t(&fragments)[kFragments][4] = a[(turn * kPieces + piece) % 2];
          if (k % kChunk == 0) Weights::read(stage + Input::kBytes, block, chunk, words[tile]);
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            if constexpr (kAsScaledF16<T>) {
              if ((k + 16 * i) % (GroupK < kChunk ? GroupK : kChunk) == 0) {
                group_scales = Weights::group_scales(stage + Input::kBytes, block, (k + 16 * i) / GroupK);
              }
              Weights::elements(words[tile], bits, k % kChunk / 16 + i, group_scales, fragments[i]);
            } else {
              Weights::fragment(words[tile], bits, k % kChunk / 16 / kParts + i, fragments[i]);
            }
          }
          // Asks for the decoding before the products, while those of the piece before run.
#pragma unroll
          for (int i = 0; i < kFragments; ++i) wgmma_fence_operand(fragments[i]);
          const bool starts = turn == 0 && piece == 0;
          if (kSumK != 0 && starts) {
            wgmma_wait<0>();
            wgmma_fence_operand(product[1 - current]);
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) {
            const uint64_t input = kAsTwoFp8<T>
                                       ? inputs + i % 2 * (Input::kChunkBytes / 16) + (k / 32 + i / 2) * 2
                                       : inputs + chunk * (Input::kChunkBytes / 16) + (k % kChunk / 16 + i) * 2;
            if constexpr (kSumK == 0) {
              wgmma_rs<Operand>(total[tile], fragments[i / kParts], input, 1);
            } else {
              wgmma_rs<Operand>(product[current], fragments[i / kParts], input, piece == 0 && i == 0 ? 0 : 1);
            }
          }
          wgmma_commit();
          if (kSumK == 0 || !starts) wgmma_wait<1>();
          if (piece == 0) {
            if (starts && step > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + (step - 1) % kStages);
            add_product(1 - current, Tiles - 1 - tile);
            pending = scale;
          }
        }
      }
    }
  };
  using First = std::integral_constant<int, 0>;
  using Second = std::integral_constant<int, 1>;
  constexpr bool kTurnsEven = kUnits * Tiles % 2 == 0;
  if constexpr (kTurnsEven) {
    for (int step = 0; step < steps; ++step) run_stage(step, First());
  } else {
    for (int step = 0; step < steps; step += 2) {
      run_stage(step, First());
      if (step + 1 < steps) run_stage(step + 1, Second());
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) wgmma_fence_operand(total[tile]);
  if (kTurnsEven || steps % 2 == 0) {
    add_product(1, Tiles - 1);
  } else {
    add_product(0, Tiles - 1);
  }
  if constexpr (kGroupSums) {
    constexpr int kStagePieces = kStageGroups / 4 / kFragments;
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + (steps - 1) % kStages);
#pragma unroll 1
    for (int step = steps; step < steps + sum_steps; ++step) {
      const char* const stage = ring + step % kStages * Shape::kStageBytes;
      barrier_wait(full + step % kStages, step / kStages & 1);
      const uint64_t inputs = wgmma_descriptor(stage);
      pending = make_float2(1.0f, 1.0f);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int piece = 0; piece < kStagePieces; ++piece) {
          uint32_t(&fragments)[kFragments][4] = a[piece % 2];
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            Weights::zero_points(stage + Input::kBytes, first_block + 4 * tile, piece * kFragments + i, fragments[i]);
          }
#pragma unroll
          for (int i = 0; i < kFragments; ++i) wgmma_fence_operand(fragments[i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            const int j = piece * kFragments + i;
            wgmma_rs<float>(product[tile], fragments[i], inputs + j / 4 * (Input::kChunkBytes / 16) + j % 4 * 2,
                            j == 0 ? 0 : 1);
          }
          wgmma_commit();
          wgmma_wait<1>();
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) add_product(tile, tile);
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + step % kStages);
    }
  }

  const WgmmaPlace block = {rank, own_tokens, block_row, first_token};
  epilogue_sums<Shape, Weight, T, Tokens, GroupK, Tiles>(p, epilogue, share, block, ring, exchange, arrived, factors,
                                                         first_block, total);
#else
  __trap();  // a build without code for 9.0a
#endif
}

}  // namespace quantized
}  // namespace nvb
