// Where the tokens of a sequence lie in a KV cache: one after the other, in a ring, or in pages that a table names.
//
// A token has a row, `block << 8 | place`, whose elements begin at block * block_stride + place * token_stride behind
// the first key (or value) of its head:
//   pages   block is the page, which the table's entry token / page_tokens names, and place token % page_tokens
//   ring    block << 8 | place is token % ring_tokens, and block_stride is 256 * token_stride
// Values have a block_stride of their own, for their token stride differs where heads of keys and values do.
// The table is read by the kernel, so a captured launch sees what it holds by then. An entry outside the pool is no
// page: nothing is read or written for its tokens, whose keys and values count as zeros.
#pragma once

#include <stdint.h>

// The most pages of a pool, and the most tokens of a page.
enum { NVB_KV_MAX_PAGES = 1 << 23, NVB_KV_MAX_PAGE_TOKENS = 256 };

struct nvb_kv_placement {
  const int32_t* pages;        // [sequences, page_row_stride]; null: no pages
  int64_t page_row_stride;     // entries from one sequence's row to the next
  int64_t block_stride;        // elements of the keys; ignored without pages and ring
  int64_t value_block_stride;  // as block_stride, of the values
  int32_t page_tokens;         // 1 to NVB_KV_MAX_PAGE_TOKENS
  int32_t page_count;          // pages of the pool
  int32_t ring_tokens;         // 0: no ring
  int32_t reserved;            // 0
};

namespace nvb {

inline bool is_valid(const nvb_kv_placement& placement) {
  if (placement.pages == nullptr) return placement.ring_tokens >= 0;
  return placement.ring_tokens == 0 && placement.page_tokens >= 1 && placement.page_tokens <= NVB_KV_MAX_PAGE_TOKENS &&
         placement.page_count >= 0 && placement.page_count <= NVB_KV_MAX_PAGES;
}

}  // namespace nvb
