// The decode kernel of compute capability 9.0 for caches in rows with scales of their own (common/kv_row.cuh): keys and
// values of one such format, heads of 128, where a head's rows lie one after the other, also in rings and pages; up to
// 256 query rows of any float dtype, aligned to 16 bytes, and any output dtype.
#pragma once

#include "attention_decode.cuh"

namespace nvb {

bool supports_decode_rows(const nvb_attention_decode_params& params, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape);
cudaError_t launch_decode_rows(const DecodeArguments& arguments, const nvb_launch& launch);

}  // namespace nvb
