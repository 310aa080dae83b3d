// nvb_cuda_quantize: checks the parameters and picks the kernel by encoding and kind of scales.
#include "quantize_encode.cuh"

namespace nvb {
namespace quantize {
namespace {

bool is_valid(const nvb_quantize_params& p) {
  const nvb_quantized_matrix& matrix = p.matrix;
  if (!nvb_is_valid_quantized(matrix.encoding, matrix.scale_kind, matrix.group, matrix.zero_points)) return false;
  if (p.part_count < 1 || p.part_count > 4 || p.gated > 1 || (p.gated == 1 && p.part_count != 2)) return false;
  if (p.report == nullptr) return false;
  if (p.clipping > 1 || (p.clipping == 1 && matrix.encoding != NVB_INT4)) return false;
  if (p.per_tensor > 1 || (p.per_tensor == 1 && matrix.scale_kind != NVB_SCALES_ROWS)) return false;
  int64_t rows = 0;
  for (uint32_t i = 0; i < p.part_count; ++i) rows += p.parts[i].rows;
  return rows == matrix.rows && float_dtype_bytes(p.input_dtype) != 0 && matrix.columns >= 0 &&
         (matrix.encoding == NVB_INT4 || (matrix.row_bytes % 16 == 0 && matrix.row_bytes >= matrix.columns));
}

}  // namespace
}  // namespace quantize
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_quantize(const nvb_quantize_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::quantize::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->matrix.rows == 0 || params->matrix.columns == 0) return cudaSuccess;
  if (params->matrix.encoding == NVB_INT4) return nvb::quantize::launch_int4(*params, *launch);
  switch (params->matrix.scale_kind) {
    case NVB_SCALES_GROUPS:
      return nvb::quantize::launch_groups(*params, *launch);
    case NVB_SCALES_BLOCKS:
      return nvb::quantize::launch_blocks(*params, *launch);
    default:
      return nvb::quantize::launch_rows(*params, *launch);
  }
}
