// What makes operands of FP8 products in a kernel: matrices from and to shared memory, and numbers as bytes.
//
// Compute capability 9.0a; one thin wrapper each.
#pragma once

#include "wgmma.cuh"

namespace nvb {

// Four 8x8 matrices of 16-bit elements from shared memory, each transposed: ldmatrix_x4_trans of an address.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
#ifdef NVB_WGMMA
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
#endif
}

// And to shared memory: lane l gives the address of the 16-byte row l % 8 of matrix l / 8, and in r[i] the elements
// (lane / 4, 2 * (lane % 4) ..+1) of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&r)[4]) {
#ifdef NVB_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// Two numbers rounded to E4M3, the first in the low byte; what exceeds 448 becomes 448.
__device__ __forceinline__ uint16_t pack_e4m3(float first, float second) {
  uint16_t pair = 0;
#ifdef NVB_WGMMA
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

// Two pairs as a register.
__device__ __forceinline__ uint32_t join_pairs(uint16_t low, uint16_t high) {
  uint32_t joined = 0;
#ifdef NVB_WGMMA
  asm("mov.b32 %0, {%1, %2};" : "=r"(joined) : "h"(low), "h"(high));
#endif
  return joined;
}

}  // namespace nvb
