// What the launchers of prefill attention on compute capability 9.0 share: which shapes have a tensor map, and the
// kernel's arguments with the work laid out.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../../common/hopper.h"
#include "../../common/tensor_map.h"
#include "../../common/vector.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_wgmma {

// Coordinates of tensor maps are 32 bits, and tiles reach a little past the end.
inline constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1024;
inline constexpr int64_t kMostStrideBytes = (int64_t{1} << 40) - 16;
inline constexpr int kMostParts = 255;

inline bool is_stride(int64_t stride, int bytes) {
  return stride > 0 && stride * bytes % 16 == 0 && stride <= kMostStrideBytes / 2;
}

// Whether one number of rows leads from a sequence's start to the next in query, output and lse.
inline bool has_rows_in_step(const nvb_attention_prefill_params& p) {
  const int64_t rows = p.query_token_stride > 0 ? p.query_sequence_stride / p.query_token_stride : 0;
  return rows >= 0 && rows <= kMostTokens && p.query_sequence_stride == rows * p.query_token_stride &&
         p.output_sequence_stride == rows * p.output_token_stride &&
         (p.lse == nullptr || p.lse_sequence_stride == rows);
}

inline int64_t first_row(const nvb_attention_prefill_params& p, const nvb_attention_sequence& sequence) {
  return sequence.query_start * (p.query_sequence_stride / p.query_token_stride);
}

// Keys of the prefix that all sequences have; -1 where they differ. Lengths in device memory have none.
inline int prefix_of(const nvb_attention_prefill_params& p) {
  if (has_device_lengths(p) || p.sequences < 1) return 0;
  const int first = p.sequence[0].prefix;
  const bool is_one = std::all_of(p.sequence, p.sequence + p.sequences,
                                  [&](const nvb_attention_sequence& sequence) { return sequence.prefix == first; });
  return is_one ? first : -1;
}

// Which of what changes the softmax the kernels' terms have.
inline bool supports_terms(const nvb_attention_prefill_params& p) {
  if (p.tree_parents != nullptr || p.chunk < 0 || prefix_of(p) < 0) return false;
  // Random numbers count rows as the lse does.
  if (p.dropout_threshold > 0 && p.lse_sequence_stride * p.query_token_stride != p.query_sequence_stride) return false;
  return has_device_lengths(p) || p.sequences <= WithTerms::kMostSequences;
}
// Whether there is what changes single scores or weights.
inline bool has_score_terms(const nvb_attention_prefill_params& p) {
  return p.slopes != nullptr || p.mask != nullptr || p.dropout_threshold > 0;
}

// The factor is 2^shift / chunk rounded up. It errs by less than chunk / 2^shift of itself, and as positions are below
// 2^31 and 2^(shift - 31) is at least the chunk, by too little to change a quotient; and it has 32 bits.
inline Terms terms_of(const nvb_attention_prefill_params& p) {
  const int32_t chunk = std::min(p.chunk, kMaxLength);
  uint32_t shift = 31;
  while (chunk > int64_t{1} << (shift - 31)) ++shift;
  const uint64_t power = uint64_t{1} << shift;
  const uint64_t factor = chunk == 0 ? 0 : (power + static_cast<uint64_t>(chunk) - 1) / static_cast<uint64_t>(chunk);
  Terms terms = {};
  terms.sinks = p.sinks, terms.slopes = p.slopes;
  terms.prefix = prefix_of(p);
  terms.chunk = chunk, terms.chunk_factor = static_cast<uint32_t>(factor), terms.chunk_shift = shift;
  terms.mask = p.mask, terms.mask_dtype = p.mask_dtype;
  terms.mask_sequence_stride = p.mask_sequence_stride;
  terms.mask_row_stride = p.mask_row_stride, terms.mask_head_stride = p.mask_head_stride;
  terms.rows_per_start = static_cast<int32_t>(std::max<int64_t>(1, p.query_sequence_stride / p.query_token_stride));
  terms.dropout_offsets = p.dropout_offsets;
  terms.dropout_seed = p.dropout_seed, terms.dropout_offset = p.dropout_offset;
  terms.dropout_threshold = p.dropout_threshold;
  terms.dropout_scale = p.dropout_threshold > 0 ? p.dropout_scale : 1.0f;
  return terms;
}

