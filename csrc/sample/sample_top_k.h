// Sampling with a top-k that is small beside the vocabulary.
#pragma once

#include "sample.h"

namespace nvb {

// What nvb_cuda_sample enqueues where `supports_top_k` says so; `width` is the logits' vector width. The workspace
// needs `top_k_workspace` bytes a row.
bool supports_top_k(const nvb_sample_params& p, int width, const nvb_launch* launch);
size_t top_k_workspace();
cudaError_t enqueue_top_k(const nvb_sample_params& p, int width, const nvb_launch* launch);

}  // namespace nvb
