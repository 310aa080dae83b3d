// group_norm: statistics of a group and its normalisation by one block (formula in group_norm.h).
//
// Shapes: rows of contiguous elements in vectors of 8, 4 or 1 by alignment, dtypes per operand.
// Work: a block takes one group where a row is a channel. Where a row is a position and groups are narrower than a
// cache line, it takes as many groups beside each other as the line holds, as long as every multiprocessor gets a
// block. Its threads walk over the vectors row by row; with several groups a thread keeps to one column and so to
// one group.
// Numerics: a thread merges the moments of some 32 elements at a time into its own, and the block those of its
// threads in a fixed order (Chan, Golub and LeVeque 1983). So one reading gives mean and variance, without the
// cancellation of E[x^2] - mean^2. A second reading normalises; L2 has the group then, and L1 if it is small.
// Registers: 51 to 64 a thread, 82 for vectors of 8 along the channels; none spilled on 8.0 and 9.0.
// Shared memory: 6.3 KB.
#include <algorithm>

#include "../common/activation.cuh"
#include "../common/programmatic_launch.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "group_norm.h"

namespace nvb {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostGroups = 32;      // of a block
constexpr int64_t kLineBytes = 128;  // that a block reads of each row where groups are narrower

static_assert(kMostThreads % 32 == 0, "sums over a warp need all its lanes");

// Vectors that a thread has under way.
template <int Width>
inline constexpr int kBatch = Width == 1 ? 8 : 4;

// Of some elements: how many, their mean, and the sum of squared differences from it.
struct moments {
  float count;
  float mean;
  float squares;
};

__device__ __forceinline__ moments merge(const moments& a, const moments& b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float difference = b.mean - a.mean;
  // The large factor comes last, because its square may overflow where a count is 0.
  const float between = difference * (difference * (a.count * share));
  return {count, a.mean + difference * share, a.squares + b.squares + between};
}

// The moments of all 32 lanes, in lane 0.
__device__ __forceinline__ moments merge_warp(moments mine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const moments other = {__shfl_down_sync(0xffffffffu, mine.count, offset),
                           __shfl_down_sync(0xffffffffu, mine.mean, offset),
                           __shfl_down_sync(0xffffffffu, mine.squares, offset)};
    mine = merge(mine, other);
  }
  return mine;
}

// A thread's way over the vectors of a block's rows, `step` of them at a time and without a division for each. Extents
// are below 2^31, so sums of two fit.
struct walk {
  uint32_t row;
  uint32_t vector;
  uint32_t step_rows;
  uint32_t step_vectors;
  uint32_t vectors;  // of a row

  __device__ __forceinline__ walk(uint32_t first, uint32_t step, uint32_t row_vectors)
      : row(first / row_vectors),
        vector(first % row_vectors),
        step_rows(step / row_vectors),
        step_vectors(step % row_vectors),
        vectors(row_vectors) {}

  __device__ __forceinline__ void advance() {
    row += step_rows;
    vector += step_vectors;
    if (vector >= vectors) vector -= vectors, ++row;
  }
};

// Loads up to kBatch vectors from `at` on and advances it; returns how many there were.
template <int Width>
__device__ __forceinline__ int load_batch(const nvb_group_norm_params& p, int64_t base, uint32_t rows, walk& at,
                                          uint4 (&raw)[kBatch<Width>]) {
  int filled = 0;
#pragma unroll
  for (int b = 0; b < kBatch<Width>; ++b) {
    raw[b] = make_uint4(0, 0, 0, 0);
    if (at.row < rows) {
      raw[b] = load_raw<Width>(p.input, p.input_dtype,
                               base + at.row * p.input_row_stride + static_cast<int64_t>(at.vector) * Width);
      filled = b + 1;
    }
    at.advance();
  }
  return filled;
}

// The moments of the vectors of a batch that are there.
template <int Width>
__device__ __forceinline__ moments moments_of(const uint4 (&raw)[kBatch<Width>], uint32_t dtype, int filled) {
  float values[Width];
  float sum = 0.0f;
#pragma unroll
  for (int b = 0; b < kBatch<Width>; ++b) {
    unpack_raw<Width>(raw[b], dtype, values);  // what is not there is 0
#pragma unroll
    for (int i = 0; i < Width; ++i) sum += values[i];
  }
  const float count = static_cast<float>(filled * Width);
  const float mean = sum / count;
  float squares = 0.0f;
#pragma unroll
  for (int b = 0; b < kBatch<Width>; ++b) {
    if (b >= filled) break;
    unpack_raw<Width>(raw[b], dtype, values);
#pragma unroll
    for (int i = 0; i < Width; ++i) squares += (values[i] - mean) * (values[i] - mean);
  }
  return {count, mean, squares};
}