// Whether the sequence's first key, or value, is a token of the map.
inline bool is_at_token(const nvb_attention_sequence& sequence, int64_t sequence_stride, int64_t token_stride) {
  if (sequence.kv_start < 0 || sequence_stride < 0 || sequence_stride > kMostStrideBytes) return false;
  const int64_t offset = sequence.kv_start * sequence_stride;
  return offset % token_stride == 0 && offset / token_stride + sequence.kv_length <= kMostTokens;
}

// The most that sequences of lengths in device memory may be: rows of query, and tokens of key and value to the end of
// the last one.
struct Tokens {
  int64_t query = 0, key = 0, value = 0;
};
inline Tokens device_tokens(const nvb_attention_prefill_params& p) {
  Tokens tokens;
  const int64_t step = p.query_sequence_stride / p.query_token_stride;
  tokens.query = p.query_starts != nullptr ? p.query_rows : (p.sequences - 1) * step + p.max_query_count;
  const int64_t last = p.kv_rows - 1;
  const bool follow = p.kv_starts != nullptr;
  if (p.kv_rows > 0) {
    tokens.key = follow ? p.kv_rows : last * p.key_sequence_stride / p.key_token_stride + p.max_kv_length;
    tokens.value = follow ? p.kv_rows : last * p.value_sequence_stride / p.value_token_stride + p.max_kv_length;
  }
  return tokens;
}

// Whether every start that lengths in device memory may have is a row or a token of the maps.
inline bool supports_device_lengths(const nvb_attention_prefill_params& p) {
  if (p.query_rows < 0 || p.kv_rows < 0 || p.max_query_count < 0 || p.max_query_count > kMaxLength ||
      p.max_kv_length < 0 || p.max_kv_length > kMaxLength) {
    return false;
  }
  const auto is_in_step = [](int64_t sequence_stride, int64_t token_stride) {
    return sequence_stride >= 0 && sequence_stride <= kMostStrideBytes && sequence_stride % token_stride == 0;
  };
  if (p.placement.pages == nullptr && !(is_in_step(p.key_sequence_stride, p.key_token_stride) &&
                                        is_in_step(p.value_sequence_stride, p.value_token_stride))) {
    return false;
  }
  const Tokens tokens = device_tokens(p);
  return tokens.query <= kMostTokens &&
         (p.placement.pages != nullptr || (tokens.key <= kMostTokens && tokens.value <= kMostTokens));
}

// What a kernel or a map cannot express is refused; shapes and lengths were checked before.
inline bool supports_shape(const nvb_attention_prefill_params& p, int bytes, const nvb_launch& launch) {
  if (!is_hopper(launch) || tensor_map_encoder() == nullptr) return false;
  const bool paged = p.placement.pages != nullptr;
  // A copy from a page fills whole groups of eight rows, within which 16-byte pieces change places.
  if (p.placement.ring_tokens != 0 || (paged && (p.placement.page_tokens % 8 != 0 || p.placement.page_count < 1))) {
    return false;
  }
  if (!has_rows_in_step(p)) return false;
  const int multiple = 16 / bytes;
  if (p.head_dim < multiple || p.head_dim > 256 || p.head_dim % multiple != 0 || p.value_dim < multiple ||
      p.value_dim > p.head_dim || p.value_dim % multiple != 0 || p.kv_heads < 1 || p.query_heads < 1 ||
      p.query_heads % p.kv_heads != 0 || p.sequences < 0) {
    return false;
  }
  if (!std::isfinite(p.scale) || !(p.scale > 0.0f) || !(p.soft_cap >= 0.0f) || p.window < 0 || p.chunk < 0) {
    return false;
  }
  const int output_bytes = float_dtype_bytes(p.output_dtype);
  if (!is_stride(p.query_token_stride, bytes) || !is_stride(p.key_token_stride, bytes) ||
      !is_stride(p.value_token_stride, bytes) || (p.query_heads > 1 && !is_stride(p.query_head_stride, bytes)) ||
      (p.kv_heads > 1 && !(is_stride(p.key_head_stride, bytes) && is_stride(p.value_head_stride, bytes))) ||
      !is_aligned16(p.query, 0, 2) || !is_aligned16(p.key, 0, 2) || !is_aligned16(p.value, 0, 2) ||
      !is_aligned16(p.output, p.output_token_stride, output_bytes) ||
      !is_aligned16(p.output, p.output_head_stride, output_bytes)) {
    return false;
  }
  if (paged && (!is_stride(p.placement.block_stride, bytes) || !is_stride(p.placement.value_block_stride, bytes) ||
                p.placement.page_row_stride < 0 || p.placement.page_row_stride > INT32_MAX)) {
    return false;
  }
  if (has_device_lengths(p)) return p.parts <= 1 && supports_device_lengths(p);
  if (p.query_starts != nullptr || p.sequences > NVB_ATTENTION_MAX_SEQUENCES) return false;
  // A part's rows lie behind those of the part before it.
  if (p.parts > 1 && (p.parts > kMostParts || p.output_dtype != NVB_F32 || p.lse == nullptr || p.part_rows < 0 ||
                      int64_t{p.parts} * p.part_rows > kMostTokens)) {
    return false;
  }
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    if (sequence.query_start < 0 || sequence.query_count < 0 || sequence.query_count > kMaxLength ||
        sequence.kv_length < 0 || sequence.kv_length > kMaxLength ||
        first_row(p, sequence) + sequence.query_count > kMostTokens) {
      return false;
    }
    if (sequence.kv_length == 0) continue;
    if (paged) {
      if (sequence.kv_start < 0) return false;
      continue;
    }
    if (!is_at_token(sequence, p.key_sequence_stride, p.key_token_stride) ||
        !is_at_token(sequence, p.value_sequence_stride, p.value_token_stride)) {
      return false;
    }
  }
  return true;
}

