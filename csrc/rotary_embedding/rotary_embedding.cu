// rotary_embedding: the general rotation, for engines whose caches are plain tensors; csrc/rope is the fused one.
//
// Work: a block has up to eight heads of a kind of a token, whose threads share the angles. Without a norm they go
// through the heads' pairs and single elements, one a thread; with one a warp takes a head, whose squares it adds up,
// and each lane writes what it alone has read, so that work in place is sound. Shared memory: 2 KiB of sines and
// cosines. Registers are no bound: a thread holds one pair.
//
// One token is a few kilobytes, so its time is that of what waits for something else. The frequencies, of which every
// lane reads another place of the arguments, are read before the grid in front has ended; and a warp adds its head's
// squares while it waits for the token's position. Where all of a head turns, of 64 to 256 elements, each lane keeps
// its pairs and their norm's weights in registers: all of them are asked for at once and are there when the sines are,
// where otherwise each pair waits for its own reads behind the stores of the one before.
#include <type_traits>

#include "../common/programmatic_launch.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "rotary_embedding.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 288;
constexpr int kHeads = kThreads / 32;  // of a block

static_assert(sizeof(nvb_rotary_embedding_params) <= 4096, "drivers before 12.1 take at most 4096 bytes of arguments");

// A pair of a head or, behind the pairs, an element that only passes through, times `factor(element)`.
template <typename Factor>
__device__ __forceinline__ void turn_item(const nvb_rotary_embedding_params& p, int64_t input, int64_t output, int i,
                                          const float* sines, const float* cosines, const Factor& factor) {
  const int pairs = static_cast<int>(p.rotary_dim / 2);
  const int first = static_cast<int>(p.first);
  const auto load = [&](int at) {
    return load_element(p.heads[0].input, p.heads[0].input_dtype, input + at) * factor(at);
  };
  if (i >= pairs) {
    const int rest = i - pairs;
    const int at = rest < first ? rest : rest + static_cast<int>(p.rotary_dim);
    store_element(p.heads[0].output, p.heads[0].output_dtype, output + at, load(at));
    return;
  }
  const bool interleaved = p.pairs == NVB_ROTARY_INTERLEAVED;
  const int one = interleaved ? first + 2 * i : first + i;
  const int other = interleaved ? one + 1 : one + pairs;
  const float x = load(one);
  const float y = load(other);
  store_element(p.heads[0].output, p.heads[0].output_dtype, output + one, x * cosines[i] - y * sines[i]);
  store_element(p.heads[0].output, p.heads[0].output_dtype, output + other, x * sines[i] + y * cosines[i]);
}

// Elements of a row of any float dtype, first 32 * Count neighbours of `one`, a lane's 32 apart, then those of `other`:
// one branch for all of them, behind which the reads follow one another.
template <int Count>
__device__ __forceinline__ void load_pairs(const void* base, uint32_t dtype, int64_t one, int64_t other, int step,
                                           float (&x)[Count], float (&y)[Count]) {
  const auto load = [&](auto* row) {
#pragma unroll
    for (int n = 0; n < Count; ++n) x[n] = to_float(row[one + n * step]), y[n] = to_float(row[other + n * step]);
  };
  if (dtype == NVB_F32) {
    load(static_cast<const float*>(base));
  } else if (dtype == NVB_F16) {
    load(static_cast<const __half*>(base));
  } else {
    load(static_cast<const __nv_bfloat16*>(base));
  }
}

// Heads of a kind with those that its last block lacks.
__host__ __device__ constexpr int64_t padded_heads(const nvb_rotary_heads& heads) {
  return (heads.count + kHeads - 1) / kHeads * kHeads;
}

