// The part of the logits that a block takes, and the random number of a row.
#pragma once

#include "../common/philox.cuh"
#include "../common/row_chunks.cuh"
#include "sample.h"

namespace nvb {

struct chunk {
  int64_t row;
  int32_t number;
  int32_t begin;
  int32_t end;
};

__device__ __forceinline__ chunk this_chunk(const nvb_sample_params& p, const row_chunks& chunks) {
  const int32_t number = static_cast<int32_t>(blockIdx.x % chunks.count);
  const int32_t begin = number * chunks.columns;
  return {blockIdx.x / chunks.count, number, begin, min(begin + chunks.columns, static_cast<int32_t>(p.columns))};
}

__device__ __forceinline__ const void* row_logits(const nvb_sample_params& p, int64_t row) {
  return element_address(p.logits, p.logits_dtype, row * p.logits_stride);
}

// The row's 24 random bits.
__device__ __forceinline__ uint32_t row_uniform(const nvb_sample_params& p, int64_t row) {
  const uint32_t position = p.positions != nullptr ? static_cast<uint32_t>(p.positions[row]) : 0u;
  const uint32_t sequence =
      p.sequences != nullptr ? static_cast<uint32_t>(p.sequences[row]) : static_cast<uint32_t>(row);
  const uint2 key = make_uint2(static_cast<uint32_t>(p.seed), static_cast<uint32_t>(p.seed >> 32));
  return philox4x32<10>(make_uint4(position, sequence, 0, 0), key).x >> 8;
}

__device__ __forceinline__ void store_token(const nvb_sample_params& p, int64_t row, uint64_t ranked,
                                            float probability) {
  p.tokens[row] = ranked_index(ranked);
  if (p.probabilities != nullptr) p.probabilities[row] = probability;
}

// The blocks of a row; equal for all the kernels of a call.
inline row_chunks sample_chunks(const nvb_sample_params& p, const nvb_launch* launch) {
  constexpr int64_t kMinimumChunk = 8192;
  return divide_row(p.rows, p.columns, kMinimumChunk, launch);
}

}  // namespace nvb
