// Which instance of grouped_linear_blocks.cuh takes a product; they are units of csrc/instances.rs.
#include "../../common/block_element.cuh"
#include "grouped_linear_blocks.h"

namespace nvb {
namespace grouped {

cudaError_t launch_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return with_block_format(p.encoding,
                           [&](auto format) { return launch_blocks_format<decltype(format)::value>(p, launch); });
}

bool supports_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  bool supported = false;
  with_block_format(p.encoding, [&](auto format) {
    supported = supports_blocks_format<decltype(format)::value>(p, launch);
    return cudaSuccess;
  });
  return supported;
}

}  // namespace grouped
}  // namespace nvb
