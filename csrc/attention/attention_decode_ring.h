// The decode kernel of compute capability 9.0 (sm90/attention_decode_ring.cu): caches whose tokens lie one after the
// other, also in rings and pages, head_dim and value_dim alike, up to 256 query rows, any query and output dtype, rows
// of queries aligned to 16 bytes: 128 or 256 of FP8 with any scales, and 64, 128 or 256 of F16 and BF16 with up to 8
// items where it is faster than attention_decode_mma.
#pragma once

#include "attention_decode.cuh"

namespace nvb {

bool supports_decode_ring(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
