// Rows of blocks to rows of floats, or back: floats[i, j, t] and blocks[i, j, rows[i mod, j mod, t]].
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// All pointers are device memory. Strides of the floats are in elements, those of the blocks in bytes and even, unless
// the format is MXFP4. Every block format is decoded; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL are encoded, with the
// scales and roundings of src/weight/blocks/encode.rs. A row whose number is none of the blocks' is left out. What is
// written must not overlap what is read.
struct nvb_block_rows_params {
  void* floats;
  void* blocks;
  const int32_t* rows;  // null: row t meets row t
  int64_t shape[4];     // of the floats: i, j, t, columns, a multiple of the block's elements; none is 0
  int64_t float_strides[4];
  int64_t block_strides[3];
  int64_t block_rows;
  int64_t rows_shape[4];  // 1, extents that divide i and j, t
  int64_t rows_strides[4];
  uint32_t dtype;
  uint32_t format;    // NVB_BLOCKS_...
  uint32_t encode;    // 0: decode
  uint32_t reserved;  // 0
};

extern "C" cudaError_t nvb_cuda_block_rows(const nvb_block_rows_params* params, const nvb_launch* launch) noexcept;