// The factors or addends of a vector's elements.
template <int Width, bool ChannelsLast>
__device__ __forceinline__ void load_channels(const void* from, uint32_t dtype, int64_t first_channel, const walk& at,
                                              float (&values)[Width]) {
  if constexpr (ChannelsLast) {
    load_vector<Width>(from, dtype, first_channel + static_cast<int64_t>(at.vector) * Width, values);
  } else {
    const float value = load_element(from, dtype, first_channel + at.row);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = value;
  }
}

template <int Width, bool ChannelsLast>
__global__ void __launch_bounds__(kMostThreads)
    group_norm_kernel(const nvb_group_norm_params p, const uint32_t groups_per_block) {
  __shared__ moments parts[kMostThreads];
  __shared__ float means[kMostGroups];
  __shared__ float inverses[kMostGroups];
  begin_overlapped();

  // The block's part of the image.
  const uint32_t all_groups = static_cast<uint32_t>(p.groups);
  const uint32_t blocks_per_sample = (all_groups + groups_per_block - 1) / groups_per_block;
  const int64_t sample = blockIdx.x / blocks_per_sample;
  const uint32_t first_group = blockIdx.x % blocks_per_sample * groups_per_block;
  const uint32_t groups = min(groups_per_block, all_groups - first_group);
  const uint32_t group_channels = static_cast<uint32_t>(p.channels) / all_groups;
  const int64_t first_channel = static_cast<int64_t>(first_group) * group_channels;
  const uint32_t rows = ChannelsLast ? static_cast<uint32_t>(p.positions) : group_channels;
  const uint32_t group_vectors = (ChannelsLast ? group_channels : static_cast<uint32_t>(p.positions)) / Width;
  const uint32_t vectors = groups * group_vectors;
  const int64_t input_base =
      sample * p.input_sample_stride + (ChannelsLast ? first_channel : first_channel * p.input_row_stride);
  const int64_t output_base =
      sample * p.output_sample_stride + (ChannelsLast ? first_channel : first_channel * p.output_row_stride);

  // A step of whole rows keeps a thread in its column. The launcher sees to it that several groups' vectors are no more
  // than the threads.
  const uint32_t thread = threadIdx.x;
  const uint32_t active = groups > 1 ? blockDim.x / vectors * vectors : blockDim.x;
  const walk start(thread, active, vectors);
  const uint32_t last_row = thread < active ? rows : 0;

  // Moments of the thread's elements.
  moments mine = {0.0f, 0.0f, 0.0f};
  for (walk at = start; at.row < last_row;) {
    uint4 raw[kBatch<Width>];
    const int filled = load_batch<Width>(p, input_base, last_row, at, raw);
    mine = merge(mine, moments_of<Width>(raw, p.input_dtype, filled));
  }

  // Moments of each group, by one warp from the parts of its members.
  const uint32_t warp = thread / 32;
  const uint32_t lane = thread % 32;
  const uint32_t warps = blockDim.x / 32;
  uint32_t members = warps;
  if (groups == 1) {
    mine = merge_warp(mine);
    if (lane == 0) parts[warp] = mine;
  } else {
    members = active / vectors * group_vectors;
    parts[thread] = mine;
  }
  __syncthreads();
  for (uint32_t group = warp; group < groups; group += warps) {
    moments sum = {0.0f, 0.0f, 0.0f};
    for (uint32_t member = lane; member < members; member += 32) {
      const uint32_t row = member / group_vectors;
      const uint32_t column = group * group_vectors + member % group_vectors;
      sum = merge(sum, parts[groups == 1 ? member : row * vectors + column]);
    }
    sum = merge_warp(sum);
    if (lane == 0) {
      means[group] = sum.mean;
      inverses[group] = rsqrtf(sum.squares / sum.count + p.epsilon);
    }
  }
  __syncthreads();

  // Norm and activation. Every read for the moments is behind the barriers above, and each element is then read by the
  // thread that overwrites it, so in place is sound.
  const uint32_t group = groups == 1 ? 0 : start.vector / group_vectors;
  const float mean = means[group];
  const float inverse = inverses[group];
  for (walk at = start; at.row < last_row;) {
    uint4 raw[kBatch<Width>];
    walk to = at;
    const int filled = load_batch<Width>(p, input_base, last_row, at, raw);
#pragma unroll
    for (int b = 0; b < kBatch<Width>; ++b) {
      if (b >= filled) break;
      float values[Width];
      float factors[Width];
      float addends[Width];
      unpack_raw<Width>(raw[b], p.input_dtype, values);
      if (p.weight != nullptr) {
        load_channels<Width, ChannelsLast>(p.weight, p.weight_dtype, first_channel, to, factors);
      }
      if (p.bias != nullptr) load_channels<Width, ChannelsLast>(p.bias, p.weight_dtype, first_channel, to, addends);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        values[i] = (values[i] - mean) * inverse;
        if (p.weight != nullptr) values[i] *= factors[i];
        if (p.bias != nullptr) values[i] += addends[i];
        values[i] = activate(p.activation, values[i]);
      }
      store_vector<Width>(p.output, p.output_dtype,
                          output_base + to.row * p.output_row_stride + static_cast<int64_t>(to.vector) * Width, values);
      to.advance();
    }
  }
}

