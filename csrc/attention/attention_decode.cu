// Chooses the decode kernel and how finely it splits the keys.
#include <algorithm>
#include <cmath>

#include "attention_decode.cuh"

namespace nvb {
namespace {

bool is_valid(const nvb_attention_decode_params& p) {
  if (float_dtype_bytes(p.query_dtype) == 0 || float_dtype_bytes(p.kv_dtype) == 0 ||
      float_dtype_bytes(p.output_dtype) == 0) {
    return false;
  }
  if (p.sequences < 0 || p.sequences > 65535 || p.head_dim < 1 || p.head_dim > 512) return false;
  if (p.kv_heads < 1 || p.query_heads < 1 || p.query_heads > 65535 || p.query_heads % p.kv_heads != 0) return false;
  if (p.slot_count < 0 || p.capacity < 0 || p.capacity > kMaxLength || p.max_kv_length < 0) return false;
  if (p.splits < 0 || p.splits > kMaxSplits || p.window < 0 || !is_valid(p.placement)) return false;
  return std::isfinite(p.scale) && p.soft_cap >= 0.0f;
}

bool supports_mma(const nvb_attention_decode_params& p, const nvb_launch& launch) {
  return launch.capability >= 80 && p.kv_dtype != NVB_F32 && p.head_dim % 8 == 0 && p.placement.block_stride % 8 == 0 &&
         is_aligned16(p.key, p.key_sequence_stride, 2) && is_aligned16(p.key, p.key_head_stride, 2) &&
         is_aligned16(p.key, p.key_token_stride, 2) && is_aligned16(p.value, p.value_sequence_stride, 2) &&
         is_aligned16(p.value, p.value_head_stride, 2) && is_aligned16(p.value, p.value_token_stride, 2);
}

// The fewest splits that keep the device nearly as busy as the best number would: a last wave of few blocks leaves it
// idle, and every split costs a write and a read of the output. Where all blocks fit at once, as many as there are.
int choose_splits(const nvb_attention_decode_params& p, const nvb_launch& launch, const DecodeShape& shape,
                  int64_t blocks) {
  if (p.splits > 0) return p.splits;
  const int64_t visible = std::max(p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length, 1);
  const int64_t split_keys = static_cast<int64_t>(shape.tile_keys) * shape.min_tiles;
  const int most = static_cast<int>(std::min<int64_t>((visible + split_keys - 1) / split_keys, kMaxSplits));
  // 1 KiB of every block's shared memory is the system's, and what one block may have is what a multiprocessor has less
  // that.
  constexpr int kSystemBytes = 1024;
  const int resident = std::max(1, std::min((launch.shared_bytes_per_block + kSystemBytes) /
                                                (shape.shared_bytes + kDecodeStaticBytes + kSystemBytes),
                                            1024 / shape.threads));
  const int64_t slots = static_cast<int64_t>(launch.multiprocessors) * resident;
  if (blocks * most <= slots) return most;
  const auto use = [&](int splits) {
    const int64_t total = blocks * splits;
    const int64_t waves = (total + slots - 1) / slots;
    return static_cast<double>(total) / static_cast<double>(waves * slots);
  };
  double best = 0.0;
  for (int splits = 1; splits <= most; ++splits) {
    if (use(splits) >= 0.9) return splits;
    best = std::max(best, use(splits));
  }
  int splits = 1;
  while (use(splits) < 0.9 * best) ++splits;
  return splits;
}

// Everything of a launch that follows from the arguments.
struct DecodePlan {
  bool is_short;  // few keys; `mma` too
  bool mma;
  DecodeShape shape;
  int chunks;
  int heads_per_chunk;
  int splits;
  int slots_per_head;
  int64_t partials;  // over all sequences and query heads
};

DecodePlan make_plan(const nvb_attention_decode_params& p, const nvb_launch& launch) {
  DecodePlan plan;
  plan.mma = supports_mma(p, launch);
  ShortPlan short_plan;
  plan.is_short = plan.mma && decode_short_plan(p, launch, short_plan);
  if (plan.is_short) {
    plan.shape = {};
    plan.chunks = short_plan.chunks;
    plan.heads_per_chunk = short_plan.heads_per_chunk;
    plan.splits = short_plan.blocks;
    plan.slots_per_head = 0;
    plan.partials = 0;
    return plan;
  }
  plan.shape = plan.mma ? decode_mma_shape(p, launch) : decode_simt_shape(p);
  const int group = p.query_heads / p.kv_heads;
  plan.chunks = (group + plan.shape.heads_per_block - 1) / plan.shape.heads_per_block;
  plan.heads_per_chunk = (group + plan.chunks - 1) / plan.chunks;
  plan.splits =
      choose_splits(p, launch, plan.shape, static_cast<int64_t>(std::max(p.sequences, 1)) * p.kv_heads * plan.chunks);
  plan.slots_per_head = plan.splits == 1 ? 0 : plan.splits + (plan.splits + kGroup - 1) / kGroup;
  plan.partials = static_cast<int64_t>(p.sequences) * p.query_heads * plan.slots_per_head;
  return plan;
}

// The sums come first, padded so that the outputs are 16-byte aligned.
size_t sums_bytes(const DecodePlan& plan) {
  return (plan.partials * sizeof(float2) + 15) / 16 * 16;
}

}  // namespace
}  // namespace nvb

extern "C" size_t nvb_cuda_attention_decode_workspace(const nvb_attention_decode_params* params,
                                                      const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return 0;
  const nvb::DecodePlan plan = nvb::make_plan(*params, *launch);
  return nvb::sums_bytes(plan) + plan.partials * params->head_dim * sizeof(float);
}

extern "C" const char* nvb_cuda_attention_decode_kernel_name(const nvb_attention_decode_params* params,
                                                             const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return nullptr;
  const nvb::DecodePlan plan = nvb::make_plan(*params, *launch);
  return plan.is_short ? "attention_decode_short" : plan.mma ? "attention_decode_mma" : "attention_decode_simt";
}

extern "C" cudaError_t nvb_cuda_attention_decode(const nvb_attention_decode_params* params,
                                                 const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->sequences == 0) return cudaSuccess;
  const nvb::DecodePlan plan = nvb::make_plan(*params, *launch);
  if (plan.slots_per_head > 0 && (params->workspace == nullptr || params->counters == nullptr))
    return cudaErrorInvalidValue;
  nvb::DecodeArguments arguments;
  arguments.params = *params;
  arguments.splits = plan.splits;
  arguments.chunks = plan.chunks;
  arguments.heads_per_chunk = plan.heads_per_chunk;
  arguments.slots_per_head = plan.slots_per_head;
  arguments.partial_sums = static_cast<float2*>(params->workspace);
  arguments.partial_outputs =
      reinterpret_cast<float*>(static_cast<unsigned char*>(params->workspace) + nvb::sums_bytes(plan));
  if (plan.is_short) return nvb::launch_decode_short(arguments, *launch);
  return plan.mma ? nvb::launch_decode_mma(arguments, plan.shape, *launch)
                  : nvb::launch_decode_simt(arguments, plan.shape, *launch);
}
