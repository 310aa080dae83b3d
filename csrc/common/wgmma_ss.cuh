// wgmma with both operands in shared memory, and the bulk tensor copies and cluster arrivals of a pipeline that feeds
// them. Compute capability 9.0a; one thin wrapper each.
//
// Either operand is rows of 128 bytes as wgmma_descriptor (wgmma.cuh) wants them, whatever its elements are: 64 of 16
// bits or 128 of 8. A product takes 32 bytes of each row, and the descriptor of the next 32 bytes is 2 more.
#pragma once

#include <cuda.h>

#include "wgmma.cuh"

namespace nvb {

// What the elements of the two operands are, x first.
enum class Operands { kF16, kBf16, kE4m3E4m3, kE4m3E5m2, kInt8 };

// Sums are f32, of Int8 i32.
template <Operands Kind>
struct OperandTraits {
  static constexpr bool kIntegers = Kind == Operands::kInt8;
  static constexpr int kElementBytes = Kind == Operands::kF16 || Kind == Operands::kBf16 ? 2 : 1;
};

#define NVB_8(m, c, d, i)                                                                                     \
  m(c, d, i), m(c, d, i + 1), m(c, d, i + 2), m(c, d, i + 3), m(c, d, i + 4), m(c, d, i + 5), m(c, d, i + 6), \
      m(c, d, i + 7)
#define NVB_64(m, c, d, i)                                                                                          \
  NVB_8(m, c, d, i), NVB_8(m, c, d, i + 8), NVB_8(m, c, d, i + 16), NVB_8(m, c, d, i + 24), NVB_8(m, c, d, i + 32), \
      NVB_8(m, c, d, i + 40), NVB_8(m, c, d, i + 48), NVB_8(m, c, d, i + 56)
#define NVB_SUM(c, d, i) c(d[i])

#define NVB_NAMES_4 "%0, %1, %2, %3"
#define NVB_NAMES_8 NVB_NAMES_4 ", %4, %5, %6, %7"
#define NVB_NAMES_16 NVB_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NVB_NAMES_32 NVB_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NVB_NAMES_64                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NVB_NAMES_128                                                                            \
  NVB_NAMES_64                                                                                   \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `constraint` is "+f" or "+r", `tail` the immediates after the predicate.
#define NVB_WGMMA_N128(constraint, instruction, tail)                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128" instruction \
               " {" NVB_NAMES_64 "}, %64, %65, p" tail ";\n}\n"                                             \
               : NVB_64(NVB_SUM, constraint, d, 0)                                                          \
               : "l"(a), "l"(b), "r"(accumulate))
#define NVB_WGMMA_N256(constraint, instruction, tail)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256" instruction \
               " {" NVB_NAMES_128 "}, %128, %129, p" tail ";\n}\n"                                           \
               : NVB_64(NVB_SUM, constraint, d, 0), NVB_64(NVB_SUM, constraint, d, 64)                       \
               : "l"(a), "l"(b), "r"(accumulate))

// The products are of 16-bit floats; the sums follow as arguments.
#define NVB_WGMMA_FEW(columns, instruction, names, operands, predicate, ...)                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns \
               "k16.f32." instruction " {" names "}, " operands ", p, 1, 1, 0, 0;\n}\n"                        \
               : __VA_ARGS__                                                                                   \
               : "l"(a), "l"(b), "r"(accumulate))
#define NVB_WGMMA_FEW_OF(instruction)                                                                             \
  if constexpr (Count == 4) {                                                                                     \
    NVB_WGMMA_FEW("8", instruction, NVB_NAMES_4, "%4, %5", "%6", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])); \
  } else if constexpr (Count == 8) {                                                                              \
    NVB_WGMMA_FEW("16", instruction, NVB_NAMES_8, "%8, %9", "%10", NVB_8(NVB_SUM, "+f", d, 0));                   \
  } else if constexpr (Count == 16) {                                                                             \
    NVB_WGMMA_FEW("32", instruction, NVB_NAMES_16, "%16, %17", "%18", NVB_8(NVB_SUM, "+f", d, 0),                 \
                  NVB_8(NVB_SUM, "+f", d, 8));                                                                    \
  } else {                                                                                                        \
    NVB_WGMMA_FEW("64", instruction, NVB_NAMES_32, "%32, %33", "%34", NVB_8(NVB_SUM, "+f", d, 0),                 \
                  NVB_8(NVB_SUM, "+f", d, 8), NVB_8(NVB_SUM, "+f", d, 16), NVB_8(NVB_SUM, "+f", d, 24));          \
  }

