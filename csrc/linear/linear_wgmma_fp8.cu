#include "linear_wgmma.cuh"

namespace nvb {
namespace linear_wgmma {

template cudaError_t launch_kind<Operands::kE4m3E4m3>(const nvb_linear_wgmma_params&, const nvb_launch&);
template cudaError_t launch_kind<Operands::kE4m3E5m2>(const nvb_linear_wgmma_params&, const nvb_launch&);

}  // namespace linear_wgmma
}  // namespace nvb
