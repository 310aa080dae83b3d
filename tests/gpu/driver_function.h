// The driver's functions for programs that link the library's kernels without the library, once in a program.
#ifndef NVBACKEND_TESTS_GPU_DRIVER_FUNCTION_H
#define NVBACKEND_TESTS_GPU_DRIVER_FUNCTION_H

#include <cuda_runtime.h>

// The library finds the driver by itself (csrc/driver); here the runtime does.
extern "C" void* nvb_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
}

#endif
