// The decode attention that norms, rotates and appends its one new token itself: what its launcher offers to the table.
#pragma once

#include "attention_decode.cuh"

namespace nvb {

// Capability >= 9.0; one row a sequence; query, new key and value, and cache of one 16-bit dtype; head_dim 64, 128 or
// 256; rotary_dim a multiple of 16; all rows aligned to 16 bytes.
bool supports_decode_rope(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_rope(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
