// Int8 with an f16 scale for 32, 64 or 128 neighbours of a row.
//
// A warp takes 128 columns of a row, four a lane; the lanes of a group find its largest magnitude by shuffles.
// Shared memory: none.
#include <algorithm>

#include "quantize_encode.cuh"

namespace nvb {
namespace quantize {
namespace {

constexpr int kWarps = 4;
constexpr int kWidth = 128;  // columns of a warp

template <int Group>
__global__ void __launch_bounds__(32 * kWarps) quantize_groups(const nvb_quantize_params p) {
  constexpr int kLanes = Group / 4;
  const nvb_quantized_matrix& matrix = p.matrix;
  const int64_t k = static_cast<int64_t>(blockIdx.x) * kWidth + threadIdx.x % 32 * 4;
  const int64_t groups = (matrix.columns + Group - 1) / Group;
  Findings findings(p.report);
  for (int64_t row = blockIdx.y * kWarps + threadIdx.x / 32; row < matrix.rows; row += gridDim.y * kWarps) {
    float values[4];
    load_four_sources(p, source_row(p, row), k, 0.0f, values);
    const __half scale = __float2half_rn(scale_for<NVB_INT8>(warp_max<kLanes>(magnitude_of(values))));
    if (k < matrix.columns && threadIdx.x % kLanes == 0) {
      static_cast<__half*>(const_cast<void*>(matrix.scales))[row * groups + k / Group] = scale;
      findings.check_scale(__half2float(scale));
    }
    const uint32_t codes = encode_four<NVB_INT8>(values, __half2float(scale), k, matrix.columns, findings);
    if (k < matrix.row_bytes) {
      *reinterpret_cast<uint32_t*>(static_cast<char*>(const_cast<void*>(matrix.data)) + row * matrix.row_bytes + k) =
          codes;
    }
  }
  findings.report();
}

template <int Group>
cudaError_t launch_group(const nvb_quantize_params& params, const nvb_launch& launch) {
  const nvb_quantized_matrix& matrix = params.matrix;
  const dim3 grid(static_cast<unsigned>((matrix.row_bytes + kWidth - 1) / kWidth),
                  static_cast<unsigned>(std::min<int64_t>((matrix.rows + kWarps - 1) / kWarps, 1024)));
  quantize_groups<Group><<<grid, 32 * kWarps, 0, launch.stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t launch_groups(const nvb_quantize_params& params, const nvb_launch& launch) {
  if (params.matrix.group == 32) return launch_group<32>(params, launch);
  if (params.matrix.group == 64) return launch_group<64>(params, launch);
  return launch_group<128>(params, launch);
}

}  // namespace quantize
}  // namespace nvb
