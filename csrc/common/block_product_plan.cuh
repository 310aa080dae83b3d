// How block_product.cuh divides a product, or one of several like it, among blocks and warps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "block_codes.cuh"
#include "hopper.h"
#include "quantized_product.h"
#include "tensor_map.h"
#include "vector.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

constexpr int kRows = 16;
// Of a multiprocessor by registers: 80 a thread with one tile of columns, 128 with two, 168 with four. With 64, and a
// third more warps, most products of one row took up to a fifth longer on an H200.
constexpr int resident_warps(int tiles) {
  return tiles == 1 ? 24 : tiles == 2 ? 16 : 12;
}
// Of a block, of which two are resident with one tile.
constexpr int max_warps(int tiles) {
  return tiles == 1 ? 12 : resident_warps(tiles);
}
// Of a block with several teams.
constexpr int usual_warps(int tiles) {
  return tiles == 1 ? 8 : max_warps(tiles);
}
constexpr int kMaxColumns = 32;
constexpr int kStages = 2;              // of a warp's ring; with three the head of Gemma 3 4B took a quarter longer
constexpr int kMaxSumBytes = 24 << 10;  // of sums that wait for their team
constexpr int kSumsOver = 32;           // what F16 sums of F16 numbers are divided by

// What a number of x becomes for the mma.
enum class Digits {
  kBytes,   // of a whole number
  kHalves,  // F16
};
template <Digits Kind>
using DigitsOf = std::integral_constant<Digits, Kind>;
constexpr int kMostBytesTokens = 2;

// Columns of the second operand that a number takes.
__host__ __device__ constexpr int columns_of(Digits kind, uint32_t dtype) {
  return kind == Digits::kBytes ? 3 : dtype == NVB_F32 ? 2 : 1;
}
// Of a unit's numbers in a column, and of its steps' sums, which with F16 have rests.
__host__ __device__ constexpr int unit_bytes(Digits kind) {
  return kind == Digits::kBytes ? kUnit : 2 * kUnit;
}
// What a lane of a quad loads of a column at a time.
__host__ __device__ constexpr int lane_bytes(Digits kind) {
  return kind == Digits::kBytes ? 8 : 16;
}
__host__ __device__ constexpr int step_sum_bytes(Digits kind) {
  return (kind == Digits::kBytes ? 2 : 4) * kUnit / kStep;
}

// A unit's copy begins at a multiple of 16 bytes and ends at one.
template <uint32_t Format>
constexpr int kMostChunks = (BlockCodes<Format>::kUnitBytes + 15 + 14) / 16;

// How a unit of 16 rows comes into shared memory.
enum class Copies {
  kAsync,   // 16 bytes at a time, by all lanes
  kTensor,  // by the copy engine of 9.0
};

struct Plan {
  Digits kind;
  Copies copies;
  int digits;   // columns of a number
  int team;     // warps that divide the units of 16 rows
  int teams;    // of a block, each with rows of its own
  int tokens;   // of a pass
  int columns;  // of x's rows in shared memory, in bytes: a slice's numbers, then the steps' sums where they count
  int row_blocks;
  int units;
  int slice;        // units of which x lies in shared memory at a time
  int slots;        // times 16 rows whose sums a team takes before it adds them up
  int batches;      // of as many, the same for all teams
  int row_bytes;    // of the blocks of a row of W
  int at_end_from;  // the first of the 16 rows a whole copy of the last of which could pass the end of W
  int chunks;       // of 16 bytes that a unit's copy has at most
  int place;        // bytes of it in a ring, an odd number of 16
  int stage_bytes;  // of 16 places, a multiple of the 128 bytes at which the copy engine begins
  bool vectors;     // x's rows are 16-byte aligned
  unsigned grid;    // blocks of a pass
  size_t bytes;
};

// Elements of a tensor map, of which a box has 256 at most.
template <uint32_t Format>
constexpr int kMapBytes = BlockCodes<Format>::kUnitBytes > 240 ? 2 : 1;

// Whether the copy engine takes the rows of W.
inline bool takes_boxes(const nvb_linear_quantized_params& p, const nvb_launch& launch) {
  return is_hopper(launch) && is_aligned16(p.weight, p.weight_stride, 1) && p.weight_stride < (int64_t{1} << 31) &&
         tensor_map_encoder() != nullptr;
}

