// What changes single scores and weights in the tiles of attention_prefill_wgmma.cuh that take it: slopes by distance
// (ALiBi), a mask of bits or of numbers, and dropout. A thread has two rows of its warp's 16, eight apart, and of each
// eight columns a pair (wgmma.cuh). Tiles without it have the same calls and nothing behind them.
//
// A mask's words and elements are read where they are used: the four threads of a quad share the words of their rows.
// Of random numbers a quad needs 2 * Keys / 16 blocks for its rows (csrc/common/dropout.cuh). Each thread makes a
// quarter of them and gives the others a bit a key.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/vector.cuh"
#include "attention_prefill_wgmma_softmax.cuh"

namespace nvb {
namespace prefill_wgmma {

template <typename Tile, bool = Tile::kTakesScoreTerms>
struct ScoreTerms {
  __device__ __forceinline__ ScoreTerms(const Arguments&, const Work&, int, int) {}
  template <int Count>
  __device__ __forceinline__ void change_scores(float (&)[Count], const Work&, const RowMask&, int) const {}
  template <int Count>
  __device__ __forceinline__ void drop_weights(float (&)[Count], int) const {}
};

template <typename Tile>
struct ScoreTerms<Tile, true> {
  static constexpr int kKeys = Tile::kKeys;
  static_assert(kKeys % 64 == 0, "whole words of bits, and a block of random numbers for each thread of a quad");

  const Arguments& arguments;
  const Terms& terms;
  int row;     // the thread's first one in the tile
  int column;  // and its first key in a tile of keys
  uint32_t random_row, random_head, random_offset;

  __device__ __forceinline__ ScoreTerms(const Arguments& its_arguments, const Work& work, int its_row, int its_column)
      : arguments(its_arguments), terms(its_arguments.with_terms.terms), row(its_row), column(its_column) {
    uint64_t offset = terms.dropout_offset;
    if (const uint32_t* const added = terms.dropout_offsets; added != nullptr) {
      offset += static_cast<uint64_t>(added[1]) << 32 | added[0];
    }
    random_row = static_cast<uint32_t>(work.first_token + row);
    random_head = static_cast<uint32_t>(work.head) | static_cast<uint32_t>(offset >> 32) << 16;
    random_offset = static_cast<uint32_t>(offset);
  }

  // Scores come as the products or as tanh, before any factor.
  __device__ __forceinline__ void change_scores(float (&score)[kKeys / 2], const Work& work, const RowMask& mask,
                                                int tile) const {
    const float per_unit = kLog2E / arguments.exponent_factor;
    if (terms.slopes != nullptr) {
      const float slope = terms.slopes[work.head] * per_unit;
      const int distance = work.position + row - tile * kKeys - column;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int from_key = distance + 8 * (i / 2 % 2) - (i / 4 * 8 + i % 2);
        score[i] = fmaf(-slope, fabsf(static_cast<float>(from_key)), score[i]);
      }
    }
    if (terms.mask == nullptr) return;
    if (terms.mask_dtype == NVB_I32) {
      hide_by_bits(score, work, tile);
    } else if (terms.mask_dtype == NVB_F32) {
      add_mask<float>(score, work, mask, tile, per_unit);
    } else if (terms.mask_dtype == NVB_F16) {
      add_mask<__half>(score, work, mask, tile, per_unit);
    } else {
      add_mask<__nv_bfloat16>(score, work, mask, tile, per_unit);
    }
  }

  // Words past that of the last key need not be there. A tile that all rows see whole is not asked for.
  __device__ __forceinline__ void hide_by_bits(float (&score)[kKeys / 2], const Work& work, int tile) const {
    if (terms.mask_tiles != nullptr) {
      const uint32_t* const whole = seen_tiles(arguments, work) + terms.tile_words;
      if (whole[tile / 32] >> (tile % 32) & 1) return;
    }
    const int words = (work.kv_length + 31) / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* const bits =
          static_cast<const uint32_t*>(terms.mask) + mask_offset(arguments, work, row + 8 * half);
      const bool inside = row + 8 * half < work.rows;
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int word = tile * (kKeys / 32) + i;
        const uint32_t seen = (inside && word < words ? bits[word] : 0) >> column;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if ((seen >> (j / 2 * 8 + j % 2) & 1) == 0) score[16 * i + 4 * (j / 2) + 2 * half + j % 2] = -CUDART_INF_F;
        }
      }
    }
  }

  template <typename Element>
  __device__ __forceinline__ void add_mask(float (&score)[kKeys / 2], const Work& work, const RowMask& mask, int tile,
                                           float per_unit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile * kKeys + column;
      const Element* const added =
          static_cast<const Element*>(terms.mask) + mask_offset(arguments, work, row + 8 * half) + key;
      const int last = row + 8 * half < work.rows ? mask.range[half].last - key : -1;
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) {
        const int at = j / 2 * 8 + j % 2;
        float& one = score[4 * (j / 2) + 2 * half + j % 2];
        if (at <= last) one = fmaf(to_float(added[at]), per_unit, one);
      }
    }
  }

  // Makes weights 0. The others are multiplied by dropout_scale when the row is stored.
  __device__ __forceinline__ void drop_weights(float (&weight)[kKeys / 2], int tile) const {
    if (terms.dropout_threshold == 0) return;
    constexpr int kBlocks = kKeys / kDropoutKeys;
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const uint2 seed =
        make_uint2(static_cast<uint32_t>(terms.dropout_seed), static_cast<uint32_t>(terms.dropout_seed >> 32));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int first = 0; first < kBlocks; first += 4) {
        const uint4 counter = make_uint4(static_cast<uint32_t>(tile * kBlocks + first + quad), random_row + 8 * half,
                                         random_head, random_offset);
        const uint32_t kept = kept_keys(philox4x32_10(counter, seed), terms.dropout_threshold);
#pragma unroll
        for (int from = 0; from < 4; ++from) {
          const uint32_t bits = __shfl_sync(0xffffffffu, kept, lane - quad + from) >> column;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if ((bits >> (j / 2 * 8 + j % 2) & 1) == 0)
              weight[8 * (first + from) + 4 * (j / 2) + 2 * half + j % 2] = 0.0f;
          }
        }
      }
    }
  }
};

}  // namespace prefill_wgmma
}  // namespace nvb
