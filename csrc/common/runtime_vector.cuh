// Vectors of 8, 4 or 1 elements of tensors whose dtype is known at run time, for operations that move bytes and whose
// operands may each have another dtype. One kernel per width then serves every combination of dtypes.
//
// Width 8 is for 16-bit elements (16 bytes), width 4 for any (16 bytes of f32, 8 of f16 or bf16), width 1 for what is
// not aligned. With one width for all operands, neighbouring lanes touch neighbouring bytes in every one of them.
// Loading and unpacking are apart so that a thread can have several loads under way: the branch on the dtype would
// otherwise make each load wait for the conversion of the one before.
#pragma once

#include <initializer_list>

#include "vector.cuh"

namespace nvb {

// A [rows, columns] operand as the choice of the width sees it; a null pointer is an absent operand.
struct vector_operand {
  const void* pointer;
  int64_t stride;  // between rows, in elements
  uint32_t dtype;
};

// The widest vectors that divide `columns` and are naturally aligned in every row of every operand.
inline int widest_vector(int64_t columns, std::initializer_list<vector_operand> operands) {
  for (const int width : {8, 4}) {
    bool fits = columns % width == 0;
    for (const vector_operand& operand : operands) {
      if (operand.pointer == nullptr) continue;
      const int element = float_dtype_bytes(operand.dtype);
      const int bytes = width * element;
      const uint64_t offsets =
          reinterpret_cast<uintptr_t>(operand.pointer) | static_cast<uint64_t>(operand.stride * element);
      fits = fits && bytes <= 16 && offsets % bytes == 0;
    }
    if (fits) return width;
  }
  return 1;
}

// The address of element `index`.
__device__ __forceinline__ const void* element_address(const void* base, uint32_t dtype, int64_t index) {
  return static_cast<const char*>(base) + index * (dtype == NVB_F32 ? 4 : 2);
}

// The `Width` elements at `index`, as they lie in memory; the rest of the 16 bytes is zero.
template <int Width>
__device__ __forceinline__ uint4 load_raw(const void* base, uint32_t dtype, int64_t index) {
  static_assert(Width == 8 || Width == 4 || Width == 1, "widest_vector chooses among these");
  const void* address = element_address(base, Width == 8 ? NVB_F16 : dtype, index);
  uint4 raw = make_uint4(0, 0, 0, 0);
  if constexpr (Width == 8) {
    raw = load16(address);
  } else if constexpr (Width == 4) {
    if (dtype == NVB_F32) {
      raw = load16(address);
    } else {
      const uint2 low = *static_cast<const uint2*>(address);
      raw.x = low.x, raw.y = low.y;
    }
  } else {
    raw.x = dtype == NVB_F32 ? *static_cast<const uint32_t*>(address) : *static_cast<const uint16_t*>(address);
  }
  return raw;
}

template <int Width>
__device__ __forceinline__ void unpack_raw(const uint4& raw, uint32_t dtype, float (&values)[Width]) {
  if constexpr (Width == 8) {
    if (dtype == NVB_F16) {
      unpack16<__half>(raw, values);
    } else {
      unpack16<__nv_bfloat16>(raw, values);
    }
  } else if constexpr (Width == 4) {
    if (dtype == NVB_F32) {
      unpack16<float>(raw, values);
    } else {
      const float2 low = dtype == NVB_F16 ? unpack_pair<__half>(raw.x) : unpack_pair<__nv_bfloat16>(raw.x);
      const float2 high = dtype == NVB_F16 ? unpack_pair<__half>(raw.y) : unpack_pair<__nv_bfloat16>(raw.y);
      values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
    }
  } else {
    values[0] = dtype == NVB_F32   ? __uint_as_float(raw.x)
                : dtype == NVB_F16 ? unpack_pair<__half>(raw.x).x
                                   : unpack_pair<__nv_bfloat16>(raw.x).x;
  }
}

template <int Width>
__device__ __forceinline__ void load_vector(const void* base, uint32_t dtype, int64_t index, float (&values)[Width]) {
  unpack_raw<Width>(load_raw<Width>(base, dtype, index), dtype, values);
}

template <int Width>
__device__ __forceinline__ void store_vector(void* base, uint32_t dtype, int64_t index, const float (&values)[Width]) {
  if constexpr (Width == 8) {
    void* address = static_cast<uint16_t*>(base) + index;
    store16(address, dtype == NVB_F16 ? pack16<__half>(values) : pack16<__nv_bfloat16>(values));
  } else if constexpr (Width == 4) {
    if (dtype == NVB_F32) {
      store16_from_float<float>(static_cast<float*>(base) + index, values);
    } else {
      const bool half = dtype == NVB_F16;
      const uint2 pairs =
          make_uint2(half ? pack_pair<__half>(values[0], values[1]) : pack_pair<__nv_bfloat16>(values[0], values[1]),
                     half ? pack_pair<__half>(values[2], values[3]) : pack_pair<__nv_bfloat16>(values[2], values[3]));
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + index) = pairs;
    }
  } else {
    store_element(base, dtype, index, values[0]);
  }
}

}  // namespace nvb
