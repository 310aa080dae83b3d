// The kernels of nvb_cuda_linear and nvb_cuda_linear_quantized by their place in the dispatchers' tables, for whoever
// lists, measures or overrides them.
#pragma once

#include "linear.h"
#include "linear_quantized.h"

extern "C" {
// The name of row `index`, a static string; null past the last.
const char* nvb_cuda_linear_kernel_at(int32_t index) noexcept;
const char* nvb_cuda_linear_quantized_kernel_at(int32_t index) noexcept;

// 1 if the kernel can do the product, whether or not the dispatcher would choose it.
int32_t nvb_cuda_linear_kernel_supports(int32_t index, const nvb_linear_params* params,
                                        const nvb_launch* launch) noexcept;
int32_t nvb_cuda_linear_quantized_kernel_supports(int32_t index, const nvb_linear_quantized_params* params,
                                                  const nvb_launch* launch) noexcept;

// Bytes of workspace that the kernel wants in `params` for a product that it can do.
size_t nvb_cuda_linear_quantized_kernel_workspace(int32_t index, const nvb_linear_quantized_params* params) noexcept;

// The product by this kernel; cudaErrorInvalidValue where it cannot do it.
cudaError_t nvb_cuda_linear_launch(int32_t index, const nvb_linear_params* params, const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_linear_quantized_launch(int32_t index, const nvb_linear_quantized_params* params,
                                             const nvb_launch* launch) noexcept;
}
