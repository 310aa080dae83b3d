// Prefill attention by wgmma on compute capability 9.0, after FlashAttention 3 (Shah et al., arXiv:2407.08608).
//
//   S = Q . K^T (f32)   m = max(m, S)   P = 2^(S * factor - m)   l += sum(P)   O = O * 2^(old m - m) + P . V
//
// One warp brings Q, K and V by bulk tensor copies, K and V through rings of two stages each. Two or three warpgroups
// multiply, 64 query rows each, over the same keys from the last tile to the first, so that the tile at the sequence's
// end and the diagonal's come first. Within a warpgroup the product S of one tile is issued before O += P . V of the
// tile before it, and the exponentials of the one run beside the other. Between warpgroups named barriers pass the turn
// to issue products. A maximum is kept while scores pass it by less than 2^kRescaleThreshold, and O is scaled where it
// was not kept. Tiles that every row sees whole have a loop without a mask.
//
// Rows past a sequence's end are the neighbours' or stale. Scores of such keys are masked, and the rows of such values
// are cleared in shared memory before the product by a warp of their own, because 0 * NaN is NaN.
//
// Shapes and alignment: attention_prefill_wgmma.h. Head dims between the tiles' are filled with zeros by the copies.
//
// Shared memory: Shared<Tile>, rows of 128 bytes in blocks of 64 columns. Q 64 * head_dim a warpgroup, K and V two
// stages of Keys * head_dim. 208 KiB for D128_FULL, 224 KiB for D256.
// Registers a thread, of 232 (three warpgroups: 160): S Keys / 2, P Keys / 4, O value_dim / 2. D128_FULL: 88 + 44 + 64,
// D256: 40 + 20 + 128, D64: 64 + 32 + 32.
#pragma once

#include "../../common/programmatic_launch.cuh"
#include "attention_prefill_find_mask_tiles.cuh"
#include "attention_prefill_wgmma_copy.cuh"
#include "attention_prefill_wgmma_scores.cuh"
#include "attention_prefill_wgmma_softmax.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_wgmma {

template <typename Tile>
struct Shared {
  uint8_t query[Tile::kConsumers][Tile::kQueryBytes];
  uint8_t key[Tile::kStages][Tile::kKeyBytes];
  uint8_t value[Tile::kStages][Tile::kValueBytes];
  // Full: the bytes are there. Empty: every warpgroup that reads them has.
  uint64_t query_full[Tile::kConsumers];
  uint64_t query_empty[Tile::kConsumers];
  uint64_t key_full[Tile::kStages];
  uint64_t key_empty[Tile::kStages];
  uint64_t value_full[Tile::kStages];
  uint64_t value_empty[Tile::kStages];
  uint64_t value_landed[Tile::kStages];  // a tile with rows to clear has been copied

  // What a copy of values completes on.
  __device__ __forceinline__ uint64_t* value_copied(int stage, bool past_end) {
    return past_end ? &value_landed[stage] : &value_full[stage];
  }
};

// ---- The warp that clears values past the end ----

template <typename Tile>
__device__ __forceinline__ void clear_all(const Arguments& arguments, Shared<Tile>& shared) {
  static_assert(Tile::kStages == 2, "two parities");
  const int lane = threadIdx.x % 32;
  int stage = 0;
  uint32_t parities = 0;  // a bit a stage
  Walk<Tile> walk;
  Work work;
#pragma unroll 1
  while (walk.next(arguments, work)) {
    if (work.first < work.end && work.end * Tile::kKeys > work.kv_length) {
      barrier_wait(&shared.value_landed[stage], parities >> stage & 1);
      parities ^= 1u << stage;
      const int valid = work.kv_length - (work.end - 1) * Tile::kKeys;
#pragma unroll 1
      for (int block = 0; block < Tile::kValueBlocks; ++block) {
        uint8_t* const rows = shared.value[stage] + block * Tile::kKeys * 128;
#pragma unroll 1
        for (int at = valid * 128 + lane * 16; at < Tile::kKeys * 128; at += 32 * 16) {
          store16(rows + at, make_uint4(0, 0, 0, 0));
        }
      }
      fence_shared_before_products();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.value_full[stage]);
    }
    stage = (stage + count_tiles<Tile>(arguments, work)) % Tile::kStages;
  }
}

// ---- The warpgroups that multiply ----

template <typename T, typename Tile>
__device__ __forceinline__ void multiply_all(const Arguments& arguments, Shared<Tile>& shared, int warpgroup) {
  constexpr int kKeys = Tile::kKeys;
  const int thread = threadIdx.x % 128;
  const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  const uint64_t query_matrix = wgmma_descriptor(shared.query[warpgroup]);
  const uint64_t key_matrix = wgmma_descriptor(shared.key[0]);
  const uint64_t value_matrix = wgmma_descriptor_transposed(shared.value[0], kKeys * 128);
  RingPlace<Tile::kStages> keys, values;
  uint32_t query_parity = 0;
  const int turn = kFirstTurn + warpgroup;
  const int next_turn = kFirstTurn + (warpgroup + 1) % Tile::kConsumers;
  // The first turn is the first warpgroup's.
  if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) named_barrier_arrive(next_turn, 256);

  Walk<Tile> walk;
  Work work;
  bool more = walk.next(arguments, work);
