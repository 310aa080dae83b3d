// Launches the kernel of attention_decode_rope.cuh.
#include "../attention_decode_rope.h"

#include <cmath>
#include <type_traits>

#include "../../common/constant_reads.h"
#include "../../common/inverse_frequency.h"
#include "attention_decode_rope.cuh"

namespace nvb {
namespace {

using namespace decode_rope;

// A second pass waits for L2 between the first one's scores and its own: on an H200, 512 keys of one KV head of 256
// columns in two passes took 1.6 us longer than a rope kernel and attention_decode_short, and 256 in one 1.1 to 2.0 us
// less.
constexpr int kMaxPasses = 1;

// Query heads of a block. Two a block make twice as many blocks as four, and a block's arithmetic is half as long; with
// many sequences there are blocks enough, and each reads all keys of its KV head.
int heads_per_block(const nvb_attention_decode_params& p, const nvb_launch& launch) {
  const int64_t pairs = static_cast<int64_t>(p.sequences) * p.kv_heads * ((items_per_kv_head(p) + 1) / 2);
  return std::min(items_per_kv_head(p), pairs * kMaxBlocks <= launch.multiprocessors ? 2 : 4);
}

bool is_aligned(const void* pointer, int64_t stride, int64_t other_stride) {
  return is_aligned16(pointer, stride, 2) && is_aligned16(pointer, other_stride, 2);
}

bool takes_norm(const void* norm, uint32_t dtype) {
  return norm == nullptr || (float_dtype_bytes(dtype) != 0 && is_aligned16(norm, 0, 4));
}

template <typename T, typename Tile>
cudaError_t launch_tile(const Arguments& arguments, const nvb_launch& launch) {
  const auto kernel = attention_decode_rope_kernel<T, Tile>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (status != cudaSuccess) return status;
  const nvb_attention_decode_params& p = arguments.params;
  const dim3 grid(p.splits, p.kv_heads * p.chunks, p.sequences);
  return launch_overlapped_clusters(kernel, grid, dim3(p.splits), dim3(32 * Tile::kWarps), Tile::kSharedBytes, &launch,
                                    arguments);
}

}  // namespace

bool supports_decode_rope(const nvb_attention_decode_params& p, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape) {
  const nvb_attention_decode_rope& rope = *p.rope;
  if (launch.capability < 90 || p.rows_per_sequence != 1 || (p.kv_dtype != NVB_F16 && p.kv_dtype != NVB_BF16) ||
      p.query_dtype != p.kv_dtype || rope.key_dtype != p.kv_dtype || rope.value_dtype != p.kv_dtype ||
      p.key_scale != nullptr || p.value_scale != nullptr || p.value_dim != p.head_dim ||
      (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256) ||
      p.placement.value_block_stride != p.placement.block_stride || p.placement.block_stride % 8 != 0 ||
      rope.rotary_dim < 0 || rope.rotary_dim % 16 != 0 || rope.rotary_dim > p.head_dim ||
      !takes_norm(rope.query_norm, rope.query_norm_dtype) || !takes_norm(rope.key_norm, rope.key_norm_dtype) ||
      !is_aligned(p.query, p.query_token_stride, p.query_head_stride) ||
      !is_aligned(rope.key, rope.key_token_stride, rope.key_head_stride) ||
      !is_aligned(rope.value, rope.value_token_stride, rope.value_head_stride) ||
      !is_aligned(p.key, p.key_sequence_stride, p.key_head_stride) || !is_aligned16(p.key, p.key_token_stride, 2) ||
      !is_aligned(p.value, p.value_sequence_stride, p.value_head_stride) ||
      !is_aligned16(p.value, p.value_token_stride, 2)) {
    return false;
  }
  const int heads = heads_per_block(p, launch);
  shape = with_tile(p.head_dim, heads, [&](auto tile) {
    using Tile = decltype(tile);
    return nvb_attention_decode_shape{
        heads, Tile::kPass, 1, 32 * Tile::kWarps, Tile::kSharedBytes + kDecodeStaticBytes, kMaxBlocks, kMaxPasses, 1};
  });
  return true;
}

cudaError_t launch_decode_rope(const DecodeArguments& of, const nvb_launch& launch) {
  Arguments arguments;
  arguments.params = of.params;
  arguments.rope = *of.params.rope;
  arguments.params.rope = nullptr;
  const uint32_t constant = nvb_cuda_constant_reads();
  constexpr uint32_t kEarly = NVB_CONSTANT_WEIGHTS | NVB_CONSTANT_POSITIONS;
  arguments.early = (constant & kEarly) == kEarly;
  arguments.loads_early = (constant & NVB_CONSTANT_OLDER_KEYS) != 0;
  const float* const frequencies = inverse_frequencies(arguments.rope.base, arguments.rope.rotary_dim);
  std::copy(frequencies, frequencies + arguments.rope.rotary_dim / 2, arguments.inverse_frequency);
  return with_tile(of.params.head_dim, of.params.heads_per_chunk, [&](auto tile) {
    using Tile = decltype(tile);
    return of.params.kv_dtype == NVB_F16 ? launch_tile<__half, Tile>(arguments, launch)
                                         : launch_tile<__nv_bfloat16, Tile>(arguments, launch);
  });
}

}  // namespace nvb
