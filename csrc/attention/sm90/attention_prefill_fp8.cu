// nvb_cuda_attention_prefill_fp8: chooses the tile.
#include "../attention_prefill_fp8.h"

#include "attention_prefill_fp8.cuh"
#include "attention_prefill_wgmma_launch.h"

namespace nvb {
namespace prefill_fp8 {

#define NVB_EXTERN(TILE)                                                                                         \
  extern template cudaError_t launch_tile<__nv_fp8_e4m3, tiles::TILE>(const Arguments&, int, const nvb_launch&); \
  extern template cudaError_t launch_tile<__nv_fp8_e5m2, tiles::TILE>(const Arguments&, int, const nvb_launch&)
NVB_EXTERN(D64);
NVB_EXTERN(D128);
NVB_EXTERN(D128_LONG);
NVB_EXTERN(D256);
#undef NVB_EXTERN

namespace {

bool supports(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return (p.kv_dtype == NVB_F8_E4M3 || p.kv_dtype == NVB_F8_E5M2) && p.query_dtype == p.kv_dtype &&
         float_dtype_bytes(p.output_dtype) != 0 && !has_terms(p) && prefill_wgmma::supports_shape(p, 1, launch);
}

template <typename T, typename Tile>
cudaError_t launch_with(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return prefill_wgmma::with_arguments<Tile>(p, 1, launch, [&](Arguments& arguments, int blocks) {
    arguments.output_dtype = p.output_dtype;
    arguments.query_scale = p.query_scale, arguments.query_scale_stride = p.query_scale_stride != 0;
    arguments.key_scale = p.key_scale, arguments.key_scale_stride = p.key_scale_stride != 0;
    arguments.value_scale = p.value_scale, arguments.value_scale_stride = p.value_scale_stride != 0;
    return prefill_fp8::launch_tile<T, Tile>(arguments, blocks, launch);
  });
}

// Keys of the longest sequence up to which tiles of 128 keys gain over 192: 595 against 580 TFLOP/s at 2,048 keys,
// causal, and 741 against 819 at 16,384 on an H200.
constexpr int kLong = 2048;

template <typename T>
cudaError_t launch_dtype(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (p.head_dim <= 64) return launch_with<T, tiles::D64>(p, launch);
  if (p.head_dim <= 128 && prefill_wgmma::longest(p) > kLong) return launch_with<T, tiles::D128_LONG>(p, launch);
  if (p.head_dim <= 128) return launch_with<T, tiles::D128>(p, launch);
  return launch_with<T, tiles::D256>(p, launch);
}

}  // namespace

cudaError_t launch_prefill(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (!supports(p, launch)) return cudaErrorInvalidValue;
  return p.kv_dtype == NVB_F8_E4M3 ? launch_dtype<__nv_fp8_e4m3>(p, launch) : launch_dtype<__nv_fp8_e5m2>(p, launch);
}

}  // namespace prefill_fp8
}  // namespace nvb

extern "C" int32_t nvb_cuda_attention_prefill_fp8_supports(const nvb_attention_prefill_params* params,
                                                           const nvb_launch* launch) noexcept {
  return nvb::prefill_fp8::supports(*params, *launch);
}

extern "C" cudaError_t nvb_cuda_attention_prefill_fp8(const nvb_attention_prefill_params* params,
                                                      const nvb_launch* launch) noexcept {
  return nvb::prefill_fp8::launch_prefill(*params, *launch);
}
