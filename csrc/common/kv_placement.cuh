// Rows of tokens in rings and pages; kv_placement.h says what a row is.
#pragma once

#include "kv_placement.h"

namespace nvb {

inline constexpr uint32_t kNoRow = 0xffffffffu;

// Whether tokens lie elsewhere than one after the other. The same in all threads.
__device__ __forceinline__ bool is_placed(const nvb_kv_placement& placement) {
  return placement.pages != nullptr || placement.ring_tokens > 0;
}

// A number that is known when the grids in front have ended. `Old`: they may be writing it; the load goes past L1,
// whose line would be found again behind the wait for them.
template <bool Old>
__device__ __forceinline__ int32_t load_index(const int32_t* index) {
  return Old ? __ldcg(index) : *index;
}

// The row of a token, or kNoRow. `table` is the sequence's row of the page table; `Old` as in load_index.
template <bool Old = false>
__device__ __forceinline__ uint32_t kv_row(const nvb_kv_placement& placement, const int32_t* table, int token) {
  if (placement.pages == nullptr) return static_cast<uint32_t>(token) % static_cast<uint32_t>(placement.ring_tokens);
  const uint32_t tokens = placement.page_tokens;
  const uint32_t entry = static_cast<uint32_t>(token) / tokens;
  const uint32_t page = load_index<Old>(table + entry);
  return page < static_cast<uint32_t>(placement.page_count)
             ? page << 8 | (static_cast<uint32_t>(token) - entry * tokens)
             : kNoRow;
}

// The rows of Count tokens, `Step` apart from `first` on; kNoRow from `end` on. A ring takes one division at most, and
// none as long as it is not full.
template <int Count, int Step, bool Old = false>
__device__ __forceinline__ void kv_rows(const nvb_kv_placement& placement, const int32_t* table, int first, int end,
                                        uint32_t (&rows)[Count]) {
  if (placement.pages != nullptr) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const int token = first + i * Step;
      rows[i] = token < end ? kv_row<Old>(placement, table, token) : kNoRow;
    }
    return;
  }
  const uint32_t ring = placement.ring_tokens;
  uint32_t row = first;
  if (row >= ring) row %= ring;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    rows[i] = first + i * Step < end ? row : kNoRow;
    row += Step;
    if (row >= ring) row = ring >= uint32_t{Step} ? row - ring : row % ring;
  }
}

// Elements from the head's first to those of the row, which is none of kNoRow.
__device__ __forceinline__ int64_t kv_offset(int64_t block_stride, uint32_t row, int64_t token_stride) {
  return static_cast<int64_t>(row >> 8) * block_stride + static_cast<int64_t>(row & 255) * token_stride;
}

}  // namespace nvb
