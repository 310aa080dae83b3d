// The rope kernel; rope.h has the formula, shapes and dtypes.
//
// A block takes one token and some of its heads (queries, keys, then values), up to 256 lanes; every head has 4 to 32
// lanes. A lane holds kItems pairs of vectors of `Width` elements: i .. and i + r/2 .. of the rotated part, or two
// neighbours of the rest. Width is 8 where extents, strides and addresses allow, else 1. The block finds sine and
// cosine of the token's angles once, for all its heads, while 16-bit inputs are on their way to registers.
//
// Inverse frequencies are computed on the host, by the powf that the CPU executor calls: one unit in the last place of
// a frequency is 0.006 radians at position 100,000. Shared memory: 2 KiB of sines and cosines. Registers: 4 * Width *
// kItems; the stack is that of sincosf, which reduces angles above 105,615 in memory.
#include <algorithm>
#include <cmath>

#include "../common/overlap.cuh"
#include "../common/vector.cuh"
#include "rope.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // on a multiprocessor, so that loads of some cover the sines of others
constexpr int kMaxHeadDim = 512;

struct RopeArguments {
  nvb_rope_params params;
  int32_t lanes_per_head;  // a power of two, at most 32
  int32_t padding;
  float inverse_frequency[kMaxHeadDim / 2];
};
static_assert(sizeof(RopeArguments) <= 4096, "drivers before 12.1 take at most 4096 bytes of kernel arguments");

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

// Kernel arguments as global memory: neighbouring lanes that read neighbouring arguments would take turns at the
// constant cache otherwise.
__device__ __forceinline__ float load_frequency(const RopeArguments& arguments, int i) {
  float value;
  asm("ld.f32 %0, [%1];" : "=f"(value) : "l"(&arguments.inverse_frequency[i]));
  return value;
}

// Prefetch: all inputs are 16-bit vectors, and are fetched before the angles are known.
template <int Width, bool Prefetch>
__global__ void __launch_bounds__(kThreads, kBlocks) rope_kernel(const __grid_constant__ RopeArguments arguments) {
  static_assert(!Prefetch || Width == 8, "what is fetched early is 16 bytes of 16-bit elements");
  constexpr int kItems = kMaxHeadDim / 2 / Width / 32 > 0 ? kMaxHeadDim / 2 / Width / 32 : 1;
  __shared__ __align__(16) float cosines[kMaxHeadDim / 2];
  __shared__ __align__(16) float sines[kMaxHeadDim / 2];
  begin_overlapped();
  const nvb_rope_params& p = arguments.params;
  const int half = p.rotary_dim / 2;
  const int64_t token = blockIdx.x;
  const int position = p.positions[token];

  // Which head. Lanes without one still take part in the shuffles.
  const int lanes = arguments.lanes_per_head;
  const int lane = threadIdx.x % lanes;
  const int row = (blockIdx.y * blockDim.x + threadIdx.x) / lanes;
  const int query_rows = p.query != nullptr ? p.query_heads : 0;
  const int key_rows = p.key != nullptr ? p.kv_heads : 0;
  const int value_rows = p.value_cache != nullptr ? p.kv_heads : 0;
  const bool valid = row < query_rows + key_rows + value_rows;
  const bool is_query = row < query_rows;
  const bool is_key = !is_query && row < query_rows + key_rows;
  const int head = is_query ? row : is_key ? row - query_rows : row - query_rows - key_rows;
  const void* source = is_query ? p.query : is_key ? p.key : p.value;
  const uint32_t source_dtype = is_query ? p.query_dtype : is_key ? p.key_dtype : p.value_dtype;
  const int64_t start = is_query ? token * p.query_token_stride + head * p.query_head_stride
                        : is_key ? token * p.key_token_stride + head * p.key_head_stride
                                 : token * p.value_token_stride + head * p.value_head_stride;

  // Where this lane's vectors lie.
  int column[kItems][2];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = i * lanes + lane;
    const bool rotated = item * Width < half;
    column[i][0] = rotated ? item * Width : item * 2 * Width;
    column[i][1] = rotated ? half + item * Width : (item * 2 + 1) * Width;
  }
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

  // The token's angles.
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const float angle = static_cast<float>(position) * load_frequency(arguments, i) * p.position_scale;
    sincosf(angle, &sines[i], &cosines[i]);
  }
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
    const void* norm = is_query ? p.query_norm : is_key ? p.key_norm : nullptr;
    if (norm != nullptr) {
      const uint32_t norm_dtype = is_query ? p.query_norm_dtype : p.key_norm_dtype;
      const float inverse = rsqrtf(squares / static_cast<float>(p.head_dim) + p.epsilon);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (column[i][j] >= p.head_dim) continue;
          float weight[Width];
          load_vector(norm, norm_dtype, column[i][j], weight);
#pragma unroll
          for (int e = 0; e < Width; ++e) x[i][j][e] = x[i][j][e] * inverse * (p.weight_offset + weight[e]);
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
  const int64_t output_start = is_query ? token * p.query_output_token_stride + head * p.query_output_head_stride
                                        : token * p.key_output_token_stride + head * p.key_output_head_stride;
  void* cache = nullptr;
  int64_t cache_start = 0;
  if (!is_query && p.key_cache != nullptr) {
    const int slot = p.slots != nullptr ? p.slots[token] : 0;
    if (position >= 0 && position < p.capacity && slot >= 0 && slot < p.slot_count) {
      cache = is_key ? p.key_cache : p.value_cache;
      cache_start = slot * p.cache_slot_stride + position * p.cache_token_stride + head * p.cache_head_stride;
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (column[i][j] >= p.head_dim) continue;
      if (output != nullptr) store_vector(output, output_dtype, output_start + column[i][j], x[i][j]);
      if (cache != nullptr) store_vector(cache, p.cache_dtype, cache_start + column[i][j], x[i][j]);
    }
  }
}

