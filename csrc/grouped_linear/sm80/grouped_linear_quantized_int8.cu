// Grouped products with Int8 weights.
#include "grouped_linear_quantized.cuh"

namespace nvb {
namespace grouped {
namespace {

using quantized::ByteWeight;
using quantized::Scales;

template <typename T>
cudaError_t launch(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.scale_kind == NVB_SCALES_ROWS) return launch_weight<ByteWeight<NVB_INT8, Scales::kRows>, T>(p, launch);
  if (p.group == 32) return launch_weight<ByteWeight<NVB_INT8, Scales::kGroups32>, T>(p, launch);
  return launch_weight<ByteWeight<NVB_INT8, Scales::kGroups64>, T>(p, launch);
}

}  // namespace

cudaError_t launch_int8(const nvb_grouped_linear_params& p, const nvb_launch& l) {
  return p.input_dtype == NVB_BF16 ? launch<__nv_bfloat16>(p, l) : launch<__half>(p, l);
}

}  // namespace grouped
}  // namespace nvb
