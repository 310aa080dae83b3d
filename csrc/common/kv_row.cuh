// Rows of keys and values that have scales of their own: NVB_KV_INT8, NVB_KV_Q8_0 and NVB_KV_Q4_0 of launch.h.
//
// A row, the key or value of `dim` elements of one token and head, is bytes, of which strides count too:
//
//   values   a signed byte an element; Q4_0: 16 bytes for 32 elements, i in the low and i + 16 in the high half of byte
//   i scales   from the next multiple of 4 on, one f32 (INT8) or an f16 for every 32 elements zeros    up to a multiple
//   of 16, at which every row begins, so that bulk copies bring rows with their scales
//
// An element is scale * value, of Q4_0 scale * (half - 8). src/tensor/kv_row.rs has the rounding, which this shares bit
// for bit.
#pragma once

#include <cuda_fp16.h>

#include "launch.h"

namespace nvb {

inline constexpr int kKvBlock = 32;

__host__ __device__ constexpr bool is_kv_row(uint32_t dtype) {
  return dtype == NVB_KV_INT8 || dtype == NVB_KV_Q8_0 || dtype == NVB_KV_Q4_0;
}
__host__ __device__ constexpr int kv_value_bytes(uint32_t dtype, int dim) {
  return dtype == NVB_KV_Q4_0 ? (dim + kKvBlock - 1) / kKvBlock * (kKvBlock / 2) : dim;
}
__host__ __device__ constexpr int kv_scales_at(uint32_t dtype, int dim) {
  return (kv_value_bytes(dtype, dim) + 3) / 4 * 4;
}
__host__ __device__ constexpr int kv_row_bytes(uint32_t dtype, int dim) {
  const int scales = dtype == NVB_KV_INT8 ? 4 : (dim + kKvBlock - 1) / kKvBlock * 2;
  return (kv_scales_at(dtype, dim) + scales + 15) / 16 * 16;
}

__device__ __forceinline__ float kv_row_element(const uint8_t* row, uint32_t dtype, int dim, int column) {
  const uint8_t* const scales = row + kv_scales_at(dtype, dim);
  if (dtype == NVB_KV_INT8) {
    return static_cast<float>(static_cast<int8_t>(row[column])) * *reinterpret_cast<const float*>(scales);
  }
  const float scale = __half2float(reinterpret_cast<const __half*>(scales)[column / kKvBlock]);
  if (dtype == NVB_KV_Q8_0) return static_cast<float>(static_cast<int8_t>(row[column])) * scale;
  const int place = column % kKvBlock;
  const uint8_t two = row[column / kKvBlock * (kKvBlock / 2) + place % (kKvBlock / 2)];
  return (static_cast<float>(place < kKvBlock / 2 ? two & 15 : two >> 4) - 8.0f) * scale;
}

// The scale of a block in f16, as a float.
__device__ __forceinline__ float half_kv_scale(float scale) {
  return __half2float(__float2half_rn(fminf(fmaxf(scale, -65504.0f), 65504.0f)));
}

// Rounds `dim` elements to a row, by `lanes` neighbouring lanes of a warp, a power of two, of which this is `lane`;
// `mask` names them. `values` is shared memory that they have written before a __syncwarp.
__device__ __forceinline__ void store_kv_row(uint8_t* row, uint32_t dtype, const float* values, int dim, int lane,
                                             int lanes, uint32_t mask) {
  const int block = dtype == NVB_KV_INT8 ? dim : kKvBlock;
  uint8_t* const scales = row + kv_scales_at(dtype, dim);
  for (int first = 0; first < dim; first += block) {
    const int count = min(block, dim - first);
    // The largest magnitude, and of two the positive one; NaN above infinities above all others.
    uint32_t most = 0;
    for (int i = lane; i < count; i += lanes) {
      const uint32_t bits = __float_as_uint(values[first + i]);
      most = max(most, bits << 1 | (bits >> 31 == 0 ? 1u : 0u));
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(mask, most, offset));
    const float largest = __uint_as_float(most >> 1 | ((most & 1) ^ 1) << 31);
    const bool finite = most >> 1 < 0x7f800000u;
    float scale = 0.0f;
    if (dtype == NVB_KV_INT8) {
      scale = fabsf(largest) / 127.0f;
      if (lane == 0) *reinterpret_cast<uint32_t*>(scales) = finite ? __float_as_uint(scale) : 0x7fc00000u;
    } else {
      scale = half_kv_scale(dtype == NVB_KV_Q8_0 ? fabsf(largest) / 127.0f : largest / -8.0f);
      if (lane == 0) {
        reinterpret_cast<uint16_t*>(scales)[first / kKvBlock] =
            finite ? __half_as_ushort(__float2half_rn(scale)) : uint16_t{0x7e00};
      }
    }
    const bool divides = finite && scale != 0.0f;
    if (dtype != NVB_KV_Q4_0) {
      for (int i = lane; i < count; i += lanes) {
        const float value = fminf(fmaxf(rintf(values[first + i] / scale), -127.0f), 127.0f);
        row[first + i] = static_cast<uint8_t>(divides ? static_cast<int>(value) : 0);
      }
      continue;
    }
    const auto half_of = [&](int i) -> uint32_t {
      if (i >= count || !divides) return 8;
      return static_cast<uint32_t>(fminf(fmaxf(floorf(values[first + i] / scale + 8.5f), 0.0f), 15.0f));
    };
    for (int i = lane; i < kKvBlock / 2; i += lanes) {
      row[first / 2 + i] = static_cast<uint8_t>(half_of(i) | half_of(i + kKvBlock / 2) << 4);
    }
  }
  const int scale_bytes = dtype == NVB_KV_INT8 ? 4 : (dim + kKvBlock - 1) / kKvBlock * 2;
  for (int i = kv_value_bytes(dtype, dim) + lane; i < kv_scales_at(dtype, dim); i += lanes) row[i] = 0;
  for (int i = kv_scales_at(dtype, dim) + scale_bytes + lane; i < kv_row_bytes(dtype, dim); i += lanes) row[i] = 0;
}

}  // namespace nvb
