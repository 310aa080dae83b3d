// output[m][k] = input[m][order[k]]: a gather inside rows, for weights whose columns were sorted (GPTQ's activation
// order). Without an order: a copy, for input whose rows are not aligned.
//
// Shapes: any. A thread gathers one element of a row; reads scatter inside a row, which L1 and L2 hold, and stores are
// contiguous. Shared memory: none.
#include <algorithm>

#include "../common/vector.cuh"
#include "linear_order.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void __launch_bounds__(kThreads) linear_order(const nvb_linear_order_params p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.columns) return;
  const int64_t from = p.order == nullptr ? column : p.order[column];
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    static_cast<Element*>(p.output)[row * p.output_stride + column] =
        static_cast<const Element*>(p.input)[row * p.input_stride + from];
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_linear_order(const nvb_linear_order_params* params, const nvb_launch* launch) noexcept {
  const nvb_linear_order_params& p = *params;
  const int bytes = nvb::float_dtype_bytes(p.dtype);
  if (bytes == 0 || p.rows < 0 || p.columns < 0) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((p.columns + nvb::kThreads - 1) / nvb::kThreads),
                  static_cast<unsigned>(std::min<int64_t>(p.rows, 65535)));
  if (bytes == 2) {
    nvb::linear_order<uint16_t><<<grid, nvb::kThreads, 0, launch->stream>>>(p);
  } else {
    nvb::linear_order<uint32_t><<<grid, nvb::kThreads, 0, launch->stream>>>(p);
  }
  return cudaPeekAtLastError();
}