#pragma unroll 1
  while (more) {
    float score[kKeys / 2];
    float output[Tile::kValueDim / 2];
    uint32_t p[kKeys / 16][4];
    Work next;
    RowSums rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    float scaled[2];
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) output[i] = 0.0f;
    ScoreTerms<Tile> terms(arguments, work, row, column);
    const auto before = [&](int tile) { return tile_before<Tile>(arguments, work, tile); };

    const auto multiply_keys = [&](auto& scores, bool begun) {
      const uint64_t b = key_matrix + keys.stage * (Tile::kKeyBytes >> 4);
#pragma unroll
      for (int k = 0; k < Tile::kHeadDim / 16; ++k) {
        const int block = k / 4, part = k % 4;
        wgmma_ss_rows<T>(scores, query_matrix + block * (64 * 128 >> 4) + 2 * part,
                         b + block * (kKeys * 128 >> 4) + 2 * part, k != 0 || begun);
      }
    };
    const auto multiply_values = [&] {
      const uint64_t b = value_matrix + values.stage * (Tile::kValueBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) wgmma_rs_transposed<T>(output, p[k], b + k * kTransposedStep, 1);
    };
    const auto release = [&](uint64_t* barrier) {
      if (thread == 0) barrier_arrive(barrier);
    };
    if (work.first < work.end) {
      // Tiles that every row of this warpgroup sees whole: [clear_first, clear_end).
      const int first_row = warpgroup * 64, last_row = max(first_row, min(first_row + 63, work.rows - 1));
      const KeyRange last_seen = keys_of_row<Tile>(arguments, work.kv_length, work.position + last_row);
      const int seen_end = keys_of_row<Tile>(arguments, work.kv_length, work.position + first_row).last + 1;
      const int clear_first = (last_seen.first + kKeys - 1) / kKeys, clear_end = seen_end / kKeys;
      RowMask mask;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask.range[half] = keys_of_row<Tile>(arguments, work.kv_length, work.position + row + 8 * half);
      }
      const auto finish_scores = [&](int tile, bool masked) {
        if (arguments.cap_factor != 0.0f) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) score[i] = tanh_fast(score[i] * arguments.cap_factor);
        }
        terms.change_scores(score, work, mask, tile);
        if (!masked) return;
        if (tile >= clear_end) mask_last(score, mask, tile * kKeys + column);
        if (tile < clear_first) mask_first(score, mask, tile * kKeys + column);
      };

      // The last tile of keys.
      int tile = work.end - 1;
      uint32_t kept[Tile::kTakesScoreTerms ? kKeys / 32 : 1];
      barrier_wait(&shared.query_full[warpgroup], query_parity);
      query_parity ^= 1;
      barrier_wait(&shared.key_full[keys.stage], keys.parity);
      const auto release_keys = [&] {
        release(&shared.key_empty[keys.stage]);
        keys.advance();
        if (tile == work.first) release(&shared.query_empty[warpgroup]);
      };
      if (Tile::kSkipsHalf && last_seen.last < tile * kKeys + kKeys / 2) {
        if constexpr (Tile::kSkipsHalf) {
          float half_score[kKeys / 4];
          wgmma_fence();
          multiply_keys(half_score, false);
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_fence_operand(half_score);
          release_keys();
          if (arguments.cap_factor != 0.0f) {
#pragma unroll
            for (int i = 0; i < kKeys / 4; ++i) half_score[i] = tanh_fast(half_score[i] * arguments.cap_factor);
          }
          mask_last(half_score, mask, tile * kKeys + column);
          if (tile < clear_first) mask_first(half_score, mask, tile * kKeys + column);
          exponentiate(half_score, rows, scaled, arguments.exponent_factor);
          // As scores of zero in the other half these would serialise the products of 64 columns (C7511).
          pack_first_half<T>(p, half_score);
        }
      } else {
        const bool begun = terms.begin_scores(score, work, tile);
        wgmma_fence();
        multiply_keys(score, begun);
        wgmma_commit();
        terms.fetch(work, mask, tile);
        wgmma_wait<0>();
        wgmma_fence_operand(score);
        release_keys();
        finish_scores(tile, true);
        exponentiate(score, rows, scaled, arguments.exponent_factor);
        terms.draw_weights(kept, work, tile);
        pack_probabilities<T>(p, score);
        terms.drop_weights(p, kept);
      }

      // S of one tile beside P . V of the tile after it.
      const auto step = [&](auto masked) {
        const bool begun = terms.begin_scores(score, work, tile);
        barrier_wait(&shared.key_full[keys.stage], keys.parity);
        if constexpr (Tile::kPingPong) named_barrier_sync(turn, 256);
        wgmma_fence();
        multiply_keys(score, begun);
        wgmma_commit();
        barrier_wait(&shared.value_full[values.stage], values.parity);
        wgmma_fence();
        multiply_values();
        wgmma_commit();
        if constexpr (Tile::kPingPong) named_barrier_arrive(next_turn, 256);
        terms.fetch(work, mask, tile);
        wgmma_wait<1>();
        wgmma_fence_operand(score);
        release_keys();
        finish_scores(tile, decltype(masked)::value);
        exponentiate(score, rows, scaled, arguments.exponent_factor);
        terms.draw_weights(kept, work, tile);
        // ptxas moves a wait up to the start of its basic block, and nothing would run beside the product. The loop,
        // which is left at once because no sum is negative, puts the exponentials into the block before the wait's.
        do {
          wgmma_wait<0>();
        } while (__any_sync(0xffffffffu, rows.sum[0] < 0.0f || rows.sum[1] < 0.0f));
        wgmma_fence_operand(output);
        release(&shared.value_empty[values.stage]);
        values.advance();
        if (__any_sync(0xffffffffu, scaled[0] != 1.0f || scaled[1] != 1.0f)) scale_output(output, scaled);
        pack_probabilities<T>(p, score);
        terms.drop_weights(p, kept);
      };
      tile = before(tile);
