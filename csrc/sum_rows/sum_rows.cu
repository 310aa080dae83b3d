// sum_rows: a block a row, whose threads stride over the columns and meet in one reduction, in an order that depends on
// the number of columns alone. Shared memory: 128 bytes for the reduction.
#include <algorithm>

#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "sum_rows.h"

namespace nvb {
namespace {

constexpr int kMostThreads = 256;

__global__ void __launch_bounds__(kMostThreads) sum_rows_kernel(const nvb_sum_rows_params p) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const int64_t a = row / p.shape[2] / p.shape[1];
  const int64_t b = row / p.shape[2] % p.shape[1];
  const int64_t c = row % p.shape[2];
  const int64_t from = a * p.input_strides[0] + b * p.input_strides[1] + c * p.input_strides[2];
  float sum = 0.0f;
  for (int64_t column = threadIdx.x; column < p.shape[3]; column += blockDim.x) {
    sum += load_element(p.input, p.input_dtype, from + column * p.input_strides[3]);
  }
  sum = row_sum(sum, scratch);
  if (threadIdx.x == 0) {
    const int64_t to = a * p.output_strides[0] + b * p.output_strides[1] + c * p.output_strides[2];
    store_element(p.output, p.output_dtype, to, sum * p.scale);
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_sum_rows(const nvb_sum_rows_params* params, const nvb_launch* launch) noexcept {
  const nvb_sum_rows_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  if (!nvb::fits_grid(rows)) return cudaErrorInvalidValue;
  const int64_t warps = std::clamp<int64_t>(nvb::ceiling_divide(p.shape[3], 32), 1, nvb::kMostThreads / 32);
  nvb::sum_rows_kernel<<<static_cast<unsigned>(rows), static_cast<unsigned>(warps * 32), 0, launch->stream>>>(p);
  return cudaGetLastError();
}