bool is_float_or_absent(const void* pointer, uint32_t dtype) {
  return pointer == nullptr || float_dtype_bytes(dtype) != 0;
}

bool is_valid(const nvb_rope_params& p) {
  if (p.tokens < 0 || p.head_dim < 1 || p.head_dim > kMaxHeadDim) return false;
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) return false;
  if (p.positions == nullptr) return false;
  if (p.query != nullptr && (p.query_heads < 1 || p.query_output == nullptr)) return false;
  if (p.key != nullptr && p.kv_heads < 1) return false;
  if ((p.key_cache == nullptr) != (p.value_cache == nullptr)) return false;
  if (p.key_cache != nullptr && (p.key == nullptr || p.value == nullptr)) return false;
  return is_float_or_absent(p.query, p.query_dtype) && is_float_or_absent(p.key, p.key_dtype) &&
         is_float_or_absent(p.value, p.value_dtype) && is_float_or_absent(p.query_output, p.query_output_dtype) &&
         is_float_or_absent(p.key_output, p.key_output_dtype) && is_float_or_absent(p.query_norm, p.query_norm_dtype) &&
         is_float_or_absent(p.key_norm, p.key_norm_dtype) && is_float_or_absent(p.key_cache, p.cache_dtype);
}

bool takes_vectors(const nvb_rope_params& p) {
  const auto aligned = [](const void* pointer, uint32_t dtype, int64_t stride0, int64_t stride1) {
    const int bytes = float_dtype_bytes(dtype);
    return pointer == nullptr || (is_aligned16(pointer, stride0, bytes) && is_aligned16(pointer, stride1, bytes));
  };
  return p.head_dim % 8 == 0 && p.rotary_dim % 16 == 0 &&
         aligned(p.query, p.query_dtype, p.query_token_stride, p.query_head_stride) &&
         aligned(p.key, p.key_dtype, p.key_token_stride, p.key_head_stride) &&
         aligned(p.value, p.value_dtype, p.value_token_stride, p.value_head_stride) &&
         aligned(p.query_output, p.query_output_dtype, p.query_output_token_stride, p.query_output_head_stride) &&
         aligned(p.key_output, p.key_output_dtype, p.key_output_token_stride, p.key_output_head_stride) &&
         aligned(p.query_norm, p.query_norm_dtype, 0, 0) && aligned(p.key_norm, p.key_norm_dtype, 0, 0) &&
         aligned(p.key_cache, p.cache_dtype, p.cache_slot_stride, p.cache_head_stride) &&
         aligned(p.value_cache, p.cache_dtype, p.cache_token_stride, p.cache_token_stride);
}

