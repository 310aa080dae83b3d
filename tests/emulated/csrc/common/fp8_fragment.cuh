// In the place of csrc/common/fp8_fragment.cuh.
#pragma once

#include <cuda_fp8.h>

#include "wgmma.cuh"

namespace nvb {

inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  emulated::load_matrices_transposed(r, row);
}
inline void store_matrices(uint32_t row, const uint32_t (&r)[4]) {
  emulated::store_matrices(row, r);
}

inline uint16_t pack_e4m3(float first, float second) {
  const uint32_t high = __nv_cvt_float_to_fp8(second, __NV_SATFINITE, __NV_E4M3);
  return static_cast<uint16_t>(high << 8 | __nv_cvt_float_to_fp8(first, __NV_SATFINITE, __NV_E4M3));
}
inline uint32_t join_pairs(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(high) << 16 | low;
}

}  // namespace nvb
