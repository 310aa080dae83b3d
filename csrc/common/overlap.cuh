// Kernels that start while the one before them in the stream still runs (programmatic dependent launch, from 9.0 on).
//
// A kernel launched by `launch_overlapped` calls `wait_for_previous_grid`, in every block, before it reads what the one
// before wrote and before it writes anything: a block that left without would let the next grid pass the one before.
// The one before calls `allow_next_grid` where its blocks leave room for the next. Elsewhere both do nothing.
#pragma once

#include <utility>

#include "launch.h"

namespace nvb {

__device__ __forceinline__ void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For kernels that leave room from their first instruction: the next grid comes while this one waits and works.
__device__ __forceinline__ void begin_overlapped() {
  allow_next_grid();
  wait_for_previous_grid();
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                              const nvb_launch* launch, Arguments&&... arguments) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch->stream;
  config.attrs = &overlap;
  config.numAttrs = launch->capability >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace nvb
