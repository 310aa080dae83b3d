// What attention_prefill_wgmma.cuh does between products: mask, online softmax, P as the next operand, and the store of
// a tile. A thread has two rows of its warp's 16, eight apart, and of each eight columns a pair (wgmma.cuh).
#pragma once

#include "../../common/wgmma.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_wgmma {

// The keys that a thread's two rows see.
struct RowMask {
  KeyRange range[2];
};

// Makes scores of keys past a row's last one, or before its first one, -inf. `first_key` is the key of this thread's
// first column.
template <int Count>
__device__ __forceinline__ void mask_last(float (&score)[Count], const RowMask& mask, int first_key) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i / 4 * 8 + i % 2 > mask.range[i / 2 % 2].last - first_key) score[i] = -CUDART_INF_F;
  }
}
template <int Count>
__device__ __forceinline__ void mask_first(float (&score)[Count], const RowMask& mask, int first_key) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i / 4 * 8 + i % 2 < mask.range[i / 2 % 2].first - first_key) score[i] = -CUDART_INF_F;
  }
}

// The running softmax of a thread's two rows: maxima of raw scores over all columns, sums over its own.
struct RowSums {
  float maximum[2];
  float sum[2];
};

// Replaces scores by 2^(score * factor - maximum + shift); `scaled` is what sums and outputs so far are multiplied by.
template <int Count>
__device__ __forceinline__ void exponentiate(float (&score)[Count], RowSums& rows, float (&scaled)[2], float factor,
                                             float threshold = kRescaleThreshold, float shift = 0.0f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains each, because a step of a chain waits for the one before.
    float highest[2] = {score[2 * half], score[2 * half + 1]};
#pragma unroll
    for (int j = 1; j < Count / 4; ++j) {
      highest[0] = fmaxf(highest[0], score[4 * j + 2 * half]);
      highest[1] = fmaxf(highest[1], score[4 * j + 2 * half + 1]);
    }
    float seen = fmaxf(highest[0], highest[1]);
    seen = fmaxf(seen, __shfl_xor_sync(0xffffffffu, seen, 1));
    seen = fmaxf(seen, __shfl_xor_sync(0xffffffffu, seen, 2));
    const float before = rows.maximum[half];
    seen = fmaxf(seen, before);
    // -inf - -inf is NaN, and -inf stays either way.
    const float after = (seen - before) * factor <= threshold ? before : seen;
    const float highest_exponent = exponent_base(after) * factor, base = highest_exponent - shift;
    scaled[half] = after == before ? 1.0f : exp2_fast(before * factor - highest_exponent);
    rows.maximum[half] = after;
    float sums[2] = {rows.sum[half] * scaled[half], 0.0f};
#pragma unroll
    for (int j = 0; j < Count / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& one = score[4 * j + 2 * half + i];
        one = exp2_fast(fmaf(one, factor, -base));
        sums[i] += one;
      }
    }
    rows.sum[half] = sums[0] + sums[1];
  }
}

// Rounds P to the first operand of P . V: fragments of 16 keys.
template <typename T, int Count>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[Count / 8][4], const float (&score)[Count]) {
#pragma unroll
  for (int k = 0; k < Count / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[k][i] = pack_pair<T>(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
  }
}

// The same for the first half of the keys; the others weigh 0.
template <typename T, int Count>
__device__ __forceinline__ void pack_first_half(uint32_t (&p)[Count / 4][4], const float (&score)[Count]) {
#pragma unroll
  for (int k = 0; k < Count / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[k][i] = pack_pair<T>(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
      p[Count / 8 + k][i] = 0;
    }
  }
}

template <int Count>
__device__ __forceinline__ void scale_output(float (&output)[Count], const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) output[i] *= scale[i / 2 % 2];
}

// Lane q of a quad gives word i of column block i and receives the four words of column block q, 16 bytes of a row.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
      words[i] = upper ? received : words[i];
      words[i | bit] = upper ? words[i | bit] : received;
    }
  }
}

// Normalises and stores a warpgroup's rows, those of the sequence alone. An empty row has sum 0; a NaN stays NaN.
template <typename T, typename Tile>
__device__ __forceinline__ void store_rows(const Arguments& arguments, const Work& work,
                                           const float (&output)[Tile::kValueDim / 2], const RowSums& rows,
                                           int warpgroup) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = rows.sum[half] + __shfl_xor_sync(0xffffffffu, rows.sum[half], 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    RowEnd end = {total == 0.0f ? 0.0f : 1.0f / total, 0.0f};
    if (arguments.lse != nullptr || arguments.has_terms) {
      end = row_end(rows.maximum[half] * arguments.exponent_factor, total, sinks_of(arguments, work), work.head);
    }
    float inverse = end.inverse;
    if (Tile::kTakesScoreTerms) inverse *= arguments.with_terms.terms.dropout_scale;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + half * 8 + lane / 4;
    const bool inside = row < work.rows;
    const int64_t token = work.output_row + row;
    if (arguments.lse != nullptr && quad == 0 && inside) {
      arguments.lse[token * arguments.query_heads + work.head] = end.lse;
    }
    const int64_t start = token * arguments.output_token_stride + work.head * arguments.output_head_stride;
    if (arguments.output_is_f32) {
      // A quad writes one 32-byte sector.
      float* const target = static_cast<float*>(arguments.output) + start;
#pragma unroll
      for (int j = 0; j < Tile::kValueDim / 8; ++j) {
        if (inside && 8 * j < arguments.value_dim) {
          *reinterpret_cast<float2*>(target + 8 * j + 2 * quad) =
              make_float2(output[4 * j + 2 * half] * inverse, output[4 * j + 2 * half + 1] * inverse);
        }
      }
    } else {
      // A quad writes two.
      T* const target = static_cast<T*>(arguments.output) + start;
#pragma unroll
      for (int four = 0; four < Tile::kValueDim / 32; ++four) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * four + i) + 2 * half;
          words[i] = pack_pair<T>(output[at] * inverse, output[at + 1] * inverse);
        }
        transpose_quad(words);
        const int column = 32 * four + 8 * quad;
        if (inside && column < arguments.value_dim) {
          store16(target + column, make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }
}

}  // namespace prefill_wgmma
}  // namespace nvb