// 1 / base^(2i / rotary_dim). A model alternates between one or two bases, so each thread keeps the last few tables.
const float* inverse_frequencies(float base, int rotary_dim) {
  struct Table {
    float base;
    int rotary_dim;
    float values[kMaxHeadDim / 2];
  };
  constexpr int kTables = 4;
  thread_local Table tables[kTables];
  thread_local int next = 0;
  for (const Table& table : tables) {
    if (table.base == base && table.rotary_dim == rotary_dim) return table.values;
  }
  Table& table = tables[next];
  next = (next + 1) % kTables;
  table.base = base;
  table.rotary_dim = rotary_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    table.values[i] = 1.0f / std::pow(base, static_cast<float>(2 * i) / static_cast<float>(rotary_dim));
  }
  return table.values;
}

template <int Width>
cudaError_t launch_rope(const nvb_rope_params& p, const nvb_launch& launch) {
  RopeArguments arguments;
  arguments.params = p;
  arguments.padding = 0;
  const float* frequencies = inverse_frequencies(p.base, p.rotary_dim);
  std::copy(frequencies, frequencies + p.rotary_dim / 2, arguments.inverse_frequency);

  arguments.lanes_per_head = 4;
  while (arguments.lanes_per_head < 32 && arguments.lanes_per_head * 2 * Width < p.head_dim) {
    arguments.lanes_per_head *= 2;
  }
  const int64_t rows = static_cast<int64_t>(p.query != nullptr ? p.query_heads : 0) +
                       (p.key != nullptr ? p.kv_heads : 0) + (p.value_cache != nullptr ? p.kv_heads : 0);
  if (rows == 0) return cudaSuccess;
  // The heads of a token are spread evenly over as few blocks as hold them.
  const int64_t lanes = rows * arguments.lanes_per_head;
  const int64_t blocks = (lanes + kThreads - 1) / kThreads;
  if (blocks > 65535) return cudaErrorInvalidValue;
  const unsigned threads = static_cast<unsigned>(((lanes + blocks - 1) / blocks + 31) / 32 * 32);
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(blocks));
  const auto is_wide = [](const void* pointer, uint32_t dtype) { return pointer != nullptr && dtype == NVB_F32; };
  if (Width == 1 || is_wide(p.query, p.query_dtype) || is_wide(p.key, p.key_dtype) ||
      is_wide(p.value_cache != nullptr ? p.value : nullptr, p.value_dtype)) {
    return launch_overlapped(rope_kernel<Width, false>, grid, dim3(threads), 0, &launch, arguments);
  }
  return launch_overlapped(rope_kernel < Width, Width == 8 >, grid, dim3(threads), 0, &launch, arguments);
}

}  // namespace
}  // namespace nvb

extern "C" const char* nvb_cuda_rope_kernel_name(const nvb_rope_params* params, const nvb_launch*) noexcept {
  if (!nvb::is_valid(*params)) return nullptr;
  return nvb::takes_vectors(*params) ? "rope_vector" : "rope_scalar";
}

extern "C" cudaError_t nvb_cuda_rope(const nvb_rope_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->tokens == 0) return cudaSuccess;
  return nvb::takes_vectors(*params) ? nvb::launch_rope<8>(*params, *launch) : nvb::launch_rope<1>(*params, *launch);
}
