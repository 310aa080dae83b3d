// The work of attention_prefill_wgmma.cuh: sizes of tiles, the kernel's arguments, and which tile a block takes when.
//
// A tile is 64 query rows of one head for each warpgroup that multiplies. Blocks stay, one a multiprocessor, and take
// tiles in rounds. The order of the tiles: sequences with the most work first; sequences with as many tiles each make a
// bundle. Of a bundle's pairs of sequence and head, as many as have keys and values that fit L2 together make a group.
// A group's tiles go from the last to the first (under a causal mask the last has the most keys), and its pairs in
// turn. Every other round goes through the blocks backwards, so that who had the longest tile gets the shortest next.
// For that a group starts with a round of its own where its tiles differ and less than an eighth of its places stay
// empty by that: of the causal shapes of the benchmark the longest block then has 1.00 to 1.07 times its share, and up
// to 1.7 times where the next group begins in mid-round (measured at head_dim 256, where it was 1.67 and is 1.015).
#pragma once

#include <cuda.h>

#include "../attention.h"
#include "../attention_head_terms.cuh"

namespace nvb {
namespace prefill_wgmma {

// `Consumers` warpgroups multiply; a tile of keys has `Keys` of them. `Scores`: with what changes single scores or
// weights (attention_prefill_wgmma_scores.cuh).
template <int HeadDim, int ValueDim, int Consumers, int Keys, bool PingPong, bool Scores = false>
struct Tile {
  static constexpr int kHeadDim = HeadDim, kValueDim = ValueDim, kConsumers = Consumers, kKeys = Keys;
  // Warpgroups take turns with the tensor cores, so that one multiplies while another exponentiates.
  static constexpr bool kPingPong = PingPong;
  static constexpr bool kTakesTerms = true;
  static constexpr bool kTakesScoreTerms = Scores;
  static constexpr int kRows = 64 * Consumers;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (Consumers + 1);
  static constexpr int kProducerRegisters = Consumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Consumers == 2 ? 232 : 160;
  // Blocks of 64 columns, 128 bytes a row.
  static constexpr int kHeadBlocks = (HeadDim + 63) / 64, kValueBlocks = (ValueDim + 63) / 64;
  static constexpr int kQueryBytes = 64 * 128 * kHeadBlocks;  // of a warpgroup
  static constexpr int kKeyBytes = Keys * 128 * kHeadBlocks;
  static constexpr int kValueBytes = Keys * 128 * kValueBlocks;

