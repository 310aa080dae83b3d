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

// In clusters of `cluster` blocks; of one block, which is none, everywhere, of more from 9.0 on alone.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, dim3 block,
                                       size_t shared_bytes, const nvb_launch* launch, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch->stream;
  config.attrs = attributes;
  config.numAttrs = launch->capability < 90 ? 0 : cluster.x * cluster.y * cluster.z == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                              const nvb_launch* launch, Arguments&&... arguments) {
  return launch_overlapped_clusters(kernel, grid, dim3(1), block, shared_bytes, launch,
                                    std::forward<Arguments>(arguments)...);
}

}  // namespace nvb
