// Blocks of Q4_0, Q4_1 or Q8_0 <-> the layout that products read, which holds the same bits: Int4 in groups of 32, the
// same with zero points (Q4_1's minima), Int8 in groups of 32.
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// All pointers are device memory. The blocks lie row behind row, 2-byte aligned, and do not overlap the matrix, whose
// rows are a multiple of 16 and whose columns are one of 64. Packing sets *not_finite to 1 if a scale or a minimum is
// an infinity or NaN, and leaves it as it is otherwise; unpacking does not look at it.
struct nvb_pack_blocks_params {
  nvb_quantized_matrix matrix;
  void* blocks;
  uint32_t* not_finite;
  uint32_t format;  // NVB_BLOCKS_...
  uint32_t unpack;  // 0: blocks to matrix
};

extern "C" cudaError_t nvb_cuda_pack_blocks(const nvb_pack_blocks_params* params, const nvb_launch* launch) noexcept;
