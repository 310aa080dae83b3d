// Which instance of the kernel of blocks takes a product; they are units of csrc/instances.rs.
#include "../../common/block_element.cuh"
#include "linear_quantized_blocks.h"

namespace nvb {
namespace quantized {

cudaError_t launch_blocks(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  return with_block_format(params.encoding,
                           [&](auto format) { return launch_blocks_format<decltype(format)::value>(params, launch); });
}

bool supports_blocks(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  bool supported = false;
  with_block_format(params.encoding, [&](auto format) {
    supported = supports_blocks_format<decltype(format)::value>(params, launch);
    return cudaSuccess;
  });
  return supported;
}

}  // namespace quantized
}  // namespace nvb
