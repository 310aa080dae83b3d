// A block that leaves a row in 8 bits and, beside that, rounded to a float tensor: the largest magnitude first, then
// the quantised values. The row's values stay in registers where they are at most 32 a thread; of a longer row they are
// made again.
#pragma once

#include <algorithm>

#include "launch.h"
#include "quantized_output.cuh"
#include "vector.cuh"

namespace nvb {

inline constexpr int kRowColumns = 8;  // neighbours that a thread takes at a time
inline constexpr int kRowThreads = 512;
inline constexpr int kRowParts = 4;  // of kRowColumns columns, that a thread keeps
inline constexpr int64_t kKeptRow = static_cast<int64_t>(kRowThreads) * kRowParts * kRowColumns;

// Threads of a block: whole warps. Few rows are divided among as many threads as there can be; of many rows a thread
// takes all that it keeps, so that its loads are under way together and little of the device waits for reductions.
inline unsigned row_threads(int64_t rows, int64_t columns, const nvb_launch& launch) {
  const int64_t warp_columns = 32 * kRowColumns * (rows >= 4 * launch.multiprocessors ? kRowParts : 1);
  return static_cast<unsigned>(32 * std::clamp<int64_t>((columns + warp_columns - 1) / warp_columns, 1, 16));
}
static_assert(kRowThreads == 32 * 16, "as many as row_threads gives");

// Where rows go.
struct QuantizedRowTarget {
  nvb_quantized_output codes;
  void* output;  // or null
  int64_t output_stride;
  int64_t columns;
  uint32_t output_dtype;
  bool vectors;  // the output's rows are 16-byte aligned
};

__device__ __forceinline__ void store_row_part(const QuantizedRowTarget& target, int64_t row, int64_t column,
                                               float inverse, const float (&values)[kRowColumns]) {
  const int64_t output = row * target.output_stride + column;
  if (column + kRowColumns <= target.columns) {
    store_codes(target.codes, row, column, inverse, values);
    if (target.output != nullptr && target.vectors) {
      store_elements(target.output, target.output_dtype, output, values);
      return;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRowColumns; ++i) {
      const float value[1] = {values[i]};
      if (column + i < target.columns) store_codes(target.codes, row, column + i, inverse, value);
    }
  }
  if (target.output == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRowColumns; ++i) {
    if (column + i < target.columns) store_element(target.output, target.output_dtype, output + i, values[i]);
  }
}

// `load(column, values)` gives kRowColumns values of the row, 0 past its end. The float output is written last: it may
// be what the values are made of, of which a thread then has no more to read. Keeps: the row is at most kKeptRow long.
template <bool Keeps, typename Load>
__device__ __forceinline__ void quantize_row(const QuantizedRowTarget& target, int64_t row, const Load& load) {
  __shared__ uint32_t scratch[32];
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kRowColumns;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kRowColumns;
  uint32_t most = 0;
  if constexpr (Keeps) {
    float values[kRowParts][kRowColumns];
#pragma unroll
    for (int part = 0; part < kRowParts; ++part) {
      if (first + part * step < target.columns) {
        load(first + part * step, values[part]);
        most = largest_bits(values[part], most);
      }
    }
    const float inverse = store_row_scale(target.codes, row, row_largest_bits(most, scratch));
#pragma unroll
    for (int part = 0; part < kRowParts; ++part) {
      const int64_t column = first + part * step;
      if (column < target.columns) store_row_part(target, row, column, inverse, values[part]);
    }
  } else {
    float values[kRowColumns];
    for (int64_t column = first; column < target.columns; column += step) {
      load(column, values);
      most = largest_bits(values, most);
    }
    const float inverse = store_row_scale(target.codes, row, row_largest_bits(most, scratch));
    for (int64_t column = first; column < target.columns; column += step) {
      load(column, values);
      store_row_part(target, row, column, inverse, values);
    }
  }
}

}  // namespace nvb
