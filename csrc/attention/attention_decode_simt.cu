// Decode attention in f32 on the ordinary cores: every cache dtype, any head_dim to 576 and value_dim to 512, any
// alignment, every device. The formula is that of attention.h; it serves F32 caches, capability 7.5 and odd shapes.
//
// A block of 4 warps takes up to 8 items of one KV head (attention.h) and walks its keys in tiles of 32:
//   scores    a warp takes 4 keys at a time, its lanes share the head dimension
//   softmax   a warp takes a head, a lane a key
//   output    a thread takes up to 4 columns of all heads
//
// Shared memory: heads f32 rows of Q as wide as head_dim or value_dim, in whose place the output is left; scores 1 KiB.
// Registers: the output of 8 heads x 4 columns, the scores of 4 keys x 8 heads.
#include <algorithm>
#include <type_traits>

#include "../common/reduce.cuh"
#include "attention_decode.cuh"

namespace nvb {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 8;
constexpr int kKeys = kDecodeSimtKeys;
constexpr int kKeysAtOnce = 4;
constexpr int kColumns = 512 / kThreads;
static_assert(kKeys == 32, "a lane a key");
static_assert(kKeysAtOnce * kHeads == 32, "one sum a lane");

// The sums over the warp of 32 values a lane: lane i receives that of value i. Every step halves the values that a lane
// still carries, so 31 shuffles do the work of 160.
__device__ __forceinline__ float transpose_sum(float (&values)[32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const int width = 16 >> step;
    const bool upper = (lane & width) != 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i >= width) continue;
      const float kept = upper ? values[i + width] : values[i];
      const float given = upper ? values[i] : values[i + width];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, given, width);
    }
  }
  return values[0];
}

// `Width` consecutive elements as f32, in one load.
template <typename T, int Width>
__device__ __forceinline__ void load_elements(const T* address, float (&values)[Width]) {
  if constexpr (Width == 1) {
    values[0] = to_float(*address);
  } else if constexpr (sizeof(T) == 4) {
    load16_as_float<T>(address, values);
  } else if constexpr (sizeof(T) == 1) {
    const uint32_t raw = *reinterpret_cast<const uint32_t*>(address);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = to_float(T{static_cast<uint8_t>(raw >> (8 * i))});
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(address);
    const float2 low = unpack_pair<T>(raw.x);
    const float2 high = unpack_pair<T>(raw.y);
    values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
  }
}

// Stands for elements whose type is known when the kernel runs: of two dtypes, or rows with scales of their own.
struct AnyElement {
  uint8_t byte;
};

// A key's or value's element, of a row that lies `offset` elements behind `base`.
__device__ __forceinline__ float any_element(const AnyElement* base, uint32_t dtype, int dim, int64_t offset,
                                             int column) {
  const AnyElement* const row = base + offset * kv_dtype_bytes(dtype);
  if (is_kv_row(dtype)) return kv_row_element(reinterpret_cast<const uint8_t*>(row), dtype, dim, column);
  if (dtype == NVB_F8_E4M3) return to_float(reinterpret_cast<const fp8_e4m3*>(row)[column]);
  if (dtype == NVB_F8_E5M2) return to_float(reinterpret_cast<const fp8_e5m2*>(row)[column]);
  return load_element(row, dtype, column);
}

