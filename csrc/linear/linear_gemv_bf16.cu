// linear_gemv for weights in BF16.
#include "linear_gemv.cuh"

template cudaError_t nvb::launch_linear_gemv<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&);
