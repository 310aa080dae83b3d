// The tensor-core prefill kernels for F16 queries, keys and values.
#include "attention_prefill_mma.cuh"

namespace nvb {

cudaError_t launch_prefill_mma_f16(const PrefillArguments& arguments, SharedClass shared, int blocks,
                                   cudaStream_t stream) {
  return launch_prefill_mma<__half>(arguments, shared, blocks, stream);
}

}  // namespace nvb
