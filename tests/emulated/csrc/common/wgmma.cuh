// In the place of csrc/common/wgmma.cuh and what it includes: the same names, run by block.h.
#pragma once

#include "block.h"
#include "vector.cuh"

#define NVB_WGMMA 1

namespace nvb {

inline uint32_t shared_address(const void* pointer) {
  return emulated::shared_address(pointer);
}

inline uint64_t wgmma_descriptor(const void* shared, uint32_t eight_rows = 1024) {
  return 1ull << 62 | static_cast<uint64_t>(eight_rows >> 4) << 32 | 1ull << 16 |
         (shared_address(shared) & 0x3ffff) >> 4;
}

inline void wgmma_fence() {
  emulated::product_fence();
}
inline void wgmma_commit() {
  emulated::product_commit();
}
template <int Pending>
void wgmma_wait() {
  emulated::product_wait(Pending);
}
// The compiler knows here that a wait may write what a product was given.
template <int Count>
void wgmma_fence_operand(float (&)[Count]) {}

template <int Count>
void setmaxnreg_inc() {
  emulated::trade_registers(Count, true);
}
template <int Count>
void setmaxnreg_dec() {
  emulated::trade_registers(Count, false);
}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  emulated::barrier_init(barrier, arrivals);
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* barrier) {
  emulated::barrier_arrive(barrier, 0);
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  emulated::barrier_arrive(barrier, bytes);
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  emulated::barrier_wait(barrier, parity);
}

}  // namespace nvb
