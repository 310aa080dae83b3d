// What changes single scores and weights in the tiles of attention_prefill_wgmma.cuh that take it: slopes by distance
// (ALiBi), a mask of bits or of numbers, and dropout. A thread has two rows of its warp's 16, eight apart, and of each
// eight columns a pair (wgmma.cuh). Tiles without it have the same calls and nothing behind them.
//
// A mask's words are read where they are used: the four threads of a quad share the words of their rows. Pairs of
// elements of 16 bits are asked for while the product that they change runs, as far as registers allow (`fetch`);
// single elements wait for each tile. Weights are dropped when the product before theirs has ended, though what is
// dropped is drawn beside it: written earlier they would share the registers that it reads, and ptxas then runs one
// product after the other (C7513). Warps of their own drew too slowly: with two of them a call took 1.3 times as long.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/vector.cuh"
#include "attention_prefill_wgmma_softmax.cuh"

namespace nvb {
namespace prefill_wgmma {

template <typename Tile, bool = Tile::kTakesScoreTerms>
struct ScoreTerms {
  __device__ __forceinline__ ScoreTerms(const Arguments&, const Work&, int, int) {}
  __device__ __forceinline__ void fetch(const Work&, const RowMask&, int) {}
  template <int Count>
  __device__ __forceinline__ bool begin_scores(float (&)[Count], const Work&, int) const {
    return false;
  }
  template <int Count>
  __device__ __forceinline__ void change_scores(float (&)[Count], const Work&, const RowMask&, int) const {}
  template <int Count>
  __device__ __forceinline__ void draw_weights(uint32_t (&)[Count], const Work&, int) const {}
  template <int Steps, int Count>
  __device__ __forceinline__ void drop_weights(uint32_t (&)[Steps][4], const uint32_t (&)[Count]) const {}
};

template <typename Tile>
struct ScoreTerms<Tile, true> {
  static constexpr int kKeys = Tile::kKeys;
  static_assert(kKeys % kDropoutKeys == 0, "whole words of bits, and whole blocks of random numbers");

  // Wider outputs leave no registers for them.
  static constexpr bool kFetchesPairs = Tile::kValueDim <= 128;

  const Arguments& arguments;
  const Terms& terms;
  int row;      // the thread's first one in the tile
  int column;   // and its first key in a tile of keys
  float slope;  // in units of raw scores; 0: none
  // Pairs of elements of the tile that is multiplied, of each row kKeys / 8.
  uint32_t fetched[kFetchesPairs ? kKeys / 4 : 1];

  __device__ __forceinline__ ScoreTerms(const Arguments& its_arguments, const Work& work, int its_row, int its_column)
      : arguments(its_arguments), terms(its_arguments.with_terms.terms), row(its_row), column(its_column) {
    slope = terms.slopes == nullptr ? 0.0f : terms.slopes[work.head] * (kLog2E / arguments.exponent_factor);
  }

  // Whether a mask is of 16 bits a key, and its pairs lie on words.
  __device__ __forceinline__ bool has_pairs() const {
    const uint64_t odd = reinterpret_cast<uint64_t>(terms.mask) / 2 | terms.mask_sequence_stride |
                         terms.mask_head_stride | terms.mask_row_stride;
    return (terms.mask_dtype == NVB_F16 || terms.mask_dtype == NVB_BF16) && odd % 2 == 0;
  }

  // Asks for the elements that `change_scores` of the tile adds, as far as there is room for them.
  __device__ __forceinline__ void fetch(const Work& work, const RowMask& mask, int tile) {
    if constexpr (kFetchesPairs) {
      if (terms.mask != nullptr && has_pairs()) fetch_pairs(work, mask, tile);
    }
  }

  __device__ __forceinline__ void fetch_pairs(const Work& work, const RowMask& mask, int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile * kKeys + column;
      const uint16_t* const added =
          static_cast<const uint16_t*>(terms.mask) + mask_offset(arguments, work, row + 8 * half) + key;
      const int last = row + 8 * half < work.rows ? mask.range[half].last - key : -1;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        uint32_t pair = 0;
        if (8 * j < last) {
          pair = *reinterpret_cast<const uint32_t*>(added + 8 * j);
        } else if (8 * j == last) {
          pair = added[8 * j];
        }
        fetched[half * (kKeys / 8) + j] = pair;
      }
    }
  }

