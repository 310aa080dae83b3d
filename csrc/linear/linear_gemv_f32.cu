// linear_gemv for weights in F32.
#include "linear_gemv.cuh"

template cudaError_t nvb::launch_linear_gemv<float>(const nvb_linear_params&, const nvb_launch&);
