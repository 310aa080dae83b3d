// wgmma of 16-bit floats and of FP8 for more widths than a product of matrices takes: the first operand in shared
// memory or in registers, the second with its k along rows or, of 16-bit floats, down columns. And barriers that some
// of a block's warps share.
//
// Compute capability 9.0a; one thin wrapper each. The fragments are those of wgmma.cuh.
#pragma once

#include "wgmma_ss.cuh"

namespace nvb {

// A second operand of `width` columns whose k runs down the rows: 64 columns of a row are 128 bytes, with 16-byte piece
// i of row r at i ^ (r % 8); eight rows are contiguous and 1024-byte aligned, the next eight follow them, and the next
// 64 columns lie `next_columns` bytes on. The descriptor of the next 16 rows is kTransposedStep more.
inline constexpr uint64_t kTransposedStep = 16 * 128 >> 4;
__device__ __forceinline__ uint64_t wgmma_descriptor_transposed(const void* shared, uint32_t next_columns) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4;
  return kSwizzle128 | kEightRows << 32 | static_cast<uint64_t>(next_columns >> 4) << 16 |
         ((shared_address(shared) & 0x3ffff) >> 4);
}

// Waits until `threads` threads, whole warps, have come to the barrier; `named_barrier_arrive` comes and does not wait.
// Barrier 0 is that of __syncthreads, and there are 16.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Orders what this thread has written to shared memory before products of threads that it tells of it.
__device__ __forceinline__ void fence_shared_before_products() {
#ifdef NVB_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#ifdef NVB_WGMMA
#define NVB_D8(I)                                                                                             \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])
#define NVB_D16(I) NVB_D8(I), NVB_D8(I + 8)
#define NVB_D32(I) NVB_D16(I), NVB_D16(I + 16)
#define NVB_D64(I) NVB_D32(I), NVB_D32(I + 32)
#define NVB_NAMES32                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define NVB_NAMES40 NVB_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NVB_NAMES48 NVB_NAMES40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NVB_NAMES56 NVB_NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NVB_NAMES64 NVB_NAMES56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NVB_NAMES80 \
  NVB_NAMES64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NVB_NAMES88                                                                                        \
  NVB_NAMES64                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87"
#define NVB_NAMES96 NVB_NAMES88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NVB_NAMES112 \
  NVB_NAMES96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NVB_NAMES128                                                                                                 \
  NVB_NAMES96                                                                                                        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define NVB_PRODUCT(COLUMNS, TYPES, NAMES, OPERANDS, PREDICATE, TAIL, INPUTS, ...)                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " PREDICATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" COLUMNS TYPES \
               " {" NAMES "}, " OPERANDS ", p, " TAIL ";\n}\n"                                                       \
               : __VA_ARGS__                                                                                         \
               : INPUTS, "r"(accumulate))
#define NVB_PRODUCT_OF(COLUMNS, NAMES, OPERANDS, PREDICATE, TAIL, INPUTS, ...)                                       \
  if constexpr (kDtype<T> == NVB_F16) {                                                                              \
    NVB_PRODUCT(COLUMNS, "k16.f32.f16.f16", NAMES, OPERANDS, PREDICATE, TAIL, NVB_WGMMA_LIST INPUTS, __VA_ARGS__);   \
  } else {                                                                                                           \
    NVB_PRODUCT(COLUMNS, "k16.f32.bf16.bf16", NAMES, OPERANDS, PREDICATE, TAIL, NVB_WGMMA_LIST INPUTS, __VA_ARGS__); \
  }
