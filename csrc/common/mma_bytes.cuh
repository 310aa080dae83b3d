// mma.sync over bytes, sums of whole numbers, from compute capability 8.0 on; and copies of fewer than 16 bytes.
#pragma once

#include "mma.cuh"

namespace nvb {

// cp_async16 of which the first `bytes` are read, 0 to 16, and zero bytes written in the place of the others.
__device__ __forceinline__ void cp_async16_part(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
#else
  for (int i = 0; i < 16; ++i)
    static_cast<uint8_t*>(shared)[i] = i < bytes ? static_cast<const uint8_t*>(global)[i] : 0;
#endif
}

// d = c + a * b for 16 rows, 8 columns and 32 k of whole numbers: b's are signed bytes, a's bytes with a sign where
// `Signed`. With lane = 4 * group + quad, four neighbouring k a word:
//   a[0] = A[group][4 * quad ..+3]  a[1] = A[group + 8][same]  a[2], a[3] the same with k + 16
//   b0 = B[4 * quad ..+3][group]    b1 with k + 16             d as of m16n8k16
template <bool Signed>
__device__ __forceinline__ void mma_m16n8k32_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                   const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
#define NVB_MMA(A)                                                   \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." A                     \
      ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, " \
      "%11, %12, %13};"                                              \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
  if constexpr (Signed) {
    NVB_MMA("s8");
  } else {
    NVB_MMA("u8");
  }
#undef NVB_MMA
#endif
}

// The same for 16 k, of which a has the first two words and b the first.
template <bool Signed>
__device__ __forceinline__ void mma_m16n8k16_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b,
                                                   const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
#define NVB_MMA(A)                                                                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.s32." A ".s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};" \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                          \
      : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
  if constexpr (Signed) {
    NVB_MMA("s8");
  } else {
    NVB_MMA("u8");
  }
#undef NVB_MMA
#endif
}

}  // namespace nvb
