// What every program of tests/gpu/ needs of the device: calls that must succeed, and the device as launchers want it
// described.
#ifndef NVBACKEND_TESTS_GPU_DEVICE_H
#define NVBACKEND_TESTS_GPU_DEVICE_H

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

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

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* data = nullptr;
  MUST(cudaMalloc(&data, values.size() * sizeof(T)));
  MUST(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// SplitMix64 (Steele et al. 2014).
inline uint64_t random_bits(uint64_t index) {
  uint64_t bits = (index + 1) * 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return bits ^ bits >> 31;
}

}  // namespace gpu

#endif
