// Products of few rows with blocks of GGUF as a file has them, from compute capability 8.0 on, for the dispatcher of
// nvb_cuda_linear_quantized. Parameters are valid.
#pragma once

#include "../linear_quantized.h"

namespace nvb {
namespace quantized {

// linear_quantized_blocks.cuh: of one format.
template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch);
template <uint32_t Format>
bool supports_blocks_format(const nvb_linear_quantized_params& params, const nvb_launch& launch);

// linear_quantized_blocks_input.cu: x as F16 numbers in the workspace, which products of several rows want first; and
// the bytes that they take there.
cudaError_t stage_blocks_input(const nvb_linear_quantized_params& params, const nvb_launch& launch);
size_t blocks_workspace(const nvb_linear_quantized_params& params);

// linear_quantized_blocks.cu: of every format.
cudaError_t launch_blocks(const nvb_linear_quantized_params& params, const nvb_launch& launch);
bool supports_blocks(const nvb_linear_quantized_params& params, const nvb_launch& launch);

}  // namespace quantized
}  // namespace nvb
