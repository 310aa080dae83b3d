// Sizes of tiles of attention_prefill_wgmma.cuh, the kernel's arguments, and what a block works on at a time.
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
  // A warpgroup that sees the first half of its last tile of keys alone leaves the other out. With 128 columns that did
  // not gain: 512 causal tokens 290 TFLOP/s beside 307 in an earlier run, where calls without a mask lost 3 %.
  static constexpr bool kSkipsHalf = HeadDim == 64 && Keys == 128 && !Scores;
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

}  // namespace prefill_wgmma
}  // namespace nvb
