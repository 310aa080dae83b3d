// Large products on compute capability 9.0: wgmma fed by bulk tensor copies, with every epilogue in the same kernel.
#pragma once

#include "../common/launch.h"

// What x and W hold.
enum nvb_linear_operands : uint32_t {
  NVB_OPERANDS_F16 = 1,
  NVB_OPERANDS_BF16 = 2,
  NVB_OPERANDS_E4M3_E4M3 = 3,
  NVB_OPERANDS_E4M3_E5M2 = 4,
  NVB_OPERANDS_INT8 = 5,
};

// y = act(row_scales[row] * column_scales[column] * (x Wᵀ) + bias) + residual, gated as in nvb_linear_params. x [m, k],
// W [n, k].
//
// Supported: capability 9.0; y in F16 or BF16; no activation, GELU's tanh form or SiLU; a residual of any float dtype
// where there is neither activation nor gating, which y may be (same dtype and stride); rows of x and W 16-byte
// aligned, so strides of whole 16 bytes; k at least 1. Scales with FP8 and INT8, and with them alone. Sums of FP8 are
// as exact as the tensor cores keep them, to some 14 bits, which is little beside what quantising has lost.
struct nvb_linear_wgmma_params {
  const void* input;
  const void* weight;
  const float* row_scales;     // [m], null with floats
  const float* column_scales;  // [n], null with floats
  const void* bias;
  const void* residual;  // of y's shape, or null
  void* output;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t input_stride;
  int64_t weight_stride;
  int64_t residual_stride;
  int64_t output_stride;
  uint32_t operands;
  uint32_t bias_dtype;      // ignored without a bias
  uint32_t residual_dtype;  // ignored without a residual
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t gated;
};

extern "C" {
// Whether the product can be done; reads the two structs alone.
int32_t nvb_cuda_linear_wgmma_supports(const nvb_linear_wgmma_params* params, const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_linear_wgmma(const nvb_linear_wgmma_params* params, const nvb_launch* launch) noexcept;
}
