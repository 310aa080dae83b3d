// Prefill attention by wgmma on compute capability 9.0 (sm90/attention_prefill_wgmma.cuh).
//
// Beside what attention.h asks for: capability 9.0, query, key and value all F16 or all BF16, output of that dtype or
// F32, head_dim and value_dim multiples of 8 up to 256, the latter not above the former, scale > 0, no scales, no tree,
// one prefix of all sequences, at most 120 of them with what has_terms sees, keys and values not in a ring and pages of
// a multiple of 8 tokens; query, key, value and output rows aligned to 16 bytes; sequences that begin a whole number of
// tokens behind each tensor's first, or at a row of the page table, and the same number in query, output and lse. It
// divides the keys of a tile of rows into parts where lengths come from the host and the output is F32 with an lse.
#pragma once

#include "attention.h"

extern "C" {
// Whether the kernel can do it, and then the shape of its tiles; reads the first two structs alone.
int32_t nvb_cuda_attention_prefill_wgmma_supports(const nvb_attention_prefill_params* params, const nvb_launch* launch,
                                                  nvb_attention_prefill_shape* shape) noexcept;
cudaError_t nvb_cuda_attention_prefill_wgmma(const nvb_attention_prefill_params* params,
                                             const nvb_launch* launch) noexcept;
}
