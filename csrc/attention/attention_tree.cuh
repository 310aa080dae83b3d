// The rows of a sequence as a tree of draft tokens: which of them a row sees.
#pragma once

#include <stdint.h>

namespace nvb {

// Rows of a tree, at most.
inline constexpr int kMaxTreeRows = 64;

// A bit for each row that `row` comes from, itself included. parents[j] is below j, or row j has none. A walk of up to
// 64 loads, which the lanes of a warp do side by side.
__device__ __forceinline__ uint64_t tree_ancestors(const int32_t* parents, int row) {
  uint64_t seen = 0;
  int last = row + 1;
  while (row >= 0 && row < last && row < kMaxTreeRows) {
    seen |= uint64_t{1} << row;
    last = row;
    row = parents[row];
  }
  return seen;
}

}  // namespace nvb
