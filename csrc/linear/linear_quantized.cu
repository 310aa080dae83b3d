// nvb_cuda_linear_quantized: checks the parameters and picks the kernel, the first row of the table that fits.
#include "../common/hopper.h"
#include "../common/linear_epilogue.cuh"
#include "../common/vector.cuh"
#include "sm80/linear_quantized_blocks.h"
#include "sm90/linear_quantized_decode.h"

#include "linear_quantized_kernels.h"
#include "sm90/linear_quantized_wgmma.h"

#include "linear_table.h"

namespace nvb {
namespace quantized {
namespace {

constexpr int64_t kMaxK = int64_t{1} << 30;        // the kernels count chunks of k in 32 bits
constexpr int64_t kMaxHopperK = int64_t{1} << 20;  // and those for 9.0 bytes of a row

bool is_valid(const nvb_linear_quantized_params& p) {
  const bool dtypes = float_dtype_bytes(p.input_dtype) != 0 && float_dtype_bytes(p.output_dtype) != 0 &&
                      (p.bias == nullptr || float_dtype_bytes(p.bias_dtype) != 0) && is_valid_residual(p);
  const bool weight = nvb_is_valid_quantized(p.encoding, p.scale_kind, p.group, p.zero_points) &&
                      (p.encoding == NVB_INT4 || nvb_is_blocks(p.encoding) || p.weight_stride % 16 == 0);
  return dtypes && weight && p.m >= 0 && p.n >= 0 && p.k >= 0 && p.k <= kMaxK && p.gated <= 1 &&
         (p.gated == 0 || p.n % 2 == 0) && p.activation <= NVB_SILU;
}

using Params = const nvb_linear_quantized_params&;
using Launch = const nvb_launch&;

// Chunks of 64 along k, and rows of x that 16-byte copies can take. The stride of a single row is never used. SFP has
// values that F16 has not.
bool fits_tensor_cores(Params p, Launch launch) {
  return launch.capability >= 80 && p.input_dtype != NVB_F32 && !nvb_is_blocks(p.encoding) &&
         (p.encoding != NVB_SFP || p.input_dtype == NVB_BF16) && p.k > 0 && p.k % 64 == 0 &&
         (p.k <= kMaxHopperK || !is_hopper(launch)) && is_aligned16(p.input, p.m == 1 ? 0 : p.input_stride, 2) &&
         is_aligned16(p.weight, 0, 1) && is_aligned16(p.scales, 0, 1);
}

constexpr int64_t kMostBlocksRows = 16;

struct Kernel {
  const char* name;
  bool (*fits)(Params, Launch);
  cudaError_t (*launch)(Params, Launch);
  bool (*supports)(Params, Launch) = nullptr;  // where the kernel can do more than it is chosen for
  size_t (*workspace)(Params) = nullptr;
};

template <typename T>
cudaError_t launch_encoding(Params p, Launch launch, Tokens tokens) {
  switch (p.encoding) {
    case NVB_INT4:
      return p.zero_points == nullptr ? launch_int4<T>(p, launch, tokens)
                                      : launch_int4_zero_points<T>(p, launch, tokens);
    case NVB_INT8:
      return launch_int8<T>(p, launch, tokens);
    case NVB_FP8_E4M3:
      return launch_fp8_e4m3<T>(p, launch, tokens);
    case NVB_SFP:
      if constexpr (kDtype<T> == NVB_BF16) return launch_sfp<T>(p, launch, tokens);
      return cudaErrorInvalidValue;
    default:
      return launch_fp8_e5m2<T>(p, launch, tokens);
  }
}

template <Tokens Count>
cudaError_t launch_tensor_cores(Params p, Launch launch) {
  return p.input_dtype == NVB_F16 ? launch_encoding<__half>(p, launch, Count)
                                  : launch_encoding<__nv_bfloat16>(p, launch, Count);
}

template <typename T>
cudaError_t launch_decode_encoding(Params p, Launch launch) {
  switch (p.encoding) {
    case NVB_INT4:
      return launch_decode_int4<T>(p, launch);
    case NVB_INT8:
      return launch_decode_int8<T>(p, launch);
    case NVB_SFP:
      if constexpr (kDtype<T> == NVB_BF16) return launch_decode_sfp<T>(p, launch);
      return cudaErrorInvalidValue;
    default:
      return launch_decode_fp8<T>(p, launch);
  }
}

cudaError_t launch_decode(Params p, Launch launch) {
  return p.input_dtype == NVB_F16 ? launch_decode_encoding<__half>(p, launch)
                                  : launch_decode_encoding<__nv_bfloat16>(p, launch);
}

bool supports_wgmma(Params p, Launch launch) {
  return is_hopper(launch) && p.m <= 64 && fits_tensor_cores(p, launch);
}

// For 9 to 16 tokens, from the same times as the tables of linear_quantized_choices.h.
bool wgmma_leads(Params p) {
  const int64_t row_blocks = (p.n + 15) / 16, chunks = p.k / 64;
  if (p.zero_points != nullptr) {
    // Where x and the sums of a cluster's rows leave linear_quantized_stationary no room, and of long rows. 57344 x
    // 8192 takes 108 µs for 16 tokens on an H200 so, and 274 by the best of the others.
    if (chunks < 143) return chunks >= 100 && row_blocks >= 1600 && p.m > (row_blocks < 2900 ? 12 : 9);
    return chunks >= 284 || row_blocks >= 1267;
  }
  if (p.encoding != NVB_INT4) {
    if (chunks < 54) return row_blocks >= 443 && (row_blocks < 1071 || row_blocks >= 1600);
    return chunks >= 143 || row_blocks >= 83;
  }
  if (chunks < 17) return row_blocks >= 443;
  if (chunks < 36) return row_blocks < 1071 && row_blocks >= (chunks < 24 ? 111 : 215);
  return chunks >= 284 || (chunks >= 143 && row_blocks >= 771);
}

bool fits_wgmma(Params p, Launch launch) {
  return (p.m > 16 || (p.m > 8 && wgmma_leads(p))) && supports_wgmma(p, launch);
}

// The dispatcher does not choose this kernel; it is asked for by name alone.
bool never(Params, Launch) {
  return false;
}

// Kernels of one compute capability stand in front of those that serve all of them.
constexpr Kernel kKernels[] = {
    {"linear_quantized_wgmma", fits_wgmma, launch_wgmma, supports_wgmma, wgmma_workspace},
    {"linear_quantized_decode", [](Params p, Launch l) { return is_hopper(l) && p.m <= 16 && fits_tensor_cores(p, l); },
     launch_decode},
    {"linear_quantized_skinny8", [](Params p, Launch l) { return p.m <= 8 && fits_tensor_cores(p, l); },
     launch_tensor_cores<Tokens::kSkinny8>},
    {"linear_quantized_skinny16", [](Params p, Launch l) { return p.m <= 16 && fits_tensor_cores(p, l); },
     launch_tensor_cores<Tokens::kSkinny16>},
    {"linear_quantized_mma16", never, launch_tensor_cores<Tokens::kMma16>,
     [](Params p, Launch l) { return p.m <= 16 && fits_tensor_cores(p, l); }},
    {"linear_quantized_mma32", [](Params p, Launch l) { return p.m <= 32 && fits_tensor_cores(p, l); },
     launch_tensor_cores<Tokens::kMma32>},
    {"linear_quantized_mma64", fits_tensor_cores, launch_tensor_cores<Tokens::kMma64>},
    {"linear_quantized_blocks", [](Params p, Launch l) { return p.m <= kMostBlocksRows && supports_blocks(p, l); },
     launch_blocks, supports_blocks, blocks_workspace},
    {"linear_quantized_plain", [](Params, Launch) { return true; }, launch_plain},
};

const Kernel& choose(Params params, Launch launch) {
  const Kernel* kernel = kKernels;
  while (!kernel->fits(params, launch)) ++kernel;
  return *kernel;
}

bool is_kernel(int32_t index) {
  return index >= 0 && index < static_cast<int32_t>(sizeof kKernels / sizeof *kKernels);
}

bool supports(int32_t index, Params params, Launch launch) {
  const Kernel& kernel = kKernels[index];
  return (kernel.supports != nullptr ? kernel.supports : kernel.fits)(params, launch);
}

}  // namespace
}  // namespace quantized
}  // namespace nvb

