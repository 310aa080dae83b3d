// Grouped products with Int4 weights.
#include "grouped_linear_quantized.cuh"

namespace nvb {
namespace grouped {
namespace {

using quantized::Int4Weight;
using quantized::Scales;

template <typename T>
cudaError_t launch(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.zero_points != nullptr) {
    if (p.group == 32) return launch_weight<Int4Weight<Scales::kGroups32, true>, T>(p, launch);
    return launch_weight<Int4Weight<Scales::kGroups64, true>, T>(p, launch);
  }
  if (p.group == 32) return launch_weight<Int4Weight<Scales::kGroups32, false>, T>(p, launch);
  return launch_weight<Int4Weight<Scales::kGroups64, false>, T>(p, launch);
}

}  // namespace

cudaError_t launch_int4(const nvb_grouped_linear_params& p, const nvb_launch& l) {
  return p.input_dtype == NVB_BF16 ? launch<__nv_bfloat16>(p, l) : launch<__half>(p, l);
}

}  // namespace grouped
}  // namespace nvb
