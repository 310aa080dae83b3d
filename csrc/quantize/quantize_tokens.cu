// Rows of floats to 8 bits with a scale a row, and to a float tensor (quantize_tokens.h).
//
// A block takes a row (quantized_row.cuh). The values are read as vectors where their rows are 16-byte aligned, else
// element by element. Shared memory: 128 bytes.
#include "../common/quantized_row.cuh"
#include "quantize_tokens.h"

namespace nvb {
namespace {

template <bool Keeps>
__global__ void __launch_bounds__(kRowThreads)
    quantize_tokens(const nvb_quantize_tokens_params p, const bool vector_loads, const bool vector_stores) {
  const int64_t row = blockIdx.x;
  const int64_t start = row * p.values_stride;
  const QuantizedRowTarget target = {p.quantized_output, p.output,       p.output_stride,
                                     p.code_columns,     p.output_dtype, vector_stores};
  quantize_row<Keeps>(target, row, [&](int64_t column, float(&values)[kRowColumns]) {
    if (vector_loads && column + kRowColumns <= p.columns) {
      load_elements(p.values, p.values_dtype, start + column, values);
    } else {
#pragma unroll
      for (int i = 0; i < kRowColumns; ++i) {
        values[i] = column + i < p.columns ? load_element(p.values, p.values_dtype, start + column + i) : 0.0f;
      }
    }
  });
}

bool is_valid(const nvb_quantize_tokens_params& p) {
  const bool pads = p.code_columns > p.columns;
  return p.rows >= 0 && p.rows <= 0x7fffffff && p.columns >= 0 && p.code_columns >= p.columns &&
         float_dtype_bytes(p.values_dtype) != 0 && p.quantized_output.data != nullptr &&
         nvb_is_valid_output(p.quantized_output) &&
         (p.output == nullptr || (!pads && float_dtype_bytes(p.output_dtype) != 0));
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_quantize_tokens(const nvb_quantize_tokens_params* params,
                                                const nvb_launch* launch) noexcept {
  const nvb_quantize_tokens_params& p = *params;
  if (!nvb::is_valid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const bool loads = nvb::is_aligned16(p.values, p.values_stride, nvb::float_dtype_bytes(p.values_dtype));
  const bool stores = nvb::is_aligned16(p.output, p.output_stride, nvb::float_dtype_bytes(p.output_dtype));
  const unsigned rows = static_cast<unsigned>(p.rows);
  const unsigned threads = nvb::row_threads(p.rows, p.code_columns, *launch);
  if (p.code_columns <= nvb::kKeptRow) {
    nvb::quantize_tokens<true><<<rows, threads, 0, launch->stream>>>(p, loads, stores);
  } else {
    nvb::quantize_tokens<false><<<rows, threads, 0, launch->stream>>>(p, loads, stores);
  }
  return cudaPeekAtLastError();
}
