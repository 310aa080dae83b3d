// In the place of csrc/common/wgmma_widths.cuh.
#pragma once

#include <cuda_fp8.h>

#include "wgmma_ss.cuh"

namespace nvb {

inline constexpr uint64_t kTransposedStep = 16 * 128 >> 4;
inline uint64_t wgmma_descriptor_transposed(const void* shared, uint32_t next_columns) {
  return 1ull << 62 | static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(next_columns >> 4) << 16 |
         (shared_address(shared) & 0x3ffff) >> 4;
}

inline void named_barrier_sync(int barrier, int threads) {
  emulated::named_sync(barrier, threads);
}
inline void named_barrier_arrive(int barrier, int threads) {
  emulated::named_arrive(barrier, threads);
}

inline void fence_shared_before_products() {
  emulated::proxy_fence();
}

template <typename T>
float float_of_bits(uint16_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return to_float(value);
}

template <typename T, int Count>
void wgmma_ss_rows(float (&d)[Count], uint64_t a, uint64_t b, int accumulate) {
  emulated::product(d, nullptr, a, b, 2 * Count, false, accumulate != 0, {2, float_of_bits<T>, float_of_bits<T>});
}
template <typename T, int Count>
void wgmma_rs_transposed(float (&d)[Count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulated::product(d, a, 0, b, 2 * Count, true, accumulate != 0, {2, float_of_bits<T>, float_of_bits<T>});
}

template <typename T>
float float_of_byte(uint16_t bits) {
  T value;
  value.__x = static_cast<__nv_fp8_storage_t>(bits);
  return static_cast<float>(value);
}

template <typename T, int Count>
void wgmma_ss_fp8(float (&d)[Count], uint64_t a, uint64_t b, int accumulate) {
  emulated::product(d, nullptr, a, b, 2 * Count, false, accumulate != 0, {1, float_of_byte<T>, float_of_byte<T>});
}
template <typename T, int Count>
void wgmma_rs_fp8(float (&d)[Count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulated::product(d, a, 0, b, 2 * Count, false, accumulate != 0, {1, float_of_byte<__nv_fp8_e4m3>, float_of_byte<T>});
}

}  // namespace nvb
