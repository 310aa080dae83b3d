// Rows of a table, chosen by tokens and scaled.
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// output[t, :] = table[tokens[t], :] * scale, in f32 with one rounding. A token outside [0, vocabulary) gives a row of
// zeros and reads nothing. All pointers are device memory. In batches, batch b has rows b * batch_tokens and on of the
// output and its numbers name rows b * vocabulary and on of the table.
//
// Supports every pair of float dtypes, any sizes and strides; 16-byte (or, for 16-bit rows beside f32 ones, 8-byte)
// aligned rows take vector loads. The output must not overlap the table.
struct nvb_embedding_params {
  const int32_t* tokens;  // [rows / batch_tokens, batch_tokens]
  const void* table;      // [rows / batch_tokens * vocabulary, columns]
  void* output;           // [rows, columns]
  int64_t rows;
  int64_t vocabulary;    // of a batch
  int64_t batch_tokens;  // rows, of one batch
  int64_t token_stride;  // from batch to batch
  int64_t columns;
  int64_t table_stride;  // between rows, in elements; so are all strides
  int64_t output_stride;
  uint32_t table_dtype;
  uint32_t output_dtype;
  float scale;
  uint32_t reserved;  // 0
};

// The table [vocabulary, columns] is in an encoding of common/quantized.h; everything else is as in
// nvb_embedding_params.
struct nvb_embedding_quantized_params {
  nvb_quantized_matrix table;
  const int32_t* tokens;  // [rows]
  void* output;           // [rows, table.columns]
  int64_t rows;
  int64_t output_stride;
  uint32_t output_dtype;
  float scale;
};

extern "C" {
cudaError_t nvb_cuda_embedding(const nvb_embedding_params* params, const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_embedding_quantized(const nvb_embedding_quantized_params* params,
                                         const nvb_launch* launch) noexcept;
}
