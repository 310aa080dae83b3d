// Prefill attention by wgmma on FP8 queries, keys and values, compute capability 9.0. The pipeline is that of
// attention_prefill_wgmma.cuh, whose copies, order of tiles and mask it shares; this is what FP8 changes:
//
//   S = Q . K^T   P = 2^(S * factor - m + 8)   l += sum(P)   O = O * 2^(old m - m) + E4M3(P) . V   output = O / l *
//   scale
//
// - A product of FP8 wants k along the rows of both operands, and the k of P . V are keys. Three warps of the producers
//   transpose each tile of V from where the copy has put it to where the product reads it.
// - The sums of S lie in a thread as two neighbouring keys of every eight, and the first operand of P . V wants four
//   neighbours. P keeps the order of S, and the transposing warps give V the same: key 8 i + 2 q + e of every 16 stands
//   at 4 q + 2 i + e. What ldmatrix makes of V has that order. The columns of V come as even and odd ones of every 16,
//   which a thread's sums bring together again, four neighbours each.
// - E4M3 goes from 2^-9 to 448: the exponent is shifted by 8, and a maximum is raised when scores pass it by 2^0.8.
// - The tensor cores add with 14 bits to what they hold, and cut off the rest of each product. So that long sums do not
//   shrink, O is moved out every so many keys: divided by its row's sum so far, as F16, it lies in shared memory, or
//   where that has no room in the output tensor, until the next time adds to it.
//
// Rows of V past a sequence's end become zeros as they are transposed.
//
// Shapes and alignment: attention_prefill_wgmma.h. Head dims between the tiles' are filled with zeros by the copies.
//
// Shared memory: Shared<Tile>, rows of 128 bytes. Q 64 * head_dim a warpgroup; K, V and the transposed V two stages of
// Keys * head_dim each, keys of the latter in blocks of 128. 208 KiB for D128_LONG with what O left, 224 KiB for D256.
// Registers a thread: S Keys / 2, P Keys / 8, O head_dim / 2. D128_LONG: 96 + 24 + 64, D256: 64 + 16 + 128.
#pragma once

#include "../../common/programmatic_launch.cuh"
#include "attention_prefill_fp8_output.cuh"
#include "attention_prefill_wgmma_copy.cuh"

namespace nvb {
namespace prefill_fp8 {

using prefill_wgmma::kFirstTurn;

// ---- The warpgroups that multiply ----

__device__ __forceinline__ float scale_of(const float* scale, int stride, int kv_head) {
  return scale == nullptr ? 1.0f : scale[kv_head * stride];
}

// T is the dtype of queries, keys and values.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_all(const Arguments& arguments, Shared<Tile>& shared, int warpgroup) {
  constexpr int kKeys = Tile::kKeys;
  const int thread = threadIdx.x % 128;
  const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  const uint64_t query_matrix = wgmma_descriptor(shared.query[warpgroup]);
  const uint64_t key_matrix = wgmma_descriptor(shared.key[0]);
  const uint64_t value_matrix = wgmma_descriptor(shared.transposed[0]);
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
    float output[Tile::kHeadDim / 2];
    uint16_t pairs[kKeys / 4];
    uint32_t p[kKeys / 32][4];
    Work next;
    RowSums rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    Flushed flushed = {{0.0f, 0.0f}, false};
    float scaled[2];
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 2; ++i) output[i] = 0.0f;
    const float product_scale = scale_of(arguments.query_scale, arguments.query_scale_stride, work.kv_head) *
                                scale_of(arguments.key_scale, arguments.key_scale_stride, work.kv_head);
    const float cap_factor = arguments.cap_factor * product_scale;
    // A capped score has no scale.
    const float exponent_factor = arguments.exponent_factor * (arguments.cap_factor == 0.0f ? product_scale : 1.0f);

