// Rows of tokens in rings and pages; kv_placement.h says what a row is.
#pragma once

#include "kv_placement.h"

namespace nvb {

inline constexpr uint32_t kNoRow = 0xffffffffu;

// Whether tokens lie elsewhere than one after the other. The same in all threads.
__device__ __forceinline__ bool is_placed(const nvb_kv_placement& placement) {
  return placement.pages != nullptr || placement.ring_tokens > 0;
}

// The row of a token, or kNoRow. `table` is the sequence's row of the page table.
__device__ __forceinline__ uint32_t kv_row(const nvb_kv_placement& placement, const int32_t* table, int token) {
  if (placement.pages == nullptr) return static_cast<uint32_t>(token) % static_cast<uint32_t>(placement.ring_tokens);
  const uint32_t tokens = placement.page_tokens;
  const uint32_t entry = static_cast<uint32_t>(token) / tokens;
  const uint32_t page = table[entry];
  return page < static_cast<uint32_t>(placement.page_count)
             ? page << 8 | (static_cast<uint32_t>(token) - entry * tokens)
             : kNoRow;
}

// Elements from the head's first to those of the row, which is none of kNoRow.
__device__ __forceinline__ int64_t kv_offset(int64_t block_stride, uint32_t row, int64_t token_stride) {
  return static_cast<int64_t>(row >> 8) * block_stride + static_cast<int64_t>(row & 255) * token_stride;
}

}  // namespace nvb
