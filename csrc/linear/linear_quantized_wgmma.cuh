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
// x and W meet in T (linear_quantized_wgmma_input.cuh): f16 or bf16 with codes that are exact; for bf16 outputs
// SplitBf16 for FP8, whose codes need no decoding, or ScaledF16 for Int4, whose elements are made before the product,
// with scales and offsets, so that sums need no scales (linear_quantized_wgmma.h says where).
//
// Memory serves requests in turn, and nothing starts without x, which waits for the grid before: so it is asked for
// behind kEarlyStages of W and not behind a whole ring. On an H200 that takes 23.2 µs instead of 24.7 for 64 tokens and
// 14336 x 4096 elements in FP8, 20.0 instead of 20.7 in Int4 with groups of 128. Split x comes later, after two reads
// of it: twice as many stages of 128 rows take 21.1 instead of 21.4.
//
// In f16 and bf16, W = s q + o with offsets is multiplied as q alone, which takes a mask for each pair of codes
// (RawInt4), and Σ_groups o Σ x is one more product, in tf32: the offsets, which tf32 holds exactly, with the groups'
// sums of x in two parts of 11 bits. Its stages lie behind those of x and W, in groups of 32 one for every eight. What
// is not finite after that is summed again (linear_quantized_special.cuh).
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

#include "../common/wgmma.cuh"
#include "linear_epilogue.cuh"
#include "linear_quantized_special.cuh"
#include "linear_quantized_wgmma.h"
#include "linear_quantized_wgmma_stage.cuh"

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
  // Of the 65,536 registers, whole eights for each thread: what the producers leave goes to the consumers.
  static constexpr int kProducerRegisters = BlocksPerSm == 2 ? 40 : 56;
  static constexpr int kConsumerRegisters = BlocksPerSm == 2 ? 96 : Warpgroups == 3 ? 152 : 224;
  static_assert(Warpgroups == 2 || (Warpgroups == 3 && BlocksPerSm == 1), "register counts are for these");
  static_assert(Tiles == 1 || Tiles == 2, "two products take turns");
  static_assert(kStages >= 2, "copies overlap products");
  static_assert(Tokens * kResultPitch * 4 <= kRingBytes, "the sums lie where the ring was");
};

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
  constexpr int kEarly = kSplit<T> && Shape::kRows == 128 ? 2 * kEarlyStages : kEarlyStages;
  extern __shared__ char unaligned[];
  char* const ring = unaligned + (-shared_address(unaligned) & 1023);
  char* const exchange = ring + Shape::kRingBytes;
  float* const factors = reinterpret_cast<float*>(exchange + Shape::kExchangeBytes);  // of the tokens
  uint64_t* const full = reinterpret_cast<uint64_t*>(exchange + Shape::kExchangeBytes + Shape::kFactorBytes);
  uint64_t* const empty = full + kStages;
  uint64_t* const arrived = empty + kStages;
  constexpr bool kGroupSums = Weight::kOffsets && !kScaled<T>;
  const int rank = blockIdx.y;
  const int64_t block_row = static_cast<int64_t>(blockIdx.x) * Shape::kRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.z) * Tokens;
  const int begin = rank * share.steps + min(rank, share.more);
  const int steps = share.steps + (rank < share.more ? 1 : 0);
  // Of the groups' sums; they follow as steps of their own.
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
    leave_registers<Shape::kProducerRegisters>();
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
        weights.copy_offsets(sums_begin + step, stage + Input::kBytes);
        barrier_arrive_after_copies(full + slot);
        advance();
      }
    }
    __syncwarp();
    if (share.splits > 1) cluster_wait();
    return;
  }

  take_registers<Shape::kConsumerRegisters>();
  if (GroupK == 0 && threadIdx.x < Shape::kRows && block_row + threadIdx.x < p.n) {
    prefetch_l2(static_cast<const float*>(p.scales) + block_row + threadIdx.x);
  }
  const int warp = threadIdx.x / 32;
  const int first_block = warp / 4 * 4 * Tiles + warp % 4;  // of 16 rows, four for each of the warpgroup's tiles
  const int group = threadIdx.x % 32 / 4;
  const int quad = threadIdx.x % 4;
  const Weights weights(p, block_row);
  using Operand = typename OperandOf<Weight::kEncoding, T>::Type;
  constexpr int kSums = Tokens / 2;
  constexpr int kSumK = kScaled<T>                 ? 0
                        : GroupK == 0 && kSplit<T> ? kStageK
                                                   : GroupK;  // that the tensor cores add by themselves
  constexpr int kUnitK = kSumK == 0 ? kChunk : kSumK;         // of a tile, before the other one's turn
  constexpr int kUnits = kStageK / kUnitK;
  constexpr int kPieceK = kUnitK == 32 || (Warpgroups == 3 && kSumK != 0 && !kSplit<T>) ? 32 : kChunk;
  constexpr int kPieces = kUnitK / kPieceK;
  constexpr int kInstructions = kPieceK / 16;  // of a piece
  constexpr int kParts = kSplit<T> ? 2 : 1;    // of x, which meet the same fragment of W
  constexpr int kFragments = kInstructions / kParts;
  static_assert(!kSplit<T> || kPieceK == kChunk, "an instruction takes 32 k of one part");
  float total[Tiles][kSums] = {};
  float product[2][kSumK == 0 ? 1 : kSums] = {};
  float2 pending = make_float2(0.0f, 0.0f);  // the scale of the product that runs
  uint32_t a[2][kFragments][4];
  uint32_t words[Tiles][Weight::kWords];
  uint32_t bits[2];
  Weights::constants(bits);
  // Zero before the loop: otherwise ptxas may put it into the loop and make every product wait for the one before.
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) wgmma_hold(total[tile]);
  wgmma_hold(product[0]);
  wgmma_hold(product[1]);
  const auto add_product = [&](int index, int tile) {
    if constexpr (kSumK != 0) {
      wgmma_hold(product[index]);
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
          if constexpr (kGroupSums) scale.x *= RawInt4<T>::kLowFactor, scale.y *= RawInt4<T>::kHighFactor;
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int k = unit * kUnitK + piece * kPieceK;
          const int chunk = k / kChunk;
          uint32_t(&fragments)[kFragments][4] = a[(turn * kPieces + piece) % 2];
          if (k % kChunk == 0) Weights::read(stage + Input::kBytes, block, chunk, words[tile]);
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            if constexpr (kScaled<T>) {
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
          for (int i = 0; i < kFragments; ++i) wgmma_hold(fragments[i]);
          const bool starts = turn == 0 && piece == 0;
          if (kSumK != 0 && starts) {
            wgmma_wait<0>();
            wgmma_hold(product[1 - current]);
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) {
            const uint64_t input = kSplit<T> ? inputs + i % 2 * (Input::kChunkBytes / 16) + (k / 32 + i / 2) * 2
                                             : inputs + chunk * (Input::kChunkBytes / 16) + (k % kChunk / 16 + i) * 2;
            if constexpr (kSumK == 0) {
              wgmma<Operand>(total[tile], fragments[i / kParts], input, 1);
            } else {
              wgmma<Operand>(product[current], fragments[i / kParts], input, piece == 0 && i == 0 ? 0 : 1);
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
  for (int tile = 0; tile < Tiles; ++tile) wgmma_hold(total[tile]);
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
            Weights::offsets(stage + Input::kBytes, first_block + 4 * tile, piece * kFragments + i, fragments[i]);
          }
#pragma unroll
          for (int i = 0; i < kFragments; ++i) wgmma_hold(fragments[i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            const int j = piece * kFragments + i;
            wgmma<float>(product[tile], fragments[i], inputs + j / 4 * (Input::kChunkBytes / 16) + j % 4 * 2,
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

  // A thread will finish four columns of some tokens; what it needs for that arrives meanwhile.
  constexpr int kColumnGroups = Shape::kRows / 4;
  constexpr int kTokenStep = Shape::kConsumers / kColumnGroups;
  const int local_column = threadIdx.x % kColumnGroups * 4;
  const int local_token = threadIdx.x / kColumnGroups;
  const int64_t column = block_row + local_column;
  float bias[4], row_scales[4];
  load_bias(epilogue, column, bias);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row_scales[i] = GroupK == 0 && column + i < p.n ? static_cast<const float*>(p.scales)[column + i] : 1.0f;
  }

  // Lay the sums out in shared memory, once every consumer has left the ring.
  consumer_barrier<Shape::kConsumers>();
  float* const result = reinterpret_cast<float*>(ring);
  constexpr int kPitch = Shape::kResultPitch;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float* const address = result + (2 * i + 2 * quad) * kPitch + (first_block + 4 * tile) * kTileRows + group;
      address[0] = total[tile][i];
      address[kPitch] = total[tile][i + 1];
      address[8] = total[tile][i + 2];
      address[kPitch + 8] = total[tile][i + 3];
    }
  }
  consumer_barrier<Shape::kConsumers>();

  // The blocks of a cluster send each other their sums for the other's tokens.
  float* const own = result + rank * share.tokens * kPitch + local_column;
  if (share.splits > 1) {
    cluster_wait();
    for (int away = 1; away < share.splits; ++away) {
      const int owner = rank + away < share.splits ? rank + away : rank + away - share.splits;
      const int place = (away - 1) * share.tokens * Shape::kRows + local_column;
      const uint32_t target = cluster_address(exchange + place * 4, owner);
      const uint32_t barrier = cluster_address(arrived, owner);
      const int end = min(Tokens, (owner + 1) * share.tokens) - owner * share.tokens;
#pragma unroll 1
      for (int token = local_token; token < end; token += kTokenStep) {
        const float4 sum =
            *reinterpret_cast<const float4*>(result + (owner * share.tokens + token) * kPitch + local_column);
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        cluster_store(target + token * Shape::kRows * 4, values, barrier);
      }
    }
    barrier_wait(arrived, 0);
  }
  if (epilogue.residual != nullptr) wait_for_previous_grid();  // of the consumers, none has waited
  if (column < p.n) {
    const int64_t first_row = first_token + rank * share.tokens;
    const int tokens = static_cast<int>(min(p.m - first_row, static_cast<int64_t>(own_tokens)));
    const auto finished = [&](int token) {
      float4 sum = *reinterpret_cast<const float4*>(own + token * kPitch);
      for (int away = 1; away < share.splits; ++away) {
        const float4 part = *reinterpret_cast<const float4*>(
            exchange + (((away - 1) * share.tokens + token) * Shape::kRows + local_column) * 4);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      if constexpr (kHasFactors<T>) {
        const float factor = factors[rank * share.tokens + token];
        if (kSplit<T> && factor < 0.0f) return sum;
        sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
      }
      if (GroupK == 0) sum.x *= row_scales[0], sum.y *= row_scales[1], sum.z *= row_scales[2], sum.w *= row_scales[3];
      return sum;
    };
    if constexpr (Weight::kOffsets || kHasFactors<T>) {
      bool finite = true;
      const auto is_finite = [](float sum) { return fabsf(sum) < CUDART_INF_F; };
#pragma unroll 4
      for (int token = local_token; token < tokens; token += kTokenStep) {
        if constexpr (kSplit<T>) {
          finite = finite && !(factors[rank * share.tokens + token] < 0.0f);
          continue;
        }
        const float4 sum = finished(token);
        finite = finite && is_finite(sum.x) && is_finite(sum.y) && is_finite(sum.z) && is_finite(sum.w);
      }
      if (!finite) {
        // Put right where they lie, so that what follows has one way alone.
        wait_for_previous_grid();
#pragma unroll 1
        for (int token = local_token; token < tokens; token += kTokenStep) {
          if (kSplit<T> && !(factors[rank * share.tokens + token] < 0.0f)) continue;
          const float4 sum = finished(token);
          float values[4] = {sum.x, sum.y, sum.z, sum.w};
          repair_sums<true, Element<T>, Weight::kEncoding>(p, first_row + token, column, values);
          // `finished` will multiply by this token's power of two once more.
          const float back = kScaled<T> ? 1.0f / factors[rank * share.tokens + token] : 1.0f;
          *reinterpret_cast<float4*>(own + token * kPitch) =
              make_float4(values[0] * back, values[1] * back, values[2] * back, values[3] * back);
          for (int away = 1; away < share.splits; ++away) {
            *reinterpret_cast<float4*>(exchange + (((away - 1) * share.tokens + token) * Shape::kRows + local_column) *
                                                      4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
        }
      }
    }
    const bool vectors = !epilogue.gated && epilogue.activation == NVB_NONE && epilogue.vectors && column + 4 <= p.n;
    if (vectors && epilogue.residual != nullptr && epilogue.residual_vectors) {
      // The residual may be the output, so its loads do not pass stores by themselves.
      constexpr int kBatch = 4;
#pragma unroll 1
      for (int token = local_token; token < tokens; token += kBatch * kTokenStep) {
        float values[kBatch][4] = {};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (token + i * kTokenStep >= tokens) break;
          load_elements(epilogue.residual, epilogue.residual_dtype,
                        (first_row + token + i * kTokenStep) * epilogue.residual_stride + column, values[i]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (token + i * kTokenStep >= tokens) break;
          const float4 sum = finished(token + i * kTokenStep);
          values[i][0] += sum.x + bias[0], values[i][1] += sum.y + bias[1];
          values[i][2] += sum.z + bias[2], values[i][3] += sum.w + bias[3];
          store_elements(epilogue.output, epilogue.output_dtype,
                         (first_row + token + i * kTokenStep) * epilogue.output_stride + column, values[i]);
        }
      }
    } else if (vectors && epilogue.residual == nullptr) {
#pragma unroll 4
      for (int token = local_token; token < tokens; token += kTokenStep) {
        const float4 sum = finished(token);
        const float values[4] = {sum.x + bias[0], sum.y + bias[1], sum.z + bias[2], sum.w + bias[3]};
        store_elements(epilogue.output, epilogue.output_dtype, (first_row + token) * epilogue.output_stride + column,
                       values);
      }
    } else {
#pragma unroll 1
      for (int token = local_token; token < tokens; token += kTokenStep) {
        const float4 sum = finished(token);
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        store_columns(epilogue, first_row + token, column, values, bias);
      }
    }
  }
#else
  __trap();  // a build without code for 9.0a
#endif
}

}  // namespace quantized
}  // namespace nvb