// Heads of which every element turns, or none: a warp has a head, and a lane pairs lane + 32 n of it. Blocks have eight
// heads of one kind.
template <int Pairs>
__global__ void __launch_bounds__(kThreads)
    rotate_whole_heads_kernel(const __grid_constant__ nvb_rotary_embedding_params p) {
  constexpr int kPairs = 32 * Pairs;
  __shared__ float sines[kPairs];
  __shared__ float cosines[kPairs];
  const int64_t token = blockIdx.x % p.tokens;
  const int64_t batch = blockIdx.x / p.tokens;
  const int i = static_cast<int>(threadIdx.x), warp = i / 32, lane = i % 32;
  int kind = 0;
  int64_t first_head = static_cast<int64_t>(blockIdx.y) * kHeads;
  while (first_head >= padded_heads(p.heads[kind])) first_head -= padded_heads(p.heads[kind++]);
  const nvb_rotary_heads& heads = p.heads[kind];
  const int64_t head = first_head + warp;
  const bool has_head = head < heads.count;
  const bool interleaved = p.pairs == NVB_ROTARY_INTERLEAVED;
  // A lane's first pair, and from one of its pairs to the next.
  const int one = interleaved ? 2 * lane : lane, other = interleaved ? one + 1 : one + kPairs;
  const int step = interleaved ? 64 : 32;
  allow_next_grid();
  const float frequency = i < kPairs ? p.frequencies[i] : 0.0f;
  const int axis = p.position_axes[(i < kPairs ? i : 0) / 16] >> (i % 16 * 2) & 3;
  wait_for_previous_grid();

  float x[Pairs], y[Pairs], v[Pairs], w[Pairs];
  // A warp without a head reads the block's first, which nobody writes before the barrier.
  const int64_t read_head = has_head ? head : first_head;
  const int64_t from =
      batch * heads.input_strides[0] + token * heads.input_strides[1] + read_head * heads.input_strides[2];
  load_pairs<Pairs>(heads.input, heads.input_dtype, from + one, from + other, step, x, y);
  if (heads.norm != nullptr) load_pairs<Pairs>(heads.norm, heads.norm_dtype, one, other, step, v, w);
  const int64_t row = heads.rows == nullptr ? token : heads.rows[token * heads.rows_stride];
  const bool turns = heads.turn != 0;
  if (turns && i < kPairs) {
    const float factor = p.factors == nullptr ? 1.0f : p.factors[i];
    const int32_t position = p.positions[token * p.position_stride + axis * p.position_axis_stride];
    float sine, cosine;
    sincosf(static_cast<float>(position) * frequency / factor, &sine, &cosine);
    sines[i] = sine * heads.magnitude;
    cosines[i] = cosine * heads.magnitude;
  }
  if (heads.norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Pairs; ++n) sum += x[n] * x[n] + y[n] * y[n];
    const float inverse = rsqrtf(warp_sum(sum) / static_cast<float>(2 * kPairs) + heads.epsilon);
#pragma unroll
    for (int n = 0; n < Pairs; ++n) x[n] *= inverse * v[n], y[n] *= inverse * w[n];
  }
  // In place, no lane writes before all of the block have read.
  __syncthreads();
  if (!has_head || (heads.rows != nullptr && (row < 0 || row >= heads.output_rows))) return;
  const int64_t to = batch * heads.output_strides[0] + row * heads.output_strides[1] + head * heads.output_strides[2];
  const auto store = [&](auto* output) {
    using T = std::remove_pointer_t<decltype(output)>;
#pragma unroll
    for (int n = 0; n < Pairs; ++n) {
      float a = x[n], b = y[n];
      if (turns) {
        const float sine = sines[lane + 32 * n], cosine = cosines[lane + 32 * n];
        a = x[n] * cosine - y[n] * sine;
        b = x[n] * sine + y[n] * cosine;
      }
      output[to + one + n * step] = from_float<T>(a);
      output[to + other + n * step] = from_float<T>(b);
    }
  };
  if (heads.output_dtype == NVB_F32) {
    store(static_cast<float*>(heads.output));
  } else if (heads.output_dtype == NVB_F16) {
    store(static_cast<__half*>(heads.output));
  } else {
    store(static_cast<__nv_bfloat16*>(heads.output));
  }
}

