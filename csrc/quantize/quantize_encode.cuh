// Scales and quantised values, and where the rows of a weight come from: the pieces of all quantising kernels.
#pragma once

#include <math_constants.h>

#include "../common/quantized_element.cuh"
#include "../common/quantized_encode.cuh"
#include "../common/reduce.cuh"
#include "quantize.h"

namespace nvb {
namespace quantize {

// The host side of each kernel family, for quantize.cu. Parameters are valid.
cudaError_t launch_rows(const nvb_quantize_params& params, const nvb_launch& launch);
cudaError_t launch_groups(const nvb_quantize_params& params, const nvb_launch& launch);
cudaError_t launch_blocks(const nvb_quantize_params& params, const nvb_launch& launch);
cudaError_t launch_int4(const nvb_quantize_params& params, const nvb_launch& launch);

struct SourceRow {
  const void* data;
  int part;
  bool vectors;  // four elements from a multiple of four on can be loaded at once
};

__device__ __forceinline__ SourceRow source_row(const nvb_quantize_params& p, int64_t row) {
  int part = 0;
  if (p.gated) {
    part = static_cast<int>(row % 2);
    row /= 2;
  } else {
    while (part + 1 < static_cast<int>(p.part_count) && row >= p.parts[part].rows) row -= p.parts[part++].rows;
  }
  const int bytes = p.input_dtype == NVB_F32 ? 4 : 2;
  const char* const data = static_cast<const char*>(p.parts[part].data) + row * p.parts[part].stride * bytes;
  return {data, part, reinterpret_cast<uintptr_t>(data) % (4 * bytes) == 0};
}

// Columns k .. k + 3 of a source row; `fill` past the last column.
__device__ __forceinline__ void load_four_sources(const nvb_quantize_params& p, const SourceRow& row, int64_t k,
                                                  float fill, float (&values)[4]) {
  if (row.vectors && k + 4 <= p.matrix.columns) {
    if (p.input_dtype == NVB_F32) {
      load16_as_float(static_cast<const float*>(row.data) + k, values);
    } else {
      const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(row.data) + k);
      const bool half = p.input_dtype == NVB_F16;
      const float2 low = half ? unpack_pair<__half>(raw.x) : unpack_pair<__nv_bfloat16>(raw.x);
      const float2 high = half ? unpack_pair<__half>(raw.y) : unpack_pair<__nv_bfloat16>(raw.y);
      values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = k + i < p.matrix.columns ? load_element(row.data, p.input_dtype, k + i) : fill;
  }
}

// A scale as it is stored: to nearest, but away from zero where f16 has few digits left, or the largest values would be
// clipped by more than half a step.
__device__ __forceinline__ __half stored_scale(float value) {
  const __half near = __float2half_rn(value);
  const bool clips = fabsf(__half2float(near)) < fabsf(value) && fabsf(value) < 0x1p-14f;
  return clips ? __ushort_as_half(static_cast<unsigned short>(__half_as_ushort(near) + 1)) : near;
}

// The value of a code, scale not applied.
template <uint32_t Encoding>
__device__ __forceinline__ float decode_byte(uint32_t code) {
  if constexpr (Encoding == NVB_INT8) {
    return static_cast<float>(static_cast<int8_t>(code));
  } else {
    return decode_fp8<Encoding>(code);
  }
}

// What a thread has found and lost. In f64: squares of small values are less than f32 holds.
class Findings {
 public:
  __device__ __forceinline__ explicit Findings(nvb_quantize_report* report) : report_(report) {}

  __device__ __forceinline__ void add(float source, float value) {
    const double lost = static_cast<double>(value - source), wanted = static_cast<double>(source);
    difference_ = fma(lost, lost, difference_);
    norm_ = fma(wanted, wanted, norm_);
    if (!(fabsf(source) < CUDART_INF_F)) flags_ |= NVB_QUANTIZE_NOT_FINITE;
  }
  __device__ __forceinline__ void check_scale(float stored) {
    if (!(fabsf(stored) < CUDART_INF_F)) flags_ |= NVB_QUANTIZE_SCALE_OVERFLOW;
  }
  // All lanes of the warp take part.
  __device__ __forceinline__ void report() const {
    const double all_difference = sum_over_warp(difference_), all_norm = sum_over_warp(norm_);
    const uint32_t all_flags = or_over_warp(flags_);
    if (threadIdx.x % 32 != 0) return;
    atomicAdd(&report_->difference, all_difference);
    atomicAdd(&report_->norm, all_norm);
    if (all_flags != 0) atomicOr(&report_->flags, all_flags);
  }

 private:
  static __device__ __forceinline__ double sum_over_warp(double value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
  }
  static __device__ __forceinline__ uint32_t or_over_warp(uint32_t value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value |= __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
  }

  nvb_quantize_report* const report_;
  double difference_ = 0.0;
  double norm_ = 0.0;
  uint32_t flags_ = 0;
};

// Encodes four neighbours into one word.
template <uint32_t Encoding>
__device__ __forceinline__ uint32_t encode_four(const float (&values)[4], float scale, int64_t k, int64_t columns,
                                                Findings& findings) {
  const float inverse = inverse_of(scale);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (k + i >= columns) break;
    const uint32_t code = encode_byte<Encoding>(values[i] * inverse);
    word |= code << (8 * i);
    // Rounded as dequantising rounds it, not inside the subtraction.
    findings.add(values[i], __fmul_rn(scale, decode_byte<Encoding>(code)));
  }
  return word;
}

__device__ __forceinline__ float magnitude_of(const float (&values)[4]) {
  return fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
}

}  // namespace quantize
}  // namespace nvb
