// The kernels of products with SFP weights, and with INT8 weights beside them, each in a unit of its own.
#ifndef NVBACKEND_TESTS_GPU_LINEAR_SFP_H
#define NVBACKEND_TESTS_GPU_LINEAR_SFP_H

#include "common/quantized_product.h"

using Product = cudaError_t (*)(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// One to 16 rows on compute capability 9.0.
cudaError_t decode_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);
cudaError_t decode_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch);
// Up to 8 rows, 16 rows, and any.
cudaError_t skinny8_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);
cudaError_t skinny16_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);
cudaError_t mma64_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);
// Up to 64 rows, by a division that fits every shape.
cudaError_t wgmma_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);
cudaError_t plain_sfp(const nvb_linear_quantized_params& params, const nvb_launch& launch);

#endif
