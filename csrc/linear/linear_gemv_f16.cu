// linear_gemv for weights in F16.
#include "linear_gemv.cuh"

template cudaError_t nvb::launch_linear_gemv<__half>(const nvb_linear_params&, const nvb_launch&);
