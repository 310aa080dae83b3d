// The decode kernel of compute capability 9.0 (sm90/attention_decode_ring.cu), of F16, BF16 and FP8 caches whose tokens
// lie one after the other, also in rings and pages; any query and output dtype, rows of queries aligned to 16 bytes,
// head_dim 64 (16 bits alone), 128 or 256 and value_dim the same, up to 256 query rows.
#pragma once

#include "attention_decode.cuh"

namespace nvb {

bool supports_decode_ring(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_ring(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
