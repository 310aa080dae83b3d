// Bulk copies of data that is read once, by the copy engine of compute capability 9.0: global to shared memory,
// completed on a barrier of cluster.cuh, and global memory to L2. One thin wrapper each.
//
// Addresses and sizes are multiples of 16 bytes. One thread issues a copy, for as many threads as read what it brings.
#pragma once

#include "cluster.cuh"

namespace nvb {

// Orders what the grids before have written before this thread's bulk copies.
__device__ __forceinline__ void order_bulk_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// To shared memory, first in line to leave L2 afterwards.
__device__ __forceinline__ void bulk_copy_once(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// Into L2, and does not wait.
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

}  // namespace nvb