#pragma unroll 1
      while (tile >= work.first) {
#pragma unroll 1
        for (; tile >= work.first && (tile >= clear_end || tile < clear_first); tile = before(tile)) {
          step(std::true_type());
        }
#pragma unroll 1
        for (; tile >= work.first && tile < clear_end && tile >= clear_first; tile = before(tile)) {
          step(std::false_type());
        }
      }

      // P . V of the first tile.
      barrier_wait(&shared.value_full[values.stage], values.parity);
      wgmma_fence();
      multiply_values();
      wgmma_commit();
      // The next tile is looked for beside the product.
      more = walk.next(arguments, next);
      wgmma_wait<0>();
      wgmma_fence_operand(output);
      release(&shared.value_empty[values.stage]);
      values.advance();
    } else {
      more = walk.next(arguments, next);
    }
    store_rows<T, Tile>(arguments, work, output, rows, warpgroup);
    work = next;
  }
  // Nobody leaves a barrier half full.
  if (Tile::kPingPong && warpgroup == 0) named_barrier_sync(turn, 256);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_prefill_wgmma(const __grid_constant__ Arguments arguments) {
#ifdef NVB_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<Tile>& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  // All lanes of a warp have one value, and the shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int warpgroup = 0; warpgroup < Tile::kConsumers; ++warpgroup) {
      barrier_init(&shared.query_full[warpgroup], 1);
      barrier_init(&shared.query_empty[warpgroup], 1);
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barrier_init(&shared.key_full[stage], 1);
      barrier_init(&shared.key_empty[stage], Tile::kConsumers);
      barrier_init(&shared.value_full[stage], 1);
      barrier_init(&shared.value_empty[stage], Tile::kConsumers);
      barrier_init(&shared.value_landed[stage], 1);
    }
    barrier_init_fence();
    prefetch_tensor_map(&arguments.query);
    prefetch_tensor_map(&arguments.key);
    prefetch_tensor_map(&arguments.value);
  }
  __syncthreads();
  wait_for_previous_grid();

  if (warp >= 4 * Tile::kConsumers) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers) {
      copy_with_one_warp<Tile>(arguments, shared);
    } else if (warp == 4 * Tile::kConsumers + 1) {
      clear_all<Tile>(arguments, shared);
    }
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    multiply_all<T, Tile>(arguments, shared, warp / 4);
  }
#else
  __trap();  // a library built for other devices alone: the launcher chose by the device
#endif
}

template <typename T, typename Tile>
cudaError_t launch_tile(const Arguments& arguments, int blocks, const nvb_launch& launch) {
  static_assert(sizeof(Shared<Tile>) <= 227 * 1024, "what a block can have");
  if constexpr (Tile::kTakesScoreTerms) {
    if (arguments.with_terms.terms.mask_tiles != nullptr) {
      const cudaError_t error = launch_mask_tiles<Tile>(arguments, launch);
      if (error != cudaSuccess) return error;
    }
  }
  const auto kernel = attention_prefill_wgmma<T, Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<Tile>));
  if (error != cudaSuccess) return error;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), sizeof(Shared<Tile>),
                           &launch, arguments);
}

}  // namespace prefill_wgmma
}  // namespace nvb
