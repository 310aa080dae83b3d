// rotary_embedding: the general rotation, for engines whose caches are plain tensors; csrc/rope is the fused one.
//
// Work: a block a token, whose threads share the angles and go through the heads, a pair or two single elements a
// thread. Shared memory: 2 KiB of sines and cosines. Registers are no bound: a thread holds one pair.
#include "../common/vector.cuh"
#include "rotary_embedding.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 288;

static_assert(sizeof(nvb_rotary_embedding_params) <= 4096, "drivers before 12.1 take at most 4096 bytes of arguments");

__global__ void __launch_bounds__(kThreads)
    rotary_embedding_kernel(const __grid_constant__ nvb_rotary_embedding_params p) {
  __shared__ float sines[kMaxPairs];
  __shared__ float cosines[kMaxPairs];
  const int64_t token = blockIdx.x % p.shape[1];
  const int64_t batch = blockIdx.x / p.shape[1];
  const int pairs = static_cast<int>(p.rotary_dim / 2);
  for (int i = threadIdx.x; i < pairs; i += kThreads) {
    const float factor = p.factors == nullptr ? 1.0f : p.factors[i];
    const int64_t place =
        token * p.position_stride + (p.position_axes[i / 16] >> (i % 16 * 2) & 3) * p.position_axis_stride;
    const float position = static_cast<float>(p.positions[place]);
    float sine, cosine;
    sincosf(position * p.frequencies[i] / factor, &sine, &cosine);
    sines[i] = sine * p.magnitude;
    cosines[i] = cosine * p.magnitude;
  }
  __syncthreads();

  // Items of a head: its pairs, then the elements that only pass through.
  const int head_dim = static_cast<int>(p.shape[3]);
  const int rotary_dim = static_cast<int>(p.rotary_dim);
  const int first = static_cast<int>(p.first);
  const int items = pairs + head_dim - rotary_dim;
  const int64_t from = batch * p.input_strides[0] + token * p.input_strides[1];
  const int64_t to = batch * p.output_strides[0] + token * p.output_strides[1];
  for (int64_t item = threadIdx.x; item < p.shape[2] * items; item += kThreads) {
    const int64_t head = item / items;
    const int i = static_cast<int>(item - head * items);
    const int64_t input = from + head * p.input_strides[2];
    const int64_t output = to + head * p.output_strides[2];
    if (i >= pairs) {
      const int rest = i - pairs;
      const int at = rest < first ? rest : rest + rotary_dim;
      store_element(p.output, p.output_dtype, output + at, load_element(p.input, p.input_dtype, input + at));
      continue;
    }
    const bool interleaved = p.pairs == NVB_ROTARY_INTERLEAVED;
    const int one = interleaved ? first + 2 * i : first + i;
    const int other = interleaved ? one + 1 : one + pairs;
    const float x = load_element(p.input, p.input_dtype, input + one);
    const float y = load_element(p.input, p.input_dtype, input + other);
    store_element(p.output, p.output_dtype, output + one, x * cosines[i] - y * sines[i]);
    store_element(p.output, p.output_dtype, output + other, x * sines[i] + y * cosines[i]);
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_rotary_embedding(const nvb_rotary_embedding_params* params,
                                                 const nvb_launch* launch) noexcept {
  const nvb_rotary_embedding_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      p.pairs > NVB_ROTARY_INTERLEAVED || p.rotary_dim > 2 * nvb::kMaxPairs) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = p.shape[0] * p.shape[1];
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  nvb::rotary_embedding_kernel<<<static_cast<unsigned>(blocks), nvb::kThreads, 0, launch->stream>>>(p);
  return cudaGetLastError();
}
