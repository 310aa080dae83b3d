// Products of rows that name their experts with weights in blocks of GGUF as a file has them, from compute capability
// 8.0 on, for the dispatcher in grouped_linear.cu. Parameters are valid and not empty.
#pragma once

#include "../grouped_linear.h"

namespace nvb {
namespace grouped {

// grouped_linear_blocks.cuh: of one format.
template <uint32_t Format>
cudaError_t launch_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch);
template <uint32_t Format>
bool supports_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch);

// grouped_linear_blocks.cu: of every format.
cudaError_t launch_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch);
bool supports_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch);

}  // namespace grouped
}  // namespace nvb
