// Rows of logits divided among several blocks, and the order in which argmax and sampling rank tokens.
//
// A ranked logit is one 64-bit integer: the value's order above, the complement of the index below. A larger integer is
// a token that comes earlier in descending order with ties broken by the lowest index, and no two are equal. NaN ranks
// below -inf; -0 and +0 are equal.
#pragma once

#include "runtime_vector.cuh"

namespace nvb {

inline constexpr int kMaximumChunks = 64;
inline constexpr int kChunkAlignment = 8;  // in columns, so that no vector crosses into the next chunk

// `count` blocks a row, block c of them on the columns [c * columns, (c + 1) * columns).
struct row_chunks {
  int32_t count;
  int32_t columns;
};

// Enough chunks to give every multiprocessor two blocks, none smaller than `minimum_columns`.
inline row_chunks divide_row(int64_t rows, int64_t columns, int64_t minimum_columns, const nvb_launch* launch) {
  int64_t wanted = 2 * launch->multiprocessors / rows;
  const int64_t largest = columns / minimum_columns;
  if (wanted > largest) wanted = largest;
  if (wanted > kMaximumChunks) wanted = kMaximumChunks;
  if (wanted < 1) wanted = 1;
  const int64_t share = (columns + wanted - 1) / wanted;
  const int64_t aligned = (share + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  return {static_cast<int32_t>((columns + aligned - 1) / aligned), static_cast<int32_t>(aligned)};
}

// Unsigned order equal to the order of floats.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return 0;
  if (value == 0.0f) return 0x80000000u;
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t rank_logit(float value, int32_t index) {
  return static_cast<uint64_t>(ordered_key(value)) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
__device__ __forceinline__ int32_t ranked_index(uint64_t ranked) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(ranked));
}
// The logit again; a NaN comes back as a NaN.
__device__ __forceinline__ float ranked_logit(uint64_t ranked) {
  const uint32_t key = static_cast<uint32_t>(ranked >> 32);
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ uint64_t warp_max_ranked(uint64_t ranked) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, ranked, offset);
    ranked = other > ranked ? other : ranked;
  }
  return ranked;
}

// Calls visit(value, column) for the columns [begin, end) of a row, both multiples of Width; `Batch` vectors a thread
// are under way at once.
template <int Width, int Batch = 4, typename Visit>
__device__ __forceinline__ void visit_columns(const void* row, uint32_t dtype, int32_t begin, int32_t end,
                                              Visit visit) {
  const int32_t step = static_cast<int32_t>(blockDim.x) * Width;
  for (int32_t first = begin + static_cast<int32_t>(threadIdx.x) * Width; first < end; first += Batch * step) {
    uint4 raw[Batch];
#pragma unroll
    for (int b = 0; b < Batch; ++b) {
      if (first + b * step < end) raw[b] = load_raw<Width>(row, dtype, first + b * step);
    }
#pragma unroll
    for (int b = 0; b < Batch; ++b) {
      if (first + b * step >= end) break;
      float values[Width];
      unpack_raw<Width>(raw[b], dtype, values);
#pragma unroll
      for (int i = 0; i < Width; ++i) visit(values[i], first + b * step + i);
    }
  }
}

}  // namespace nvb
