// What a product with W in 8 or 4 bits is made of, for linear and for the experts of grouped_linear.
#pragma once

#include "launch.h"
#include "quantized.h"

// x [m, k] (row stride in elements), W [n, k] in `encoding` with its scales, bias [n] or null, residual of y's shape or
// null, y [m, n]; device memory. Gated: the rows of W (and of the bias) are pairs, row 2i the gate and row 2i + 1 the
// up projection, n is even, and y [m, n / 2] = act(gate) * up + residual. The product is that of the dequantised
// weights with x, summed in f32 and rounded once; linear_quantized_wgmma.h says where it is rounded within, finer than
// the output.
//
// Supported: x, bias, residual and y of any float dtype; any m, n, k up to 2^30, strides and alignment of x, residual
// and y, which may be the residual itself (same dtype and stride); the encodings and scales of quantized.h with
// weights and scales 16-byte aligned. Tensor-core paths take x in F16 or BF16 with 16-byte aligned rows, k a multiple
// of 64, from compute capability 8.0 on (on 9.0 k up to 2^20); everything else takes a plain kernel.
struct nvb_linear_quantized_params {
  const void* input;
  const void* weight;
  const void* scales;
  const void* zero_points;  // of Int4 with zero points, else null
  const void* bias;
  const void* residual;
  void* output;
  void* workspace;  // as large as asked for, 16-byte aligned; null for 0 bytes
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t input_stride;
  int64_t weight_stride;  // bytes of a row of an 8-bit W, a multiple of 16, or of blocks; ignored for Int4
  int64_t residual_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t encoding;
  uint32_t scale_kind;
  uint32_t group;           // of k, with NVB_SCALES_GROUPS: 32, 64 or 128
  uint32_t bias_dtype;      // ignored without a bias
  uint32_t residual_dtype;  // ignored without a residual
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t gated;  // 0 or 1
  uint32_t reserved;
};