// Width is 4 where head_dim, strides and addresses allow vectors, else 1.
template <typename T, int Width>
__global__ void __launch_bounds__(kThreads)
    attention_decode_simt_kernel(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(16) float query[];  // [heads][head_dim], in the end the output, [heads][value_dim]
  __shared__ __align__(16) float score[kKeys][kHeads];
  __shared__ float rescale[kHeads];
  __shared__ uint32_t rows[kKeys];  // of the tile's keys, in rings and pages
  __shared__ float part_maximum[kGroup * kMaxHeadsPerBlock];
  __shared__ float part_sum[kGroup * kMaxHeadsPerBlock];
  __shared__ float2 total[kMaxHeadsPerBlock];

  begin_overlapped();

  // Which keys.
  const nvb_attention_decode_params& p = arguments.params;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const DecodeBlock block = find_decode_block<kKeys>(arguments, 1);
  if (block.split >= block.splits) return;
  constexpr bool kAny = std::is_same_v<T, AnyElement>;
  const uint32_t value_dtype = value_dtype_of(p);
  const int key_units = kAny ? kv_dtype_bytes(p.kv_dtype) : 1, value_units = kAny ? kv_dtype_bytes(value_dtype) : 1;
  const T* key = static_cast<const T*>(p.key) +
                 (sequence_offset(p, block, p.key_sequence_stride) + block.kv_head * p.key_head_stride) * key_units;
  const T* value =
      static_cast<const T*>(p.value) +
      (sequence_offset(p, block, p.value_sequence_stride) + block.kv_head * p.value_head_stride) * value_units;
  // Where the first tokens are seen beside a window, rows say where a key lies as those of rings and pages do.
  const bool placed = is_placed(p.placement) || block.sinks > 0;
  const int64_t key_block = is_placed(p.placement) ? p.placement.block_stride : 256 * p.key_token_stride;
  const int64_t value_block = is_placed(p.placement) ? p.placement.value_block_stride : 256 * p.value_token_stride;
  const auto offset_of = [&](int first, int i, int64_t token_stride) {
    return placed ? kv_offset(key_block, rows[i], token_stride) : (first + i) * token_stride;
  };

  for (int index = threadIdx.x; index < block.heads * p.head_dim; index += kThreads) {
    const int head = index / p.head_dim;
    const DecodeItem item = item_of(p, block, head);
    query[index] =
        load_element(p.query, p.query_dtype,
                     item.row * p.query_token_stride + item.head * p.query_head_stride + (index - head * p.head_dim));
  }
  __syncthreads();

  float output[kHeads][kColumns] = {};
  float maximum[kHeads / kWarps];  // of heads warp, warp + kWarps; the same in all lanes
  float sum[kHeads / kWarps] = {};
  DecodeKeys visible[kHeads / kWarps];
  ItemSlope slopes[kHeads / kWarps];
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    maximum[i] = -CUDART_INF_F;
    visible[i] = block.sinks > 0 && p.rows_per_sequence > 1 && warp + i * kWarps < block.heads
                     ? keys_at(p, p.positions[item_of(p, block, warp + i * kWarps).row])
                     : item_keys(p, block, warp + i * kWarps);
    slopes[i] = item_slope(p, block, warp + i * kWarps);
  }
  const float scale = p.key_scale != nullptr ? p.scale * p.key_scale[block.kv_head] : p.scale;

  for (int first = block.begin; first < block.end; first += kKeys) {
    const int keys = min(kKeys, block.end - first);
    if (placed) {
      if (static_cast<int>(threadIdx.x) < keys) {
        const int token = block.token(first + static_cast<int>(threadIdx.x));
        rows[threadIdx.x] = is_placed(p.placement) ? kv_row(p.placement, page_row(p, block), token) : token;
      }
      __syncthreads();
    }

    // Scores, scaled and capped, in powers of two.
    for (int part = warp * kKeysAtOnce; part < keys; part += kWarps * kKeysAtOnce) {
      float sums[32] = {};  // [key][head]
      for (int column = lane * Width; column < p.head_dim; column += 32 * Width) {
        float k[kKeysAtOnce][Width];
#pragma unroll
        for (int i = 0; i < kKeysAtOnce; ++i) {
          // The tile's last key stands in for those past the end, whose scores nobody reads.
          const int row = min(part + i, keys - 1);
          if (placed && rows[row] == kNoRow) {
#pragma unroll
            for (int j = 0; j < Width; ++j) k[i][j] = 0.0f;
            continue;
          }
          const int64_t offset = offset_of(first, row, p.key_token_stride);
          if constexpr (kAny) {
            k[i][0] = any_element(key, p.kv_dtype, p.head_dim, offset, column);
          } else {
            load_elements<T, Width>(key + offset + column, k[i]);
          }
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h < block.heads) {
            float q[Width];
            load_elements<float, Width>(query + h * p.head_dim + column, q);
#pragma unroll
            for (int i = 0; i < kKeysAtOnce; ++i) {
#pragma unroll
              for (int j = 0; j < Width; ++j) sums[i * kHeads + h] = fmaf(q[j], k[i][j], sums[i * kHeads + h]);
            }
          }
        }
      }
      float s = transpose_sum(sums) * scale;
      if (p.soft_cap > 0.0f) s = p.soft_cap * tanhf(s / p.soft_cap);
      score[part + lane / kHeads][lane % kHeads] = s * kLog2E;
    }
    __syncthreads();

    // Softmax, in place.
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i) {
      const int head = warp + i * kWarps;
      if (head >= block.heads) continue;
      const int key = first + lane, token = block.token(key);
      const float bias = slopes[i].slope * fabsf(static_cast<float>(slopes[i].position - token));
      // The keys of the block are all one row's; of several each sees the first ones and those of its window.
      const bool seen =
          p.rows_per_sequence == 1
              ? key >= block.begin && key < block.end
              : token < visible[i].end && (token >= visible[i].begin || token < p.sink_tokens) && key < block.end;
      const float s = seen ? score[lane][head] - bias : -CUDART_INF_F;
      const float most = fmaxf(maximum[i], warp_max(s));
      const float base = exponent_base(most);
      const float factor = exp2_fast(maximum[i] - base);
      const float probability = exp2_fast(s - base);
      maximum[i] = most;
      sum[i] = sum[i] * factor + probability;
      score[lane][head] = probability;
      if (lane == 0) rescale[head] = factor;
    }
    __syncthreads();

    // O = O * rescale + P . V.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < block.heads) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) output[h][j] *= rescale[h];
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = j * kThreads + static_cast<int>(threadIdx.x);
      if (column < p.value_dim) {
        const T* source = value + (placed ? 0 : first * p.value_token_stride * value_units);
#pragma unroll 8
        for (int i = 0; i < keys; ++i) {
          const int64_t offset =
              placed ? kv_offset(value_block, rows[i], p.value_token_stride) : i * p.value_token_stride;
          float v = 0.0f;
          if (!placed || rows[i] != kNoRow) {
            if constexpr (kAny) {
              v = any_element(source, value_dtype, p.value_dim, offset, column);
            } else {
              v = to_float(source[offset + column]);
            }
          }
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            if (h < block.heads) output[h][j] = fmaf(score[i][h], v, output[h][j]);
          }
        }
      }
    }
    __syncthreads();
  }

  // Leave the result in the place of Q.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = j * kThreads + static_cast<int>(threadIdx.x);
      if (h < block.heads && column < p.value_dim) query[h * p.value_dim + column] = output[h][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    const float all = warp_sum(sum[i]);
    if (lane == 0) {
      part_maximum[warp + i * kWarps] = maximum[i];
      part_sum[warp + i * kWarps] = all;
    }
  }
  __syncthreads();
  epilogue_split(arguments, block, SplitResult{query, 0, p.value_dim, 1, part_maximum, part_sum}, total);
}

