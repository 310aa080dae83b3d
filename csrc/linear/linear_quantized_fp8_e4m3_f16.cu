#include "linear_quantized_bytes.cuh"

template cudaError_t nvb::quantized::launch_fp8_e4m3<__half>(const nvb_linear_quantized_params&, const nvb_launch&,
                                                             Tokens);
