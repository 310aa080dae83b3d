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
// Half of a multiprocessor's shared memory less what the system keeps, so that two blocks find room: both of this grid,
// or one of the next that asks for its first keys while those of this one merge.
constexpr int kSharedBytes = 112 * 1024 - 256;

template <typename Tile>
int stages_of(const nvb_attention_decode_params& p, int items) {
  return decode_ring::stages_within<Tile>(kSharedBytes, items, float_dtype_bytes(p.query_dtype));
}

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
    if (p.head_dim == 128) return use(T(), Tile<T, 128, 1, 4, 1>(), Two());
    return use(T(), Tile<T, 256, 1, 2, 2>(), Two());
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

int64_t bytes_read(const nvb_attention_decode_params& p) {
  const int visible = p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length;
  return int64_t{2} * kv_dtype_bytes(p.kv_dtype) * p.sequences * visible * p.kv_heads * p.head_dim;
}

// Up to these bytes one block a multiprocessor takes less time: 13.1 us instead of 14.4 where 16 MiB of BF16 are read
// (128 columns), 11.2 instead of 12.8 where 8 MiB of FP8 are; 64 MiB of FP8 take 34.8 and 29.5 us, 1 GiB of BF16 315
// and 267.
constexpr int64_t kOneBlockBytes = int64_t{40} << 20;

int blocks_of(const nvb_attention_decode_params& p) {
  return bytes_read(p) <= kOneBlockBytes ? 1 : 2;
}

// What a row costs beside its tiles, in tiles: 32 sequences of 128 to 16,384 tokens take 182 us with 0, 166 with 1, 156
// with 2 and 158 with 4 (BF16, 128 columns, 32/8 heads). Rows of equal length take the same time with each.
constexpr int kExtra = 2;

// Whether the ring is faster than attention_decode_mma where both can. One H200, us, here and there:
//
//   one sequence of 4,096 tokens, 64 and 128 columns, 32/8 heads: 10.5, 13.7; 13.1, 17.1; 256, 8/4: 14.1, 18.3
//   of 32,768, 64 columns: 27.0, 28.6; 128: 43.6, 45.2;  of 131,072, 64 columns: 76.1, 76.1
//   128 sequences of 1,024, 64 columns: 77.8, 95.3; 128: 142, 132;  64 of 4,096, 64 columns: 142, 140; 128: 267, 249
bool is_faster(const nvb_attention_decode_params& p) {
  const int items = items_per_kv_head(p);
  if (items > kMostItems) return false;  // 64 x 4,096, 16 items of 128 columns: 351 and 265
  const int64_t bytes = bytes_read(p);
  if (p.sequences == 1) return bytes <= (p.head_dim == 256 ? kOneBlockBytes : int64_t{150} << 20);
  return p.head_dim == 64 && p.sequences >= 64 && p.max_kv_length <= 2048;
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
  if (!narrow && !is_faster(p)) return false;
  const int items = items_per_kv_head(p);
  const bool wide = items > kMostItems;
  const nvb_kv_placement& placement = p.placement;
  if (!lie_aligned(p.key, p.key_sequence_stride, p.key_head_stride, placement.block_stride, bytes) ||
      !lie_aligned(p.value, p.value_sequence_stride, p.value_head_stride, placement.value_block_stride, bytes) ||
      !is_aligned16(p.query, p.query_token_stride, query_bytes) ||
      !is_aligned16(p.query, p.query_head_stride, query_bytes)) {
    return false;
  }
  const int most = wide ? 2 * kMostItems : kMostItems;
  const int chunks = (items + most - 1) / most;
  const int64_t rows = static_cast<int64_t>(std::max(p.sequences, 1)) * p.kv_heads * chunks;
  return with_tile(p, wide, [&](auto, auto tile, auto held) {
    using Tile = decltype(tile);
    if (placement.pages != nullptr && placement.page_tokens < Tile::kRun) return false;
    if (rows * (p.capacity / Tile::kKeys + 2 + kExtra) > INT32_MAX) return false;
    const int stages = stages_of<Tile>(p, (items + chunks - 1) / chunks);
    if (stages < Tile::kTeams || kSharedBytes + kDecodeStaticBytes > launch.shared_bytes_per_block) return false;
    const int blocks = std::min(blocks_of(p), decltype(held)::value);
    shape = nvb_attention_decode_shape{most, Tile::kKeys, 0, Tile::kThreads, kSharedBytes, 0, 0, stages, blocks};
    return true;
  });
}

cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  const bool wide = p.heads_per_chunk > kMostItems;
  return with_tile(p, wide, [&](auto product, auto tile, auto held) {
    using T = decltype(product);
    using Tile = decltype(tile);
    const int stages = stages_of<Tile>(p, p.heads_per_chunk);
    return decode_ring::launch_tile<T, Tile, decltype(held)::value>(arguments, {stages, kExtra}, p.splits, launch);
  });
}

}  // namespace nvb
