#include "linear_quantized_decode.cuh"

template cudaError_t nvb::quantized::launch_decode_fp8<__half>(const nvb_linear_quantized_params&, const nvb_launch&);
