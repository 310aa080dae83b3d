// Chooses the prefill kernel and lays out its blocks.
#include <algorithm>
#include <cmath>

#include "sm80/attention_prefill_mma.cuh"

namespace nvb {
namespace {

SharedClass shared_class(int capability) {
  if (capability >= 90 && capability < 120) return SharedClass::kLarge;
  return capability == 80 || capability == 87 ? SharedClass::kMedium : SharedClass::kSmall;
}

bool is_valid(const nvb_attention_prefill_params& p) {
  if (float_dtype_bytes(p.query_dtype) == 0 || float_dtype_bytes(p.kv_dtype) == 0 ||
      float_dtype_bytes(p.output_dtype) == 0) {
    return false;
  }
  if (p.sequences < 0 || p.sequences > NVB_ATTENTION_MAX_SEQUENCES || p.head_dim < 1 || p.head_dim > 512) return false;
  if (p.kv_heads < 1 || p.query_heads < 1 || p.query_heads % p.kv_heads != 0) return false;
  if (!std::isfinite(p.scale) || !(p.soft_cap >= 0.0f) || p.window < 0 || !is_valid(p.placement)) return false;
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    if (sequence.query_count < 0 || sequence.query_count > kMaxLength) return false;
    if (sequence.kv_length < 0 || sequence.kv_length > kMaxLength) return false;
  }
  return true;
}

bool supports_mma(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (launch.capability < 80 || p.kv_dtype == NVB_F32 || p.head_dim % 8 != 0 || !(p.scale > 0.0f) ||
      (p.query_dtype != p.kv_dtype && p.query_dtype != NVB_F32) ||
      (p.output_dtype != p.kv_dtype && p.output_dtype != NVB_F32)) {
    return false;
  }
  if (p.placement.block_stride % 8 != 0) return false;
  const int query_bytes = float_dtype_bytes(p.query_dtype);
  const int output_bytes = float_dtype_bytes(p.output_dtype);
  for (int i = 0; i < p.sequences; ++i) {
    if (p.placement.pages == nullptr && p.sequence[i].kv_offset % 8 != 0) return false;
  }
  return is_aligned16(p.query, p.query_token_stride, query_bytes) &&
         is_aligned16(p.query, p.query_head_stride, query_bytes) && is_aligned16(p.key, p.key_head_stride, 2) &&
         is_aligned16(p.key, p.key_token_stride, 2) && is_aligned16(p.value, p.value_head_stride, 2) &&
         is_aligned16(p.value, p.value_token_stride, 2) &&
         is_aligned16(p.output, p.output_token_stride, output_bytes) &&
         is_aligned16(p.output, p.output_head_stride, output_bytes);
}

// Query heads whose keys and values fit L2 together, so that blocks which run side by side find them there; the KV
// heads are dealt out evenly, because the short tiles that end a group leave part of the device idle.
int heads_per_group(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  int64_t longest = 1;
  for (int i = 0; i < p.sequences; ++i) longest = std::max<int64_t>(longest, p.sequence[i].kv_length);
  const int64_t bytes = 2 * longest * p.head_dim * float_dtype_bytes(p.kv_dtype);
  const int64_t fitting = std::clamp<int64_t>(launch.l2_bytes / bytes, 1, p.kv_heads);
  const int64_t groups = (p.kv_heads + fitting - 1) / fitting;
  const int64_t kv_heads = (p.kv_heads + groups - 1) / groups;
  return static_cast<int>(kv_heads) * (p.query_heads / p.kv_heads);
}

// Fills in the arguments; returns the number of blocks.
int64_t arrange(const nvb_attention_prefill_params& p, const nvb_launch& launch, int rows_per_tile,
                PrefillArguments& arguments) {
  arguments.params = p;
  arguments.params.window = std::min(p.window, kMaxLength);
  arguments.heads_per_group = heads_per_group(p, launch);
  std::sort(arguments.params.sequence, arguments.params.sequence + p.sequences,
            [](const nvb_attention_sequence& left, const nvb_attention_sequence& right) {
              return static_cast<int64_t>(left.query_count) * left.kv_length >
                     static_cast<int64_t>(right.query_count) * right.kv_length;
            });
  int64_t blocks = 0;
  for (int i = 0; i < p.sequences; ++i) {
    arguments.params.sequence[i].first_block = static_cast<int32_t>(blocks);
    const int64_t tiles = (arguments.params.sequence[i].query_count + rows_per_tile - 1) / rows_per_tile;
    blocks += tiles * p.query_heads;
    if (blocks > INT32_MAX) break;
  }
  return blocks;
}

}  // namespace

int prefill_mma_rows(int head_dim, SharedClass shared) {
  return with_prefill_tile<__half>(head_dim, shared, [](auto tile) { return decltype(tile)::kRows; });
}

}  // namespace nvb

extern "C" const char* nvb_cuda_attention_prefill_kernel_name(const nvb_attention_prefill_params* params,
                                                              const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return nullptr;
  return nvb::supports_mma(*params, *launch) ? "attention_prefill_mma" : "attention_prefill_simt";
}

extern "C" cudaError_t nvb_cuda_attention_prefill(const nvb_attention_prefill_params* params,
                                                  const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return cudaErrorInvalidValue;
  const bool mma = nvb::supports_mma(*params, *launch);
  const nvb::SharedClass shared = nvb::shared_class(launch->capability);
  nvb::PrefillArguments arguments;
  const int64_t blocks = nvb::arrange(
      *params, *launch, mma ? nvb::prefill_mma_rows(params->head_dim, shared) : nvb::kPrefillSimtRows, arguments);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int grid = static_cast<int>(blocks);
  if (!mma) return nvb::launch_prefill_simt(arguments, grid, launch->stream);
  return params->kv_dtype == NVB_F16 ? nvb::launch_prefill_mma_f16(arguments, shared, grid, launch->stream)
                                     : nvb::launch_prefill_mma_bf16(arguments, shared, grid, launch->stream);
}
