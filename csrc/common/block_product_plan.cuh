// How block_product.cuh divides a product, or one of several like it, among blocks and warps.
#pragma once

#include <algorithm>

#include "block_codes.cuh"
#include "quantized_product.h"
#include "vector.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

constexpr int kRows = 16;
constexpr int kMaxWarps = 12;
// Of a multiprocessor by registers: 80 a thread, or 168 for many columns. With 64, and a third more warps, most
// products of one row took up to a fifth longer on an H200.
constexpr int resident_warps(int tiles) {
  return tiles == 4 ? 12 : 24;
}
constexpr int kUsualWarps = 8;  // of a block with several teams
constexpr int kDigits = 3;      // bytes of a number of x, each a column
constexpr int kMaxColumns = 32;
constexpr int kStepSumBytes = 2 * kUnit / kStep;  // of a unit, in F16
constexpr int kStages = 2;                        // a third place made no product faster

// A unit's copy begins at a multiple of 16 bytes and ends at one.
template <uint32_t Format>
constexpr int kMostChunks = (BlockCodes<Format>::kUnitBytes + 15 + 14) / 16;

struct Plan {
  int team;     // warps that divide the units of 16 rows
  int teams;    // of a block, each with rows of its own
  int tokens;   // of a pass
  int columns;  // of x's rows in shared memory, in bytes: the elements' bytes, then the steps' sums where they count
  int row_blocks;
  int units;
  int chunks;     // of 16 bytes that a unit's copy has at most
  int place;      // bytes of it in a ring, an odd number of 16
  bool vectors;   // x's rows are 16-byte aligned
  unsigned grid;  // blocks of a pass
  size_t bytes;
};

// Whether the kernel takes such a product, and how: of the ways to divide units among warps the one with the fewest
// units one after the other, where the end of 16 rows counts as one. By the shape of the weight, and the number of
// tokens that share a pass. `products` of this shape, each with rows of W and of x of its own, run together.
template <uint32_t Format>
bool make_plan(const nvb_linear_quantized_params& p, const nvb_launch& launch, Plan& plan, int64_t products = 1) {
  Plan made = {};
  made.units = static_cast<int>((p.k + kUnit - 1) / kUnit);
  // Rows begin 32 bytes apart in the banks, so that the eight that a load touches do not meet.
  const int row_bytes = made.units * (kUnit + (BlockCodes<Format>::kStepMinima ? kStepSumBytes : 0));
  made.columns = (row_bytes + 127) / 128 * 128 + 32;
  made.vectors = is_aligned16(p.input, p.m * products == 1 ? 0 : p.input_stride, float_dtype_bytes(p.input_dtype));
  made.row_blocks = static_cast<int>((p.n + kRows - 1) / kRows);
  constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  made.chunks = kBytes % 16 == 0 && is_aligned16(p.weight, p.weight_stride, 1) ? kBytes / 16 : kMostChunks<Format>;
  made.place = 16 * (made.chunks | 1);
  const int64_t shared = launch.shared_bytes_per_block, token_bytes = int64_t{1} * made.columns * kDigits;
  const int64_t multiprocessors = std::max(1, launch.multiprocessors);
  int64_t best = 0;
  for (made.team = 1; made.team <= std::min(kMaxWarps, made.units); ++made.team) {
    made.teams = std::max(1, kUsualWarps / made.team);
    const int warps = made.team * made.teams;
    const auto fixed = [&](int tiles) {
      return int64_t{4} * 8 * tiles * (made.units + warps * kRows) +
             static_cast<int64_t>(warps) * kStages * kRows * made.place;
    };
    const int64_t fit = std::min((shared - 1024 - fixed(4)) / token_bytes, shared / 2 / token_bytes);
    const int64_t most = std::min<int64_t>({p.m, kMaxColumns / kDigits, fit});
    if (most <= 0) continue;
    const int64_t passes = (p.m + most - 1) / most;
    if (passes > 65535) continue;
    made.tokens = static_cast<int>((p.m + passes - 1) / passes);
    const int columns = made.tokens * kDigits, tiles = columns <= 8 ? 1 : columns <= 16 ? 2 : 4;
    made.bytes = made.tokens * token_bytes + fixed(tiles);
    const int64_t blocks =
        std::max<int64_t>(1, std::min<int64_t>((shared + 1024) / (made.bytes + 1024), resident_warps(tiles) / warps));
    const int64_t room = blocks * multiprocessors * made.teams, row_blocks = made.row_blocks * products;
    const int64_t rounds = (row_blocks + room - 1) / room;
    const int64_t time = passes * rounds * ((made.units + made.team - 1) / made.team + 1);
    if (best != 0 && time >= best) continue;
    best = time;
    const int64_t each = made.teams * std::min<int64_t>(rounds, made.row_blocks);
    made.grid = static_cast<unsigned>((made.row_blocks + each - 1) / each);
    plan = made;
  }
  return best != 0;
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
