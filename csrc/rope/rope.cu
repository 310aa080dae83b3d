// Launches the rope kernels of rope.cuh and rope_many.cuh; rope.h has the formula, shapes and dtypes.
#include <algorithm>

#include "../common/constant_reads.h"
#include "../common/inverse_frequency.h"
#include "rope_many.cuh"

namespace nvb {
namespace rope {
namespace {

static_assert(kMaxHeadDim / 2 <= kMaxRotaryPairs, "a table holds the frequencies of the widest head");

bool is_float_or_absent(const void* pointer, uint32_t dtype) {
  return pointer == nullptr || float_dtype_bytes(dtype) != 0;
}

bool is_valid(const nvb_rope_params& p) {
  const bool rows = p.key_cache != nullptr && is_kv_row(p.cache_dtype);
  if (p.tokens < 0 || p.head_dim < 1 || p.head_dim > (rows ? kMaxRowDim : kMaxHeadDim)) return false;
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim || p.rotary_dim > kMaxHeadDim)
    return false;
  if (p.positions == nullptr) return false;
  if (p.query != nullptr && (p.query_heads < 1 || p.query_output == nullptr)) return false;
  if (p.key != nullptr && p.kv_heads < 1) return false;
  if (!nvb::is_valid(p.placement)) return false;
  if ((p.key_cache != nullptr && p.key == nullptr) || (p.value_cache != nullptr && p.value == nullptr)) return false;
  if (p.value_cache != nullptr && p.key_cache == nullptr) return false;
  return is_float_or_absent(p.query, p.query_dtype) && is_float_or_absent(p.key, p.key_dtype) &&
         is_float_or_absent(p.value, p.value_dtype) && is_float_or_absent(p.query_output, p.query_output_dtype) &&
         is_float_or_absent(p.key_output, p.key_output_dtype) && is_float_or_absent(p.query_norm, p.query_norm_dtype) &&
         is_float_or_absent(p.key_norm, p.key_norm_dtype) &&
         (p.key_cache == nullptr || kv_dtype_bytes(p.cache_dtype) != 0);
}

bool supports_vectors(const nvb_rope_params& p) {
  const auto aligned = [](const void* pointer, uint32_t dtype, int64_t stride0, int64_t stride1) {
    const int bytes = kv_dtype_bytes(dtype);
    return pointer == nullptr || (is_aligned16(pointer, stride0, bytes) && is_aligned16(pointer, stride1, bytes));
  };
  return p.head_dim % 8 == 0 && p.rotary_dim % 16 == 0 &&
         aligned(p.query, p.query_dtype, p.query_token_stride, p.query_head_stride) &&
         aligned(p.key, p.key_dtype, p.key_token_stride, p.key_head_stride) &&
         aligned(p.value, p.value_dtype, p.value_token_stride, p.value_head_stride) &&
         aligned(p.query_output, p.query_output_dtype, p.query_output_token_stride, p.query_output_head_stride) &&
         aligned(p.key_output, p.key_output_dtype, p.key_output_token_stride, p.key_output_head_stride) &&
         aligned(p.query_norm, p.query_norm_dtype, 0, 0) && aligned(p.key_norm, p.key_norm_dtype, 0, 0) &&
         aligned(p.key_cache, p.cache_dtype, p.cache_slot_stride, p.cache_head_stride) &&
         aligned(p.value_cache, p.cache_dtype, p.cache_token_stride, p.placement.block_stride);
}

// True if all tensors that are there are of the dtype, norms apart.
bool are_all(const nvb_rope_params& p, uint32_t dtype) {
  const auto is = [&](const void* pointer, uint32_t of) { return pointer == nullptr || of == dtype; };
  return is(p.query, p.query_dtype) && is(p.key, p.key_dtype) &&
         is(p.value_cache != nullptr ? p.value : nullptr, p.value_dtype) && is(p.query_output, p.query_output_dtype) &&
         is(p.key_output, p.key_output_dtype) && is(p.key_cache, p.cache_dtype);
}

template <int Width>
cudaError_t launch_rope(const nvb_rope_params& p, const nvb_launch& launch) {
  Arguments arguments;
  arguments.params = p;
  arguments.padding = 0;
  const float* frequencies = inverse_frequencies(p.base, p.rotary_dim);
  std::copy(frequencies, frequencies + p.rotary_dim / 2, arguments.inverse_frequency);

  arguments.lane_bits = 2;
  while (arguments.lane_bits < 5 && (2 * Width << arguments.lane_bits) < p.head_dim) ++arguments.lane_bits;
  const int64_t rows = static_cast<int64_t>(p.query != nullptr ? p.query_heads : 0) +
                       (p.key != nullptr ? p.kv_heads : 0) + (p.value_cache != nullptr ? p.kv_heads : 0);
  if (rows == 0) return cudaSuccess;
  if constexpr (Width == 8) {
    // What so many tokens read and write passes through L2 anyway. Fewer would leave multiprocessors without work,
    // since a token has one block.
    constexpr int kTokens = 32;  // a multiprocessor
    if (p.tokens >= static_cast<int64_t>(kTokens) * launch.multiprocessors) {
      const dim3 grid(static_cast<unsigned>(p.tokens));
      constexpr dim3 block(32 * kWarps);
      if (are_all(p, NVB_BF16)) {
        return launch_overlapped(rope_many_kernel<__nv_bfloat16>, grid, block, 0, &launch, arguments);
      }
      if (are_all(p, NVB_F16)) {
        return launch_overlapped(rope_many_kernel<__half>, grid, block, 0, &launch, arguments);
      }
    }
  }
  // The heads of a token are spread evenly over as few blocks as hold them.
  const int64_t lanes = rows << arguments.lane_bits;
  const int64_t blocks = (lanes + kThreads - 1) / kThreads;
  if (blocks > 65535) return cudaErrorInvalidValue;
  const unsigned threads = static_cast<unsigned>(((lanes + blocks - 1) / blocks + 31) / 32 * 32);
  const auto is_wide = [](const void* pointer, uint32_t dtype) { return pointer != nullptr && dtype == NVB_F32; };
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(blocks));
  if (p.key_cache != nullptr && is_kv_row(p.cache_dtype)) {
    return launch_overlapped(rope_kernel<Width, false, true, false, true>, grid, dim3(threads), 0, &launch, arguments);
  }
  if constexpr (Width == 8) {
    if (!is_wide(p.query, p.query_dtype) && !is_wide(p.key, p.key_dtype) &&
        !is_wide(p.value_cache != nullptr ? p.value : nullptr, p.value_dtype)) {
      constexpr uint32_t kConstant = NVB_CONSTANT_WEIGHTS | NVB_CONSTANT_POSITIONS;
      const bool constant = (nvb_cuda_constant_reads() & kConstant) == kConstant;
      const bool placed = p.key_cache != nullptr && (p.placement.pages != nullptr || p.placement.ring_tokens > 0);
      const auto kernel = placed     ? constant ? rope_kernel<8, true, true, true> : rope_kernel<8, true, true, false>
                              : constant ? rope_kernel<8, true, false, true>
                                     : rope_kernel<8, true, false, false>;
      return launch_overlapped(kernel, grid, dim3(threads), 0, &launch, arguments);
    }
  }
  return launch_overlapped(rope_kernel<Width, false, true, false>, grid, dim3(threads), 0, &launch, arguments);
}

}  // namespace
}  // namespace rope
}  // namespace nvb

extern "C" const char* nvb_cuda_rope_kernel_name(const nvb_rope_params* params, const nvb_launch*) noexcept {
  if (!nvb::rope::is_valid(*params)) return nullptr;
  return nvb::rope::supports_vectors(*params) ? "rope_vector" : "rope_scalar";
}

extern "C" cudaError_t nvb_cuda_rope(const nvb_rope_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::rope::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->tokens == 0) return cudaSuccess;
  return nvb::rope::supports_vectors(*params) ? nvb::rope::launch_rope<8>(*params, *launch)
                                              : nvb::rope::launch_rope<1>(*params, *launch);
}
