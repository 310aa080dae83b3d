// linear_mma and linear_skinny for BF16.
#include "linear_mma.cuh"
#include "linear_skinny.cuh"

template cudaError_t nvb::launch_linear_mma<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&, nvb::MmaTile);
template cudaError_t nvb::launch_linear_skinny<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&);
