// The rope kernel that takes every case; rope.h has the formula, shapes and dtypes, rope.cu the launcher, rope_many.cuh
// the kernel for many tokens of 16-bit heads.
//
// A block takes one token and some of its heads (queries, keys, then values), up to 256 lanes; every head has 4 to 32
// lanes. A lane holds kItems pairs of vectors of `Width` elements: i .. and i + r/2 .. of the rotated part, or two
// neighbours of the rest. Width is 8 where extents, strides and addresses allow, else 1. The block finds sine and
// cosine of the token's angles once, for all its heads, while 16-bit inputs are on their way to registers.
//
// Shared memory: 2 KiB of sines and cosines. Registers: 4 * Width * kItems, at most 64 for kBlocks; the stack is that
// of sincosf, which reduces angles above 105,615 in memory.
#pragma once

#include "../common/fp8.cuh"
#include "../common/kv_placement.cuh"
#include "../common/programmatic_launch.cuh"
#include "../common/vector.cuh"
#include "rope.h"

namespace nvb {
namespace rope {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // on a multiprocessor, so that loads of some cover the sines of others
constexpr int kMaxHeadDim = 512;
constexpr int kMaxRowDim = 576;
constexpr unsigned kFewTokens = 16;

// A block reads its arguments by lines of 64 bytes, the first of them before anything else. `lane_bits` lies in front:
// behind the placement it cost a line of its own, 1 to 2 % of one token.
struct Arguments {
  int32_t lane_bits;  // a head has 2 ^ lane_bits lanes, at most 32
  int32_t padding;
  nvb_rope_params params;
  float inverse_frequency[kMaxHeadDim / 2];
};
static_assert(sizeof(Arguments) <= 4096, "drivers before 12.1 take at most 4096 bytes of kernel arguments");

template <int Width>
__device__ __forceinline__ void load_vector(const void* base, uint32_t dtype, int64_t index, float (&values)[Width]) {
  if constexpr (Width == 1) {
    values[0] = load_element(base, dtype, index);
  } else if (dtype == NVB_F32) {
    float half[4];
    load16_as_float(static_cast<const float*>(base) + index, half);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = half[i];
    load16_as_float(static_cast<const float*>(base) + index + 4, half);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[4 + i] = half[i];
  } else if (dtype == NVB_F16) {
    load16_as_float(static_cast<const __half*>(base) + index, values);
  } else {
    load16_as_float(static_cast<const __nv_bfloat16*>(base) + index, values);
  }
}

template <int Width>
__device__ __forceinline__ void store_vector(void* base, uint32_t dtype, int64_t index, const float (&values)[Width]) {
  if constexpr (Width == 1) {
    store_element(base, dtype, index, values[0]);
  } else if (dtype == NVB_F32) {
    const float low[4] = {values[0], values[1], values[2], values[3]};
    const float high[4] = {values[4], values[5], values[6], values[7]};
    store16_from_float(static_cast<float*>(base) + index, low);
    store16_from_float(static_cast<float*>(base) + index + 4, high);
  } else if (dtype == NVB_F16) {
    store16_from_float(static_cast<__half*>(base) + index, values);
  } else {
    store16_from_float(static_cast<__nv_bfloat16*>(base) + index, values);
  }
}

// Elements from the first of a cache's head to those of a token inside it; negative: it has no place. Not `Placed`:
// tokens lie one after the other, which is known without a look at the placement.
template <bool Placed>
__device__ __forceinline__ int64_t cache_place(const nvb_rope_params& p, int slot, int position) {
  if (!Placed || !is_placed(p.placement)) return slot * p.cache_slot_stride + position * p.cache_token_stride;
  const bool paged = p.placement.pages != nullptr;
  const uint32_t row = kv_row(p.placement, p.placement.pages + slot * p.placement.page_row_stride, position);
  if (row == kNoRow) return -1;
  return (paged ? 0 : slot * p.cache_slot_stride) + kv_offset(p.placement.block_stride, row, p.cache_token_stride);
}

// Kernel arguments as global memory: neighbouring lanes that read neighbouring arguments would take turns at the
// constant cache otherwise.
__device__ __forceinline__ float load_frequency(const Arguments& arguments, int i) {
  float value;
  asm("ld.f32 %0, [%1];" : "=f"(value) : "l"(&arguments.inverse_frequency[i]));
  return value;
}

// Prefetch: all inputs are 16-bit vectors, and are fetched before the angles are known. Placed: the cache may have
// pages or rings. Constant: nothing that runs beside this writes norms or positions (constant_reads.h), so factors and
// angles are there before the grid in front has finished.
//
// What stands before the wait otherwise depends on the arguments alone, and is found while the kernel before this one
// still runs. On an H200, in a graph of such kernels, one token with 8 and 4 heads of 256 takes 1.35 µs (1.73 with the
// wait in front of all), with norms and append 2.12 (2.57); of that 0.02 and 0.1 come from not being `Placed`. Norms
// that were fetched together with the elements saved 0.1 µs at one token, and cost as much without norms and 0.3 at 512
// tokens.
//
// Rows: the caches hold rows with scales of their own (kv_row.cuh), for which the lanes of a head put its elements into
// shared memory; heads may have 576 elements then.
template <int Width, bool Prefetch, bool Placed, bool Constant, bool Rows = false>
__global__ void __launch_bounds__(kThreads, kBlocks) rope_kernel(const __grid_constant__ Arguments arguments) {
  static_assert(!Constant || Prefetch, "other inputs take the registers that the factors would");
  static_assert(!Prefetch || Width == 8, "what is fetched early is 16 bytes of 16-bit elements");
  constexpr int kWidest = Rows ? kMaxRowDim : kMaxHeadDim;
  constexpr int kItems = (kWidest / 2 + Width * 32 - 1) / (Width * 32);
  // A block's lanes hold no more elements than its heads have: 8 heads of 32 lanes, or more of fewer lanes.
  __shared__ float elements[Rows ? kThreads / 32 * kMaxRowDim : 1];
  __shared__ __align__(16) float cosines[kMaxHeadDim / 2];
  __shared__ __align__(16) float sines[kMaxHeadDim / 2];
  allow_next_grid();
  const nvb_rope_params& p = arguments.params;
  const int half = p.rotary_dim / 2;

  // Which token and head. Lanes without one still take part in the shuffles.
  const int64_t token = blockIdx.x;
  const int lanes = 1 << arguments.lane_bits;
  const int lane = threadIdx.x & (lanes - 1);
  const int row = (blockIdx.y * blockDim.x + threadIdx.x) >> arguments.lane_bits;
  const int query_rows = p.query != nullptr ? p.query_heads : 0;
  const int key_rows = p.key != nullptr ? p.kv_heads : 0;
  const int value_rows = p.value_cache != nullptr ? p.kv_heads : 0;
  const bool valid = row < query_rows + key_rows + value_rows;
  const bool is_query = row < query_rows;
  const bool is_key = !is_query && row < query_rows + key_rows;
  const int head = is_query ? row : is_key ? row - query_rows : row - query_rows - key_rows;
  const void* source = is_query ? p.query : is_key ? p.key : p.value;
  const uint32_t source_dtype = is_query ? p.query_dtype : is_key ? p.key_dtype : p.value_dtype;
  const int64_t token_stride = is_query ? p.query_token_stride : is_key ? p.key_token_stride : p.value_token_stride;
  const int64_t head_stride = is_query ? p.query_head_stride : is_key ? p.key_head_stride : p.value_head_stride;
  const int64_t start = token * token_stride + head * head_stride;

  // Where this lane's vectors lie.
  int column[kItems][2];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = i * lanes + lane;
    const bool rotated = item * Width < half;
    column[i][0] = rotated ? item * Width : item * 2 * Width;
    column[i][1] = rotated ? half + item * Width : (item * 2 + 1) * Width;
  }

