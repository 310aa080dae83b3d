// Elements of 8 bits as keys and values lie in a cache (launch.h has their dtypes), as C++ types beside __half.
#pragma once

#include "kv_row.cuh"
#include "quantized_element.cuh"
#include "quantized_encode.cuh"

namespace nvb {

struct fp8_e4m3 {
  uint8_t code;
};
struct fp8_e5m2 {
  uint8_t code;
};

__device__ __forceinline__ float to_float(fp8_e4m3 value) {
  return decode_fp8<NVB_FP8_E4M3>(value.code);
}
__device__ __forceinline__ float to_float(fp8_e5m2 value) {
  return decode_fp8<NVB_FP8_E5M2>(value.code);
}

// Bytes of an element of a cache, 1 of the bytes of a row with scales (kv_row.cuh); 0 for a dtype that no cache has.
__host__ __device__ constexpr int kv_dtype_bytes(uint32_t dtype) {
  return dtype == NVB_F8_E4M3 || dtype == NVB_F8_E5M2 || is_kv_row(dtype) ? 1 : float_dtype_bytes(dtype);
}

// Stores `Width` neighbours, each to the nearest, ties to even, saturated; 8 of them at an address of a multiple of 8.
template <int Width>
__device__ __forceinline__ void store_fp8(void* base, uint32_t dtype, int64_t index, const float (&values)[Width]) {
  static_assert(Width == 1 || Width == 8, "a byte, or 8");
  const bool e4m3 = dtype == NVB_F8_E4M3;
  uint32_t words[(Width + 3) / 4] = {};
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    words[i / 4] |= (e4m3 ? encode_byte<NVB_FP8_E4M3>(values[i]) : encode_byte<NVB_FP8_E5M2>(values[i])) << (i % 4 * 8);
  }
  uint8_t* const address = static_cast<uint8_t*>(base) + index;
  if constexpr (Width == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
    *address = static_cast<uint8_t>(words[0]);
  }
}

}  // namespace nvb
