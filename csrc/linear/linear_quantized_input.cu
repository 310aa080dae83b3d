// Rows of quantised values to aligned rows that end in zeros (linear_quantized_input.h). Bound by memory: a thread
// writes four values of a row, which it reads singly, because it is where they are not aligned that the rows are
// copied.
#include <algorithm>

#include "linear_quantized_input.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) linear_quantized_input(const nvb_linear_quantized_input_params p) {
  const int64_t word = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (4 * word >= p.output_row_bytes) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const unsigned char* const values = static_cast<const unsigned char*>(p.values) + row * p.row_bytes;
    uint32_t four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * word + i < p.columns) four |= static_cast<uint32_t>(values[4 * word + i]) << (8 * i);
    }
    reinterpret_cast<uint32_t*>(static_cast<char*>(p.output) + row * p.output_row_bytes)[word] = four;
    if (word == 0) p.output_scales[row] = p.scales[row];
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_linear_quantized_input(const nvb_linear_quantized_input_params* params,
                                                       const nvb_launch* launch) noexcept {
  const nvb_linear_quantized_input_params& p = *params;
  if (p.rows < 0 || p.columns < 0 || p.output_row_bytes < p.columns || p.output_row_bytes % 16 != 0 ||
      reinterpret_cast<uintptr_t>(p.output) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const int64_t width = 4 * nvb::kThreads;
  const dim3 grid(static_cast<unsigned>((p.output_row_bytes + width - 1) / width),
                  static_cast<unsigned>(std::min<int64_t>(p.rows, 65535)));
  nvb::linear_quantized_input<<<grid, nvb::kThreads, 0, launch->stream>>>(p);
  return cudaPeekAtLastError();
}
