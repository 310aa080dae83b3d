// The warp of Hopper's prefill kernels that brings queries, keys and values by tensor maps, from contiguous tensors or
// from pages. `Memory` is the kernel's shared memory; `Tile` says how many bytes each copy brings.
#pragma once

#include "../../common/wgmma_widths.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_wgmma {

// The named barrier of the first warpgroup's turn.
inline constexpr int kFirstTurn = 1;

template <typename Tile, typename Memory>
__device__ __forceinline__ void copy_all(const Arguments& arguments, Memory& shared) {
  RingPlace<Tile::kStages> keys, values;
  uint32_t query_parity = 0;
  Walk<Tile> walk;
  Work work;
#pragma unroll 1
  while (walk.next(arguments, work)) {
    if (work.first == work.end) continue;
    const auto copy_keys = [&](int tile) {
      uint64_t* const full = &shared.key_full[keys.stage];
      barrier_wait(&shared.key_empty[keys.stage], keys.parity ^ 1);
      barrier_expect(full, Tile::kKeyBytes);
#pragma unroll
      for (int block = 0; block < Tile::kHeadBlocks; ++block) {
        tensor_copy(shared.key[keys.stage] + block * Tile::kKeys * 128, &arguments.key, block * 128,
                    work.key_start + tile * Tile::kKeys, work.kv_head, full);
      }
      keys.advance();
    };
    const auto copy_values = [&](int tile) {
      uint64_t* const full = shared.value_copied(values.stage, (tile + 1) * Tile::kKeys > work.kv_length);
      barrier_wait(&shared.value_empty[values.stage], values.parity ^ 1);
      barrier_expect(full, Tile::kValueBytes);
#pragma unroll
      for (int block = 0; block < Tile::kValueBlocks; ++block) {
        tensor_copy(shared.value[values.stage] + block * Tile::kKeys * 128, &arguments.value, block * 128,
                    work.value_start + tile * Tile::kKeys, work.kv_head, full);
      }
      values.advance();
    };

    const auto before = [&](int tile) { return tile_before<Tile>(arguments, work, tile); };

    copy_keys(work.end - 1);
#pragma unroll
    for (int warpgroup = 0; warpgroup < Tile::kConsumers; ++warpgroup) {
      uint64_t* const full = &shared.query_full[warpgroup];
      barrier_wait(&shared.query_empty[warpgroup], query_parity ^ 1);
      barrier_expect(full, Tile::kQueryBytes);
#pragma unroll
      for (int block = 0; block < Tile::kHeadBlocks; ++block) {
        tensor_copy(shared.query[warpgroup] + block * 64 * 128, &arguments.query, block * 128,
                    work.first_token + warpgroup * 64, work.head, full);
      }
    }
    query_parity ^= 1;
    int of_values = work.end - 1;
#pragma unroll 1
    for (int tile = before(of_values); tile >= work.first; tile = before(tile)) {
      copy_keys(tile);
      copy_values(Tile::kTakesScoreTerms ? of_values : tile + 1);
      of_values = tile;
    }
    copy_values(work.first);
  }
}

// The same from pages, by all lanes: each has a box of a page, and looks its page up before it waits for the stage.
template <typename Tile, typename Memory>
__device__ __forceinline__ void copy_paged(const Arguments& arguments, Memory& shared) {
  const int lane = threadIdx.x % 32;
  const int page_tokens = arguments.page_tokens, box = arguments.page_box;
  const bool copies = lane * box < Tile::kKeys;
  RingPlace<Tile::kStages> keys, values;
  uint32_t query_parity = 0;
  Walk<Tile> walk;
  Work work;
#pragma unroll 1
  while (walk.next(arguments, work)) {
    if (work.first == work.end) continue;
    const int32_t* const table = arguments.pages + int64_t{work.key_start} * arguments.page_row_stride;
    // The page of this lane's box, and the first of its tokens there. What no page has comes as zeros.
    struct Box {
      int page, token;
    };
    const auto find_box = [&](int tile) {
      const int token = tile * Tile::kKeys + lane * box;
      if (!copies || token >= work.kv_length) return Box{-1, 0};
      return Box{table[token / page_tokens], token % page_tokens};
    };
    const auto copy_box = [&](uint8_t* to, const CUtensorMap* map, int blocks, const Box& from, uint64_t* full) {
      for (int block = 0; copies && block < blocks; ++block) {
        tensor_copy(to + (block * Tile::kKeys + lane * box) * 128, map, block * 128, from.token, work.kv_head,
                    from.page, full);
      }
    };
    const auto copy_keys = [&](const Box& from) {
      uint64_t* const full = &shared.key_full[keys.stage];
      barrier_wait(&shared.key_empty[keys.stage], keys.parity ^ 1);
      if (lane == 0) barrier_expect(full, Tile::kKeyBytes);
      __syncwarp();
      copy_box(shared.key[keys.stage], &arguments.key, Tile::kHeadBlocks, from, full);
      keys.advance();
    };
    const auto copy_values = [&](int tile, const Box& from) {
      uint64_t* const full = shared.value_copied(values.stage, (tile + 1) * Tile::kKeys > work.kv_length);
      barrier_wait(&shared.value_empty[values.stage], values.parity ^ 1);
      if (lane == 0) barrier_expect(full, Tile::kValueBytes);
      __syncwarp();
      copy_box(shared.value[values.stage], &arguments.value, Tile::kValueBlocks, from, full);
      values.advance();
    };

    const auto before = [&](int tile) { return tile_before<Tile>(arguments, work, tile); };

    int last = work.end - 1;
    Box of_keys = find_box(last);
    copy_keys(of_keys);
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Tile::kConsumers; ++warpgroup) {
      uint64_t* const full = &shared.query_full[warpgroup];
      barrier_wait(&shared.query_empty[warpgroup], query_parity ^ 1);
      if (lane == 0) {
        barrier_expect(full, Tile::kQueryBytes);
        for (int block = 0; block < Tile::kHeadBlocks; ++block) {
          tensor_copy(shared.query[warpgroup] + block * 64 * 128, &arguments.query, block * 128,
                      work.first_token + warpgroup * 64, work.head, full);
        }
      }
    }
    query_parity ^= 1;
#pragma unroll 1
    for (int tile = before(last); tile >= work.first; tile = before(tile)) {
      const Box of_values = of_keys;
      of_keys = find_box(tile);
      copy_keys(of_keys);
      copy_values(Tile::kTakesScoreTerms ? last : tile + 1, of_values);
      last = tile;
    }
    copy_values(work.first, of_keys);
  }
}

template <typename Tile, typename Memory>
__device__ __forceinline__ void copy_with_one_warp(const Arguments& arguments, Memory& shared) {
  if (arguments.pages != nullptr) {
    copy_paged<Tile>(arguments, shared);
  } else if (threadIdx.x % 32 == 0) {
    copy_all<Tile>(arguments, shared);
  }
  __syncwarp();
}

}  // namespace prefill_wgmma
}  // namespace nvb