extern "C" size_t nvb_cuda_linear_quantized_workspace(const nvb_linear_quantized_params* params,
                                                      const nvb_launch* launch) noexcept {
  const bool runs = nvb::quantized::is_valid(*params) && params->m > 0 && params->n > 0;
  if (!runs) return 0;
  if (nvb_is_blocks(params->encoding)) {
    const bool blocks = params->m <= nvb::quantized::kMostBlocksRows && launch->capability >= 80;
    return blocks ? nvb::quantized::blocks_workspace(*params) : 0;
  }
  return nvb::quantized::fits_wgmma(*params, *launch) ? nvb::quantized::wgmma_workspace(*params) : 0;
}

extern "C" cudaError_t nvb_cuda_linear_quantized(const nvb_linear_quantized_params* params,
                                                 const nvb_launch* launch) noexcept {
  if (!nvb::quantized::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->m == 0 || params->n == 0) return cudaSuccess;
  return nvb::quantized::choose(*params, *launch).launch(*params, *launch);
}

extern "C" const char* nvb_cuda_linear_quantized_kernel_name(const nvb_linear_quantized_params* params,
                                                             const nvb_launch* launch) noexcept {
  if (!nvb::quantized::is_valid(*params) || params->m == 0 || params->n == 0) return "none";
  return nvb::quantized::choose(*params, *launch).name;
}

extern "C" int32_t nvb_cuda_linear_quantized_uses_tensor_cores(const nvb_linear_quantized_params* params,
                                                               const nvb_launch* launch) noexcept {
  return nvb::quantized::is_valid(*params) && nvb::quantized::fits_tensor_cores(*params, *launch);
}

extern "C" const char* nvb_cuda_linear_quantized_kernel_at(int32_t index) noexcept {
  return nvb::quantized::is_kernel(index) ? nvb::quantized::kKernels[index].name : nullptr;
}

extern "C" int32_t nvb_cuda_linear_quantized_kernel_supports(int32_t index, const nvb_linear_quantized_params* params,
                                                             const nvb_launch* launch) noexcept {
  return nvb::quantized::is_kernel(index) && nvb::quantized::is_valid(*params) &&
         nvb::quantized::supports(index, *params, *launch);
}

extern "C" size_t nvb_cuda_linear_quantized_kernel_workspace(int32_t index,
                                                             const nvb_linear_quantized_params* params) noexcept {
  const bool runs = nvb::quantized::is_kernel(index) && nvb::quantized::is_valid(*params) && params->m > 0 &&
                    params->n > 0 && nvb::quantized::kKernels[index].workspace != nullptr;
  return runs ? nvb::quantized::kKernels[index].workspace(*params) : 0;
}

extern "C" cudaError_t nvb_cuda_linear_quantized_launch(int32_t index, const nvb_linear_quantized_params* params,
                                                        const nvb_launch* launch) noexcept {
  if (!nvb_cuda_linear_quantized_kernel_supports(index, params, launch)) return cudaErrorInvalidValue;
  if (params->m == 0 || params->n == 0) return cudaSuccess;
  return nvb::quantized::kKernels[index].launch(*params, *launch);
}
