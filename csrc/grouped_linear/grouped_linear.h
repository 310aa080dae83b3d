// y = act(x W[expert]ᵀ + bias[expert]) for tokens sorted by expert.
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// x [rows, k], W [experts * n, k] (expert e: rows e n to (e + 1) n) in floats or in `encoding` with its scales, bias
// [experts * n] or null, y [rows, n]; gated: the rows of W are (gate, up) pairs and y is [rows, n / 2], as in linear.h.
// Rows expert_offsets[e] to expert_offsets[e + 1] of x are expert e's. The expert_offsets are read by the kernel alone,
// so that one captured graph serves every routing; they ascend from 0 to at most `rows`, and what is not so is clamped.
// Rows from expert_offsets[experts] on are not written.
// With expert_ids row t used + u of y is that of expert expert_ids[t, u] and of row t of x, or of the same row where x
// has them all; kernels compute them one by one, and leave rows out whose number is no expert's. Many are sorted
// (grouped_linear_sort.h) and come here with expert_offsets (src/cuda/grouped_linear_by_id.rs): of all experts, or of
// some that follow each other, whose first offset may then be any.
//
// Supported: x, bias and y of any float dtype; a float W of x's dtype, or of any where x is F32; any rows, n, k,
// experts and strides. Tensor-core kernels take x in F16 or BF16 with 16-byte aligned rows from compute capability 8.0
// on: with a float W k a multiple of 8 and rows of W likewise aligned, with a quantised one k a multiple of 64 and, of
// Int4, n a multiple of 16. On 9.0 a float W with k a multiple of 64, n of 8 and at most 1024 experts takes wgmma.
// With an order place i has row order[i] of y and row order[i] / used of x, or order[i] where x has them all: blocks of
// GGUF of 256 elements take it on 9.0, with x in F16 or BF16, k a multiple of 256, n of 8, rows of W that begin at
// multiples of 16 bytes and at most 1024 experts.
// With expert_ids blocks of GGUF take tensor cores from 8.0 on, whatever x is, where rows of W begin at multiples of
// four bytes, of Q3_K and Q6_K of two; of them a second product with the same x, numbers of experts and shapes can run
// in the same grid. Everything else takes a plain kernel. Nothing is rounded but the result, and of blocks x, to whole
// numbers of three bytes (common/block_product.cuh).
struct nvb_grouped_linear_params {
  const void* input;
  const int32_t* expert_offsets;  // [experts + 1]; null with expert_ids
  const int32_t* expert_ids;      // [rows / used, used], or null
  const void* weight;
  const void* scales;       // of a quantised weight
  const void* zero_points;  // of Int4 with zero points, else null
  const void* bias;
  const int32_t* order;  // [rows], with expert_offsets: place i is that of row order[i] of y; null: x and y lie so
  void* workspace;       // with order
  void* output;
  const void* second_weight;  // of a second product like this one, with expert_ids and blocks; null: none
  void* second_output;
  int64_t rows;        // of y
  int64_t input_rows;  // of x: rows, or with expert_ids also rows / used
  int64_t n;           // rows of W an expert has
  int64_t k;
  int64_t input_stride;
  int64_t weight_stride;  // elements of a row of W, of blocks bytes; ignored for Int4
  int64_t output_stride;
  int64_t used;  // experts of a token, with expert_ids; so are the two strides
  int64_t token_stride;
  int64_t used_stride;
  int32_t experts;
  int32_t all_experts;  // that share the rows: `experts`, or more where these are some of them; tiles follow it
  uint32_t input_dtype;
  uint32_t weight_dtype;  // of a float W; 0: quantised
  uint32_t encoding;
  uint32_t scale_kind;
  uint32_t group;
  uint32_t bias_dtype;  // ignored without a bias
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t gated;      // 0 or 1
  uint32_t one_order;  // 1: with expert_ids sums are added in one order whatever the number of rows
};

// Kernels of one family add in one order, whatever the rows and the tiles are; those of blocks divide k by the number
// of rows.
enum nvb_grouped_linear_family : uint32_t {
  NVB_GROUPED_LINEAR_PLAIN = 0,
  NVB_GROUPED_LINEAR_MMA = 1,
  NVB_GROUPED_LINEAR_WGMMA = 2,
  NVB_GROUPED_LINEAR_QUANTIZED = 3,
  NVB_GROUPED_LINEAR_BLOCKS = 4,
  NVB_GROUPED_LINEAR_SORTED_BLOCKS = 5,
};

extern "C" {
cudaError_t nvb_cuda_grouped_linear(const nvb_grouped_linear_params* params, const nvb_launch* launch) noexcept;

// Bytes of `workspace`, for NVB_GROUPED_LINEAR_SORTED_BLOCKS.
int64_t nvb_cuda_grouped_linear_workspace(const nvb_grouped_linear_params* params) noexcept;

// The family of kernels that would run, an nvb_grouped_linear_family.
uint32_t nvb_cuda_grouped_linear_family(const nvb_grouped_linear_params* params, const nvb_launch* launch) noexcept;

// The kernel that nvb_cuda_grouped_linear would run, a static string; "none" for what it answers without a kernel.
const char* nvb_cuda_grouped_linear_kernel_name(const nvb_grouped_linear_params* params,
                                                const nvb_launch* launch) noexcept;
}
