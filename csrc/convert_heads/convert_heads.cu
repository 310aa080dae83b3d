// convert_heads: eight neighbouring elements a thread, sixteen for blocks of 512, so that a block of a head lies in at
// most 32 neighbouring lanes: pairs up to four (eight) elements apart meet in registers, those further apart by
// shuffles. A grid dimension has the heads; the blocks of one head share its tokens. Where scales are computed, a
// kernel in front reads the input as well and joins the largest magnitudes by atomic maxima, whose order does not
// matter; the second reading comes from L2 where the tensor fits it.
#include <algorithm>

#include "../common/fp8.cuh"
#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "convert_heads.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;

// The elements of one thread.
template <int Count>
struct head_part {
  float values[Count];
  uint32_t outer, inner;  // the token's places on both axes
  int first;              // its first element's place in the head
};

// Visits the parts of head blockIdx.y that this thread has. All lanes of a warp take part in each round, because they
// shuffle; those past the last token see `valid` as false.
template <int Count, typename Visit>
__device__ __forceinline__ void for_parts(const nvb_convert_heads_params& p, bool vectors, Visit visit) {
  // Divisions of 32 bits: the launcher refuses more parts of a head.
  const uint32_t parts = static_cast<uint32_t>(p.shape[3]) / Count;
  const uint32_t inner = static_cast<uint32_t>(p.shape[1]);
  const uint32_t total = static_cast<uint32_t>(p.shape[0]) * inner * parts;
  const int64_t head = blockIdx.y;
  const int lanes = static_cast<int>(p.block) / Count;  // that a block of the head lies in
  for (uint32_t base = blockIdx.x * kThreads; base < total; base += gridDim.x * kThreads) {
    const uint32_t at = base + threadIdx.x;
    const bool valid = at < total;
    head_part<Count> part = {};
    const uint32_t token = valid ? at / parts : 0;
    part.first = valid ? static_cast<int>(at - token * parts) * Count : 0;
    part.outer = p.shape[0] == 1 ? 0 : token / inner;
    part.inner = token - part.outer * inner;
    if (valid) {
      const int64_t from = part.outer * p.input_strides[0] + part.inner * p.input_strides[1] +
                           head * p.input_strides[2] + part.first * p.input_strides[3];
      if (vectors) {
#pragma unroll
        for (int i = 0; i < Count; i += 8) {
          float eight[8];
          load_elements<8>(p.input, p.input_dtype, from + i, eight);
#pragma unroll
          for (int j = 0; j < 8; ++j) part.values[i + j] = eight[j];
        }
      } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
          part.values[i] = load_element(p.input, p.input_dtype, from + i * p.input_strides[3]);
        }
      }
    }
    if (p.rotate) {
      const uint32_t signs = p.signs[part.first / 32] >> (part.first % 32);
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        part.values[i] = __uint_as_float(__float_as_uint(part.values[i]) ^ (signs >> i & 1u) << 31);
      }
#pragma unroll
      for (int distance = 1; distance < Count; distance *= 2) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
          if (i & distance) continue;
          const float low = part.values[i], high = part.values[i + distance];
          part.values[i] = low + high, part.values[i + distance] = low - high;
        }
      }
      for (int distance = 1; distance < lanes; distance *= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
          const float other = __shfl_xor_sync(0xffffffffu, part.values[i], distance);
          part.values[i] = upper ? other - part.values[i] : part.values[i] + other;
        }
      }
#pragma unroll
      for (int i = 0; i < Count; ++i) part.values[i] *= p.factor;
    }
    visit(valid, part);
  }
}

__global__ void clear_scales_kernel(float* scales, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) scales[i] = 0.0f;
}

template <int Count>
__global__ void __launch_bounds__(kThreads) head_scales_kernel(const nvb_convert_heads_params p, bool vectors) {
  // As bits, which grow as magnitudes do; those of NaN are above all of them.
  uint32_t most = 0;
  for_parts<Count>(p, vectors, [&](bool, const head_part<Count>& part) {
#pragma unroll
    for (int i = 0; i < Count; ++i) most = max(most, __float_as_uint(part.values[i]) & 0x7fffffffu);
  });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  __shared__ uint32_t of_warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) most = max(most, of_warps[warp]);
  // The quotient grows with the magnitude, so the largest quotient is that of the largest.
  const uint32_t scale = __float_as_uint(__uint_as_float(most) / p.largest) & 0x7fffffffu;
  atomicMax(reinterpret_cast<unsigned*>(p.scales) + blockIdx.y / p.heads_per_scale, scale);
}