    const auto multiply_keys = [&] {
      const uint64_t b = key_matrix + keys.stage * (Tile::kKeyBytes >> 4);
#pragma unroll
      for (int k = 0; k < Tile::kHeadDim / 32; ++k) {
        const int block = k / 4, part = k % 4;
        wgmma_ss_fp8<T>(score, query_matrix + block * (64 * 128 >> 4) + 2 * part,
                        b + block * (kKeys * 128 >> 4) + 2 * part, k != 0);
      }
    };
    const auto multiply_values = [&] {
      const uint64_t b = value_matrix + values.stage * (Tile::kTransposedBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeys / 32; ++k) {
        wgmma_rs_fp8<T>(output, p[k], b + k / 4 * (Tile::kTransposedBlock >> 4) + 2 * (k % 4), 1);
      }
    };
    const auto release = [&](uint64_t* barrier) {
      if (thread == 0) barrier_arrive(barrier);
    };
    if (work.first < work.end) {
      // Tiles that every row of this warpgroup sees whole: [clear_first, clear_end).
      const int first_row = warpgroup * 64, last_row = max(first_row, min(first_row + 63, work.rows - 1));
      const int unseen =
          visible_keys(work.position + last_row, work.kv_length, arguments.causal, arguments.window).first;
      const int seen_end =
          visible_keys(work.position + first_row, work.kv_length, arguments.causal, arguments.window).last + 1;
      const int clear_first = (unseen + kKeys - 1) / kKeys, clear_end = seen_end / kKeys;
      prefill_wgmma::RowMask mask;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask.range[half] =
            visible_keys(work.position + row + 8 * half, work.kv_length, arguments.causal, arguments.window);
      }
      const auto finish_scores = [&](int tile, bool masked) {
        if (arguments.cap_factor != 0.0f) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) score[i] = tanh_fast(score[i] * cap_factor);
        }
        if (!masked) return;
        if (tile >= clear_end) mask_last(score, mask, tile * kKeys + column);
        if (tile < clear_first) mask_first(score, mask, tile * kKeys + column);
      };

      // The last tile of keys.
      int tile = work.end - 1;
      int unflushed = Tile::kFlushTiles;
      barrier_wait(&shared.query_full[warpgroup], query_parity);
      query_parity ^= 1;
      barrier_wait(&shared.key_full[keys.stage], keys.parity);
      wgmma_fence();
      multiply_keys();
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(score);
      release(&shared.key_empty[keys.stage]);
      keys.advance();
      if (tile == work.first) release(&shared.query_empty[warpgroup]);
      finish_scores(tile, true);
      prefill_wgmma::exponentiate(score, rows, scaled, exponent_factor, kThreshold, kShift);
      round_probabilities(pairs, score);
      arrange_probabilities(p, pairs);

      // S of one tile beside P . V of the tile after it.
      const auto step = [&](auto masked) {
        barrier_wait(&shared.key_full[keys.stage], keys.parity);
        if constexpr (Tile::kPingPong) named_barrier_sync(turn, 256);
        wgmma_fence();
        multiply_keys();
        wgmma_commit();
        barrier_wait(&shared.transposed_full[values.stage], values.parity);
        wgmma_fence();
        multiply_values();
        wgmma_commit();
        if constexpr (Tile::kPingPong) named_barrier_arrive(next_turn, 256);
        wgmma_wait<1>();
        wgmma_fence_operand(score);
        release(&shared.key_empty[keys.stage]);
        keys.advance();
        if (tile == work.first) release(&shared.query_empty[warpgroup]);
        finish_scores(tile, decltype(masked)::value);
        prefill_wgmma::exponentiate(score, rows, scaled, exponent_factor, kThreshold, kShift);
        round_probabilities(pairs, score);
        // As in attention_prefill_wgmma.cuh: the loop keeps the wait behind the exponentials.
        do {
          wgmma_wait<0>();
        } while (__any_sync(0xffffffffu, rows.sum[0] < 0.0f || rows.sum[1] < 0.0f));
        wgmma_fence_operand(output);
        release(&shared.transposed_empty[values.stage]);
        values.advance();
        if (__any_sync(0xffffffffu, scaled[0] != 1.0f || scaled[1] != 1.0f)) {
          prefill_wgmma::scale_output(output, scaled);
          flushed.weight[0] *= scaled[0];
          flushed.weight[1] *= scaled[1];
        }
        arrange_probabilities(p, pairs);
        --unflushed;
      };
      --tile;
#pragma unroll 1
      while (tile >= work.first) {
        if (unflushed <= 0) {
          flush_output<Tile>(arguments, shared, work, output, rows, flushed, warpgroup);
          unflushed = Tile::kFlushTiles;
        }
        const int last = max(work.first, tile + 1 - unflushed);
#pragma unroll 1
        for (; tile >= last && (tile >= clear_end || tile < clear_first); --tile) step(std::true_type());
#pragma unroll 1
        for (; tile >= last && tile < clear_end && tile >= clear_first; --tile) step(std::false_type());
      }

      // P . V of the first tile.
      barrier_wait(&shared.transposed_full[values.stage], values.parity);
      wgmma_fence();
      multiply_values();
      wgmma_commit();
      // The next tile is looked for beside the product.
      more = walk.next(arguments, next);
      wgmma_wait<0>();
      wgmma_fence_operand(output);
      release(&shared.transposed_empty[values.stage]);
      values.advance();
    } else {
      more = walk.next(arguments, next);
    }
    store_rows<Tile>(arguments, shared, work, output, rows, flushed, exponent_factor,
                     scale_of(arguments.value_scale, arguments.value_scale_stride, work.kv_head), warpgroup);
    work = next;
  }
  // Nobody leaves a barrier half full.
  if (Tile::kPingPong && warpgroup == 0) named_barrier_sync(turn, 256);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_prefill_fp8(const __grid_constant__ Arguments arguments) {
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
      barrier_init(&shared.value_empty[stage], kTransposers);
      barrier_init(&shared.transposed_full[stage], kTransposers);
      barrier_init(&shared.transposed_empty[stage], Tile::kConsumers);
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
      prefill_wgmma::copy_with_one_warp<Tile>(arguments, shared);
    } else if (warp == 4 * Tile::kConsumers + 1) {
      transpose_all<Tile, 0>(arguments, shared);
    } else if (warp == 4 * Tile::kConsumers + 2) {
      transpose_all<Tile, 1>(arguments, shared);
    } else {
      transpose_all<Tile, 2>(arguments, shared);
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
  const auto kernel = attention_prefill_fp8<T, Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<Tile>));
  if (error != cudaSuccess) return error;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), sizeof(Shared<Tile>),
                           &launch, arguments);
}

}  // namespace prefill_fp8
}  // namespace nvb
