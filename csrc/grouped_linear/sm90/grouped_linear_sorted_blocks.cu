// What grouped_linear_sorted_blocks.cuh supports, and which instance of it takes a product; they are units of
// csrc/instances.rs.
#include "grouped_linear_sorted_blocks.h"

#include "../../common/hopper.h"
#include "../../common/tensor_map.h"
#include "grouped_linear_sorted_blocks_input.cuh"
#include "grouped_linear_wgmma_tiles.cuh"

namespace nvb {
namespace grouped {
namespace {

// Calls use(integral constant) of a format that has such a kernel; false for the others.
template <typename Use>
bool with_sorted_format(uint32_t format, const Use& use) {
  switch (format) {
    case NVB_BLOCKS_Q2_K:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_Q2_K>()), true;
    case NVB_BLOCKS_Q3_K:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_Q3_K>()), true;
    case NVB_BLOCKS_Q4_K:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_Q4_K>()), true;
    case NVB_BLOCKS_Q5_K:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_Q5_K>()), true;
    case NVB_BLOCKS_Q6_K:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_Q6_K>()), true;
    case NVB_BLOCKS_IQ4_XS:
      return use(std::integral_constant<uint32_t, NVB_BLOCKS_IQ4_XS>()), true;
    default:
      return false;
  }
}

}  // namespace

bool supports_sorted_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  // Coordinates of tensor maps are 32 bits, of which a box behind the last row takes some.
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  const bool half = p.input_dtype == NVB_F16 || p.input_dtype == NVB_BF16;
  return is_hopper(launch) && launch.shared_bytes_per_block >= 227 * 1024 && p.weight_dtype == 0 && half && p.k > 0 &&
         p.k % quantized::kUnit == 0 && p.k <= kMost && p.rows <= kMost && p.n % kGroupRows == 0 &&
         p.experts <= kMostExperts && p.n <= kMost / p.experts && is_aligned16(p.weight, p.weight_stride, 1) &&
         p.weight_stride < kMost && p.used > 0 && tensor_map_encoder() != nullptr &&
         with_sorted_format(p.encoding, [](auto) {});
}

int64_t sorted_blocks_workspace(const nvb_grouped_linear_params& p) {
  return SortedInput(nullptr, p.rows, p.k / quantized::kUnit).bytes;
}

cudaError_t launch_sorted_blocks(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  with_sorted_format(p.encoding,
                     [&](auto format) { error = launch_sorted_blocks_format<decltype(format)::value>(p, launch); });
  return error;
}

}  // namespace grouped
}  // namespace nvb
