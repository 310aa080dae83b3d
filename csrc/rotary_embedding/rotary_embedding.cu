// rotary_embedding: the general rotation, for engines whose caches are plain tensors; csrc/rope is the fused one.
//
// Work: a block has up to eight heads of a token, whose threads share the angles. Without a norm they go through the
// heads' pairs and single elements, one a thread; with one a warp takes a head, whose squares it adds up, and each lane
// writes what it alone has read, so that work in place is sound. Shared memory: 2 KiB of sines and cosines. Registers
// are no bound: a thread holds one pair.
//
// One token is a few kilobytes, so its time is that of what waits for something else. The frequencies, of which every
// lane reads another place of the arguments, are read before the grid in front has ended; and a warp adds its head's
// squares while it waits for the token's position.
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
  const auto load = [&](int at) { return load_element(p.input, p.input_dtype, input + at) * factor(at); };
  if (i >= pairs) {
    const int rest = i - pairs;
    const int at = rest < first ? rest : rest + static_cast<int>(p.rotary_dim);
    store_element(p.output, p.output_dtype, output + at, load(at));
    return;
  }
  const bool interleaved = p.pairs == NVB_ROTARY_INTERLEAVED;
  const int one = interleaved ? first + 2 * i : first + i;
  const int other = interleaved ? one + 1 : one + pairs;
  const float x = load(one);
  const float y = load(other);
  store_element(p.output, p.output_dtype, output + one, x * cosines[i] - y * sines[i]);
  store_element(p.output, p.output_dtype, output + other, x * sines[i] + y * cosines[i]);
}

__global__ void __launch_bounds__(kThreads)
    rotary_embedding_kernel(const __grid_constant__ nvb_rotary_embedding_params p) {
  __shared__ float sines[kMaxPairs];
  __shared__ float cosines[kMaxPairs];
  constexpr int kPairsOfThread = (kMaxPairs + kThreads - 1) / kThreads;
  const int64_t token = blockIdx.x % p.shape[1];
  const int64_t batch = blockIdx.x / p.shape[1];
  const int pairs = static_cast<int>(p.rotary_dim / 2);
  const int first_head = static_cast<int>(blockIdx.y) * kHeads;
  const int heads = min(static_cast<int>(p.shape[2]) - first_head, kHeads);
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
  const int64_t row = p.rows == nullptr ? token : p.rows[token * p.rows_stride];
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
  const int64_t from = batch * p.input_strides[0] + token * p.input_strides[1] + first_head * p.input_strides[2];
  float inverse = 1.0f;
  if (p.norm != nullptr && warp < heads) {
    const int64_t input = from + warp * p.input_strides[2];
    float sum = 0.0f;
    for (int at = lane; at < p.shape[3]; at += 32) {
      const float value = load_element(p.input, p.input_dtype, input + at);
      sum += value * value;
    }
    inverse = rsqrtf(warp_sum(sum) / static_cast<float>(p.shape[3]) + p.epsilon);
  }
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kThreads;
    if (i >= pairs) break;
    float sine, cosine;
    sincosf(angles[n], &sine, &cosine);
    sines[i] = sine * p.magnitude;
    cosines[i] = cosine * p.magnitude;
  }
  __syncthreads();

  if (p.rows != nullptr && (row < 0 || row >= p.output_rows)) return;
  // Items of a head: its pairs, then the elements that only pass through.
  const int items = pairs + static_cast<int>(p.shape[3]) - static_cast<int>(p.rotary_dim);
  const int64_t to = batch * p.output_strides[0] + row * p.output_strides[1] + first_head * p.output_strides[2];
  if (p.norm == nullptr) {
    for (int item = static_cast<int>(threadIdx.x); item < heads * items; item += kThreads) {
      const int head = item / items;
      turn_item(p, from + head * p.input_strides[2], to + head * p.output_strides[2], item - head * items, sines,
                cosines, [](int) { return 1.0f; });
    }
    return;
  }
  if (warp >= heads) return;
  // In place, no lane writes an element before all have read it for the sum, which the lanes' exchange orders.
  for (int i = lane; i < items; i += 32) {
    turn_item(p, from + warp * p.input_strides[2], to + warp * p.output_strides[2], i, sines, cosines,
              [&](int at) { return inverse * load_element(p.norm, p.norm_dtype, at); });
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_rotary_embedding(const nvb_rotary_embedding_params* params,
                                                 const nvb_launch* launch) noexcept {
  const nvb_rotary_embedding_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      (p.norm != nullptr && nvb::float_dtype_bytes(p.norm_dtype) == 0) || p.pairs > NVB_ROTARY_INTERLEAVED ||
      p.rotary_dim > 2 * nvb::kMaxPairs) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = p.shape[0] * p.shape[1];
  const int64_t groups = (p.shape[2] + nvb::kHeads - 1) / nvb::kHeads;
  if (blocks > INT32_MAX || groups > 65535) return cudaErrorInvalidValue;
  if (blocks == 0 || groups == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  return nvb::launch_overlapped(nvb::rotary_embedding_kernel, grid, dim3(nvb::kThreads), 0, launch, p);
}
