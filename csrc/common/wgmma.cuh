// Warpgroup matrix products (wgmma) of compute capability 9.0a with the first operand in registers, and what a kernel
// of producer and consumer warps around them needs: registers to trade, bulk copies, arrivals. One thin wrapper each.
//
// A warpgroup is four warps that start at a multiple of four; warp w of it holds rows 16 w ..+15 of the 64 rows, in the
// fragments of mma.cuh: a[4] as for m16n8k16 (tf32: m16n8k8), and d[4 j ..+3] the m16n8 fragment of columns 8 j ..+7.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "cluster.cuh"
#include "mma.cuh"
#include "vector.cuh"

namespace nvb {

// The kernels that use this file have code for 9.0a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NVB_WGMMA 1
#endif

// The second operand in shared memory: `n` rows of 64 elements of 16 bits or 32 of 32 bits, 128 bytes each, with
// 16-byte piece i of row r at i ^ (r % 8). Eight rows are contiguous and 1024-byte aligned, and the next eight lie
// `eight_rows` bytes on. The descriptor of k = 0; the next instruction's k is 2 more.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* shared, uint32_t eight_rows = 1024) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<uint64_t>(eight_rows >> 4) << 32 | (1ull << 16) |
         ((shared_address(shared) & 0x3ffff) >> 4);
}

// Orders this warpgroup's writes of a and d before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
#ifdef NVB_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifdef NVB_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most `Pending` of the youngest committed groups run.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef NVB_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

// Keeps the compiler from moving reads and writes of d over a wait, which does not name them.
template <int Count>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int Count>
__device__ __forceinline__ void wgmma_fence_operand(uint32_t (&a)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Registers that a warp of this warpgroup may hold from here on; all four warps take part.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
#ifdef NVB_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
#ifdef NVB_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

// A thread's arrival, which makes its reads before it happen before the phase ends.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives when this thread's cp.async copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// A barrier for the first `Threads` threads of the block.
template <int Threads>
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

// Orders what this thread has seen written before its bulk copies.
__device__ __forceinline__ void fence_before_bulk_copies() {
#ifdef NVB_WGMMA
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Copies bytes (a multiple of 16, both addresses 16-byte aligned) and completes them on the barrier.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

#ifdef NVB_WGMMA
// One instruction, for all types; widths differ in the list of d alone. Operands of 8 and 32 bits cannot be transposed.
#define NVB_WGMMA_TEXT(TYPE, TRANSPOSE, COLUMNS, SUMS, OPERANDS, PREDICATE)                       \
  "{\n"                                                                                           \
  ".reg .pred p;\n"                                                                               \
  "setp.ne.b32 p, " PREDICATE                                                                     \
  ", 0;\n"                                                                                        \
  "wgmma.mma_async.sync.aligned.m64n" COLUMNS TYPE " {" SUMS "}, " OPERANDS ", p, 1, 1" TRANSPOSE \
  ";\n"                                                                                           \
  "}\n"
#define NVB_WGMMA_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
#define NVB_WGMMA_SUMS8(I)                                                                                    \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])
#define NVB_WGMMA_PRODUCT(COLUMNS, SUMS, OPERANDS, PREDICATE, ...)                              \
  if constexpr (kDtype<T> == NVB_BF16) {                                                        \
    asm volatile(NVB_WGMMA_TEXT("k16.f32.bf16.bf16", ", 0", COLUMNS, SUMS, OPERANDS, PREDICATE) \
                 : __VA_ARGS__                                                                  \
                 : NVB_WGMMA_INPUTS);                                                           \
  } else if constexpr (kDtype<T> == NVB_F16) {                                                  \
    asm volatile(NVB_WGMMA_TEXT("k16.f32.f16.f16", ", 0", COLUMNS, SUMS, OPERANDS, PREDICATE)   \
                 : __VA_ARGS__                                                                  \
                 : NVB_WGMMA_INPUTS);                                                           \
  } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                      \
    asm volatile(NVB_WGMMA_TEXT("k32.f32.e4m3.e4m3", "", COLUMNS, SUMS, OPERANDS, PREDICATE)    \
                 : __VA_ARGS__                                                                  \
                 : NVB_WGMMA_INPUTS);                                                           \
  } else if constexpr (std::is_same_v<T, __nv_fp8_e5m2>) {                                      \
    asm volatile(NVB_WGMMA_TEXT("k32.f32.e5m2.e4m3", "", COLUMNS, SUMS, OPERANDS, PREDICATE)    \
                 : __VA_ARGS__                                                                  \
                 : NVB_WGMMA_INPUTS);                                                           \
  } else {                                                                                      \
    asm volatile(NVB_WGMMA_TEXT("k8.f32.tf32.tf32", "", COLUMNS, SUMS, OPERANDS, PREDICATE)     \
                 : __VA_ARGS__                                                                  \
                 : NVB_WGMMA_INPUTS);                                                           \
  }
#define NVB_WGMMA_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NVB_WGMMA_NAMES16 NVB_WGMMA_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NVB_WGMMA_NAMES32 \
  NVB_WGMMA_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#endif

// d = a * b, plus d if `accumulate`, with f32 accumulation, for 64 rows, 2 * Count columns and 16 k. T is __half or
// __nv_bfloat16; or float, of which the last 13 bits do not count, for 8 k; or the FP8 type of a, with b in E4M3, for
// 32 k, added with about 14 bits.
template <typename T, int Count>
__device__ __forceinline__ void wgmma_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(Count == 8 || Count == 16 || Count == 32, "16, 32 or 64 columns");
#ifdef NVB_WGMMA
  if constexpr (Count == 8) {
    NVB_WGMMA_PRODUCT("16", NVB_WGMMA_NAMES8, "{%8, %9, %10, %11}, %12", "%13", NVB_WGMMA_SUMS8(0))
  } else if constexpr (Count == 16) {
    NVB_WGMMA_PRODUCT("32", NVB_WGMMA_NAMES16, "{%16, %17, %18, %19}, %20", "%21", NVB_WGMMA_SUMS8(0),
                      NVB_WGMMA_SUMS8(8))
  } else {
    NVB_WGMMA_PRODUCT("64", NVB_WGMMA_NAMES32, "{%32, %33, %34, %35}, %36", "%37", NVB_WGMMA_SUMS8(0),
                      NVB_WGMMA_SUMS8(8), NVB_WGMMA_SUMS8(16), NVB_WGMMA_SUMS8(24))
  }
#endif
}

#ifdef NVB_WGMMA
#undef NVB_WGMMA_PRODUCT
#undef NVB_WGMMA_TEXT
#undef NVB_WGMMA_INPUTS
#undef NVB_WGMMA_SUMS8
#undef NVB_WGMMA_NAMES8
#undef NVB_WGMMA_NAMES16
#undef NVB_WGMMA_NAMES32
#endif

}  // namespace nvb
