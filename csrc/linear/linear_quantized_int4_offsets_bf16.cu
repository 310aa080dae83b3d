#include "linear_quantized_int4.cuh"

template cudaError_t nvb::quantized::launch_int4_offsets<__nv_bfloat16>(const nvb_linear_quantized_params&,
                                                                        const nvb_launch&, Tokens);
