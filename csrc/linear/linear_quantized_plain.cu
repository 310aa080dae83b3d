// Which instance of the plain kernel takes a product; those of blocks are units of csrc/instances.rs.
#include "../common/block_element.cuh"
#include "linear_quantized_kernels.h"

namespace nvb {
namespace quantized {

cudaError_t launch_plain(const nvb_linear_quantized_params& params, const nvb_launch& launch) {
  switch (params.encoding) {
    case NVB_FP8_E4M3:
      return launch_plain_encoding<NVB_FP8_E4M3>(params, launch);
    case NVB_FP8_E5M2:
      return launch_plain_encoding<NVB_FP8_E5M2>(params, launch);
    case NVB_INT8:
      return launch_plain_encoding<NVB_INT8>(params, launch);
    case NVB_SFP:
      return launch_plain_encoding<NVB_SFP>(params, launch);
    case NVB_INT4:
      return launch_plain_encoding<NVB_INT4>(params, launch);
    default:
      return with_block_format(
          params.encoding, [&](auto format) { return launch_plain_encoding<decltype(format)::value>(params, launch); });
  }
}

}  // namespace quantized
}  // namespace nvb
