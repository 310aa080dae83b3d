#include "linear_wgmma.cuh"

namespace nvb {
namespace linear_wgmma {

template cudaError_t launch_kind<Operands::kBf16>(const nvb_linear_wgmma_params&, const nvb_launch&);

}  // namespace linear_wgmma
}  // namespace nvb