  // What slopes take from scores without a cap, to which the product is added: there it costs less than behind it.
  // False: the product starts from zeros.
  __device__ __forceinline__ bool begin_scores(float (&score)[kKeys / 2], const Work& work, int tile) const {
    if (slope == 0.0f || arguments.cap_factor != 0.0f) return false;
    const float distance = distance_of(work, tile);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) score[i] = -slope * fabsf(distance + offset_of(i));
    return true;
  }

  // From the thread's first key of a tile to its first row, and what is added to it for score i. Of floats, because
  // conversions have the pipe of the exponentials; exact up to 2^24.
  __device__ __forceinline__ float distance_of(const Work& work, int tile) const {
    return static_cast<float>(work.position + row - tile * kKeys - column);
  }
  static __device__ __forceinline__ float offset_of(int i) {
    return static_cast<float>(8 * (i / 2 % 2) - (i / 4 * 8 + i % 2));
  }

  // Scores come as the products or as tanh, before any factor.
  __device__ __forceinline__ void change_scores(float (&score)[kKeys / 2], const Work& work, const RowMask& mask,
                                                int tile) const {
    if (slope != 0.0f && arguments.cap_factor != 0.0f) {
      const float distance = distance_of(work, tile);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) score[i] = fmaf(-slope, fabsf(distance + offset_of(i)), score[i]);
    }
    if (terms.mask == nullptr) return;
    if (terms.mask_dtype == NVB_I32) {
      hide_by_bits(score, work, tile);
      return;
    }
    const float per_unit = kLog2E / arguments.exponent_factor;
    if constexpr (kFetchesPairs) {
      if (has_pairs()) {
        terms.mask_dtype == NVB_F16 ? add_pairs<__half>(score, per_unit) : add_pairs<__nv_bfloat16>(score, per_unit);
        return;
      }
    }
    if (terms.mask_dtype == NVB_F32) {
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
  __device__ __forceinline__ void add_pairs(float (&score)[kKeys / 2], float per_unit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const float2 pair = unpack_pair<Element>(fetched[half * (kKeys / 8) + j]);
        float& low = score[4 * j + 2 * half];
        float& high = score[4 * j + 2 * half + 1];
        low = fmaf(pair.x, per_unit, low);
        high = fmaf(pair.y, per_unit, high);
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

  // Draws for the weights of a tile. Of each row and 64 keys, bit 7 - i of byte b says whether byte b of word i of the
  // thread's block is kept: one register, where the bytes take four.
  __device__ __forceinline__ void draw_weights(uint32_t (&kept)[kKeys / 32], const Work& work, int tile) const {
    const uint32_t threshold = terms.dropout_threshold, highest = 0x80808080u;
    if (threshold == 0) return;
    const uint2 seed =
        make_uint2(static_cast<uint32_t>(terms.dropout_seed), static_cast<uint32_t>(terms.dropout_seed >> 32));
    uint64_t offset = terms.dropout_offset;
    if (const uint32_t* const added = terms.dropout_offsets; added != nullptr) {
      offset += static_cast<uint64_t>(added[1]) << 32 | added[0];
    }
    const uint32_t head = static_cast<uint32_t>(work.head) | static_cast<uint32_t>(offset >> 32) << 16;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int first_key = tile * kKeys + i / 2 * kDropoutKeys + column;
      const uint4 counter =
          make_uint4(dropout_block(static_cast<uint32_t>(first_key)),
                     static_cast<uint32_t>(work.first_token + row + i % 2 * 8), head, static_cast<uint32_t>(offset));
      const uint4 words = dropout_words(counter, seed);
      kept[i] = (kept_bytes(words.x, threshold) & highest) | (kept_bytes(words.y, threshold) & highest) >> 1 |
                (kept_bytes(words.z, threshold) & highest) >> 2 | (kept_bytes(words.w, threshold) & highest) >> 3;
    }
  }

  // Makes rounded weights 0. The others are multiplied by dropout_scale when the row is stored.
  __device__ __forceinline__ void drop_weights(uint32_t (&p)[kKeys / 16][4], const uint32_t (&kept)[kKeys / 32]) const {
    if (terms.dropout_threshold == 0) return;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t bytes = kept[k / 4 * 2 + half] << k % 4;
        p[k][half] &= kept_pair<0>(bytes);
        p[k][2 + half] &= kept_pair<1>(bytes);
      }
    }
  }
};

}  // namespace prefill_wgmma
}  // namespace nvb