#define NVB_FP8_PRODUCT_OF(A_TYPE, COLUMNS, NAMES, OPERANDS, PREDICATE, INPUTS, ...)                                   \
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                                                    \
    NVB_PRODUCT(COLUMNS, "k32.f32.e4m3.e4m3", NAMES, OPERANDS, PREDICATE, "1, 1", NVB_WGMMA_LIST INPUTS, __VA_ARGS__); \
  } else {                                                                                                             \
    NVB_PRODUCT(COLUMNS, "k32.f32." A_TYPE ".e5m2", NAMES, OPERANDS, PREDICATE, "1, 1", NVB_WGMMA_LIST INPUTS,         \
                __VA_ARGS__);                                                                                          \
  }
#define NVB_WGMMA_LIST(...) __VA_ARGS__
#define NVB_IN_SHARED ("l"(a), "l"(b))
#define NVB_IN_REGISTERS ("r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define NVB_SHARED_TAIL "1, 1, 0, 0"
#define NVB_TRANSPOSED_TAIL "1, 1, 1"
#endif

// d = a * b, plus d if `accumulate`: 64 rows of a, `2 * Count` rows of b, 32 bytes of either, both with k along rows.
template <typename T, int Count>
__device__ __forceinline__ void wgmma_ss_rows(float (&d)[Count], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kDtype<T> == NVB_F16 || kDtype<T> == NVB_BF16, "16-bit floats");
#ifdef NVB_WGMMA
  if constexpr (Count == 32) {
    NVB_PRODUCT_OF("64", NVB_NAMES32, "%32, %33", "%34", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D32(0))
  } else if constexpr (Count == 40) {
    NVB_PRODUCT_OF("80", NVB_NAMES40, "%40, %41", "%42", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D32(0), NVB_D8(32))
  } else if constexpr (Count == 48) {
    NVB_PRODUCT_OF("96", NVB_NAMES48, "%48, %49", "%50", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D32(0), NVB_D16(32))
  } else if constexpr (Count == 56) {
    NVB_PRODUCT_OF("112", NVB_NAMES56, "%56, %57", "%58", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D32(0), NVB_D16(32),
                   NVB_D8(48))
  } else if constexpr (Count == 64) {
    NVB_PRODUCT_OF("128", NVB_NAMES64, "%64, %65", "%66", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D64(0))
  } else {
    static_assert(Count == 88, "64, 80, 96, 112, 128 or 176 rows of b");
    NVB_PRODUCT_OF("176", NVB_NAMES88, "%88, %89", "%90", NVB_SHARED_TAIL, NVB_IN_SHARED, NVB_D64(0), NVB_D16(64),
                   NVB_D8(80))
  }
#endif
}

// The same with 64 rows and 16 k of a in registers and the k of b, `2 * Count` columns, down its columns.
template <typename T, int Count>
__device__ __forceinline__ void wgmma_rs_transposed(float (&d)[Count], const uint32_t (&a)[4], uint64_t b,
                                                    int accumulate) {
  static_assert(kDtype<T> == NVB_F16 || kDtype<T> == NVB_BF16, "16-bit floats");
#ifdef NVB_WGMMA
  if constexpr (Count == 32) {
    NVB_PRODUCT_OF("64", NVB_NAMES32, "{%32, %33, %34, %35}, %36", "%37", NVB_TRANSPOSED_TAIL, NVB_IN_REGISTERS,
                   NVB_D32(0))
  } else if constexpr (Count == 48) {
    NVB_PRODUCT_OF("96", NVB_NAMES48, "{%48, %49, %50, %51}, %52", "%53", NVB_TRANSPOSED_TAIL, NVB_IN_REGISTERS,
                   NVB_D32(0), NVB_D16(32))
  } else if constexpr (Count == 64) {
    NVB_PRODUCT_OF("128", NVB_NAMES64, "{%64, %65, %66, %67}, %68", "%69", NVB_TRANSPOSED_TAIL, NVB_IN_REGISTERS,
                   NVB_D64(0))
  } else if constexpr (Count == 96) {
    NVB_PRODUCT_OF("192", NVB_NAMES96, "{%96, %97, %98, %99}, %100", "%101", NVB_TRANSPOSED_TAIL, NVB_IN_REGISTERS,
                   NVB_D64(0), NVB_D32(64))
  } else {
    static_assert(Count == 128, "64, 96, 128, 192 or 256 columns of b");
    NVB_PRODUCT_OF("256", NVB_NAMES128, "{%128, %129, %130, %131}, %132", "%133", NVB_TRANSPOSED_TAIL, NVB_IN_REGISTERS,
                   NVB_D64(0), NVB_D64(64))
  }
#endif
}

