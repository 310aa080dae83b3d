#include "linear_quantized_decode.cuh"

template cudaError_t nvb::quantized::launch_decode_int4<__nv_bfloat16>(const nvb_linear_quantized_params&,
                                                                       const nvb_launch&);
