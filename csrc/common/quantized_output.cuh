// The steps of a kernel that leaves rows in 8 bits: the largest magnitude of a row, its scale, its values.
#pragma once

#include "quantized_encode.cuh"
#include "quantized_output.h"

namespace nvb {

// Bits of magnitudes are ordered as the magnitudes are, with NaN above all.
template <int Width>
__device__ __forceinline__ uint32_t largest_bits(const float (&values)[Width], uint32_t most) {
#pragma unroll
  for (int i = 0; i < Width; ++i) most = max(most, __float_as_uint(values[i]) & 0x7fffffffu);
  return most;
}

// Over the blockDim.x threads of a row, as row_max of row_block.cuh; each receives the result.
__device__ __forceinline__ uint32_t row_largest_bits(uint32_t most, uint32_t* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  if (blockDim.x > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    most = lane < blockDim.x / 32 ? scratch[lane] : 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  return most;
}

// Stores the row's scale, which the first of its threads does, unless it is given; returns what its values are
// multiplied by.
__device__ __forceinline__ float store_row_scale(const nvb_quantized_output& output, int64_t row, uint32_t most) {
  if (output.given_scales) return inverse_of(output.scales[row]);
  const float magnitude = __uint_as_float(most);
  const float scale = output.encoding == NVB_INT8 ? scale_for<NVB_INT8>(magnitude) : scale_for<NVB_FP8_E4M3>(magnitude);
  if (threadIdx.x == 0) output.scales[row] = scale;
  return inverse_of(scale);
}

// Stores the quantised values of Width neighbours that lie inside the row.
template <int Width>
__device__ __forceinline__ void store_codes(const nvb_quantized_output& output, int64_t row, int64_t column,
                                            float inverse, const float (&values)[Width]) {
  static_assert(Width == 1 || Width == 4 || Width == 8, "a byte, a word or two");
  unsigned char* const codes = static_cast<unsigned char*>(output.data) + row * output.row_bytes + column;
  if constexpr (Width == 1) {
    const float value = values[0] * inverse;
    *codes = static_cast<unsigned char>(output.encoding == NVB_INT8 ? encode_byte<NVB_INT8>(value)
                                                                    : encode_byte<NVB_FP8_E4M3>(value));
  } else {
    uint32_t words[Width / 4];
#pragma unroll
    for (int w = 0; w < Width / 4; ++w) {
      float scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = values[4 * w + i] * inverse;
      words[w] = output.encoding == NVB_INT8
                     ? encode_pair<NVB_INT8>(scaled[0], scaled[1]) | encode_pair<NVB_INT8>(scaled[2], scaled[3]) << 16
                     : encode_pair<NVB_FP8_E4M3>(scaled[0], scaled[1]) | encode_pair<NVB_FP8_E4M3>(scaled[2], scaled[3])
                                                                             << 16;
    }
    if ((reinterpret_cast<uintptr_t>(output.data) | static_cast<uintptr_t>(output.row_bytes)) % Width == 0) {
      if constexpr (Width == 4) {
        *reinterpret_cast<uint32_t*>(codes) = words[0];
      } else {
        *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) codes[i] = static_cast<unsigned char>(words[i / 4] >> (8 * (i % 4)));
    }
  }
}

}  // namespace nvb