  // The norm's factors.
  const void* norm = is_query ? p.query_norm : is_key ? p.key_norm : nullptr;
  const uint32_t norm_dtype = is_query ? p.query_norm_dtype : p.key_norm_dtype;
  float weight[Constant ? kItems : 1][2][Width] = {};
  if constexpr (Constant) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (norm != nullptr && column[i][j] < p.head_dim) load_vector(norm, norm_dtype, column[i][j], weight[i][j]);
      }
    }
  }

  // Frequencies, where the token stands, and its angles.
  float frequency = threadIdx.x < half ? load_frequency(arguments, threadIdx.x) : 0.0f;
  const bool is_cached = p.key_cache != nullptr;
  int position = 0, slot = 0;
  const auto find_angles = [&] {
    position = p.positions[token];
    slot = is_cached && p.slots != nullptr ? p.slots[token] : 0;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
      if (i != threadIdx.x) frequency = load_frequency(arguments, i);
      sincosf(static_cast<float>(position) * frequency * p.position_scale, &sines[i], &cosines[i]);
    }
  };

#if __CUDA_ARCH__ >= 900
  // What may be written is asked for in L2, which is right whoever writes it: a step has driven the factors out. Of
  // many tokens the first ones' loads do that, and the rest would ask for nothing: 4,096 take 34.3 us so and 25.4
  // without.
  if (Prefetch && !Constant && gridDim.x <= kFewTokens) {
    const int norm_bytes = norm_dtype == NVB_F32 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (norm == nullptr || column[i][j] >= p.head_dim) continue;
        prefetch_l2(static_cast<const char*>(norm) + column[i][j] * norm_bytes);
      }
    }
    prefetch_l2(p.positions + token);
    if (is_cached && p.slots != nullptr) prefetch_l2(p.slots + token);
  }
