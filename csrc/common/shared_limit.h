// The limits of a kernel: of its dynamic shared memory, which is 48 KiB until somebody raises it, and of the blocks of
// a cluster, which is 8.
//
// Raising one is a call of the runtime, a quarter of what queueing a short kernel costs, and holds as long as the
// context. So each thread remembers which kernels it has raised in which context. Contexts have numbers, because a
// context that ended may have its successor at the same address.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

// The number of the context that is current in this thread from now on, of which no two are alike; 0 at first: none.
extern "C" void nvb_cuda_set_context(uint64_t number) noexcept;

// Lets `kernel` have `bytes` of dynamic shared memory in this context: always the same for one kernel, or threads would
// lower each other's limit.
extern "C" cudaError_t nvb_cuda_raise_shared_limit(const void* kernel, int32_t bytes) noexcept;

// Lets `kernel` have clusters of up to 16 blocks in this context, where the device has places for them
// (cluster_places.h).
extern "C" cudaError_t nvb_cuda_raise_cluster_limit(const void* kernel) noexcept;
