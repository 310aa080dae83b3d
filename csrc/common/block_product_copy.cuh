// W of block_product.cuh: units of 16 rows from memory to a warp's ring in shared memory.
#pragma once

#include "block_product_plan.cuh"
#include "mma_bytes.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// Copies units of 16 rows to a warp's ring. A lane copies of rows lane / 4 and lane / 4 + 8, which are those that it
// multiplies.
template <uint32_t Format>
struct UnitCopy {
  static constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  const uint8_t* weight;
  int64_t stride;
  int last_row;
  int row_bytes;
  int chunks;
  int place;
  const uint8_t* rows[2];
  bool at_end;  // a whole copy of the last of the rows could pass the end of those of the product

  // Of `count` rows of W from `first` on.
  __device__ __forceinline__ UnitCopy(const nvb_linear_quantized_params& p, const Plan& plan, int64_t first,
                                      int64_t count)
      : weight(static_cast<const uint8_t*>(p.weight) + first * p.weight_stride),
        stride(p.weight_stride),
        last_row(static_cast<int>(count - 1)),
        chunks(plan.chunks),
        place(plan.place) {
    row_bytes = static_cast<int>(p.k / BlockElement<Format>::kElements) * BlockElement<Format>::kBytes;
  }

  __device__ __forceinline__ void set_rows(int row_block) {
    const int row = row_block * kRows + threadIdx.x % 32 / 4;
    // A copy may pass the end of its own row, by less than it has bytes at most.
    at_end = (last_row - (row_block * kRows + kRows - 1)) * stride < 16 * kMostChunks<Format>;
    rows[0] = weight + min(row, last_row) * stride;
    rows[1] = weight + min(row + 8, last_row) * stride;
  }

  // Asks for the unit's lines, a quarter of a row each lane.
  __device__ __forceinline__ void fetch_to_l2(int unit) const {
    const int begin = unit * kBytes;
    const int at = min(begin + static_cast<int>(threadIdx.x % 4) * ((kBytes + 3) / 4), row_bytes - 1);
    prefetch_l2(rows[0] + at);
    prefetch_l2(rows[1] + at);
  }

  // What lies in the place behind the row's last block is 0, or the next row's.
  __device__ __forceinline__ void start(uint8_t* to, int unit) const {
    const int first = 16 * (threadIdx.x % 4), begin = unit * kBytes;
    uint8_t* const lane_to = to + threadIdx.x % 32 / 4 * place + first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const from = rows[r] + begin;
      const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15u);
      const uint8_t* const aligned = from - past + first;
      const int left = row_bytes - begin + past - first;
#pragma unroll
      for (int chunk = 0; chunk < kMostChunks<Format>; chunk += 4) {
        if (chunk * 16 + first >= 16 * chunks) break;
        uint8_t* const chunk_to = lane_to + 8 * r * place + 16 * chunk;
        if (at_end) {
          cp_async16_part(chunk_to, aligned + 16 * chunk, max(min(left - 16 * chunk, 16), 0));
        } else {
          cp_async16(chunk_to, aligned + 16 * chunk);
        }
      }
    }
  }
};

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
