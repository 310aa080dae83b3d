// nvb_cuda_attention_prefill_wgmma: chooses the tile.
#include "../attention_prefill_wgmma.h"

#include "attention_prefill_wgmma.cuh"
#include "attention_prefill_wgmma_launch.h"

namespace nvb {
namespace prefill_wgmma {

#define NVB_EXTERN(TILE)                                                                                  \
  extern template cudaError_t launch_tile<__half, tiles::TILE>(const Arguments&, int, const nvb_launch&); \
  extern template cudaError_t launch_tile<__nv_bfloat16, tiles::TILE>(const Arguments&, int, const nvb_launch&)
NVB_EXTERN(D64);
NVB_EXTERN(D64_SHORT);
NVB_EXTERN(D96);
NVB_EXTERN(D128);
NVB_EXTERN(D128_FULL);
NVB_EXTERN(D192);
NVB_EXTERN(D192_128);
NVB_EXTERN(D256);
NVB_EXTERN(D64_SCORES);
NVB_EXTERN(D128_SCORES);
NVB_EXTERN(D256_SCORES);
#undef NVB_EXTERN

namespace {

bool supports(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return (p.kv_dtype == NVB_F16 || p.kv_dtype == NVB_BF16) && p.query_dtype == p.kv_dtype &&
         (p.output_dtype == p.kv_dtype || p.output_dtype == NVB_F32) && !has_scales(p) &&
         (!has_terms(p) || supports_terms(p)) && supports_shape(p, 2, launch);
}

template <typename T, typename Tile>
cudaError_t launch_with(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return with_arguments<Tile>(p, 2, launch, [&](const Arguments& arguments, int blocks) {
    return launch_tile<T, Tile>(arguments, blocks, launch);
  });
}

// Keys of the longest sequence with which tiles of 128 rows, which waste less on the diagonal, gain over 192: 204
// against 192 TFLOP/s at 512 keys, causal, and 336 against 359 at 2,048 on an H200.
constexpr int kShort = 768;

// Calls `run` with the tile.
template <typename Run>
auto with_tile(const nvb_attention_prefill_params& p, const Run& run) {
  if (has_score_terms(p)) {
    if (p.head_dim <= 64) return run(tiles::D64_SCORES());
    return p.head_dim <= 128 ? run(tiles::D128_SCORES()) : run(tiles::D256_SCORES());
  }
  const bool full = !p.causal && p.window == 0 && p.chunk == 0;
  if (p.head_dim <= 64 && !full && longest(p) <= kShort) return run(tiles::D64_SHORT());
  if (p.head_dim <= 64) return run(tiles::D64());
  if (p.head_dim <= 96) return run(tiles::D96());
  if (p.head_dim <= 128 && full) return run(tiles::D128_FULL());
  if (p.head_dim <= 128) return run(tiles::D128());
  if (p.head_dim <= 192 && p.value_dim <= 128) return run(tiles::D192_128());
  if (p.head_dim <= 192) return run(tiles::D192());
  return run(tiles::D256());
}

template <typename T>
cudaError_t launch_dtype(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return with_tile(p, [&](auto tile) { return launch_with<T, decltype(tile)>(p, launch); });
}

}  // namespace

cudaError_t launch_prefill(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (!supports(p, launch)) return cudaErrorInvalidValue;
  return p.kv_dtype == NVB_F16 ? launch_dtype<__half>(p, launch) : launch_dtype<__nv_bfloat16>(p, launch);
}

}  // namespace prefill_wgmma
}  // namespace nvb

extern "C" int32_t nvb_cuda_attention_prefill_wgmma_supports(const nvb_attention_prefill_params* params,
                                                             const nvb_launch* launch,
                                                             nvb_attention_prefill_shape* shape) noexcept {
  namespace wgmma = nvb::prefill_wgmma;
  *shape = {};
  wgmma::with_tile(
      *params, [&](auto tile) { shape->tile_rows = decltype(tile)::kRows, shape->tile_keys = decltype(tile)::kKeys; });
  shape->finds_mask_tiles =
      params->mask != nullptr && params->mask_dtype == NVB_I32 && !nvb::has_device_lengths(*params);
  return wgmma::supports(*params, *launch);
}

extern "C" cudaError_t nvb_cuda_attention_prefill_wgmma(const nvb_attention_prefill_params* params,
                                                        const nvb_launch* launch) noexcept {
  return nvb::prefill_wgmma::launch_prefill(*params, *launch);
}
