// What every program of tests/gpu/ needs of the device: calls that must succeed, and the device as launchers want it
// described.
#ifndef NVBACKEND_TESTS_GPU_DEVICE_H
#define NVBACKEND_TESTS_GPU_DEVICE_H

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "common/launch.h"

namespace gpu {

inline void must(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}
#define MUST(call) gpu::must(call, #call)

inline nvb_launch device_launch(cudaStream_t stream) {
  int device = 0, major = 0, minor = 0;
  nvb_launch launch = {};
  MUST(cudaGetDevice(&device));
  MUST(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MUST(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  MUST(cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  MUST(cudaDeviceGetAttribute(&launch.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  MUST(cudaDeviceGetAttribute(&launch.l2_bytes, cudaDevAttrL2CacheSize, device));
  launch.capability = 10 * major + minor;
  launch.stream = stream;
  return launch;
}

}  // namespace gpu

#endif
