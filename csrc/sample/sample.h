// Drawing the next token of each row of logits.
#pragma once

#include "../common/launch.h"

// Per row: temperature, then top-k, then top-p (over what top-k left), then a draw.
//   weight[i] = e^((logits[i] - max) / temperature); probabilities are weights over their sum.
//   top_k keeps the top_k largest logits; top_p keeps the shortest prefix, in descending order, whose probability sum
//   reaches top_p, at least one token. Among equal logits the lowest index comes first throughout.
//   u = (first word of Philox4x32-10(counter = {positions[r], sequences[r], 0, 0}, key = seed's halves) >> 8) * 2^-24
//   tokens[r] = the first kept token in descending order with cumulative probability, over the kept ones, above u.
//   probabilities[r] = its probability after temperature, before top-k and top-p.
// temperature <= 0 is argmax with probability 1. NaN counts as -inf. A row without any logit above -inf gives argmax's
// token and probability 0 at any temperature; logits of +inf share the row evenly.
// Every sum is a sum of integers, weights in units of 2^-44 of the largest, so results do not depend on the order of
// execution; a token of less than 2^-45 of the largest weight is never drawn.
//
// All pointers are device memory, so that one captured graph serves every step. Supports float dtypes, 1 to 2^20 - 1
// columns, any stride; rows aligned to 16 bytes take vector loads.
struct nvb_sample_params {
  const void* logits;        // [rows, columns]
  const int32_t* sequences;  // [rows], or null: the row's number
  const int32_t* positions;  // [rows], or null: 0
  int32_t* tokens;           // [rows]
  float* probabilities;      // [rows], or null
  void* workspace;           // nvb_cuda_sample_workspace bytes, 16-byte aligned, need not be cleared
  int64_t rows;
  int64_t columns;
  int64_t logits_stride;  // between rows, in elements
  uint64_t seed;
  uint32_t logits_dtype;
  int32_t top_k;  // <= 0 or >= columns: off
  float temperature;
  float top_p;  // >= 1: off; <= 0: one token
};

// Reads rows alone of the params.
extern "C" size_t nvb_cuda_sample_workspace(const nvb_sample_params* params, const nvb_launch* launch) noexcept;
extern "C" cudaError_t nvb_cuda_sample(const nvb_sample_params* params, const nvb_launch* launch) noexcept;
