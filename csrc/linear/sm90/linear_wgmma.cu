// nvb_cuda_linear_wgmma: checks the parameters.
#include <cuda_runtime.h>

#include "linear_wgmma.cuh"

namespace nvb {
namespace linear_wgmma {

extern template cudaError_t launch_kind<Operands::kF16>(const nvb_linear_wgmma_params&, const nvb_launch&);
extern template cudaError_t launch_kind<Operands::kBf16>(const nvb_linear_wgmma_params&, const nvb_launch&);
extern template cudaError_t launch_kind<Operands::kE4m3E4m3>(const nvb_linear_wgmma_params&, const nvb_launch&);
extern template cudaError_t launch_kind<Operands::kE4m3E5m2>(const nvb_linear_wgmma_params&, const nvb_launch&);
extern template cudaError_t launch_kind<Operands::kInt8>(const nvb_linear_wgmma_params&, const nvb_launch&);

namespace {

// Built for other architectures alone, the kernels would do nothing on 9.0.
constexpr bool are_built() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  for (const int architecture : kArchitectures) {
    if (architecture == 900) return true;
  }
  return false;
}

int element_bytes(uint32_t operands) {
  return operands == NVB_OPERANDS_F16 || operands == NVB_OPERANDS_BF16 ? 2 : 1;
}

bool is_valid(const nvb_linear_wgmma_params& p) {
  const bool codes = p.operands >= NVB_OPERANDS_F16 && p.operands <= NVB_OPERANDS_INT8 &&
                     float_dtype_bytes(p.output_dtype) == 2 &&
                     (p.bias == nullptr || float_dtype_bytes(p.bias_dtype) != 0) && is_valid_residual(p) &&
                     (p.residual == nullptr || (p.activation == NVB_NONE && p.gated == 0)) &&
                     (p.activation == NVB_NONE || p.activation == NVB_GELU_TANH || p.activation == NVB_SILU);
  const bool scaled = element_bytes(p.operands) == 1;
  // Coordinates of tensor maps are 32 bits.
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  return codes && p.m >= 0 && p.m <= kMost && p.n >= 0 && p.n <= kMost && p.k >= 1 &&
         p.k * element_bytes(p.operands) <= kMost && p.gated <= 1 && (p.gated == 0 || p.n % 2 == 0) &&
         (p.row_scales != nullptr) == scaled && (p.column_scales != nullptr) == scaled;
}

bool rows_are_aligned(const nvb_linear_wgmma_params& p) {
  const int bytes = element_bytes(p.operands);
  return is_aligned16(p.input, p.m == 1 ? 0 : p.input_stride, bytes) &&
         is_aligned16(p.weight, p.n == 1 ? 0 : p.weight_stride, bytes);
}

}  // namespace
}  // namespace linear_wgmma
}  // namespace nvb

extern "C" int32_t nvb_cuda_linear_wgmma_supports(const nvb_linear_wgmma_params* params,
                                                  const nvb_launch* launch) noexcept {
  using namespace nvb::linear_wgmma;
  return are_built() && launch->capability == 90 && is_valid(*params) && rows_are_aligned(*params) &&
         nvb::tensor_map_encoder() != nullptr;
}

extern "C" cudaError_t nvb_cuda_linear_wgmma(const nvb_linear_wgmma_params* params, const nvb_launch* launch) noexcept {
  using namespace nvb;
  using namespace nvb::linear_wgmma;
  const nvb_linear_wgmma_params& p = *params;
  if (!nvb_cuda_linear_wgmma_supports(params, launch)) return cudaErrorInvalidValue;
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  switch (p.operands) {
    case NVB_OPERANDS_F16:
      return launch_kind<Operands::kF16>(p, *launch);
    case NVB_OPERANDS_BF16:
      return launch_kind<Operands::kBf16>(p, *launch);
    case NVB_OPERANDS_E4M3_E4M3:
      return launch_kind<Operands::kE4m3E4m3>(p, *launch);
    case NVB_OPERANDS_E4M3_E5M2:
      return launch_kind<Operands::kE4m3E5m2>(p, *launch);
    default:
      return launch_kind<Operands::kInt8>(p, *launch);
  }
}