template <int Count>
__global__ void __launch_bounds__(kThreads)
    convert_heads_kernel(const nvb_convert_heads_params p, bool vectors, bool vector_stores) {
  const bool floats = float_dtype_bytes(p.output_dtype) != 0;
  const float scale = p.scales ? p.scales[blockIdx.y / p.heads_per_scale] : 1.0f;
  for_parts<Count>(p, vectors, [&](bool valid, head_part<Count>& part) {
    if (!valid) return;
    if (p.scales) {
#pragma unroll
      for (int i = 0; i < Count; ++i) part.values[i] = scale == 0.0f ? 0.0f : part.values[i] / scale;
    }
    const int64_t to = part.outer * p.output_strides[0] + part.inner * p.output_strides[1] +
                       blockIdx.y * p.output_strides[2] + part.first * p.output_strides[3];
#pragma unroll
    for (int i = 0; i < Count; i += 8) {
      float eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = part.values[i + j];
      if (vector_stores) {
        if (floats) {
          store_elements<8>(p.output, p.output_dtype, to + i, eight);
        } else {
          store_fp8<8>(p.output, p.output_dtype, to + i, eight);
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int64_t place = to + (i + j) * p.output_strides[3];
        if (floats) {
          store_element(p.output, p.output_dtype, place, eight[j]);
        } else {
          const float one[1] = {eight[j]};
          store_fp8<1>(p.output, p.output_dtype, place, one);
        }
      }
    }
  });
}

// Whether eight elements at multiples of eight of a head lie in whole vectors of `bytes` bytes.
bool in_vectors(const void* data, const int64_t (&shape)[4], const int64_t (&strides)[4], int element, int bytes) {
  if (strides[3] != 1) return false;
  uintptr_t all = reinterpret_cast<uintptr_t>(data);
  for (int axis = 0; axis < 3; ++axis) {
    if (shape[axis] > 1) all |= static_cast<uintptr_t>(strides[axis] * element);
  }
  return all % static_cast<uintptr_t>(bytes) == 0;
}

template <int Count>
cudaError_t launch_parts(const nvb_convert_heads_params& p, const nvb_launch& launch) {
  const int64_t total = p.shape[0] * p.shape[1] * (p.shape[3] / Count);
  // At most eight blocks a multiprocessor: the threads of long inputs have several parts each, and few maxima meet in
  // one place.
  const int64_t most =
      std::max<int64_t>(1, ceiling_divide(8 * static_cast<int64_t>(launch.multiprocessors), p.shape[2]));
  const dim3 grid(static_cast<unsigned>(std::min(ceiling_divide(total, kThreads), most)),
                  static_cast<unsigned>(p.shape[2]));
  const bool vectors = in_vectors(p.input, p.shape, p.input_strides, float_dtype_bytes(p.input_dtype), 16);
  const int bytes = kv_dtype_bytes(p.output_dtype);
  const bool vector_stores = in_vectors(p.output, p.shape, p.output_strides, bytes, bytes == 1 ? 8 : 16);
  if (p.write_scales) {
    clear_scales_kernel<<<1, kThreads, 0, launch.stream>>>(p.scales, p.shape[2] / p.heads_per_scale);
    head_scales_kernel<Count><<<grid, kThreads, 0, launch.stream>>>(p, vectors);
  }
  convert_heads_kernel<Count><<<grid, kThreads, 0, launch.stream>>>(p, vectors, vector_stores);
  return cudaGetLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_convert_heads(const nvb_convert_heads_params* params,
                                              const nvb_launch* launch) noexcept {
  const nvb_convert_heads_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::kv_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  // A thread's step past the last part stays within 32 bits.
  if (p.shape[2] > 65535 || p.block > 512 || p.shape[0] * p.shape[1] * (p.shape[3] / 8) > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (p.shape[0] * p.shape[1] == 0) {
    if (p.write_scales) {
      nvb::clear_scales_kernel<<<1, nvb::kThreads, 0, launch->stream>>>(p.scales, p.shape[2] / p.heads_per_scale);
    }
    return cudaGetLastError();
  }
  return p.block == 512 ? nvb::launch_parts<16>(p, *launch) : nvb::launch_parts<8>(p, *launch);
}
