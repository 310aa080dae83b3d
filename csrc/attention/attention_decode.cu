// The table of decode kernels, and how one of them is launched as planned.
#include <cmath>
#include <iterator>

#include "attention_decode.cuh"
#include "attention_decode_ring.h"
#include "attention_decode_rope.h"
#include "attention_decode_rows.h"

namespace nvb {
namespace {

bool are_valid(const nvb_attention_decode_params& p) {
  if (float_dtype_bytes(p.query_dtype) == 0 || kv_dtype_bytes(p.kv_dtype) == 0 ||
      kv_dtype_bytes(value_dtype_of(p)) == 0 || float_dtype_bytes(p.output_dtype) == 0) {
    return false;
  }
  if (p.sequences < 0 || p.sequences > 65535 || p.head_dim < 1 || p.head_dim > 576) return false;
  if (p.rows_per_sequence < 1 || p.rows_per_sequence > NVB_ATTENTION_MAX_ROWS_PER_SEQUENCE) return false;
  if (p.kv_heads < 1 || p.query_heads < 1 || p.query_heads % p.kv_heads != 0) return false;
  if (p.query_heads > 65535 / p.rows_per_sequence) return false;  // a block an item, at most, along the grid's y
  if (p.value_dim < 1 || p.value_dim > 512) return false;
  if (p.slot_count < 0 || p.capacity < 0 || p.capacity > kMaxLength || p.max_kv_length < 0) return false;
  if (p.sink_tokens < 0 || (p.sink_tokens > 0 && (p.window == 0 || p.chunk > 0 || p.placement.ring_tokens > 0))) {
    return false;
  }
  return p.window >= 0 && p.chunk >= 0 && is_valid(p.placement) && std::isfinite(p.scale) && p.soft_cap >= 0.0f;
}

// Whether the plan divides the work as the kernels can take it.
bool is_planned(const nvb_attention_decode_params& p, const nvb_attention_decode_shape& shape) {
  const int items = items_per_kv_head(p);
  if (p.chunks < 1 || p.heads_per_chunk < 1 || p.heads_per_chunk > shape.heads_per_block) return false;
  if (static_cast<int64_t>(p.chunks) * p.heads_per_chunk < items || (p.chunks - 1) * p.heads_per_chunk >= items)
    return false;
  if (shape.min_tiles == 0) {
    return p.splits >= 1 && p.slots_per_head == 0 && p.workspace != nullptr && p.counters != nullptr;
  }
  if (shape.cluster > 0) return p.splits >= 1 && p.splits <= shape.cluster && p.slots_per_head == 0;
  if (p.splits < 1 || p.splits > kMaxSplits) return false;
  if (p.splits == 1) return p.slots_per_head == 0;
  return p.slots_per_head == p.splits + (p.splits + kGroup - 1) / kGroup && p.workspace != nullptr &&
         p.counters != nullptr;
}

// Whether heads or a chunk change the softmax.
bool has_decode_terms(const nvb_attention_decode_params& p) {
  return p.sinks != nullptr || p.slopes != nullptr || p.chunk > 0;
}
// Whether a kernel is needed that takes every option and format.
bool is_special(const nvb_attention_decode_params& p) {
  return p.sink_tokens > 0;
}

struct DecodeKernel {
  const char* name;
  bool takes_terms;
  bool (*supports)(const nvb_attention_decode_params&, const nvb_launch&, nvb_attention_decode_shape&);
  cudaError_t (*launch)(const DecodeArguments&, const nvb_launch&);
  bool rotates = false;     // its new tokens; the others want them rotated and in the cache
  bool takes_rows = false;  // of keys and values with scales of their own, or of two dtypes
  bool takes_all = false;   // every option
};

constexpr DecodeKernel kKernels[] = {
    {"attention_decode_short", false, supports_decode_short, launch_decode_short},
    {"attention_decode_ring", false, supports_decode_ring, launch_decode_ring},
    {"attention_decode_mma", true, supports_decode_mma, launch_decode_mma},
    {"attention_decode_rows", false, supports_decode_rows, launch_decode_rows, false, true},
    {"attention_decode_simt", true, supports_decode_simt, launch_decode_simt, false, true, true},
    {"attention_decode_rope", false, supports_decode_rope, launch_decode_rope, true},
};

const DecodeKernel* kernel_at(int index) {
  return index >= 0 && index < static_cast<int>(std::size(kKernels)) ? &kKernels[index] : nullptr;
}

}  // namespace
}  // namespace nvb

extern "C" const char* nvb_cuda_attention_decode_kernel_at(int index) noexcept {
  const nvb::DecodeKernel* const kernel = nvb::kernel_at(index);
  return kernel != nullptr ? kernel->name : nullptr;
}

extern "C" int nvb_cuda_attention_decode_kernel_supports(int index, const nvb_attention_decode_params* params,
                                                         const nvb_launch* launch,
                                                         nvb_attention_decode_shape* shape) noexcept {
  *shape = {};
  const nvb::DecodeKernel* const kernel = nvb::kernel_at(index);
  return kernel != nullptr && nvb::are_valid(*params) && kernel->rotates == (params->rope != nullptr) &&
         (kernel->takes_terms || !nvb::has_decode_terms(*params)) &&
         (kernel->takes_rows || nvb::has_plain_elements(*params)) && (kernel->takes_all || !nvb::is_special(*params)) &&
         kernel->supports(*params, *launch, *shape);
}

extern "C" cudaError_t nvb_cuda_attention_decode_launch(int index, const nvb_attention_decode_params* params,
                                                        const nvb_launch* launch) noexcept {
  nvb_attention_decode_shape shape;
  if (!nvb_cuda_attention_decode_kernel_supports(index, params, launch, &shape)) return cudaErrorInvalidValue;
  if (!nvb::is_planned(*params, shape)) return cudaErrorInvalidValue;
  if (params->sequences == 0) return cudaSuccess;
  const int64_t partials = shape.min_tiles == 0 ? int64_t{2} * params->splits * params->heads_per_chunk
                                                : static_cast<int64_t>(params->sequences) * params->rows_per_sequence *
                                                      params->query_heads * params->slots_per_head;
  const size_t sums_bytes = (partials * sizeof(float2) + 15) / 16 * 16;  // so that the outputs are 16-byte aligned
  nvb::DecodeArguments arguments;
  arguments.params = *params;
  arguments.partial_sums = static_cast<float2*>(params->workspace);
  arguments.partial_outputs = reinterpret_cast<float*>(static_cast<unsigned char*>(params->workspace) + sums_bytes);
  arguments.constant = nvb_cuda_constant_reads();
  return nvb::kKernels[index].launch(arguments, *launch);
}
