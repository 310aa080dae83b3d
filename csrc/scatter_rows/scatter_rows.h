// Rows go to the places that row numbers name: output[i, j, rows[i mod, j mod, t]] = input[i, j, t].
#pragma once

#include "../common/launch.h"

// All pointers are device memory, the rows' columns contiguous, every combination of float dtypes. Strides are in
// elements. A row whose number is none of the output's is not written. Of two rows with one number either is written,
// element by element. The output must not overlap anything that is read.
struct nvb_scatter_rows_params {
  const void* input;
  const int32_t* rows;
  void* output;
  int64_t shape[4];          // of the input: i, j, t, columns; none is 0
  int64_t input_strides[4];  // of the columns 1
  int64_t output_strides[4];
  int64_t rows_shape[4];  // 1, extents that divide i and j, t
  int64_t rows_strides[4];
  int64_t output_rows;
  uint32_t input_dtype;
  uint32_t output_dtype;
};

extern "C" cudaError_t nvb_cuda_scatter_rows(const nvb_scatter_rows_params* params, const nvb_launch* launch) noexcept;
