// The product of tokens that are multiplied in the order of their experts with blocks of GGUF as a file has them
// (grouped_linear_sorted_blocks.cuh).
#pragma once

#include "../grouped_linear.h"

namespace nvb {
namespace grouped {

// By p.order, with p.workspace of as many bytes as sorted_blocks_workspace says.
bool supports_sorted_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch);
int64_t sorted_blocks_workspace(const nvb_grouped_linear_params& p);
cudaError_t launch_sorted_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch);

// Of one format; the instances are units of csrc/instances.rs.
template <uint32_t Format>
cudaError_t launch_sorted_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch);

}  // namespace grouped
}  // namespace nvb