#endif
  if constexpr (Constant) find_angles();
  wait_for_previous_grid();

  uint4 raw[kItems][2] = {};
  if constexpr (Prefetch) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (valid && column[i][j] < p.head_dim) {
          raw[i][j] = load16(static_cast<const uint16_t*>(source) + start + column[i][j]);
        }
      }
    }
  }

  // In this order and after the elements: the compiler widens a position or moves it to a uniform register as soon as
  // it has asked for it, and what is asked for later waits for it.
  if constexpr (!Constant) find_angles();
  __syncthreads();

  // The head's elements.
  float x[kItems][2][Width] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (Prefetch) {
        if (source_dtype == NVB_F16) {
          unpack16<__half>(raw[i][j], x[i][j]);
        } else {
          unpack16<__nv_bfloat16>(raw[i][j], x[i][j]);
        }
      } else if (valid && column[i][j] < p.head_dim) {
        load_vector(source, source_dtype, start + column[i][j], x[i][j]);
      }
    }
  }

  // Norm.
  if (p.query_norm != nullptr || p.key_norm != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < Width; ++e) squares += x[i][j][e] * x[i][j][e];
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    const float inverse = rsqrtf(squares / static_cast<float>(p.head_dim) + p.epsilon);
    if (norm != nullptr) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (column[i][j] >= p.head_dim) continue;
          float factors[Width];
          if constexpr (!Constant) load_vector(norm, norm_dtype, column[i][j], factors);
#pragma unroll
          for (int e = 0; e < Width; ++e) {
            x[i][j][e] = x[i][j][e] * inverse * (p.weight_offset + (Constant ? weight[i][j][e] : factors[e]));
          }
        }
      }
    }
  }
  if (!valid) return;

  // Rotate; the rest of the head is left alone.
  if (is_query || is_key) {
    const float scale = is_query ? p.query_scale : 1.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int first_angle = (i * lanes + lane) * Width;
      if (first_angle < half) {
        float cosine[Width];
        float sine[Width];
        load_vector(cosines, NVB_F32, first_angle, cosine);
        load_vector(sines, NVB_F32, first_angle, sine);
#pragma unroll
        for (int e = 0; e < Width; ++e) {
          const float first = x[i][0][e];
          const float second = x[i][1][e];
          x[i][0][e] = first * cosine[e] - second * sine[e];
          x[i][1][e] = second * cosine[e] + first * sine[e];
        }
      }
#pragma unroll
      for (int e = 0; e < Width; ++e) {
        x[i][0][e] *= scale;
        x[i][1][e] *= scale;
      }
    }
  }

  // Store, and append.
  void* output = is_query ? p.query_output : is_key ? p.key_output : nullptr;
  const uint32_t output_dtype = is_query ? p.query_output_dtype : p.key_output_dtype;
  const int64_t output_token_stride = is_query ? p.query_output_token_stride : p.key_output_token_stride;
  const int64_t output_head_stride = is_query ? p.query_output_head_stride : p.key_output_head_stride;
  const int64_t output_start = token * output_token_stride + head * output_head_stride;
  void* cache = nullptr;
  int64_t cache_start = 0;
  const bool quantizes = p.cache_dtype == NVB_F8_E4M3 || p.cache_dtype == NVB_F8_E5M2;
  const float* const scales = is_key ? p.key_scale : p.value_scale;
  const float cache_scale = quantizes && !is_query && scales != nullptr ? scales[head] : 1.0f;
  if (!is_query && is_cached && position >= 0 && position < p.capacity && slot >= 0 && slot < p.slot_count) {
    const int64_t place = cache_place<Placed>(p, slot, position);
    cache = Placed && place < 0 ? nullptr : is_key ? p.key_cache : p.value_cache;
    cache_start = place + head * p.cache_head_stride;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (column[i][j] >= p.head_dim) continue;
      if (output != nullptr) store_vector(output, output_dtype, output_start + column[i][j], x[i][j]);
      if constexpr (Rows) {
        float* const own = elements + (threadIdx.x >> arguments.lane_bits) * p.head_dim;
#pragma unroll
        for (int e = 0; e < Width; ++e) own[column[i][j] + e] = x[i][j][e];
        continue;
      }
      if (cache != nullptr && !quantizes) store_vector(cache, p.cache_dtype, cache_start + column[i][j], x[i][j]);
      if (cache != nullptr && quantizes) {
#pragma unroll
        for (int e = 0; e < Width; ++e) x[i][j][e] /= cache_scale;
        store_fp8(cache, p.cache_dtype, cache_start + column[i][j], x[i][j]);
      }
    }
  }
  if constexpr (Rows) {
    // The lanes of a head are all here, or none is.
    const uint32_t head_lanes = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
    __syncwarp(head_lanes);
    if (cache == nullptr) return;
    store_kv_row(static_cast<uint8_t*>(cache) + cache_start, p.cache_dtype,
                 elements + (threadIdx.x >> arguments.lane_bits) * p.head_dim, p.head_dim, lane, lanes, head_lanes);
  }
}

}  // namespace rope
}  // namespace nvb
