// Which decodes attention_decode_ring.cuh takes, and with which tiles.
#include <algorithm>
#include <type_traits>

#include "../../common/hopper.h"
#include "../attention_decode_ring.h"
#include "attention_decode_ring.cuh"

namespace nvb {
namespace {

using decode_ring::Tile;

// Every block looks at the positions of all rows, 32 sequences at a time.
constexpr int kMaxRows = 256;
// Half of a multiprocessor's shared memory less what the system keeps, so that two blocks find room, and nearly all.
constexpr int kHalf = 113 * 1024 - 256;
constexpr int kWhole = 222 * 1024;

template <typename Tile>
int stages_of(const nvb_attention_decode_params& p, int shared_bytes, int items) {
  return decode_ring::stages_within<Tile>(shared_bytes, items, float_dtype_bytes(p.query_dtype));
}

int64_t bytes_read(const nvb_attention_decode_params& p) {
  const int visible = p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length;
  return int64_t{2} * kv_dtype_bytes(p.kv_dtype) * p.sequences * visible * p.kv_heads * p.head_dim;
}

constexpr int64_t kFewBytes = int64_t{40} << 20;

// How a launch uses a multiprocessor. One H200, us, BF16 with 32/8 heads (256 columns: 8/4):
//
//   one sequence of 4,096     64 columns: a block of half the memory 9.1, two 10.0; 128: 11.2, 11.8; 256: 11.9, 13.5.
//                             Where keys are constant the next grid's block comes beside one of half, 7.0, 9.4 and
//                             11.1, but not beside one of all memory, which takes 13.4 at 256.
//   one of 32,768             64: one of half 28.9, two 24.8; 128: 45.9, 40.8, one of all memory with tiles of 128 keys
//                             39.3; 256: 47.3, 42.4, with tiles of 64 keys 40.1
//   64 of 4,096               64: 179, 139; 128: 307, 261; 256: 308, 257
//
// More blocks than fit, which the device could balance, lose: 264 times 2, 3 and 4 take 55, 60 and 68 for one sequence
// of 32,768 of 128 columns, and 76, 81 and 88 instead of 71 for 8 of 8,192.
struct Choice {
  int shared_bytes;
  int blocks;  // a multiprocessor
  bool large;  // twice the keys a tile, of 16 bits and 128 or 256 columns
};
Choice choose(const nvb_attention_decode_params& p) {
  const int64_t bytes = bytes_read(p);
  const bool few = bytes <= kFewBytes;
  // 32 MiB of 256 columns (16/8 heads) take 17.8 in blocks of half the memory and 16.0 in ones of all of it.
  const bool short_one = p.head_dim == 256 ? bytes <= kFewBytes / 2 : few;
  if (p.sequences == 1 && kv_dtype_bytes(p.kv_dtype) == 2 && p.head_dim >= 128 && !short_one) return {kWhole, 1, true};
  return {kHalf, few ? 1 : 2, false};
}

// What a larger cache holds is in no L2 when it is read again, so it leaves L2 first: 64 sequences of 4,096 tokens take
// 257 instead of 261 us, one of 131,072 131 instead of 132.
constexpr int64_t kOnceBytes = int64_t{8} << 20;

constexpr int kMostItems = 8;

// Calls use(T, Tile, blocks that a multiprocessor's registers hold) of the products' and the cache's dtype: 16 bits for
// up to 8 items, FP8 for 16 where there are more (`wide`). A run has 2 KiB at least (see
// attention_decode_ring_copy.cuh), but for 16 items of FP8.
template <typename Use>
auto with_tile(const nvb_attention_decode_params& p, bool wide, const Use& use) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  const auto with_dtype = [&](auto element) {
    using T = decltype(element);
    if (p.head_dim == 64) return use(T(), Tile<T, 64, 1, 8, 1>(), Two());
    if (p.head_dim == 256) {
      return choose(p).large ? use(T(), Tile<T, 256, 1, 4, 1>(), One()) : use(T(), Tile<T, 256, 1, 2, 2>(), Two());
    }
    return choose(p).large ? use(T(), Tile<T, 128, 1, 8, 1>(), One()) : use(T(), Tile<T, 128, 1, 4, 1>(), Two());
  };
  const auto with_fp8 = [&](auto element) {
    using Element = decltype(element);
    if (p.head_dim == 128) {
      return wide ? use(__half(), Tile<Element, 128, 2, 4, 1>(), Two())
                  : use(__half(), Tile<Element, 128, 1, 8, 1>(), Two());
    }
    return wide ? use(__half(), Tile<Element, 256, 2, 4, 1>(), One())
                : use(__half(), Tile<Element, 256, 1, 4, 1>(), Two());
  };
  switch (p.kv_dtype) {
    case NVB_F16:
      return with_dtype(__half());
    case NVB_BF16:
      return with_dtype(__nv_bfloat16());
    case NVB_F8_E4M3:
      return with_fp8(__nv_fp8_e4m3());
    default:
      return with_fp8(__nv_fp8_e5m2());
  }
}

// What a row costs beside its tiles, in tiles: 32 sequences of 128 to 16,384 tokens take 130 us with 0 and 124 with 2
// (BF16, 128 columns, 32/8 heads). Rows of equal length take the same time with both, but where a block has two tiles a
// third counts: one sequence of 4,096 tokens of FP8 takes 11.2 us with 0 and 12.2 with 2.
int extra_of(const nvb_attention_decode_params& p) {
  return p.sequences > 1 ? 2 : 0;
}

// Whether the ring is preferred to attention_decode_mma where both can. One H200, us, BF16, the ring as chosen above
// first (64 and 128 columns with 32/8 heads, 256 with 8/4):
//
//   columns                                64            128           256
//   one sequence of 4,096            9.1,  14.3   11.2,  17.0   11.9,  18.3
//   one of 32,768                   24.4,  28.4   39.2,  44.7   39.6,  46.1
//   one of 131,072                  71.2,  75.6  131.1, 138.0  131.6, 136.3
//   8 of 8,192                      40.5,  40.1   70.9,  69.7   70.2,  70.2
//   32 of 128 to 16,384             70.4, 148.7  125.9, 211.0  230.0, 308.8 (32/8)
//   32 of equal length, as many     68.7,  57.5  117.8, 108.4  229.4, 214.0 (32/8)
//   64 of 4,096                    137.9, 127.0  257.1, 243.1  256.8, 242.1
//   128 of 1,024                    76.0,  74.2  137.5, 130.9  136.0, 132.9
//
// The host does not know lengths, and those of the sequences that an engine serves differ.
constexpr int kFewSequences = 48;
constexpr int64_t kLongBytes = int64_t{600} << 20;
bool is_preferred(const nvb_attention_decode_params& p) {
  const int items = items_per_kv_head(p);
  if (p.sequences == 1 && bytes_read(p) <= kFewBytes) return items <= kMostItems;
  // More items leave room for two stages only; 16 items of 128 columns take 351 and 265 us at 64 x 4,096.
  if (items > kMostItems / 2) return false;
  if (p.sequences == 1) return bytes_read(p) <= kLongBytes;
  return p.sequences <= kFewSequences;
}

// What a block of a long sequence reads while the grid in front ends, in the place of its slowest blocks, is not won:
// one sequence of 32,768 whose keys are constant takes 25.6 us with it and 24.4 without (64 columns), 39.9 and 39.2
// (128), 41.1 and 39.6 (256). Older keys behind an append are read beside kernels that read less.
uint32_t reads_early(const DecodeArguments& arguments) {
  const nvb_attention_decode_params& p = arguments.params;
  const bool late = p.sequences == 1 && bytes_read(p) > kFewBytes && (arguments.constant & NVB_CONSTANT_KEYS) != 0;
  return late ? 0 : arguments.constant;
}

bool lie_aligned(const void* data, int64_t sequence_stride, int64_t head_stride, int64_t block_stride, int bytes) {
  return is_aligned16(data, sequence_stride, bytes) && is_aligned16(data, head_stride, bytes) &&
         is_aligned16(data, block_stride, bytes);
}

}  // namespace

