// The kernels of one token for decode_step.cu, by their division: Int8 with a scale a row.
#include "linear/sm90/linear_quantized_decode.cuh"

bool launch_int8(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                 const nvb::quantized::DecodeChoice* choice, cudaError_t& result) {
  using namespace nvb::quantized;
  using Stage = ByteStage<NVB_INT8, Scales::kRows, 2>;
  if (choice != nullptr) return launch_choice<Stage, __nv_bfloat16, 1>(params, launch, *choice, result);
  result = launch_decode<Stage, __nv_bfloat16, 1>(params, launch);
  return true;
}
