// Which tiles of keys a mask of bits shows to a tile of rows: what attention_prefill_find_mask_tiles.cuh has found and
// all warps of a block of attention_prefill_wgmma.cuh walk by.
#pragma once

#include "attention_prefill_wgmma_arguments.cuh"

namespace nvb {
namespace prefill_wgmma {

// A row of mask_tiles: a bit for each tile of keys that some of a tile's rows see, and behind it one for each that all
// of them see whole. It lies where the tile's first row says, with a row for each head where the mask has heads.
__device__ __forceinline__ const uint32_t* seen_tiles(const Arguments& arguments, const Work& work) {
  const Terms& terms = arguments.with_terms.terms;
  int64_t row = work.first_token;
  if (terms.mask_head_stride != 0) row = row * arguments.query_heads + work.head;
  return terms.mask_tiles + row * 2 * terms.tile_words;
}

// From the mask's first element to that of key 0 of a row of the tile.
__device__ __forceinline__ int64_t mask_offset(const Arguments& arguments, const Work& work, int row) {
  const Terms& terms = arguments.with_terms.terms;
  const int start = (work.first_token - work.first_row) / terms.rows_per_start;
  return start * terms.mask_sequence_stride + work.head * terms.mask_head_stride +
         (work.first_row + row) * terms.mask_row_stride;
}

// The last tile with a bit of [first, tile]; first - 1: none.
__device__ __forceinline__ int last_seen_tile(const uint32_t* seen, int tile, int first) {
  while (tile >= first) {
    const uint32_t bits = seen[tile / 32] << (31 - tile % 32);
    if (bits != 0) return max(tile - __clz(static_cast<int>(bits)), first - 1);
    tile = tile / 32 * 32 - 1;
  }
  return first - 1;
}

// The first one of [tile, end); end: none.
__device__ __forceinline__ int first_seen_tile(const uint32_t* seen, int tile, int end) {
  while (tile < end) {
    const uint32_t bits = seen[tile / 32] >> (tile % 32);
    if (bits != 0) return min(tile + __ffs(static_cast<int>(bits)) - 1, end);
    tile = tile / 32 * 32 + 32;
  }
  return end;
}

// How many of [first, end) have one.
__device__ __forceinline__ int count_seen_tiles(const uint32_t* seen, int first, int end) {
  int count = 0;
  while (first < end) {
    const int last = min(end, first / 32 * 32 + 32);
    const uint32_t bits = seen[first / 32] >> (first % 32) << (32 - (last - first));
    count += __popc(bits);
    first = last;
  }
  return count;
}

// The next tile of keys that the walk from the last to the first comes to.
template <typename Tile>
__device__ __forceinline__ int tile_before(const Arguments& arguments, const Work& work, int tile) {
  if constexpr (Tile::kTakesScoreTerms) {
    if (arguments.with_terms.terms.mask_tiles != nullptr) {
      return last_seen_tile(seen_tiles(arguments, work), tile - 1, work.first);
    }
  }
  return tile - 1;
}

// How many there are.
template <typename Tile>
__device__ __forceinline__ int count_tiles(const Arguments& arguments, const Work& work) {
  if constexpr (Tile::kTakesScoreTerms) {
    if (arguments.with_terms.terms.mask_tiles != nullptr) {
      return count_seen_tiles(seen_tiles(arguments, work), work.first, work.end);
    }
  }
  return work.end - work.first;
}

}  // namespace prefill_wgmma
}  // namespace nvb