// The two products of FP8, 32 k each, with both operands' k along rows. T is the dtype of b and, in shared memory, of
// a; a is E4M3 in registers: those of thread 4 g + q hold k 4 q ..+3 of the rows g and g + 8, then k 16 + 4 q ..+3.
// Sums are kept with about 14 bits while they are added to.
template <typename T, int Count>
__device__ __forceinline__ void wgmma_ss_fp8(float (&d)[Count], uint64_t a, uint64_t b, int accumulate) {
#ifdef NVB_WGMMA
  if constexpr (Count == 64) {
    NVB_FP8_PRODUCT_OF("e5m2", "128", NVB_NAMES64, "%64, %65", "%66", NVB_IN_SHARED, NVB_D64(0))
  } else if constexpr (Count == 80) {
    NVB_FP8_PRODUCT_OF("e5m2", "160", NVB_NAMES80, "%80, %81", "%82", NVB_IN_SHARED, NVB_D64(0), NVB_D16(64))
  } else if constexpr (Count == 96) {
    NVB_FP8_PRODUCT_OF("e5m2", "192", NVB_NAMES96, "%96, %97", "%98", NVB_IN_SHARED, NVB_D64(0), NVB_D32(64))
  } else {
    static_assert(Count == 112, "128, 160, 192 or 224 rows of b");
    NVB_FP8_PRODUCT_OF("e5m2", "224", NVB_NAMES112, "%112, %113", "%114", NVB_IN_SHARED, NVB_D64(0), NVB_D32(64),
                       NVB_D16(96))
  }
#endif
}
template <typename T, int Count>
__device__ __forceinline__ void wgmma_rs_fp8(float (&d)[Count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
#ifdef NVB_WGMMA
  if constexpr (Count == 32) {
    NVB_FP8_PRODUCT_OF("e4m3", "64", NVB_NAMES32, "{%32, %33, %34, %35}, %36", "%37", NVB_IN_REGISTERS, NVB_D32(0))
  } else if constexpr (Count == 64) {
    NVB_FP8_PRODUCT_OF("e4m3", "128", NVB_NAMES64, "{%64, %65, %66, %67}, %68", "%69", NVB_IN_REGISTERS, NVB_D64(0))
  } else {
    static_assert(Count == 128, "64, 128 or 256 rows of b");
    NVB_FP8_PRODUCT_OF("e4m3", "256", NVB_NAMES128, "{%128, %129, %130, %131}, %132", "%133", NVB_IN_REGISTERS,
                       NVB_D64(0), NVB_D64(64))
  }
#endif
}

#ifdef NVB_WGMMA
#undef NVB_D8
#undef NVB_D16
#undef NVB_D32
#undef NVB_D64
#undef NVB_NAMES32
#undef NVB_NAMES40
#undef NVB_NAMES48
#undef NVB_NAMES56
#undef NVB_NAMES64
#undef NVB_NAMES80
#undef NVB_NAMES88
#undef NVB_NAMES96
#undef NVB_NAMES112
#undef NVB_NAMES128
#undef NVB_PRODUCT
#undef NVB_PRODUCT_OF
#undef NVB_FP8_PRODUCT_OF
#undef NVB_WGMMA_LIST
#undef NVB_IN_SHARED
#undef NVB_IN_REGISTERS
#undef NVB_SHARED_TAIL
#undef NVB_TRANSPOSED_TAIL
#endif

}  // namespace nvb