// A map of rows of `columns` elements of `bytes` bytes for each token, head and, if there are `pages`, page, in boxes
// of 128 bytes of `box_tokens` tokens of one head. Zeros stand for what lies outside.
inline cudaError_t make_map(CUtensorMap& map, const void* data, int bytes, int64_t columns, int64_t tokens,
                            int64_t heads, int64_t token_stride, int64_t head_stride, int box_tokens, int64_t pages = 0,
                            int64_t page_stride = 0) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(bytes * columns), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(pages)};
  // A stride that no head follows may be anything.
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(bytes * token_stride),
                                 static_cast<cuuint64_t>(bytes * (heads == 1 ? token_stride : head_stride)),
                                 static_cast<cuuint64_t>(bytes * page_stride)};
  const cuuint32_t box[4] = {128, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // Bytes, because zeros are all that the element type decides here.
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, pages == 0 ? 3 : 4, const_cast<void*>(data), sizes,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// KV pairs of a group: as many as fit L2 with their keys and values, and as many in each group where that can be.
inline int group_pairs(int64_t pairs, int64_t kv_length, int64_t bytes_of_token, const nvb_launch& launch) {
  // Some of L2 is left to queries and outputs.
  const int64_t fitting =
      std::max<int64_t>(1, int64_t{launch.l2_bytes} * 5 / 8 / std::max<int64_t>(1, kv_length * bytes_of_token));
  const int64_t least = (pairs + fitting - 1) / fitting;
  int64_t groups = least;
  while (groups < 2 * least && pairs % groups != 0) ++groups;
  if (pairs % groups != 0) groups = least;
  return static_cast<int>(std::min<int64_t>((pairs + groups - 1) / groups, (1 << 24) - 1));
}

// As `arrange`, of lengths in device memory.
inline int arrange_device_lengths(const nvb_attention_prefill_params& p, int rows_per_tile, const nvb_launch& launch,
                                  Arguments& arguments, Tokens& tokens) {
  const int64_t tiles = most_tiles(p, rows_per_tile) * p.query_heads;
  if (tiles > INT32_MAX / 2) return -1;
  const bool paged = p.placement.pages != nullptr;
  const auto step = [](int64_t sequence_stride, int64_t token_stride) {
    return static_cast<int32_t>(sequence_stride / token_stride);
  };
  arguments.bundles = 0;
  arguments.group_alignment = 1;
  arguments.tiles = static_cast<int32_t>(tiles);
  arguments.lengths = {p.query_starts,
                       p.kv_starts,
                       p.kv_lengths,
                       p.kv_sequences,
                       p.sequences,
                       p.query_rows,
                       p.kv_rows,
                       p.max_query_count,
                       p.max_kv_length,
                       step(p.query_sequence_stride, p.query_token_stride),
                       paged ? 1 : step(p.key_sequence_stride, p.key_token_stride),
                       paged ? 1 : step(p.value_sequence_stride, p.value_token_stride)};
  tokens = device_tokens(p);
  return static_cast<int>(std::min<int64_t>(tiles, std::max(1, launch.multiprocessors)));
}

// Fills in the sequences, in the order of their work and in bundles, and the tiles; returns the number of blocks, 0
// where there is nothing to do, or -1 where there are too many tiles. `tokens` is the size of the maps: no copy reads
// past what the caller gave.
inline int arrange(const nvb_attention_prefill_params& p, int bytes, int rows_per_tile, const nvb_launch& launch,
                   Arguments& arguments, Tokens& tokens) {
  if (has_device_lengths(p)) return arrange_device_lengths(p, rows_per_tile, launch, arguments, tokens);
  nvb_attention_sequence sorted[NVB_ATTENTION_MAX_SEQUENCES];
  const auto end = std::copy_if(p.sequence, p.sequence + p.sequences, sorted,
                                [](const nvb_attention_sequence& sequence) { return sequence.query_count > 0; });
  std::sort(sorted, end, [](const nvb_attention_sequence& left, const nvb_attention_sequence& right) {
    return static_cast<int64_t>(left.query_count) * left.kv_length >
           static_cast<int64_t>(right.query_count) * right.kv_length;
  });
  const int sequences = static_cast<int>(end - sorted);
  const auto tiles_of = [&](int i) { return (int64_t{sorted[i].query_count} + rows_per_tile - 1) / rows_per_tile; };
  int64_t work = 0;
  bool is_one_bundle = true;
  for (int i = 0; i < sequences; ++i) {
    const nvb_attention_sequence& from = sorted[i];
    const int64_t row = first_row(p, from);
    const bool paged = p.placement.pages != nullptr, empty = from.kv_length == 0;
    const int64_t key_start = empty   ? 0
                              : paged ? from.kv_start
                                      : from.kv_start * p.key_sequence_stride / p.key_token_stride;
    const int64_t value_start = empty || paged ? 0 : from.kv_start * p.value_sequence_stride / p.value_token_stride;
    arguments.sequence[i] = {static_cast<int32_t>(row), from.query_count, static_cast<int32_t>(key_start),
                             static_cast<int32_t>(value_start), from.kv_length};
    tokens.query = std::max(tokens.query, row + from.query_count);
    tokens.key = std::max(tokens.key, key_start + from.kv_length);
    tokens.value = std::max(tokens.value, value_start + from.kv_length);
    work += tiles_of(i) * p.query_heads;
    is_one_bundle = is_one_bundle && tiles_of(i) == tiles_of(0);
  }
  const int64_t parts = std::max(1, p.parts);
  const int blocks = static_cast<int>(std::min<int64_t>(work * parts, std::max(1, launch.multiprocessors)));
  // Empty places would cost more than they gain where groups are small or tiles equal. Divided tiles fill the device.
  const bool aligns =
      parts == 1 && is_one_bundle && p.causal && p.chunk == 0 && (p.window == 0 || p.window > 2 * rows_per_tile);
  arguments.group_alignment = 1;
  int64_t tiles = 0;
  arguments.bundles = 0;
  for (int first = 0, next = 0; first < sequences; first = next) {
    while (next < sequences && tiles_of(next) == tiles_of(first)) ++next;
    const int64_t pairs = int64_t{next - first} * p.kv_heads;
    const int of_group = group_pairs(pairs, sorted[first].kv_length, bytes * (p.head_dim + p.value_dim), launch);
    const int64_t groups = (pairs + of_group - 1) / of_group;
    int64_t group_tiles = tiles_of(first) * of_group * (p.query_heads / p.kv_heads);
    if (aligns && group_tiles <= INT32_MAX / 2) {
      // Two groups that share a round cost up to 0.7 of it, empty places their part.
      const int aligned = round_up(static_cast<int>(group_tiles), blocks);
      if (aligned - group_tiles <= group_tiles / 8) {
        arguments.group_alignment = blocks;
        group_tiles = aligned;
      }
    }
    arguments.bundle[arguments.bundles++] = {static_cast<int32_t>(tiles), static_cast<uint32_t>(first),
                                             static_cast<uint32_t>(of_group)};
    // Without empty places the last group ends where its tiles do.
    tiles += arguments.group_alignment == 1 ? tiles_of(first) * p.query_heads * (next - first) : groups * group_tiles;
    // Indices of tiles go up to a round past the last.
    if (tiles * parts > INT32_MAX / 2) return -1;
  }
  arguments.bundle[arguments.bundles] = {static_cast<int32_t>(tiles), static_cast<uint32_t>(sequences), 0};
  arguments.tiles = static_cast<int32_t>(tiles * parts);
  return blocks;
}

// Keys of the longest sequence.
inline int longest(const nvb_attention_prefill_params& p) {
  if (has_device_lengths(p)) return p.max_kv_length;
  int keys = 0;
  for (int i = 0; i < p.sequences; ++i) keys = std::max(keys, p.sequence[i].kv_length);
  return keys;
}

// Calls `run` with the kernel's arguments and the number of blocks, if there is work. Elements have `bytes` bytes.
template <typename Tile, typename Run>
cudaError_t with_arguments(const nvb_attention_prefill_params& p, int bytes, const nvb_launch& launch, const Run& run) {
  Arguments arguments = {};
  Tokens tokens;
  const int blocks = arrange(p, bytes, Tile::kRows, launch, arguments, tokens);
  if (blocks <= 0) return blocks == 0 ? cudaSuccess : cudaErrorInvalidValue;
  cudaError_t error = make_map(arguments.query, p.query, bytes, p.head_dim, tokens.query, p.query_heads,
                               p.query_token_stride, p.query_head_stride, 64);
  if (error != cudaSuccess) return error;
  const nvb_kv_placement& placement = p.placement;
  // Without keys nothing is copied, and the maps only have to be maps.
  const bool empty = tokens.key == 0;
  arguments.pages = placement.pages;
  if (placement.pages != nullptr) {
    arguments.page_row_stride = static_cast<int32_t>(placement.page_row_stride);
    arguments.page_tokens = static_cast<uint32_t>(placement.page_tokens);
    arguments.page_box = static_cast<uint32_t>(std::gcd(placement.page_tokens, Tile::kKeys));
  }
  const int64_t pages = placement.pages == nullptr ? 0 : placement.page_count;
  const int box = placement.pages == nullptr ? Tile::kKeys : static_cast<int>(arguments.page_box);
  const auto tokens_of = [&](int64_t contiguous) {
    return placement.pages != nullptr ? int64_t{placement.page_tokens} : std::max<int64_t>(contiguous, 1);
  };
  error = make_map(arguments.key, empty ? p.query : p.key, bytes, p.head_dim, tokens_of(tokens.key), p.kv_heads,
                   p.key_token_stride, p.key_head_stride, box, pages, placement.block_stride);
  if (error != cudaSuccess) return error;
  error = make_map(arguments.value, empty ? p.query : p.value, bytes, p.value_dim, tokens_of(tokens.value), p.kv_heads,
                   p.value_token_stride, p.value_head_stride, box, pages, placement.value_block_stride);
  if (error != cudaSuccess) return error;
  arguments.output = p.output;
  arguments.lse = p.lse;
  arguments.output_token_stride = p.output_token_stride;
  arguments.output_head_stride = p.output_head_stride;
  arguments.cap_factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : 0.0f;
  arguments.exponent_factor = (p.soft_cap > 0.0f ? p.soft_cap : p.scale) * kLog2E;
  arguments.query_heads = p.query_heads;
  arguments.kv_heads = p.kv_heads;
  arguments.value_dim = p.value_dim;
  arguments.causal = p.causal != 0;
  if constexpr (Tile::kTakesTerms) {
    if (has_terms(p)) {
      arguments.has_terms = 1;
      arguments.with_terms.terms = terms_of(p);
    }
    if (Tile::kTakesScoreTerms && p.mask_dtype == NVB_I32 && !has_device_lengths(p)) {
      arguments.with_terms.terms.mask_tiles = p.mask_tiles;
      arguments.with_terms.terms.tile_words = ((longest(p) + Tile::kKeys - 1) / Tile::kKeys + 31) / 32;
    }
  }
  arguments.parts = static_cast<uint32_t>(std::max(1, p.parts));
  arguments.part_rows = p.part_rows;
  arguments.window = std::min(p.window, kMaxLength);
  arguments.output_is_f32 = p.output_dtype == NVB_F32;
  return run(arguments, blocks);
}

}  // namespace prefill_wgmma
}  // namespace nvb
