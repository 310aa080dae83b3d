// masked_softmax: the scores of an attention that is made of products; csrc/attention is the fused one.
//
// Work: a block a row. One pass keeps a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867), a second
// reads the row again, through the caches, and writes. Shared memory: 256 bytes for the two reductions.
#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "masked_softmax.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;

// What is subtracted in the exponent: the maximum, or 0 for a row of -inf, where -inf - -inf would be NaN.
__device__ __forceinline__ float exponent_shift(float maximum) {
  return maximum == -CUDART_INF_F ? 0.0f : maximum;
}

__device__ __forceinline__ float slope_of(const nvb_masked_softmax_params& p, int64_t head) {
  if (p.alibi_bias == 0.0f) return 1.0f;
  const float heads = static_cast<float>(p.alibi_heads);
  if (head < p.alibi_heads) return exp2f(-p.alibi_bias / heads * static_cast<float>(head + 1));
  return exp2f(-p.alibi_bias / (2.0f * heads) * static_cast<float>(2 * (head - p.alibi_heads) + 1));
}

__global__ void __launch_bounds__(kThreads) masked_softmax_kernel(const nvb_masked_softmax_params p) {
  __shared__ float max_scratch[32];
  __shared__ float sum_scratch[32];
  const int64_t row = blockIdx.x % p.shape[2];
  const int64_t head = blockIdx.x / p.shape[2] % p.shape[1];
  const int64_t batch = blockIdx.x / p.shape[2] / p.shape[1];
  const int64_t from = batch * p.input_strides[0] + head * p.input_strides[1] + row * p.input_strides[2];
  const int64_t to = batch * p.output_strides[0] + head * p.output_strides[1] + row * p.output_strides[2];
  const int64_t mask = p.mask == nullptr
                           ? 0
                           : batch % p.mask_shape[0] * p.mask_strides[0] + head % p.mask_shape[1] * p.mask_strides[1] +
                                 row % p.mask_shape[2] * p.mask_strides[2];
  const float slope = slope_of(p, head);
  const auto score = [&](int64_t column) {
    const float scaled = load_element(p.input, p.input_dtype, from + column) * p.scale;
    return p.mask == nullptr ? scaled : scaled + slope * load_element(p.mask, p.mask_dtype, mask + column);
  };

  // Running maximum and sum of this thread's elements; the sum is relative to the maximum so far.
  float maximum = -CUDART_INF_F;
  float sum = 0.0f;
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += kThreads) {
    const float value = score(column);
    const float larger = fmaxf(maximum, value);
    const float shift = exponent_shift(larger);
    sum = sum * expf(maximum - shift) + expf(value - shift);
    maximum = larger;
  }

  // The row's, with the sink.
  const float sink = p.sinks == nullptr ? -CUDART_INF_F : p.sinks[head];
  const float shift = exponent_shift(fmaxf(row_max(maximum, max_scratch), sink));
  const float total = row_sum(sum * expf(maximum - shift), sum_scratch) + expf(sink - shift);
  const float reciprocal = total == 0.0f ? 0.0f : 1.0f / total;

  // Each thread reads and writes its own columns, so in place is sound.
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += kThreads) {
    store_element(p.output, p.output_dtype, to + column, expf(score(column) - shift) * reciprocal);
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_masked_softmax(const nvb_masked_softmax_params* params,
                                               const nvb_launch* launch) noexcept {
  const nvb_masked_softmax_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 ||
      (p.mask != nullptr && nvb::float_dtype_bytes(p.mask_dtype) == 0)) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = p.shape[0] * p.shape[1] * p.shape[2];
  if (!nvb::fits_grid(blocks)) return cudaErrorInvalidValue;
  nvb::masked_softmax_kernel<<<static_cast<unsigned>(blocks), nvb::kThreads, 0, launch->stream>>>(p);
  return cudaGetLastError();
}
