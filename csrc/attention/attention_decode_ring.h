// The decode kernel of compute capability 9.0 (sm90/attention_decode_ring.cu): caches whose tokens lie one after the
// other, also in rings and pages, head_dim and value_dim alike: 64, 128 or 256 of F16 and BF16 with one sequence of up
// to 40 MiB and 8 items, 128 or 256 of FP8 with up to 256 query rows; any query and output dtype, rows of queries
// aligned to 16 bytes.
#pragma once

#include "attention_decode.cuh"

namespace nvb {

bool supports_decode_ring(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
