// Prefill attention by wgmma on compute capability 9.0 (sm90/attention_prefill_wgmma.cuh).
//
// Beside what attention.h asks for: capability 9.0, query, key and value all F16 or all BF16, output of that dtype or
// F32, head_dim a multiple of 8 up to 256, scale > 0, keys and values neither in pages nor in a ring; query, key, value
// and output rows aligned to 16 bytes; a sequence's kv_offset at least 0 and a multiple of both token strides.
#pragma once

#include "attention.h"

extern "C" {
// Whether the kernel can do it; reads the two structs alone.
int32_t nvb_cuda_attention_prefill_wgmma_supports(const nvb_attention_prefill_params* params,
                                                  const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_attention_prefill_wgmma(const nvb_attention_prefill_params* params,
                                             const nvb_launch* launch) noexcept;
}
