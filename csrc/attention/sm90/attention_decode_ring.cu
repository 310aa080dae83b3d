// Which decodes attention_decode_ring.cuh takes, and with which tiles.
#include <algorithm>

#include "../../common/hopper.h"
#include "../attention_decode_ring.h"
#include "attention_decode_ring.cuh"

namespace nvb {
namespace {

using decode_ring::Layout;
using decode_ring::Tile;

// Every block looks at the positions of all rows, 32 sequences at a time.
constexpr int kMaxRows = 256;
// Half of a multiprocessor's shared memory less what the system keeps, so that the blocks of the next grid find room
// and ask for their first keys while those of this one merge.
constexpr int kSharedBytes = 112 * 1024 - 256;

template <typename Tile>
int stages_of(const nvb_attention_decode_params& p, int items) {
  return decode_ring::stages_within<Tile>(kSharedBytes, items, float_dtype_bytes(p.query_dtype));
}

// Bytes of keys and values of 16 bits up to which this kernel is the faster one, as measured: one sequence of 4,096
// tokens of 8 heads of 64 columns takes 10.2 us instead of 14.1, and of 128 columns 12.7 instead of 17.0. At 64 MiB
// both take as long, and from there on one copying warp cannot ask for what the memory gives. At 256 columns the stages
// that are asked for below do not fit, so another kernel runs there.
constexpr int64_t kMostBytes = 40 << 20;

// Calls use(T, Tile) of the products' and the cache's dtype: 16 bits for up to 8 items, FP8 for 16 where there are
// more. A run has 2 KiB at least (see attention_decode_ring_copy.cuh), but for 16 items of FP8.
constexpr int kMostItems = 8;
template <typename Use>
auto with_tile(const nvb_attention_decode_params& p, bool wide, const Use& use) {
  const auto with_dtype = [&](auto element) {
    using T = decltype(element);
    if (p.head_dim == 64) return use(T(), Tile<T, 64, 1, 8, 1>());
    return p.head_dim == 128 ? use(T(), Tile<T, 128, 1, 4, 1>()) : use(T(), Tile<T, 256, 1, 2, 2>());
  };
  const auto with_fp8 = [&](auto element) {
    using Element = decltype(element);
    if (p.head_dim == 128) {
      return wide ? use(__half(), Tile<Element, 128, 2, 4, 1>()) : use(__half(), Tile<Element, 128, 1, 8, 1>());
    }
    return wide ? use(__half(), Tile<Element, 256, 2, 4, 1>()) : use(__half(), Tile<Element, 256, 1, 4, 1>());
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
  const int items = items_per_kv_head(p);
  // Of FP8, what was checked on a device: the rest runs by the plain kernel.
  const bool plain_e4m3 = p.kv_dtype == NVB_F8_E4M3 && p.head_dim == 128 && items <= 8 && p.key_scale == nullptr &&
                          p.value_scale == nullptr;
  if (narrow && !plain_e4m3) return false;
  const int visible = p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length;
  if (!narrow &&
      (items > kMostItems || p.sequences > 1 || int64_t{4} * visible * p.kv_heads * p.head_dim > kMostBytes)) {
    return false;
  }
  const nvb_kv_placement& placement = p.placement;
  if (!lie_aligned(p.key, p.key_sequence_stride, p.key_head_stride, placement.block_stride, bytes) ||
      !lie_aligned(p.value, p.value_sequence_stride, p.value_head_stride, placement.value_block_stride, bytes) ||
      !is_aligned16(p.query, p.query_token_stride, query_bytes) ||
      !is_aligned16(p.query, p.query_head_stride, query_bytes)) {
    return false;
  }
  const bool wide = items > kMostItems;
  const int most = wide ? 2 * kMostItems : kMostItems;
  const int chunks = (items + most - 1) / most;
  const int64_t rows = static_cast<int64_t>(std::max(p.sequences, 1)) * p.kv_heads * chunks;
  return with_tile(p, wide, [&](auto, auto tile) {
    using Tile = decltype(tile);
    if (placement.pages != nullptr && placement.page_tokens < Tile::kRun) return false;
    if (rows * (p.capacity / Tile::kKeys + 2) > INT32_MAX) return false;
    const int stages = stages_of<Tile>(p, (items + chunks - 1) / chunks);
    if (stages < Tile::kTeams + 1 || kSharedBytes + kDecodeStaticBytes > launch.shared_bytes_per_block) return false;
    shape = nvb_attention_decode_shape{most, Tile::kKeys, 0, Tile::kThreads, kSharedBytes, 0, 0, stages};
    return true;
  });
}

cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  return with_tile(p, items_per_kv_head(p) > kMostItems, [&](auto product, auto tile) {
    using T = decltype(product);
    using Tile = decltype(tile);
    // 16 items of 256 columns take more registers than two blocks find.
    constexpr int kBlocks = Tile::kHeadTiles == 2 && Tile::kHeadDim == 256 ? 1 : 2;
    const int stages = stages_of<Tile>(p, p.heads_per_chunk);
    return decode_ring::launch_tile<T, Tile, kBlocks>(arguments, {stages, 0, 1}, p.splits, launch);
  });
}

}  // namespace nvb
