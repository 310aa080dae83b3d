// Which tiles of keys a mask of bits shows to a tile of rows of attention_prefill_wgmma.cuh: found by a grid in front
// of it, so that every warp of a block walks the same tiles without a look at the mask. For each tile of rows there is
// a bit for each tile of keys that some row sees, and one for each that all of them see whole (seen_tiles). Only rows
// of mask_tiles where a tile begins are written.
//
// A warp has 32 tiles of keys, one a lane, and walks the rows: its lanes read neighbouring words.
#pragma once

#include "../../common/programmatic_launch.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_wgmma {

template <typename Tile>
__global__ void __launch_bounds__(32) find_mask_tiles(const __grid_constant__ Arguments arguments, uint32_t* tiles) {
  constexpr int kWords = Tile::kKeys / 32;
  wait_for_previous_grid();
  const Terms& terms = arguments.with_terms.terms;
  int tile = blockIdx.x, number = 0;
#pragma unroll 1
  for (; tile >= (arguments.sequence[number].query_count + Tile::kRows - 1) / Tile::kRows; ++number) {
    tile -= (arguments.sequence[number].query_count + Tile::kRows - 1) / Tile::kRows;
  }
  const Sequence sequence = arguments.sequence[number];
  Work work = {};
  set_place<Tile>(arguments, sequence, blockIdx.z, tile * Tile::kRows, work);

  const int lane = threadIdx.x, first_word = (static_cast<int>(blockIdx.y) * 32 + lane) * kWords;
  const int words = (work.kv_length + 31) / 32;
  const uint32_t* row = static_cast<const uint32_t*>(terms.mask) + mask_offset(arguments, work, 0);
  uint32_t some = 0, lacking = 0;
#pragma unroll 4
  for (int i = 0; i < work.rows; ++i, row += terms.mask_row_stride) {
#pragma unroll
    for (int word = first_word; word < first_word + kWords; ++word) {
      if (word >= words) continue;
      const uint32_t keys = word == words - 1 ? 0xffffffffu >> (31 - (work.kv_length - 1) % 32) : 0xffffffffu;
      some |= row[word] & keys;
      lacking |= ~row[word] & keys;
    }
  }
  const uint32_t seen = __ballot_sync(0xffffffffu, some != 0);
  const uint32_t whole = __ballot_sync(0xffffffffu, first_word < words && lacking == 0);
  if (lane == 0) {
    uint32_t* const to = tiles + (seen_tiles(arguments, work) - terms.mask_tiles) + blockIdx.y;
    to[0] = seen;
    to[terms.tile_words] = whole;
  }
}

template <typename Tile>
cudaError_t launch_mask_tiles(const Arguments& arguments, const nvb_launch& launch) {
  const Terms& terms = arguments.with_terms.terms;
  int64_t tiles = 0;
  for (uint32_t i = 0; i < arguments.bundle[arguments.bundles].first_sequence; ++i) {
    tiles += (arguments.sequence[i].query_count + Tile::kRows - 1) / Tile::kRows;
  }
  const int heads = terms.mask_head_stride != 0 ? arguments.query_heads : 1;
  if (tiles == 0 || terms.tile_words == 0) return cudaSuccess;
  if (tiles > INT32_MAX || terms.tile_words > 65535 || heads > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(terms.tile_words), static_cast<unsigned>(heads));
  return launch_overlapped(find_mask_tiles<Tile>, grid, dim3(32), 0, &launch, arguments,
                           const_cast<uint32_t*>(terms.mask_tiles));
}

}  // namespace prefill_wgmma
}  // namespace nvb
