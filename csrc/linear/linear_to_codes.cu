// Rows of f32 to codes with a scale a row, and to a float tensor (linear_to_codes.h).
//
// A block takes a row (quantized_row.cuh). The values come from L2, where the product has just left them: vectors where
// their rows are 16-byte aligned, else element by element. Shared memory: 128 bytes.
#include "../common/quantized_row.cuh"
#include "linear_to_codes.h"

namespace nvb {
namespace {

template <bool Keeps>
__global__ void __launch_bounds__(kRowThreads)
    linear_to_codes(const nvb_linear_to_codes_params p, const bool vector_loads, const bool vector_stores) {
  const int64_t row = blockIdx.x;
  const float* const source = p.values + row * p.values_stride;
  const QuantizedRowTarget target = {p.quantized_output, p.output,       p.output_stride,
                                     p.columns,          p.output_dtype, vector_stores};
  quantize_row<Keeps>(target, row, [&](int64_t column, float(&values)[kRowColumns]) {
    if (vector_loads && column + kRowColumns <= p.columns) {
      load_elements(source, NVB_F32, column, values);
    } else {
#pragma unroll
      for (int i = 0; i < kRowColumns; ++i) values[i] = column + i < p.columns ? source[column + i] : 0.0f;
    }
  });
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_linear_to_codes(const nvb_linear_to_codes_params* params,
                                                const nvb_launch* launch) noexcept {
  const nvb_linear_to_codes_params& p = *params;
  if (p.rows < 0 || p.rows > 0x7fffffff || p.columns < 0 || p.quantized_output.data == nullptr ||
      !nvb_is_valid_output(p.quantized_output) ||
      (p.output != nullptr && nvb::float_dtype_bytes(p.output_dtype) == 0)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const bool loads = nvb::is_aligned16(p.values, p.values_stride, sizeof(float));
  const bool stores = nvb::is_aligned16(p.output, p.output_stride, nvb::float_dtype_bytes(p.output_dtype));
  const unsigned rows = static_cast<unsigned>(p.rows), threads = nvb::row_threads(p.columns);
  if (p.columns <= nvb::kKeptRow) {
    nvb::linear_to_codes<true><<<rows, threads, 0, launch->stream>>>(p, loads, stores);
  } else {
    nvb::linear_to_codes<false><<<rows, threads, 0, launch->stream>>>(p, loads, stores);
  }
  return cudaPeekAtLastError();
}
