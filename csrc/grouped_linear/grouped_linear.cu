// y = act(x W[expert]ᵀ + bias[expert]): the choice of the kernel, and the plain one.
//
// The plain kernel runs on the ordinary f32 units: x in F32, odd k, unaligned rows, compute capability 7.5. A warp
// computes two rows of W, a (gate, up) pair, for eight tokens of one expert; a lane takes four neighbouring k of every
// 128, of which it decodes W once and meets all tokens. Shared memory: none.
#include <algorithm>

#include "../common/reduce.cuh"
#include "sm80/grouped_linear_blocks.h"
#include "sm80/grouped_linear_quantized.h"
#include "sm90/grouped_linear_sorted_blocks.h"
#include "sm90/grouped_linear_wgmma.h"

namespace nvb {
namespace grouped {
namespace {

constexpr int kWarps = 4;
constexpr int kTokens = 8;
constexpr int kRows = 2;
constexpr int kStep = 32 * 4;

template <uint32_t Kind, bool ById>
__global__ void __launch_bounds__(32 * kWarps, 4)
    grouped_linear_plain(const nvb_grouped_linear_params p, const grouped_weight weight,
                         const LinearEpilogue epilogue) {
  const token_tile tile = ById ? find_row(p, static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y)
                               : find_tile<kTokens>(p.expert_offsets, p.experts, p.rows, blockIdx.y);
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows;
  if (tile.expert < 0 || row >= p.n) return;
  const int lane = threadIdx.x % 32;
  const int64_t first_row = tile.expert * p.n;
  const int64_t rows[kRows] = {first_row + row, first_row + min(row + 1, p.n - 1)};

  // The sums of this lane's k.
  float sums[kTokens][kRows] = {};
  for (int64_t k = 4 * lane; k < p.k; k += kStep) {
    float w[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_weight<Kind>(weight, rows[r], k, w[r]);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (tile.begin + t >= tile.end) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (k + i >= p.k) break;
        const int64_t input_row = ById && p.input_rows != p.rows ? tile.begin / p.used : tile.begin + t;
        const float x = load_element(p.input, p.input_dtype, input_row * p.input_stride + k + i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[t][r] = fmaf(x, w[r][i], sums[t][r]);
      }
    }
  }

  // Every lane receives every sum; lane t finishes token t.
  float finished[kRows] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_sum(sums[t][r]);
      if (lane == t) finished[r] = sum;
    }
  }
  if (lane >= kTokens || tile.begin + lane >= tile.end) return;
  float bias[kRows] = {};
  if (epilogue.bias != nullptr) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) bias[r] = load_element(epilogue.bias, epilogue.bias_dtype, rows[r]);
  }
  store_columns(epilogue, tile.begin + lane, row, finished, bias);
}

template <uint32_t Kind>
cudaError_t launch_by_id(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const int64_t pairs = (p.n + kRows - 1) / kRows, height = std::min<int64_t>(p.rows, 65535);
  const dim3 grid(static_cast<unsigned>((pairs + kWarps - 1) / kWarps), static_cast<unsigned>(height),
                  static_cast<unsigned>((p.rows + height - 1) / height));
  grouped_linear_plain<Kind, true>
      <<<grid, 32 * kWarps, 0, launch.stream>>>(p, make_weight(p), make_epilogue_alone(p, p.n));
  return cudaPeekAtLastError();
}

template <uint32_t Kind>
cudaError_t launch_plain(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.expert_ids != nullptr) return launch_by_id<Kind>(p, launch);
  const int64_t tiles = most_tiles(p, kTokens);
  if (tiles > 65535) return cudaErrorInvalidValue;
  const int64_t pairs = (p.n + kRows - 1) / kRows;
  const dim3 grid(static_cast<unsigned>((pairs + kWarps - 1) / kWarps), static_cast<unsigned>(tiles));
  grouped_linear_plain<Kind, false>
      <<<grid, 32 * kWarps, 0, launch.stream>>>(p, make_weight(p), make_epilogue_alone(p, p.n));
  return cudaPeekAtLastError();
}

bool is_valid(const nvb_grouped_linear_params& p) {
  if (p.expert_ids != nullptr && (p.used <= 0 || (p.input_rows != p.rows && p.input_rows != p.rows / p.used)))
    return false;
  if (p.rows < 0 || p.n < 0 || p.k < 0 || p.experts < 0 || p.all_experts < p.experts || (p.gated != 0 && p.n % 2 != 0))
    return false;
  if (float_dtype_bytes(p.input_dtype) == 0 || float_dtype_bytes(p.output_dtype) == 0) return false;
  if (p.bias != nullptr && float_dtype_bytes(p.bias_dtype) == 0) return false;
  if (p.activation > NVB_SILU) return false;
  if (p.weight_dtype != 0) {
    return float_dtype_bytes(p.weight_dtype) != 0 && (p.weight_dtype == p.input_dtype || p.input_dtype == NVB_F32);
  }
  return nvb_is_valid_quantized(p.encoding, p.scale_kind, p.group, p.zero_points);
}

bool is_empty(const nvb_grouped_linear_params& p) {
  return p.rows == 0 || p.n == 0 || p.experts == 0;
}

bool supports_input(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const bool half = p.input_dtype == NVB_F16 || p.input_dtype == NVB_BF16;
  return launch.capability >= 80 && half && is_aligned16(p.input, p.rows == 1 ? 0 : p.input_stride, 2);
}

bool supports_mma(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return p.weight_dtype != 0 && p.k % 8 == 0 && is_aligned16(p.weight, p.weight_stride, 2) && supports_input(p, launch);
}

