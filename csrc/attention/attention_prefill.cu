// The table of prefill kernels, and how one of them is launched as planned.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "../common/fp8.cuh"
#include "attention_prefill_fp8.h"
#include "attention_prefill_wgmma.h"
#include "sm80/attention_prefill_masked_division.h"
#include "sm80/attention_prefill_mma.cuh"

namespace nvb {
namespace {

SharedClass shared_class(int capability) {
  if (capability >= 90 && capability < 120) return SharedClass::kLarge;
  return capability == 80 || capability == 87 ? SharedClass::kMedium : SharedClass::kSmall;
}

bool are_valid(const nvb_attention_prefill_params& p) {
  if (kv_dtype_bytes(p.query_dtype) == 0 || kv_dtype_bytes(p.kv_dtype) == 0 || is_kv_row(p.query_dtype) ||
      kv_dtype_bytes(value_dtype_of(p)) == 0 || float_dtype_bytes(p.output_dtype) == 0 ||
      (p.mask != nullptr && float_dtype_bytes(p.mask_dtype) == 0 && p.mask_dtype != NVB_I32)) {
    return false;
  }
  const bool on_device = has_device_lengths(p);
  if (p.sequences < 0 || (p.sequences > NVB_ATTENTION_MAX_SEQUENCES && !on_device) || p.head_dim < 1 ||
      p.head_dim > kMaxHeadDim || p.value_dim < 1 || p.value_dim > kMaxValueDim) {
    return false;
  }
  if (p.kv_heads < 1 || p.query_heads < 1 || p.query_heads % p.kv_heads != 0) return false;
  if (!std::isfinite(p.scale) || !(p.soft_cap >= 0.0f) || p.window < 0 || p.chunk < 0 || !is_valid(p.placement)) {
    return false;
  }
  if (p.dropout_threshold > 255) return false;
  if (p.sink_tokens < 0 || (p.sink_tokens > 0 && (p.window == 0 || p.chunk > 0 || p.placement.ring_tokens > 0))) {
    return false;
  }
  if (on_device) {
    return p.query_rows >= 0 && p.kv_rows >= 0 && p.max_query_count >= 0 && p.max_query_count <= kMaxLength &&
           p.max_kv_length >= 0 && p.max_kv_length <= kMaxLength;
  }
  if (p.query_starts != nullptr) return false;
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    if (sequence.query_count < 0 || sequence.query_count > kMaxLength) return false;
    if (sequence.kv_length < 0 || sequence.kv_length > kMaxLength) return false;
  }
  return true;
}

// Whether a kernel is needed that takes every option and format.
bool is_special(const nvb_attention_prefill_params& p) {
  return !has_plain_elements(p) || p.sink_tokens > 0;
}

bool supports_mma(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (launch.capability < 80 || (p.kv_dtype != NVB_F16 && p.kv_dtype != NVB_BF16) || p.head_dim % 8 != 0 ||
      !(p.scale > 0.0f) || (p.query_dtype != p.kv_dtype && p.query_dtype != NVB_F32) ||
      (p.output_dtype != p.kv_dtype && p.output_dtype != NVB_F32)) {
    return false;
  }
  if (p.value_dim != p.head_dim || p.head_dim > 512 || p.mask != nullptr || p.dropout_threshold > 0 || has_scales(p)) {
    return false;
  }
  if (p.placement.block_stride % 8 != 0 || p.placement.value_block_stride != p.placement.block_stride) return false;
  const int query_bytes = float_dtype_bytes(p.query_dtype);
  const int output_bytes = float_dtype_bytes(p.output_dtype);
  return is_aligned16(p.query, p.query_sequence_stride, query_bytes) && is_aligned16(p.key, p.key_sequence_stride, 2) &&
         is_aligned16(p.value, p.value_sequence_stride, 2) &&
         is_aligned16(p.output, p.output_sequence_stride, output_bytes) &&
         is_aligned16(p.query, p.query_token_stride, query_bytes) &&
         is_aligned16(p.query, p.query_head_stride, query_bytes) && is_aligned16(p.key, p.key_head_stride, 2) &&
         is_aligned16(p.key, p.key_token_stride, 2) && is_aligned16(p.value, p.value_head_stride, 2) &&
         is_aligned16(p.value, p.value_token_stride, 2) &&
         is_aligned16(p.output, p.output_token_stride, output_bytes) &&
         is_aligned16(p.output, p.output_head_stride, output_bytes);
}

bool prefill_mma(const nvb_attention_prefill_params& p, const nvb_launch& launch, nvb_attention_prefill_shape& shape) {
  shape = {};
  shape.rows = with_prefill_tile<__half>(p.head_dim, shared_class(launch.capability),
                                         [](auto tile) { return decltype(tile)::kRows; });
  return p.parts <= 1 && supports_mma(p, launch);
}

bool prefill_masked(const nvb_attention_prefill_params& p, const nvb_launch& launch,
                    nvb_attention_prefill_shape& shape) {
  shape = {};
  const bool dtypes = (p.kv_dtype == NVB_F16 || p.kv_dtype == NVB_BF16) && float_dtype_bytes(p.query_dtype) != 0;
  if (p.parts > 1 || launch.capability < 80 || !dtypes || !has_plain_elements(p) || has_scales(p) ||
      has_device_lengths(p)) {
    return false;
  }
  if (p.placement.pages != nullptr || p.placement.ring_tokens > 0) return false;
  if (p.dropout_threshold > 0 || p.causal != 0 || p.window != 0 || p.slopes != nullptr || p.chunk > 0 ||
      p.tree_parents != nullptr) {
    return false;
  }
  if (p.mask_dtype == NVB_I32 && p.mask != nullptr) return false;
  if (p.value_dim != p.head_dim || (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)) return false;
  if (!is_aligned16(p.key, p.key_sequence_stride, 2) || !is_aligned16(p.key, p.key_head_stride, 2) ||
      !is_aligned16(p.key, p.key_token_stride, 2) || !is_aligned16(p.value, p.value_sequence_stride, 2) ||
      !is_aligned16(p.value, p.value_head_stride, 2) || !is_aligned16(p.value, p.value_token_stride, 2)) {
    return false;
  }
  const masked::Scratch scratch = masked::scratch_of(p, launch);
  shape.partial_bytes = static_cast<int32_t>(scratch.partial_bytes);
  shape.counters = static_cast<int32_t>(scratch.counters);
  return true;
}

cudaError_t launch_masked(const PrefillArguments& arguments, int, const nvb_launch& launch) {
  return arguments.params.kv_dtype == NVB_F16 ? launch_prefill_masked_f16(arguments, launch)
                                              : launch_prefill_masked_bf16(arguments, launch);
}

bool prefill_simt(const nvb_attention_prefill_params& p, const nvb_launch&, nvb_attention_prefill_shape& shape) {
  shape = {};
  shape.rows = kPrefillSimtRows;
  return p.parts <= 1;
}

cudaError_t launch_mma(const PrefillArguments& arguments, int blocks, const nvb_launch& launch) {
  const auto run = arguments.params.kv_dtype == NVB_F16 ? launch_prefill_mma_f16 : launch_prefill_mma_bf16;
  return run(arguments, shared_class(launch.capability), blocks, launch.stream);
}

cudaError_t launch_simt(const PrefillArguments& arguments, int blocks, const nvb_launch& launch) {
  return launch_prefill_simt(arguments, blocks, launch.stream);
}

// Rows of a sequence up to which a mask of numbers goes to the kernel that is made for few of them: a tile of the other
// has 128, most of them empty then. Where the two meet was not measured.
constexpr int kFewRows = 64;

bool has_few_rows(const nvb_attention_prefill_params& p) {
  return std::all_of(p.sequence, p.sequence + p.sequences,
                     [](const nvb_attention_sequence& sequence) { return sequence.query_count <= kFewRows; });
}

bool prefill_wgmma(const nvb_attention_prefill_params& p, const nvb_launch& launch,
                   nvb_attention_prefill_shape& shape) {
  nvb_attention_prefill_shape masked_shape;
  if (p.mask != nullptr && prefill_masked(p, launch, masked_shape) && has_few_rows(p)) return false;
  return nvb_cuda_attention_prefill_wgmma_supports(&p, &launch, &shape) != 0;
}

cudaError_t launch_wgmma(const PrefillArguments& arguments, int, const nvb_launch& launch) {
  return nvb_cuda_attention_prefill_wgmma(&arguments.params, &launch);
}

bool prefill_fp8(const nvb_attention_prefill_params& p, const nvb_launch& launch, nvb_attention_prefill_shape& shape) {
  shape = {};
  return p.parts <= 1 && nvb_cuda_attention_prefill_fp8_supports(&p, &launch) != 0;
}

cudaError_t launch_fp8(const PrefillArguments& arguments, int, const nvb_launch& launch) {
  return nvb_cuda_attention_prefill_fp8(&arguments.params, &launch);
}

struct PrefillKernel {
  const char* name;
  bool takes_all;  // rows with scales of their own, two dtypes, and the first tokens beside a window
  bool (*supports)(const nvb_attention_prefill_params&, const nvb_launch&, nvb_attention_prefill_shape&);
  cudaError_t (*launch)(const PrefillArguments&, int, const nvb_launch&);
};

constexpr PrefillKernel kKernels[] = {
    {"attention_prefill_wgmma", false, prefill_wgmma, launch_wgmma},
    {"attention_prefill_fp8", false, prefill_fp8, launch_fp8},
    {"attention_prefill_mma", false, prefill_mma, launch_mma},
    {"attention_prefill_masked", false, prefill_masked, launch_masked},
    {"attention_prefill_simt", true, prefill_simt, launch_simt},
};

const PrefillKernel* kernel_at(int index) {
  return index >= 0 && index < static_cast<int>(std::size(kKernels)) ? &kKernels[index] : nullptr;
}

// Whether the plan gives each sequence its blocks, in the order of the table.
bool is_planned(const nvb_attention_prefill_params& p, int rows, int blocks) {
  if (p.heads_per_group < 1 || p.heads_per_group > p.query_heads) return false;
  if (has_device_lengths(p)) return most_tiles(p, rows) * p.query_heads == blocks;
  int64_t first = 0;
  for (int i = 0; i < p.sequences; ++i) {
    if (p.sequence[i].first_block != first) return false;
    const int64_t tiles = (static_cast<int64_t>(p.sequence[i].query_count) + rows - 1) / rows;
    first += tiles * p.query_heads;
    if (first > INT32_MAX) return false;
  }
  return first == blocks;
}

}  // namespace
}  // namespace nvb