int heads_per_block(const nvb_attention_decode_params& p) {
  return std::min(items_per_kv_head(p), kHeads);
}
int shared_bytes(const nvb_attention_decode_params& p) {
  return heads_per_block(p) * std::max(p.head_dim, p.value_dim) * static_cast<int>(sizeof(float));
}

template <typename T>
cudaError_t launch_dtype(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  const dim3 grid(p.splits, p.kv_heads * p.chunks, p.sequences);
  constexpr int kBytes = sizeof(T);
  const bool vectors = p.head_dim % 4 == 0 && is_aligned16(p.key, p.placement.block_stride, kBytes) &&
                       is_aligned16(p.key, p.key_sequence_stride, kBytes) &&
                       is_aligned16(p.key, p.key_head_stride, kBytes) &&
                       is_aligned16(p.key, p.key_token_stride, kBytes);
  const auto kernel = vectors ? attention_decode_simt_kernel<T, 4> : attention_decode_simt_kernel<T, 1>;
  return launch_overlapped(kernel, grid, dim3(kThreads), shared_bytes(p), &launch, arguments);
}

}  // namespace

bool supports_decode_simt(const nvb_attention_decode_params& p, const nvb_launch&, nvb_attention_decode_shape& shape) {
  shape = {heads_per_block(p), kKeys, 1, kThreads, shared_bytes(p) + kDecodeStaticBytes, 0, 0, 1};
  return true;
}

cudaError_t launch_decode_simt(const DecodeArguments& arguments, const nvb_launch& launch) {
  if (!has_plain_elements(arguments.params)) {
    const nvb_attention_decode_params& p = arguments.params;
    const dim3 grid(p.splits, p.kv_heads * p.chunks, p.sequences);
    return launch_overlapped(attention_decode_simt_kernel<AnyElement, 1>, grid, dim3(kThreads), shared_bytes(p),
                             &launch, arguments);
  }
  switch (arguments.params.kv_dtype) {
    case NVB_F32:
      return launch_dtype<float>(arguments, launch);
    case NVB_F16:
      return launch_dtype<__half>(arguments, launch);
    case NVB_F8_E4M3:
      return launch_dtype<fp8_e4m3>(arguments, launch);
    case NVB_F8_E5M2:
      return launch_dtype<fp8_e5m2>(arguments, launch);
    default:
      return launch_dtype<__nv_bfloat16>(arguments, launch);
  }
}

}  // namespace nvb
