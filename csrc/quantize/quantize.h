// Float matrices in device memory → a quantised weight, or activations in 8 bits.
#pragma once

#include "../common/launch.h"
#include "../common/quantized.h"

// A source [rows, matrix.columns] of float elements, row stride in elements.
struct nvb_quantize_part {
  const void* data;
  int64_t rows;
  int64_t stride;
};

// What quantising found and lost, added to what is there: zero it first. The sums' last digits depend on the order in
// which blocks finish.
struct nvb_quantize_report {
  double difference;   // Σ (quantised - source)²
  double norm;         // Σ source²
  uint32_t flags;      // NVB_QUANTIZE_…
  uint32_t maxima[4];  // the bits of each part's largest magnitude, with per_tensor
  uint32_t reserved;
};

// The source holds NaN or an infinity; the result is worthless.
#define NVB_QUANTIZE_NOT_FINITE 1u
// A scale or an zero point is more than f16 holds.
#define NVB_QUANTIZE_SCALE_OVERFLOW 2u

// Writes the matrix's data (padding included), scales and zero points. Its rows are those of the parts one after the
// other or, gated, of two parts in turn. A scale spans the largest magnitude of what shares it (with zero points: the
// range), is rounded to what is stored, and values are the nearest, ties to even, as src/weight/quantize.rs has them.
// With clipping it is the scale that loses least, as src/weight/scale_search.rs has it.
//
// Supported: F32, F16 and BF16 sources of any stride and alignment, up to four; Int8 with scales of rows or groups, FP8
// with scales of rows (each row's own or, with per_tensor, its part's) or blocks, Int4 with groups. Activations:
// quantize_tokens.h.
struct nvb_quantize_params {
  nvb_quantized_matrix matrix;  // data, scales and zero points are written
  nvb_quantize_part parts[4];
  nvb_quantize_report* report;  // device memory
  uint32_t part_count;
  uint32_t gated;       // 0 or 1
  uint32_t per_tensor;  // 0 or 1
  uint32_t input_dtype;
  uint32_t clipping;  // 0 or 1; Int4 alone
  uint32_t reserved;
};

extern "C" cudaError_t nvb_cuda_quantize(const nvb_quantize_params* params, const nvb_launch* launch) noexcept;
