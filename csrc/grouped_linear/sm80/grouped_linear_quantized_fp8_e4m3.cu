// Grouped products with FP8 E4M3 weights.
#include "grouped_linear_quantized.cuh"

namespace nvb {
namespace grouped {
namespace {

using quantized::ByteWeight;
using quantized::Scales;

template <typename T>
cudaError_t launch(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.scale_kind == NVB_SCALES_ROWS) return launch_weight<ByteWeight<NVB_FP8_E4M3, Scales::kRows>, T>(p, launch);
  return launch_weight<ByteWeight<NVB_FP8_E4M3, Scales::kBlocks>, T>(p, launch);
}

}  // namespace

cudaError_t launch_fp8_e4m3(const nvb_grouped_linear_params& p, const nvb_launch& l) {
  return p.input_dtype == NVB_BF16 ? launch<__nv_bfloat16>(p, l) : launch<__half>(p, l);
}

}  // namespace grouped
}  // namespace nvb
