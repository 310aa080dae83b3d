// What a decode over a shared prefix does before and after its attentions (attention_prefix.h).
//
// Pack: a block a row and part; its threads copy the query in vectors of 16 bytes where rows are aligned, else element
// by element. Merge: a block of four warps a row and query head. One warp makes the weights of the parts; then each has
// every fourth part, four columns a lane where they are aligned, and their sums meet in shared memory in the order of
// the warps. What both read is in L2, and the time is its latency: with a warp an item the merge of 33 parts of 32 rows
// and 32 heads took 8.5 us on an H200.
#include "../common/programmatic_launch.cuh"
#include "../common/reduce.cuh"
#include "../common/runtime_vector.cuh"
#include "attention_prefix.h"

namespace nvb {
namespace {

constexpr int kMaxParts = 128;  // NVB_ATTENTION_MAX_SEQUENCES
constexpr int kWarps = 4;
constexpr int kPackThreads = 256;

// Whether the row sees the prefix, which it sees whole or not at all.
__device__ __forceinline__ bool sees_prefix(const nvb_attention_prefix_params& p, int position) {
  return position >= p.prefix_tokens - 1 && position < p.capacity;
}

template <typename Vector>
__global__ void __launch_bounds__(kPackThreads)
    attention_prefix_pack_kernel(const __grid_constant__ nvb_attention_prefix_params p, int elements) {
  begin_overlapped();
  const int row = blockIdx.x;
  const int group = p.query_heads / p.kv_heads;
  const int width = p.head_dim / elements;  // vectors of a head
  const Vector* const query = static_cast<const Vector*>(p.query);
  Vector* const packed = static_cast<Vector*>(p.packed);
  for (int index = threadIdx.x; index < p.query_heads * width; index += kPackThreads) {
    const int head = index / width;
    const int column = index - head * width;
    const int64_t from = (row * p.query_token_stride + head * p.query_head_stride) / elements + column;
    const int64_t to =
        (static_cast<int64_t>(blockIdx.y) * p.rows + row) * p.query_heads + head % group * p.kv_heads + head / group;
    packed[to * width + column] = query[from];
  }
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    const int position = p.positions[row];
    p.own_positions[row] = sees_prefix(p, position) ? position - p.prefix_tokens : -1;
  }
}

template <int Width>
__global__ void __launch_bounds__(32 * kWarps)
    attention_prefix_merge_kernel(const __grid_constant__ nvb_attention_prefix_params p) {
  __shared__ float weights[kMaxParts + 1];
  __shared__ float all_sums[kWarps][32 * Width];
  __shared__ float joint_lse;
  begin_overlapped();
  const int64_t item = blockIdx.x;
  const int row = static_cast<int>(item / p.query_heads);
  const int head = static_cast<int>(item - static_cast<int64_t>(row) * p.query_heads);
  const int lane = threadIdx.x;
  const int warp = threadIdx.y;
  const int group = p.query_heads / p.kv_heads;
  const int64_t packed = (static_cast<int64_t>(row) * group + head % group) * p.kv_heads + head / group;
  const int64_t part_items = static_cast<int64_t>(p.rows) * p.query_heads;

  // The weights of the parts. fmaxf drops a NaN, which the sum brings back.
  if (warp == 0) {
    const bool sees = sees_prefix(p, p.positions[row]);
    float most = -CUDART_INF_F;
    for (int part = lane; part <= p.parts; part += 32) {
      const float lse = part < p.parts ? p.lses[part * part_items + packed] : p.own_lses[item];
      weights[part] = sees ? lse : -CUDART_INF_F;
      most = fmaxf(most, weights[part]);
    }
    most = warp_max(most);
    float total = 0.0f;
    for (int part = lane; part <= p.parts; part += 32) {
      const float lse = weights[part];
      weights[part] = lse == -CUDART_INF_F ? 0.0f : expf(lse - most);
      total += weights[part];
    }
    total = warp_sum(total);
    for (int part = lane; part <= p.parts; part += 32) {
      if (weights[part] != 0.0f) weights[part] /= total;
    }
    if (lane == 0) joint_lse = total == 0.0f ? -CUDART_INF_F : most + logf(total);
  }
  __syncthreads();
  if (p.lse != nullptr && warp == 0 && lane == 0) p.lse[item] = joint_lse;

  // The columns. A part without weight may hold anything.
  for (int first = 0; first < p.value_dim; first += 32 * Width) {
    const int column = first + lane * Width;
    float sums[Width] = {};
    if (column < p.value_dim) {
#pragma unroll 4
      for (int part = warp; part <= p.parts; part += kWarps) {
        const float weight = weights[part];
        const float* const from = part < p.parts ? p.outputs + (part * part_items + packed) * p.value_dim
                                                 : p.own_outputs + item * p.value_dim;
        float values[Width];
        load_vector<Width>(from, NVB_F32, column, values);
#pragma unroll
        for (int i = 0; i < Width; ++i) sums[i] = weight == 0.0f ? sums[i] : fmaf(weight, values[i], sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) all_sums[warp][lane * Width + i] = sums[i];
    __syncthreads();
    if (warp == 0 && column < p.value_dim) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        sums[i] = all_sums[0][lane * Width + i];
#pragma unroll
        for (int of = 1; of < kWarps; ++of) sums[i] += all_sums[of][lane * Width + i];
      }
      store_vector<Width>(p.output, p.output_dtype, row * p.output_token_stride + head * p.output_head_stride + column,
                          sums);
    }
    __syncthreads();
  }
}

bool is_valid(const nvb_attention_prefix_params& p) {
  return float_dtype_bytes(p.query_dtype) != 0 && float_dtype_bytes(p.output_dtype) != 0 && p.rows >= 0 &&
         p.kv_heads >= 1 && p.query_heads >= 1 && p.query_heads % p.kv_heads == 0 && p.head_dim >= 1 &&
         p.head_dim <= 576 && p.value_dim >= 1 && p.value_dim <= 512 && p.prefix_tokens >= 1 && p.parts >= 1 &&
         p.parts <= kMaxParts;
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_attention_prefix_pack(const nvb_attention_prefix_params* params,
                                                      const nvb_launch* launch) noexcept {
  const nvb_attention_prefix_params& p = *params;
  if (!nvb::is_valid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const int bytes = nvb::float_dtype_bytes(p.query_dtype);
  const int elements = 16 / bytes;
  const bool aligned = p.head_dim % elements == 0 && p.query_token_stride % elements == 0 &&
                       p.query_head_stride % elements == 0 &&
                       (reinterpret_cast<uintptr_t>(p.query) | reinterpret_cast<uintptr_t>(p.packed)) % 16 == 0;
  const auto run = [&](auto kernel, int of) {
    return nvb::launch_overlapped(kernel, dim3(p.rows, p.parts), dim3(nvb::kPackThreads), 0, launch, p, of);
  };
  if (aligned) return run(nvb::attention_prefix_pack_kernel<uint4>, elements);
  if (bytes == 4) return run(nvb::attention_prefix_pack_kernel<uint32_t>, 1);
  return run(nvb::attention_prefix_pack_kernel<uint16_t>, 1);
}

extern "C" cudaError_t nvb_cuda_attention_prefix_merge(const nvb_attention_prefix_params* params,
                                                       const nvb_launch* launch) noexcept {
  const nvb_attention_prefix_params& p = *params;
  if (!nvb::is_valid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const int64_t blocks = static_cast<int64_t>(p.rows) * p.query_heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int width = nvb::widest_vector(p.value_dim, {{p.outputs, 0, NVB_F32},
                                                     {p.own_outputs, 0, NVB_F32},
                                                     {p.output, p.output_token_stride, p.output_dtype},
                                                     {p.output, p.output_head_stride, p.output_dtype}});
  const auto kernel = width == 4 ? nvb::attention_prefix_merge_kernel<4> : nvb::attention_prefix_merge_kernel<1>;
  return nvb::launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(32, nvb::kWarps), 0, launch, p);
}
