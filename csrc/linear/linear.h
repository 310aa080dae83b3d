// y = act(x Wᵀ + bias) + residual.
#pragma once

#include "../common/launch.h"

// x [m, k], W [n, k], bias [n] or null, residual of y's shape or null, y [m, n]; all rows contiguous, row strides in
// elements, device memory. Gated: the rows of W (and of the bias) are pairs, row 2i the gate and row 2i + 1 the up
// projection, n is even, and y [m, n / 2] = act(gate) * up + residual. Sums in f32, one rounding when y is stored.
//
// Supported: x of W's dtype, or x in F32 with any float W; bias, residual and y of any float dtype; any m, n and
// strides, k up to 2^30; y must not overlap x, W or the bias, and may be the residual itself (same dtype and stride).
// Fast paths want k a multiple of 8 (4 for F32 W) and 16-byte aligned rows.
struct nvb_linear_params {
  const void* input;
  const void* weight;
  const void* bias;
  const void* residual;
  void* output;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t input_stride;
  int64_t weight_stride;
  int64_t residual_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t weight_dtype;
  uint32_t bias_dtype;      // ignored without a bias
  uint32_t residual_dtype;  // ignored without a residual
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t gated;    // 0 or 1
  uint32_t settled;  // 0 or 1: no work that is queued writes the weight, as if it were constant (constant_reads.h)
};

extern "C" {
cudaError_t nvb_cuda_linear(const nvb_linear_params* params, const nvb_launch* launch) noexcept;

// The kernel that nvb_cuda_linear would run, a static string; "none" for what it answers without a kernel.
const char* nvb_cuda_linear_kernel_name(const nvb_linear_params* params, const nvb_launch* launch) noexcept;
}