// Chunks of 64 along k, counted in 32 bits, of all but SFP, and an expert's first row of Int4 at the head of a tile.
bool supports_quantized(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const bool rows = p.encoding != NVB_INT4 || p.experts == 1 || p.n % 16 == 0;
  return p.weight_dtype == 0 && !nvb_is_blocks(p.encoding) && p.encoding != NVB_SFP && p.k > 0 && p.k % 64 == 0 &&
         p.k <= int64_t{1} << 30 && rows && is_aligned16(p.weight, 0, 1) && is_aligned16(p.scales, 0, 1) &&
         supports_input(p, launch);
}

nvb_grouped_linear_family family_of(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.expert_ids != nullptr) {
    const bool blocks = p.weight_dtype == 0 && nvb_is_blocks(p.encoding) && p.one_order == 0;
    return blocks && supports_blocks(p, launch) ? NVB_GROUPED_LINEAR_BLOCKS : NVB_GROUPED_LINEAR_PLAIN;
  }
  if (p.order != nullptr) {
    return supports_sorted_blocks(p, launch) ? NVB_GROUPED_LINEAR_SORTED_BLOCKS : NVB_GROUPED_LINEAR_PLAIN;
  }
  if (supports_quantized(p, launch)) return NVB_GROUPED_LINEAR_QUANTIZED;
  if (!supports_mma(p, launch)) return NVB_GROUPED_LINEAR_PLAIN;
  return supports_wgmma(p, launch) ? NVB_GROUPED_LINEAR_WGMMA : NVB_GROUPED_LINEAR_MMA;
}

cudaError_t launch_quantized(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  switch (p.encoding) {
    case NVB_FP8_E4M3:
      return launch_fp8_e4m3(p, launch);
    case NVB_FP8_E5M2:
      return launch_fp8_e5m2(p, launch);
    case NVB_INT8:
      return launch_int8(p, launch);
    default:
      return launch_int4(p, launch);
  }
}

}  // namespace
}  // namespace grouped
}  // namespace nvb

extern "C" const char* nvb_cuda_grouped_linear_kernel_name(const nvb_grouped_linear_params* params,
                                                           const nvb_launch* launch) noexcept {
  if (!nvb::grouped::is_valid(*params) || nvb::grouped::is_empty(*params)) return "none";
  switch (nvb::grouped::family_of(*params, *launch)) {
    case NVB_GROUPED_LINEAR_QUANTIZED:
      return "grouped_linear_quantized";
    case NVB_GROUPED_LINEAR_BLOCKS:
      return "grouped_linear_blocks";
    case NVB_GROUPED_LINEAR_SORTED_BLOCKS:
      return "grouped_linear_sorted_blocks";
    case NVB_GROUPED_LINEAR_WGMMA:
      return "grouped_linear_wgmma";
    case NVB_GROUPED_LINEAR_MMA:
      return "grouped_linear_mma";
    default:
      return "grouped_linear_plain";
  }
}

extern "C" int64_t nvb_cuda_grouped_linear_workspace(const nvb_grouped_linear_params* params) noexcept {
  return nvb::grouped::sorted_blocks_workspace(*params);
}

extern "C" uint32_t nvb_cuda_grouped_linear_family(const nvb_grouped_linear_params* params,
                                                   const nvb_launch* launch) noexcept {
  using namespace nvb::grouped;
  return is_valid(*params) && !is_empty(*params) ? family_of(*params, *launch) : NVB_GROUPED_LINEAR_PLAIN;
}

extern "C" cudaError_t nvb_cuda_grouped_linear(const nvb_grouped_linear_params* params,
                                               const nvb_launch* launch) noexcept {
  using namespace nvb::grouped;
  const nvb_grouped_linear_params& p = *params;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  if (is_empty(p)) return cudaSuccess;
  const bool bf16 = p.input_dtype == NVB_BF16;
  switch (family_of(p, *launch)) {
    case NVB_GROUPED_LINEAR_QUANTIZED:
      return launch_quantized(p, *launch);
    case NVB_GROUPED_LINEAR_BLOCKS:
      return launch_blocks(p, *launch);
    case NVB_GROUPED_LINEAR_SORTED_BLOCKS:
      return launch_sorted_blocks(p, *launch);
    case NVB_GROUPED_LINEAR_WGMMA:
      return bf16 ? launch_wgmma_bf16(p, *launch) : launch_wgmma_f16(p, *launch);
    case NVB_GROUPED_LINEAR_MMA:
      return bf16 ? launch_mma_bf16(p, *launch) : launch_mma_f16(p, *launch);
    default:
      break;
  }
  if (p.order != nullptr || p.second_weight != nullptr) return cudaErrorInvalidValue;
  switch (p.weight_dtype) {
    case NVB_F32:
      return launch_plain < kFloat | NVB_F32 > (p, *launch);
    case NVB_F16:
      return launch_plain < kFloat | NVB_F16 > (p, *launch);
    case NVB_BF16:
      return launch_plain < kFloat | NVB_BF16 > (p, *launch);
    default:
      break;
  }
  switch (p.encoding) {
    case NVB_FP8_E4M3:
      return launch_plain<NVB_FP8_E4M3>(p, *launch);
    case NVB_FP8_E5M2:
      return launch_plain<NVB_FP8_E5M2>(p, *launch);
    case NVB_INT8:
      return launch_plain<NVB_INT8>(p, *launch);
    case NVB_SFP:
      return launch_plain<NVB_SFP>(p, *launch);
    case NVB_INT4:
      return launch_plain<NVB_INT4>(p, *launch);
    default:
      return nvb::with_block_format(p.encoding,
                                    [&](auto format) { return launch_plain<decltype(format)::value>(p, *launch); });
  }
}
