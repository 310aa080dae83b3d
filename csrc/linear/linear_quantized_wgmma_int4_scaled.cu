#include "linear_quantized_wgmma_launch.cuh"

template cudaError_t nvb::quantized::launch_wgmma_encoding<NVB_INT4, nvb::quantized::ScaledF16>(
    const nvb_linear_quantized_params&, const nvb_launch&, const WgmmaPlan&);