__global__ void __launch_bounds__(kThreads)
    rotary_embedding_kernel(const __grid_constant__ nvb_rotary_embedding_params p) {
  __shared__ float sines[kMaxPairs];
  __shared__ float cosines[kMaxPairs];
  const nvb_rotary_heads& heads = p.heads[0];
  constexpr int kPairsOfThread = (kMaxPairs + kThreads - 1) / kThreads;
  const int64_t token = blockIdx.x % p.tokens;
  const int64_t batch = blockIdx.x / p.tokens;
  const int pairs = static_cast<int>(p.rotary_dim / 2);
  const int first_head = static_cast<int>(blockIdx.y) * kHeads;
  const int count = min(static_cast<int>(heads.count) - first_head, kHeads);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  allow_next_grid();
  float frequencies[kPairsOfThread];
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kThreads;
    frequencies[n] = i < pairs ? p.frequencies[i] : 0.0f;
  }
  wait_for_previous_grid();

  // Where the token's heads go.
  const int64_t row = heads.rows == nullptr ? token : heads.rows[token * heads.rows_stride];
  float angles[kPairsOfThread];
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kThreads;
    if (i >= pairs) break;
    const float factor = p.factors == nullptr ? 1.0f : p.factors[i];
    const int64_t place =
        token * p.position_stride + (p.position_axes[i / 16] >> (i % 16 * 2) & 3) * p.position_axis_stride;
    angles[n] = static_cast<float>(p.positions[place]) * frequencies[n] / factor;
  }
  const int64_t from =
      batch * heads.input_strides[0] + token * heads.input_strides[1] + first_head * heads.input_strides[2];
  float inverse = 1.0f;
  if (heads.norm != nullptr && warp < count) {
    const int64_t input = from + warp * heads.input_strides[2];
    float sum = 0.0f;
    for (int at = lane; at < p.head_dim; at += 32) {
      const float value = load_element(heads.input, heads.input_dtype, input + at);
      sum += value * value;
    }
    inverse = rsqrtf(warp_sum(sum) / static_cast<float>(p.head_dim) + heads.epsilon);
  }
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kThreads;
    if (i >= pairs) break;
    float sine, cosine;
    sincosf(angles[n], &sine, &cosine);
    sines[i] = sine * heads.magnitude;
    cosines[i] = cosine * heads.magnitude;
  }
  __syncthreads();

  if (heads.rows != nullptr && (row < 0 || row >= heads.output_rows)) return;
  // Items of a head: its pairs, then the elements that only pass through.
  const int items = pairs + static_cast<int>(p.head_dim) - static_cast<int>(p.rotary_dim);
  const int64_t to =
      batch * heads.output_strides[0] + row * heads.output_strides[1] + first_head * heads.output_strides[2];
  if (heads.norm == nullptr) {
    for (int item = static_cast<int>(threadIdx.x); item < count * items; item += kThreads) {
      const int head = item / items;
      turn_item(p, from + head * heads.input_strides[2], to + head * heads.output_strides[2], item - head * items,
                sines, cosines, [](int) { return 1.0f; });
    }
    return;
  }
  if (warp >= count) return;
  // In place, no lane writes an element before all have read it for the sum, which the lanes' exchange orders.
  for (int i = lane; i < items; i += 32) {
    turn_item(p, from + warp * heads.input_strides[2], to + warp * heads.output_strides[2], i, sines, cosines,
              [&](int at) { return inverse * load_element(heads.norm, heads.norm_dtype, at); });
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_rotary_embedding(const nvb_rotary_embedding_params* params,
                                                 const nvb_launch* launch) noexcept {
  const nvb_rotary_embedding_params& p = *params;
  if (p.pairs > NVB_ROTARY_INTERLEAVED || p.rotary_dim > 2 * nvb::kMaxPairs || p.kinds == 0 || p.kinds > 3) {
    return cudaErrorInvalidValue;
  }
  int64_t groups = 0;
  for (uint32_t kind = 0; kind < p.kinds; ++kind) {
    const nvb_rotary_heads& heads = p.heads[kind];
    if (nvb::float_dtype_bytes(heads.input_dtype) == 0 || nvb::float_dtype_bytes(heads.output_dtype) == 0 ||
        (heads.norm != nullptr && nvb::float_dtype_bytes(heads.norm_dtype) == 0)) {
      return cudaErrorInvalidValue;
    }
    groups += nvb::padded_heads(heads) / nvb::kHeads;
  }
  const int64_t blocks = p.batch * p.tokens;
  if (blocks > INT32_MAX || groups > 65535) return cudaErrorInvalidValue;
  if (blocks == 0 || groups == 0) return cudaSuccess;
  auto* kernel = nvb::rotary_embedding_kernel;
  if (p.first == 0 && p.rotary_dim == p.head_dim) {
    if (p.rotary_dim == 64) kernel = nvb::rotate_whole_heads_kernel<1>;
    if (p.rotary_dim == 128) kernel = nvb::rotate_whole_heads_kernel<2>;
    if (p.rotary_dim == 192) kernel = nvb::rotate_whole_heads_kernel<3>;
    if (p.rotary_dim == 256) kernel = nvb::rotate_whole_heads_kernel<4>;
  }
  const bool turns_as_told = p.kinds == 1 && (p.heads[0].turn != 0 || p.rotary_dim == 0);
  if (kernel == nvb::rotary_embedding_kernel && !turns_as_told) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  return nvb::launch_overlapped(kernel, grid, dim3(nvb::kThreads), 0, launch, p);
}
