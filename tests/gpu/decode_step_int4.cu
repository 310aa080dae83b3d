// The kernels of one token for decode_step.cu, by their division: Int4 in groups of 32.
#include "linear/sm90/linear_quantized_decode.cuh"

bool launch_int4(const nvb_linear_quantized_params& params, const nvb_launch& launch,
                 const nvb::quantized::DecodeChoice* choice, cudaError_t& result) {
  using namespace nvb::quantized;
  using Stage = Int4Stage<Scales::kGroups32, false, 2>;
  if (choice != nullptr) return launch_choice<Stage, __nv_bfloat16, 1>(params, launch, *choice, result);
  result = launch_decode<Stage, __nv_bfloat16, 1>(params, launch);
  return true;
}