// Whether the kernel takes such a product, and how: of the ways to divide units among warps the one that takes least
// time, where a multiprocessor reads a unit in one step or its warps wait for theirs. By the shape of the weight, and
// the number of tokens that share a pass. `products` of this shape, each with rows of W and of x of its own, run
// together.
template <uint32_t Format>
bool make_plan(const nvb_linear_quantized_params& p, const nvb_launch& launch, Plan& plan, int64_t products = 1) {
  Plan made = {};
  made.units = static_cast<int>((p.k + kUnit - 1) / kUnit);
  made.vectors = is_aligned16(p.input, p.m * products == 1 ? 0 : p.input_stride, float_dtype_bytes(p.input_dtype));
  made.row_blocks = static_cast<int>((p.n + kRows - 1) / kRows);
  constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  made.chunks = kBytes % 16 == 0 && is_aligned16(p.weight, p.weight_stride, 1) ? kBytes / 16 : kMostChunks<Format>;
  made.copies = takes_boxes(p, launch) ? Copies::kTensor : Copies::kAsync;
  made.place = 16 * (made.chunks | 1);
  made.stage_bytes = kRows * made.place;
  made.row_bytes = static_cast<int>(p.k / BlockElement<Format>::kElements) * BlockElement<Format>::kBytes;
  // A copy may pass the end of its own row, by less than it has bytes at most.
  const int64_t rows_behind = 16 * kMostChunks<Format> / std::max(made.row_bytes, 1) + 1;
  made.at_end_from = static_cast<int>(std::max<int64_t>(p.n - 1 - rows_behind, 0) / kRows);
  made.kind = p.m <= kMostBytesTokens ? Digits::kBytes : Digits::kHalves;
  made.digits = columns_of(made.kind, p.input_dtype);
  const int64_t passes = (p.m * made.digits + kMaxColumns - 1) / kMaxColumns;
  if (p.m <= 0 || passes > 65535) return false;
  made.tokens = static_cast<int>((p.m + passes - 1) / passes);
  const int columns = made.tokens * made.digits, tiles = columns <= 8 ? 1 : columns <= 16 ? 2 : 4;
  const int x_bytes = unit_bytes(made.kind) + (BlockCodes<Format>::kMinimum ? step_sum_bytes(made.kind) : 0);
  // Columns begin so far apart in the banks that those that a load touches at a time do not meet.
  const int apart = made.kind == Digits::kBytes ? 32 : 64;
  const int64_t shared = launch.shared_bytes_per_block, multiprocessors = std::max(1, launch.multiprocessors);
  // In times of a multiprocessor's read of a unit at the memory's speed: what a warp does one after the other, a
  // quarter more for other rows, shared with the warps beside it, of which fewer than `busy` are no faster each; the
  // end of some rows; and x's way to shared memory. The factors are rough: an H200's times of a dozen shapes agree with
  // the order that they give, and no more was asked of them.
  int64_t best = 0;
  for (made.team = 1; made.team <= std::min(max_warps(tiles), made.units); ++made.team) {
    made.teams = std::max(1, usual_warps(tiles) / made.team);
    const int warps = made.team * made.teams, slot_bytes = 4 * warps * kRows * made.tokens;
    const int64_t rings = static_cast<int64_t>(warps) * kStages * (made.stage_bytes + 8);  // a barrier each
    const int64_t fit =
        (shared - 1024 - rings - slot_bytes - 192 * columns) / (int64_t{1} * columns * x_bytes + 4 * 8 * tiles);
    if (fit < made.team) continue;
    const int slices = static_cast<int>((made.units + fit - 1) / fit);
    made.slice = ((made.units + slices - 1) / slices + made.team - 1) / made.team * made.team;
    if (made.slice > fit) made.slice = (made.units + slices - 1) / slices;
    made.columns = (made.slice * x_bytes + 127) / 128 * 128 + apart;
    const int64_t fixed = static_cast<int64_t>(columns) * made.columns + 4 * 8 * tiles * made.slice + rings;
    const int64_t blocks = std::max<int64_t>(
        1, std::min<int64_t>((shared + 1024) / (fixed + slot_bytes + 1024), resident_warps(tiles) / warps));
    const int64_t room = blocks * multiprocessors * made.teams, row_blocks = made.row_blocks * products;
    const int64_t rounds = (row_blocks + room - 1) / room;
    const int64_t each = std::min<int64_t>(rounds, made.row_blocks);
    const int64_t most_bytes = std::min<int64_t>((shared + 1024) / blocks - 1024 - fixed, kMaxSumBytes);
    made.slots = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(each, most_bytes / slot_bytes)));
    made.bytes = fixed + made.slots * slot_bytes;
    const int64_t steps = rounds * slices * ((made.slice + made.team - 1) / made.team);
    const int64_t batches = (rounds + made.slots - 1) / made.slots;
    const int64_t staging = slices > 1 ? batches * slices : 1;
    const int64_t resident =
        std::min<int64_t>(blocks, (row_blocks + multiprocessors * made.teams - 1) / (multiprocessors * made.teams));
    const int64_t busy = std::max<int64_t>(resident * warps, tiles == 1 ? 20 : 16) * (tiles == 4 ? 4 : tiles);
    const int64_t time =
        passes * ((4 * steps + rounds * slices) * busy / 4 + 6 * batches + staging * (8 + made.slice * columns / 16));
    if (best != 0 && time >= best) continue;
    best = time;
    made.grid = static_cast<unsigned>((made.row_blocks + made.teams * each - 1) / (made.teams * each));
    const int64_t batch_blocks = int64_t{made.grid} * made.teams * made.slots;
    made.batches = static_cast<int>((made.row_blocks + batch_blocks - 1) / batch_blocks);
    plan = made;
  }
  return best != 0;
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