bool supports_decode_ring(const nvb_attention_decode_params& p, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape) {
  const int bytes = kv_dtype_bytes(p.kv_dtype), query_bytes = float_dtype_bytes(p.query_dtype);
  const bool narrow = bytes == 1;
  if (!is_hopper(launch) || bytes > 2 || p.head_dim != p.value_dim || p.sequences * p.rows_per_sequence > kMaxRows) {
    return false;
  }
  if (p.head_dim != 128 && p.head_dim != 256 && (narrow || p.head_dim != 64)) return false;
  if (p.key_token_stride != p.head_dim || p.value_token_stride != p.head_dim) return false;
  if (!narrow && !is_preferred(p)) return false;
  const int items = items_per_kv_head(p);
  const nvb_kv_placement& placement = p.placement;
  if (!lie_aligned(p.key, p.key_sequence_stride, p.key_head_stride, placement.block_stride, bytes) ||
      !lie_aligned(p.value, p.value_sequence_stride, p.value_head_stride, placement.value_block_stride, bytes) ||
      !is_aligned16(p.query, p.query_token_stride, query_bytes) ||
      !is_aligned16(p.query, p.query_head_stride, query_bytes)) {
    return false;
  }
  const auto supports = [&](bool wide) {
    const int most = wide ? 2 * kMostItems : kMostItems;
    const int chunks = (items + most - 1) / most;
    const int64_t rows = static_cast<int64_t>(std::max(p.sequences, 1)) * p.kv_heads * chunks;
    return with_tile(p, wide, [&](auto, auto tile, auto held) {
      using Tile = decltype(tile);
      if (placement.pages != nullptr && placement.page_tokens < Tile::kRun) return false;
      if (rows * (p.capacity / Tile::kKeys + 2 + extra_of(p)) > INT32_MAX) return false;
      const Choice choice = choose(p);
      const int stages = stages_of<Tile>(p, choice.shared_bytes, (items + chunks - 1) / chunks);
      if (stages < Tile::kTeams || choice.shared_bytes + kDecodeStaticBytes > launch.shared_bytes_per_block)
        return false;
      const int blocks = std::min(choice.blocks, decltype(held)::value);
      shape =
          nvb_attention_decode_shape{most, Tile::kKeys, 0, Tile::kThreads, choice.shared_bytes, 0, 0, stages, blocks};
      return true;
    });
  };
  // 16 items of 256 columns of FP8 leave no room for a stage.
  return (items > kMostItems && supports(true)) || supports(false);
}

cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  const bool wide = p.heads_per_chunk > kMostItems;
  return with_tile(p, wide, [&](auto product, auto tile, auto held) {
    using T = decltype(product);
    using Tile = decltype(tile);
    const int stages = stages_of<Tile>(p, choose(p).shared_bytes, p.heads_per_chunk);
    return decode_ring::launch_tile<T, Tile, decltype(held)::value>(
        arguments, {stages, extra_of(p), reads_early(arguments), p.chunks == 1 && bytes_read(p) >= kOnceBytes},
        p.splits, launch);
  });
}

}  // namespace nvb
