// 16-byte vectors of f32, f16 and bf16 elements, conversion to and from f32, and streaming loads.
//
// Every 16-byte access needs a 16-byte aligned address: 4 elements of f32, 8 of f16 or bf16. `is_aligned16` is the test
// that launchers make before they choose a vector path.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace nvb {

// Elements of T in 16 bytes.
template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// The dtype code of an element type.
template <typename T>
inline constexpr uint32_t kDtype = 0;
template <>
inline constexpr uint32_t kDtype<float> = NVB_F32;
template <>
inline constexpr uint32_t kDtype<__half> = NVB_F16;
template <>
inline constexpr uint32_t kDtype<__nv_bfloat16> = NVB_BF16;

// Bytes of one element; 0 for a code that names no float dtype.
__host__ __device__ constexpr int float_dtype_bytes(uint32_t dtype) {
  return dtype == NVB_F32 ? 4 : dtype == NVB_F16 || dtype == NVB_BF16 ? 2 : 0;
}

// True if the address and every multiple of `stride` elements of `bytes` bytes from it are 16-byte aligned.
__host__ __device__ inline bool is_aligned16(const void* pointer, int64_t stride, int bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride * bytes)) % 16 == 0;
}

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Two 16-bit elements in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  // A bf16 is the upper half of an f32, so widening is a shift and a mask.
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The kVector<T> elements of 16 raw bytes as f32, and back.
template <typename T>
__device__ __forceinline__ void unpack16(const uint4& raw, float (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(raw.x), values[1] = __uint_as_float(raw.y);
    values[2] = __uint_as_float(raw.z), values[3] = __uint_as_float(raw.w);
  } else {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair<T>(words[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack16(const float (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
  } else {
    return make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                      pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
  }
}

// 16 bytes from and to global or shared memory.
__device__ __forceinline__ uint4 load16(const void* address) {
  return *static_cast<const uint4*>(address);
}
__device__ __forceinline__ void store16(void* address, const uint4& raw) {
  *static_cast<uint4*>(address) = raw;
}

// Loads 16 bytes and gives their kVector<T> elements as f32.
template <typename T>
__device__ __forceinline__ void load16_as_float(const T* address, float (&values)[kVector<T>]) {
  unpack16<T>(load16(address), values);
}
template <typename T>
__device__ __forceinline__ void store16_from_float(T* address, const float (&values)[kVector<T>]) {
  store16(address, pack16<T>(values));
}

// Asks for the line of global memory in L2, and does not wait.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// 16 bytes of global memory that nobody writes during the kernel and that are read once: past L1, and first in line to
// leave L2, so that a pass over the weights does not push out activations and the KV cache. Loads issue in program
// order.
__device__ __forceinline__ uint4 load16_streaming(const void* address) {
  uint4 raw;
#if __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(address), "l"(policy));
#else
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(address));
#endif
  return raw;
}

// One element of a tensor whose dtype is known at run time. The branch is uniform over the grid.
__device__ __forceinline__ float load_element(const void* base, uint32_t dtype, int64_t index) {
  if (dtype == NVB_F32) return static_cast<const float*>(base)[index];
  if (dtype == NVB_F16) return __half2float(static_cast<const __half*>(base)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
}
__device__ __forceinline__ void store_element(void* base, uint32_t dtype, int64_t index, float value) {
  if (dtype == NVB_F32) {
    static_cast<float*>(base)[index] = value;
  } else if (dtype == NVB_F16) {
    static_cast<__half*>(base)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(value);
  }
}

// `Count` neighbouring elements as one or two vectors, the dtype known at run time. The base is 16-byte aligned and the
// index a multiple of Count.
template <int Count>
__device__ __forceinline__ void load_elements(const void* base, uint32_t dtype, int64_t index, float (&values)[Count]) {
  static_assert(Count == 2 || Count == 4 || Count == 8, "a vector of 4, 8 or 16 bytes in the 16-bit dtypes");
  if (dtype == NVB_F32) {
    const float* address = static_cast<const float*>(base) + index;
    if constexpr (Count == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(address);
      values[0] = pair.x, values[1] = pair.y;
    } else {
#pragma unroll
      for (int i = 0; i < Count; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(address + i);
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
      }
    }
    return;
  }
  uint32_t words[Count / 2];
  const uint16_t* address = static_cast<const uint16_t*>(base) + index;
  if constexpr (Count == 2) {
    words[0] = *reinterpret_cast<const uint32_t*>(address);
  } else if constexpr (Count == 4) {
    const uint2 raw = *reinterpret_cast<const uint2*>(address);
    words[0] = raw.x, words[1] = raw.y;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(address);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  }
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    const float2 pair = dtype == NVB_F16 ? unpack_pair<__half>(words[i]) : unpack_pair<__nv_bfloat16>(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
template <int Count>
__device__ __forceinline__ void store_elements(void* base, uint32_t dtype, int64_t index,
                                               const float (&values)[Count]) {
  static_assert(Count == 2 || Count == 4 || Count == 8, "a vector of 4, 8 or 16 bytes in the 16-bit dtypes");
  if (dtype == NVB_F32) {
    float* address = static_cast<float*>(base) + index;
    if constexpr (Count == 2) {
      *reinterpret_cast<float2*>(address) = make_float2(values[0], values[1]);
    } else {
#pragma unroll
      for (int i = 0; i < Count; i += 4) {
        *reinterpret_cast<float4*>(address + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      }
    }
    return;
  }
  uint32_t words[Count / 2];
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    words[i] = dtype == NVB_F16 ? pack_pair<__half>(values[2 * i], values[2 * i + 1])
                                : pack_pair<__nv_bfloat16>(values[2 * i], values[2 * i + 1]);
  }
  uint16_t* address = static_cast<uint16_t*>(base) + index;
  if constexpr (Count == 2) {
    *reinterpret_cast<uint32_t*>(address) = words[0];
  } else if constexpr (Count == 4) {
    *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace nvb