template <int Width, bool ChannelsLast>
cudaError_t enqueue(const nvb_group_norm_params& p, const nvb_launch* launch) {
  const int64_t group_channels = p.channels / p.groups;
  const int64_t rows = ChannelsLast ? p.positions : group_channels;
  const int64_t group_vectors = (ChannelsLast ? group_channels : p.positions) / Width;
  int64_t groups = 1;
  if (ChannelsLast) {
    const int64_t for_line = ceiling_divide(kLineBytes, group_channels * float_dtype_bytes(p.input_dtype));
    const int64_t for_device = p.samples * p.groups / std::max(launch->multiprocessors, 1);
    groups = std::max<int64_t>(1, std::min({for_line, for_device, p.groups, int64_t{kMostGroups}}));
  }
  // Several groups are narrower than a line each, hence at most 127 elements wide together.
  const int64_t vectors = groups * group_vectors;
  const int64_t wanted = ceiling_divide(rows * vectors, kBatch<Width>);
  const int64_t threads = std::min<int64_t>(std::max(wanted, groups > 1 ? vectors : 1), kMostThreads);
  const int64_t blocks = p.samples * ceiling_divide(p.groups, groups);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  return launch_overlapped(group_norm_kernel<Width, ChannelsLast>, dim3(static_cast<unsigned>(blocks)),
                           dim3(static_cast<unsigned>(ceiling_divide(threads, 32) * 32)), 0, launch, p,
                           static_cast<uint32_t>(groups));
}

template <int Width>
cudaError_t enqueue_layout(const nvb_group_norm_params& p, const nvb_launch* launch) {
  return p.channels_last != 0 ? enqueue<Width, true>(p, launch) : enqueue<Width, false>(p, launch);
}

// The widest vectors that lie in one group, aligned in every row of every sample.
int widest(const nvb_group_norm_params& p) {
  const bool last = p.channels_last != 0;
  return widest_vector(last ? p.channels / p.groups : p.positions, {{p.input, p.input_row_stride, p.input_dtype},
                                                                    {p.input, p.input_sample_stride, p.input_dtype},
                                                                    {p.output, p.output_row_stride, p.output_dtype},
                                                                    {p.output, p.output_sample_stride, p.output_dtype},
                                                                    {last ? p.weight : nullptr, 0, p.weight_dtype},
                                                                    {last ? p.bias : nullptr, 0, p.weight_dtype}});
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_group_norm(const nvb_group_norm_params* params, const nvb_launch* launch) noexcept {
  const nvb_group_norm_params& p = *params;
  const bool weighs = p.weight != nullptr || p.bias != nullptr;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      (weighs && nvb::float_dtype_bytes(p.weight_dtype) == 0) || p.groups <= 0 || p.channels % p.groups != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.samples <= 0 || p.channels <= 0 || p.positions <= 0) return cudaSuccess;
  switch (nvb::widest(p)) {
    case 8:
      return nvb::enqueue_layout<8>(p, launch);
    case 4:
      return nvb::enqueue_layout<4>(p, launch);
    default:
      return nvb::enqueue_layout<1>(p, launch);
  }
}
