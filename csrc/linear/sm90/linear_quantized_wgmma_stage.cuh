// A stage of linear_quantized_wgmma.cuh: 128 k of x and of up to 256 rows of W, how producers copy it into shared
// memory and how a warp of a consumer reads its 16 rows, in linear_quantized_wgmma_int4.cuh and _bytes.cuh.
#pragma once

#include "linear_quantized_wgmma_input.cuh"

namespace nvb {
namespace quantized {

constexpr int kProducers = 128;

// A barrier for the producers alone.
__device__ __forceinline__ void producer_barrier() {
  asm volatile("bar.sync 2, %0;" ::"n"(kProducers) : "memory");
}

__device__ __forceinline__ void copy4(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy16(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}

// (word & Mask) | bits as one instruction: it has room for one constant, so that `bits` has to be a register.
template <uint32_t Mask>
__device__ __forceinline__ uint32_t mask_or(uint32_t word, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(Mask), "r"(bits));
  return result;
}
// A constant that the compiler does not know to be one.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
  uint32_t result;
  asm volatile("mov.u32 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// W and its scales; GroupK is 0 for scales of rows, else 32, 64 or 128.
template <typename Weight, typename T, int GroupK, int Rows>
class WeightStage;

}  // namespace quantized
}  // namespace nvb
