// linear_mma and linear_skinny for F16.
#include "linear_mma.cuh"
#include "linear_skinny.cuh"

template cudaError_t nvb::launch_linear_mma<__half>(const nvb_linear_params&, const nvb_launch&, nvb::MmaTile);
template cudaError_t nvb::launch_linear_skinny<__half>(const nvb_linear_params&, const nvb_launch&);
