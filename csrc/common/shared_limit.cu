// What shared_limit.h remembers, by thread.
#include "shared_limit.h"

namespace {

struct Raised {
  const void* kernel;
  cudaFuncAttribute limit;
  uint64_t context;
};

// An engine's step has a dozen kernels that need it; one that takes another's place is raised again.
constexpr uintptr_t kPlaces = 64;

thread_local uint64_t current_context = 0;
thread_local Raised raised[kPlaces] = {};

cudaError_t raise(const void* kernel, cudaFuncAttribute limit, int value) {
  const auto address = reinterpret_cast<uintptr_t>(kernel);
  Raised& place = raised[(address >> 4 ^ address >> 10 ^ static_cast<uintptr_t>(limit)) % kPlaces];
  const bool is_raised = place.kernel == kernel && place.limit == limit && place.context == current_context;
  if (current_context != 0 && is_raised) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, limit, value);
  if (error == cudaSuccess) place = {kernel, limit, current_context};
  return error;
}

}  // namespace

extern "C" void nvb_cuda_set_context(uint64_t number) noexcept {
  current_context = number;
}

extern "C" cudaError_t nvb_cuda_raise_shared_limit(const void* kernel, int32_t bytes) noexcept {
  return raise(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

extern "C" cudaError_t nvb_cuda_raise_cluster_limit(const void* kernel) noexcept {
  return raise(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}
