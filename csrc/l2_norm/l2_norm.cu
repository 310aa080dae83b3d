// l2_norm: a block a row, which is read three times, the last two from the caches: the largest element, the squares,
// the quotients. Shared memory: 256 bytes for the two reductions.
#include <algorithm>

#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "l2_norm.h"

namespace nvb {
namespace {

constexpr int kMostThreads = 256;

__global__ void __launch_bounds__(kMostThreads) l2_norm_kernel(const nvb_l2_norm_params p) {
  __shared__ float max_scratch[32];
  __shared__ float sum_scratch[32];
  const int64_t row = blockIdx.x;
  const int64_t a = row / p.shape[2] / p.shape[1];
  const int64_t b = row / p.shape[2] % p.shape[1];
  const int64_t c = row % p.shape[2];
  const int64_t from = a * p.input_strides[0] + b * p.input_strides[1] + c * p.input_strides[2];
  const int64_t to = a * p.output_strides[0] + b * p.output_strides[1] + c * p.output_strides[2];
  const auto element = [&](int64_t column) {
    return load_element(p.input, p.input_dtype, from + column * p.input_strides[3]);
  };

  float largest = 0.0f;
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += blockDim.x) {
    largest = fmaxf(largest, fabsf(element(column)));
  }
  // A power of two divides without a rounding. It is at most 2^126, so that its reciprocal is no subnormal number.
  int exponent = 0;
  frexpf(row_max(largest, max_scratch), &exponent);
  exponent = max(-125, min(exponent, 125));
  const float down = ldexpf(1.0f, -exponent);
  float squares = 0.0f;
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += blockDim.x) {
    const float value = element(column) * down;
    squares += value * value;
  }
  const float length = sqrtf(row_sum(squares, sum_scratch));
  // Compared after the division, so that epsilon counts as it does for undivided elements; a NaN stays.
  const float least = p.epsilon * down;
  const float divisor = length < least ? least : length;
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += blockDim.x) {
    store_element(p.output, p.output_dtype, to + column * p.output_strides[3], element(column) * down / divisor);
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_l2_norm(const nvb_l2_norm_params* params, const nvb_launch* launch) noexcept {
  const nvb_l2_norm_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  if (!nvb::fits_grid(rows)) return cudaErrorInvalidValue;
  const int64_t warps = std::clamp<int64_t>(nvb::ceiling_divide(p.shape[3], 32), 1, nvb::kMostThreads / 32);
  nvb::l2_norm_kernel<<<static_cast<unsigned>(rows), static_cast<unsigned>(warps * 32), 0, launch->stream>>>(p);
  return cudaGetLastError();
}
