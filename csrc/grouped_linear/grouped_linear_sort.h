// Rows by number of expert in the order of the experts, and back: what stands around a grouped product of sorted rows
// where tokens name their experts.
#pragma once

#include "../common/launch.h"

// Experts that rows can be sorted by: a block has counts of all of them in shared memory.
inline constexpr int32_t NVB_MOST_SORTED_EXPERTS = 1024;

// Row t used + u of y is that of expert expert_ids[t, u]. order [rows] becomes the rows of y, those of expert 0 first,
// each expert's ascending; expert e has order[expert_offsets[e]] to order[expert_offsets[e + 1]]. Rows whose number is
// no expert's come last, from expert_offsets[experts] on. 1 to NVB_MOST_SORTED_EXPERTS experts, 1 to 2^31 - 1 rows.
struct nvb_grouped_linear_sort_params {
  const int32_t* expert_ids;  // [rows / used, used]
  int32_t* order;
  int32_t* expert_offsets;  // [experts + 1]
  int64_t rows;
  int64_t used;  // experts of a token
  int64_t token_stride;
  int64_t used_stride;
  int32_t experts;
  uint32_t reserved;
};

// Of the first sorted_rows[0] places i of `order`, to order: output row i = input row order[i] / used; and back: output
// row order[i] = input row i, other rows being left alone. Rows are bytes, an even number, as are strides and
// addresses; input and output do not overlap.
struct nvb_grouped_linear_move_params {
  const void* input;
  void* output;
  const int32_t* order;
  const int32_t* sorted_rows;  // of an expert: the last element of expert_offsets
  int64_t rows;                // of the order
  int64_t row_bytes;
  int64_t input_stride;
  int64_t output_stride;
  int64_t used;   // rows of the order that share a row of the input, to order; at least 1
  uint32_t back;  // 0 or 1
  uint32_t reserved;
};

extern "C" {
cudaError_t nvb_cuda_grouped_linear_sort(const nvb_grouped_linear_sort_params* params,
                                         const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_grouped_linear_move(const nvb_grouped_linear_move_params* params,
                                         const nvb_launch* launch) noexcept;
}
