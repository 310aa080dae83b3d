// The work of attention_prefill_wgmma.cuh: which tile a block takes when, and which keys its rows see.
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

#include "attention_prefill_mask_tiles.cuh"

namespace nvb {
namespace prefill_wgmma {

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