extern "C" const char* nvb_cuda_attention_prefill_kernel_at(int index) noexcept {
  const nvb::PrefillKernel* const kernel = nvb::kernel_at(index);
  return kernel != nullptr ? kernel->name : nullptr;
}

extern "C" int nvb_cuda_attention_prefill_kernel_supports(int index, const nvb_attention_prefill_params* params,
                                                          const nvb_launch* launch,
                                                          nvb_attention_prefill_shape* shape) noexcept {
  const nvb::PrefillKernel* const kernel = nvb::kernel_at(index);
  return kernel != nullptr && nvb::are_valid(*params) && (kernel->takes_all || !nvb::is_special(*params)) &&
         kernel->supports(*params, *launch, *shape);
}

extern "C" cudaError_t nvb_cuda_attention_prefill_launch(int index, const nvb_attention_prefill_params* params,
                                                         int blocks, const nvb_launch* launch) noexcept {
  nvb_attention_prefill_shape shape;
  if (!nvb_cuda_attention_prefill_kernel_supports(index, params, launch, &shape)) return cudaErrorInvalidValue;
  if (shape.rows > 0) {
    if (!nvb::is_planned(*params, shape.rows, blocks)) return cudaErrorInvalidValue;
    if (blocks == 0) return cudaSuccess;
  }
  nvb::PrefillArguments arguments;
  arguments.params = *params;
  arguments.params.window = std::min(params->window, nvb::kMaxLength);
  // No position passes it, so all keys are in the first chunk either way.
  arguments.params.chunk = std::min(params->chunk, nvb::kMaxLength);
  return nvb::kKernels[index].launch(arguments, blocks, *launch);
}
