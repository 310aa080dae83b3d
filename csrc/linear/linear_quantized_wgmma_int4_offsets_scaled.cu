#include "linear_quantized_wgmma_launch.cuh"

template cudaError_t nvb::quantized::launch_wgmma_int4_offsets<nvb::quantized::ScaledF16>(
    const nvb_linear_quantized_params&, const nvb_launch&, const WgmmaPlan&);