  static_assert(Consumers == 2 || Consumers == 3, "registers are divided for two or three warpgroups");
  static_assert(Keys % 16 == 0 && HeadDim % 16 == 0 && ValueDim % 32 == 0, "whole instructions, whole vectors");
};

// For sequences with a mask that depends on the row, and for those that see every key (`_FULL`), where larger tiles
// have no edge to waste work on; `_SHORT`: for short sequences. The sizes are FlashAttention 3's but for D64 and D96,
// which keep P in registers.
namespace tiles {
using D64 = Tile<64, 64, 3, 128, true>;
using D64_SHORT = Tile<64, 64, 2, 128, true>;
using D96 = Tile<96, 96, 2, 128, true>;
using D128 = Tile<128, 128, 2, 128, true>;
using D128_FULL = Tile<128, 128, 2, 176, true>;
using D192 = Tile<192, 192, 2, 112, false>;
using D192_128 = Tile<192, 128, 2, 128, true>;
using D256 = Tile<256, 256, 2, 80, false>;
// Words of bits begin with a tile, and blocks of random numbers do.
using D64_SCORES = Tile<64, 64, 2, 128, true, true>;
using D128_SCORES = Tile<128, 128, 2, 128, true, true>;
using D256_SCORES = Tile<256, 256, 2, 64, false, true>;
}  // namespace tiles

struct Sequence {
  int32_t query_start;
  int32_t query_count;
  int32_t key_start;  // token of the tensor map; of pages, the row of the table
  int32_t value_start;
  int32_t kv_length;
};

// Sequences that have as many tiles of query rows each.
struct Bundle {
  int32_t first_tile;
  uint32_t first_sequence : 8;
  uint32_t group_pairs : 24;  // of sequence and KV head
};
static_assert(NVB_ATTENTION_MAX_SEQUENCES < 256, "a sequence's number has eight bits");

// What stands in the table's place where lengths lie in device memory: the fields of nvb_attention_prefill_params, and
// the rows from one start to the next.
struct DeviceLengths {
  const int32_t* query_starts;
  const int32_t* kv_starts;
  const int32_t* kv_lengths;
  const int32_t* kv_sequences;
  int32_t sequences;
  int32_t query_rows;
  int32_t kv_rows;
  int32_t max_query_count;
  int32_t max_kv_length;
  int32_t query_step;
  int32_t key_step;
  int32_t value_step;
};

// What few calls have. It lies behind the sequences that then are the most, because narrower fields elsewhere in the
// arguments made the kernels of FP8 spill two to ten times as much.
struct Terms {
  const float* sinks;  // of query heads; null: none
  int32_t prefix;      // of every sequence; 0: none
  int32_t chunk;       // 0: none
  // position / chunk is position * chunk_factor / 2^chunk_shift. Divisions made the code a fifth longer.
  uint32_t chunk_factor;
  uint32_t chunk_shift;
  // Of tiles that take them; as nvb_attention_prefill_params has them.
  const float* slopes;
  const void* mask;
  const uint32_t* mask_tiles;  // which tiles of keys some row sees (attention_prefill_mask_tiles.cuh); null: all
  const uint32_t* dropout_offsets;
  int64_t mask_sequence_stride;
  int64_t mask_row_stride;
  int64_t mask_head_stride;
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  uint32_t dropout_threshold;
  float dropout_scale;
  uint32_t mask_dtype;
  int32_t rows_per_start;  // rows from one sequence's start to the next number's
  int32_t tile_words;      // of one row of mask_tiles
};
struct WithTerms {
  static constexpr int kMostSequences = NVB_ATTENTION_MAX_SEQUENCES - 8;
  Sequence sequence[kMostSequences];
  Terms terms;
};
static_assert(sizeof(WithTerms) <= NVB_ATTENTION_MAX_SEQUENCES * sizeof(Sequence), "it takes the last sequences' room");

struct Arguments {
  // Dimensions: bytes of a row, tokens, heads.
  CUtensorMap query;
  CUtensorMap key;
  CUtensorMap value;
  void* output;
  float* lse;
  int64_t output_token_stride;
  int64_t output_head_stride;
  // 2^(score * exponent_factor) is what is summed, where score is query . key, or tanh(query . key * cap_factor) with a
  // soft cap, which is where cap_factor is not 0.
  float exponent_factor;
  float cap_factor;
  int32_t tiles;            // times parts, and places of a round that a group leaves empty
  int32_t bundles;          // 0: lengths lie in device memory
  int32_t group_alignment;  // a group's tiles and empty places are a multiple
  int32_t query_heads;
  int32_t kv_heads;
  int32_t value_dim;
  int32_t window;
  int32_t output_is_f32;
  int32_t part_rows;  // from one part's rows of output and lse to the next one's
  // They lie here because the union begins at a multiple of eight bytes, and there are none to spare.
  uint32_t causal : 1;
  uint32_t parts : 8;  // of a tile's keys; at least 1
  uint32_t has_terms : 1;
  // Of FP8 alone.
  uint32_t output_dtype : 8;
  uint32_t query_scale_stride : 1;
  uint32_t key_scale_stride : 1;
  uint32_t value_scale_stride : 1;
  union {
    Sequence sequence[NVB_ATTENTION_MAX_SEQUENCES];
    DeviceLengths lengths;
    WithTerms with_terms;
  };
  Bundle bundle[NVB_ATTENTION_MAX_SEQUENCES + 1];  // the last one used is the end
  // Of FP8 alone: scales of the tensors, of one number or of one a KV head; null: 1.
  const float* query_scale;
  const float* key_scale;
  const float* value_scale;
  // Rows of the page table; null: keys and values are contiguous. A copy brings `page_box` tokens of a page.
  const int32_t* pages;
  int32_t page_row_stride;
  uint32_t page_tokens : 16;
  uint32_t page_box : 16;
  // Pages are below the number that the maps end at, and others bring zeros.
};
static_assert(sizeof(Arguments) <= 4096, "drivers before 12.1 take at most 4096 bytes of kernel arguments");

__host__ __device__ constexpr int round_up(int number, int multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// The keys that the query at `position` sees. One branch for whatever is rare, because every tile comes by.
template <typename Tile>
__device__ __forceinline__ KeyRange keys_of_row(const Arguments& arguments, int kv_length, int position) {
  const int causal = arguments.causal, window = arguments.window;
  if (Tile::kTakesTerms && arguments.has_terms) {
    const Terms& terms = arguments.with_terms.terms;
    const uint64_t chunks = (static_cast<uint64_t>(max(position, 0)) * terms.chunk_factor) >> terms.chunk_shift;
    return visible_keys(position, kv_length, causal, window, terms.prefix, terms.chunk,
                        static_cast<int>(chunks) * terms.chunk);
  }
  return visible_keys(position, kv_length, causal, window);
}

// One tile: its query rows, and the tiles of keys that they see, [first, end), or a part of them.
struct Work {
  int first_token;  // row of query
  int output_row;   // of output and lse
  int rows;
  int head;
  int kv_head;
  int key_start;
  int value_start;
  int kv_length;
  int position;  // of the first row
  int first;
  int end;
  int first_row;  // of the sequence; for score terms
};

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

// The sinks of a tile's rows, which are terms of their first part alone; null: none.
__device__ __forceinline__ const float* sinks_of(const Arguments& arguments, const Work& work) {
  return arguments.has_terms && work.output_row == work.first_token ? arguments.with_terms.terms.sinks : nullptr;
}

// Fills in where a tile of rows of a head lies.
template <typename Tile>
__device__ __forceinline__ void set_place(const Arguments& arguments, const Sequence& sequence, int head, int first_row,
                                          Work& work) {
  work.first_token = sequence.query_start + first_row;
  work.rows = min(Tile::kRows, sequence.query_count - first_row);
  work.head = head;
  work.kv_head = head / (arguments.query_heads / arguments.kv_heads);
  work.key_start = sequence.key_start;
  work.value_start = sequence.value_start;
  work.kv_length = sequence.kv_length;
  work.position = sequence.kv_length - sequence.query_count + first_row;
  if (Tile::kTakesScoreTerms) work.first_row = first_row;
}

// Fills in the work of a tile of rows of a head, and of keys.
template <typename Tile>
__device__ __forceinline__ void set_work(const Arguments& arguments, const Sequence& sequence, int head, int first_row,
                                         int part, Work& work) {
  set_place<Tile>(arguments, sequence, head, first_row, work);
  work.output_row = work.first_token + part * arguments.part_rows;
  const int first_key = keys_of_row<Tile>(arguments, work.kv_length, work.position).first;
  const int last_key = keys_of_row<Tile>(arguments, work.kv_length, work.position + work.rows - 1).last;
  const int first = first_key / Tile::kKeys;
  const uint32_t tiles = last_key < first_key ? 0 : last_key / Tile::kKeys + 1 - first;
  work.first = first;
  work.end = first + static_cast<int>(tiles);
  // Divisions that every tile paid for slowed tiles of few keys: 64 causal columns at 512 tokens from 205 to 198
  // TFLOP/s.
  if (const uint32_t parts = arguments.parts; parts > 1) {
    // Products of 32 bits: up to 2^30 keys in tiles of 80 or more, and 255 parts.
    work.first = first + static_cast<int>(tiles * part / parts);
    work.end = first + static_cast<int>(tiles * (part + 1) / parts);
  }
  if constexpr (Tile::kTakesScoreTerms) {
    // Both ends are tiles that some row sees.
    if (arguments.with_terms.terms.mask_tiles != nullptr) {
      const uint32_t* const seen = seen_tiles(arguments, work);
      work.end = last_seen_tile(seen, work.end - 1, work.first) + 1;
      work.first = first_seen_tile(seen, work.first, work.end);
    }
  }
}

// The tile of lengths in device memory: sequences in their order, the last tile of each first, its heads in turn. False
// past the last one. Every role of a block looks for itself, so nothing is kept between tiles that costs registers.
template <typename Tile>
__device__ __forceinline__ bool find_device_work(const Arguments& arguments, int index, Work& work) {
  const DeviceLengths& lengths = arguments.lengths;
  int tile = index / arguments.query_heads;
#pragma unroll 1
  for (int number = 0; number < lengths.sequences; ++number) {
    int start = number, rows = lengths.max_query_count;
    if (lengths.query_starts != nullptr) {
      start = lengths.query_starts[number];
      const int end = lengths.query_starts[number + 1];
      rows = start < 0 || end < start || end > lengths.query_rows ? 0 : min(end - start, rows);
    }
    const int tiles = (rows + Tile::kRows - 1) / Tile::kRows;
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    int place = number, length = 0;
    if (lengths.kv_starts != nullptr) {
      place = lengths.kv_starts[number];
      length = lengths.kv_starts[number + 1] - place;
    } else {
      if (lengths.kv_sequences != nullptr) place = lengths.kv_sequences[number];
      length = lengths.kv_lengths[number];
    }
    const int end = lengths.kv_starts != nullptr ? place + length : place + 1;
    if (place < 0 || length < 0 || length > lengths.max_kv_length || end > lengths.kv_rows) place = length = 0;
    const Sequence sequence = {start * lengths.query_step, rows, place * lengths.key_step, place * lengths.value_step,
                               length};
    set_work<Tile>(arguments, sequence, index % arguments.query_heads, (tiles - 1 - tile) * Tile::kRows, 0, work);
    return true;
  }
  return false;
}

// False for an empty place. The parts of a tile follow one another.
template <typename Tile>
__device__ __forceinline__ bool find_work(const Arguments& arguments, int place, Work& work) {
  int index = place, part = 0;
  if (const int parts = arguments.parts; parts > 1) {
    index = place / parts;
    part = place - index * parts;
  }
  int bundle = 0, high = arguments.bundles;
  while (high - bundle > 1) {
    const int middle = (bundle + high) / 2;
    (arguments.bundle[middle].first_tile <= index ? bundle : high) = middle;
  }
  const int first_sequence = arguments.bundle[bundle].first_sequence;
  const int sequences = static_cast<int>(arguments.bundle[bundle + 1].first_sequence) - first_sequence;
  const int local = index - arguments.bundle[bundle].first_tile;
  const int tiles = (arguments.sequence[first_sequence].query_count + Tile::kRows - 1) / Tile::kRows;

  // The last group may have fewer pairs than the others.
  const int heads_of_key = arguments.query_heads / arguments.kv_heads;
  const int group_pairs = static_cast<int>(arguments.bundle[bundle].group_pairs) * heads_of_key;
  const int group_tiles = round_up(tiles * group_pairs, arguments.group_alignment);
  const int group = local / group_tiles;
  const int pairs = min(group_pairs, sequences * arguments.query_heads - group * group_pairs);
  const int rest = local - group * group_tiles;
  if (rest >= tiles * pairs) return false;
  const int pair = group * group_pairs + rest % pairs;
  const int first_row = (tiles - 1 - rest / pairs) * Tile::kRows;

  const Sequence sequence = arguments.sequence[first_sequence + pair / arguments.query_heads];
  set_work<Tile>(arguments, sequence, pair % arguments.query_heads, first_row, part, work);
  return true;
}

// The tiles of this block, one after the other.
template <typename Tile>
struct Walk {
  int round = 0;
  bool backwards = false;

  // False behind the last one.
  __device__ __forceinline__ bool next(const Arguments& arguments, Work& work) {
    const int blocks = gridDim.x;
#pragma unroll 1
    while (round < arguments.tiles) {
      const int index = round + static_cast<int>(backwards ? blocks - 1 - blockIdx.x : blockIdx.x);
      round += blocks;
      backwards = !backwards;
      if (index >= arguments.tiles) continue;
      if (arguments.bundles == 0) {
        if (find_device_work<Tile>(arguments, index, work)) return true;
        // Those that follow lie further on.
        round = arguments.tiles;
      } else if (find_work<Tile>(arguments, index, work)) {
        return true;
      }
    }
    return false;
  }
};

}  // namespace prefill_wgmma
}  // namespace nvb
