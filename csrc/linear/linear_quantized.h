// y = act(x Wᵀ + bias) + residual with W in 8 or 4 bits.
#pragma once

#include "../common/quantized_product.h"

extern "C" {
// Bytes of device memory that the product wants; `workspace` is not read.
size_t nvb_cuda_linear_quantized_workspace(const nvb_linear_quantized_params* params,
                                           const nvb_launch* launch) noexcept;

cudaError_t nvb_cuda_linear_quantized(const nvb_linear_quantized_params* params, const nvb_launch* launch) noexcept;

// The kernel that nvb_cuda_linear_quantized would run, a static string; "none" for what it answers without a kernel.
const char* nvb_cuda_linear_quantized_kernel_name(const nvb_linear_quantized_params* params,
                                                  const nvb_launch* launch) noexcept;

// 1 if a tensor-core kernel would run, 0 if a plain one, whose time grows with every eight rows of x.
int32_t nvb_cuda_linear_quantized_uses_tensor_cores(const nvb_linear_quantized_params* params,
                                                    const nvb_launch* launch) noexcept;
}