// d = a * b, plus d if `accumulate`, for 64 rows of a, 2 * Count rows of b and 32 bytes of either. Sum is float, or
// int32_t for Int8.
template <Operands Kind, typename Sum, int Count>
__device__ __forceinline__ void wgmma_ss(Sum (&d)[Count], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool kFew = Count == 4 || Count == 8 || Count == 16 || Count == 32;
  static_assert(Count == 64 || Count == 128 || (kFew && OperandTraits<Kind>::kElementBytes == 2),
                "128 or 256 rows of b, of 16-bit floats 8, 16, 32 and 64 as well");
#ifdef NVB_WGMMA
  if constexpr (kFew && Kind == Operands::kF16) {
    NVB_WGMMA_FEW_OF("f16.f16")
  } else if constexpr (kFew && Kind == Operands::kBf16) {
    NVB_WGMMA_FEW_OF("bf16.bf16")
  } else if constexpr (Kind == Operands::kF16) {
    if constexpr (Count == 64) {
      NVB_WGMMA_N128("+f", "k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else {
      NVB_WGMMA_N256("+f", "k16.f32.f16.f16", ", 1, 1, 0, 0");
    }
  } else if constexpr (Kind == Operands::kBf16) {
    if constexpr (Count == 64) {
      NVB_WGMMA_N128("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else {
      NVB_WGMMA_N256("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    }
  } else if constexpr (Kind == Operands::kE4m3E4m3) {
    if constexpr (Count == 64) {
      NVB_WGMMA_N128("+f", "k32.f32.e4m3.e4m3", ", 1, 1");
    } else {
      NVB_WGMMA_N256("+f", "k32.f32.e4m3.e4m3", ", 1, 1");
    }
  } else if constexpr (Kind == Operands::kE4m3E5m2) {
    if constexpr (Count == 64) {
      NVB_WGMMA_N128("+f", "k32.f32.e4m3.e5m2", ", 1, 1");
    } else {
      NVB_WGMMA_N256("+f", "k32.f32.e4m3.e5m2", ", 1, 1");
    }
  } else {
    if constexpr (Count == 64) {
      NVB_WGMMA_N128("+r", "k32.s32.s8.s8", "");
    } else {
      NVB_WGMMA_N256("+r", "k32.s32.s8.s8", "");
    }
  }
#endif
}

#undef NVB_8
#undef NVB_64
#undef NVB_SUM
#undef NVB_NAMES_4
#undef NVB_NAMES_8
#undef NVB_NAMES_16
#undef NVB_NAMES_32
#undef NVB_NAMES_64
#undef NVB_NAMES_128
#undef NVB_WGMMA_N128
#undef NVB_WGMMA_N256
#undef NVB_WGMMA_FEW
#undef NVB_WGMMA_FEW_OF

// A place in a ring of stages, and the parity of its round.
template <int Stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

// Keeps the compiler from moving integer sums over a wait, which does not name them.
template <int Count>
__device__ __forceinline__ void wgmma_fence_operand(int32_t (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
#ifdef NVB_WGMMA
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Copies the map's box from (byte, row) on and completes it on the barrier; what lies outside the matrix is zeros.
__device__ __forceinline__ void tensor_copy(void* shared, const CUtensorMap* map, int byte, int row,
                                            uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(byte), "r"(row), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Maps of three and of four dimensions: copies the box from its first coordinates on.
__device__ __forceinline__ void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z,
                                            uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
#endif
}
__device__ __forceinline__ void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z, int w,
                                            uint64_t* barrier) {
#ifdef NVB_WGMMA
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
#endif
}

// A box of two dimensions into every block of the cluster that `blocks` names, at the same address and on its barrier
// there.
__device__ __forceinline__ void tensor_copy_multicast(void* shared, const CUtensorMap* map, int byte, int row,
                                                      uint64_t* barrier, uint16_t blocks) {
#ifdef NVB_WGMMA
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(byte), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
#endif
}

// A thread's arrival at the barrier of another block of the cluster, at an address of cluster_address. Enough after
// reads that have ended (wgmma_wait); writes of this thread are not ordered for the other block, which would cost a
// fence of the whole device.
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
#ifdef NVB_WGMMA
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

}  // namespace nvb
