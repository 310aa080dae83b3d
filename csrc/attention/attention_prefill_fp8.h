// Prefill attention by wgmma on FP8, compute capability 9.0 (sm90/attention_prefill_fp8.cuh).
//
// Beside what attention.h asks for: capability 9.0, query, key and value all E4M3 or all E5M2, output of F16, BF16 or
// F32, head_dim and value_dim multiples of 16 up to 256, the latter not above the former, scale > 0, no mask,
// nothing that has_terms sees, keys and values not in a ring and pages of a multiple of 8 tokens; query, key, value and
// output rows aligned to 16 bytes; sequences that begin a whole number of tokens behind each tensor's first, or at a
// row of the page table, and the same number in query, output and lse. Any scales.
#pragma once

#include "attention.h"

extern "C" {
// Whether the kernel can do it; reads the two structs alone.
int32_t nvb_cuda_attention_prefill_fp8_supports(const nvb_attention_prefill_params* params,
                                                const nvb_launch* launch) noexcept;
cudaError_t nvb_cuda_attention_prefill_fp8(const nvb_attention_prefill_params* params,
                                           const nvb_launch* launch) noexcept;
}
