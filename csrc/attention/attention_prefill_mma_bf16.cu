// The tensor-core prefill kernels for BF16 queries, keys and values.
#include "attention_prefill_mma.cuh"

namespace nvb {

cudaError_t launch_prefill_mma_bf16(const PrefillArguments& arguments, SharedClass shared, int blocks,
                                    cudaStream_t stream) {
  return launch_prefill_mma<__nv_bfloat16>(arguments, shared, blocks, stream);
}

}  // namespace nvb
