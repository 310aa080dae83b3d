// output[n][k] = value of element (n, k) of a quantised matrix.
//
// Shapes: as dequantize.h says. Bound by memory: a thread turns eight neighbouring columns of two rows into one or two
// 16-byte stores each. The rows are eight apart, as a word of an Int4 tile holds columns of such a pair, which so is
// fetched from L1 the second time. A block is 16 rows x 256 columns. Shared memory: none.
#include <algorithm>

#include "../common/quantized_element.cuh"
#include "dequantize.h"

namespace nvb {
namespace {

constexpr int kWidth = 8;  // columns of a thread
constexpr int kLanes = 32;
constexpr int kPairs = 8;  // pairs of rows of a block
constexpr int kBlockColumns = kLanes * kWidth;
constexpr int kBlockRows = 2 * kPairs;

template <uint32_t Encoding>
__global__ void __launch_bounds__(kLanes* kPairs) dequantize(const nvb_dequantize_params p, const bool vectors) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kBlockColumns + threadIdx.x * kWidth;
  if (column >= p.columns) return;
  const int64_t k = p.first_column + column;
  const int64_t last_row = p.first_row + p.rows;
  // Blocks start at multiples of 16 rows of the matrix, so that pairs are those of a tile.
  const int64_t first_block = p.first_row / kBlockRows;
  for (int64_t block = blockIdx.y; (first_block + block) * kBlockRows < last_row; block += gridDim.y) {
    uint32_t codes[2][2];
    float2 scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = (first_block + block) * kBlockRows + threadIdx.y + kPairs * r;
      if (row < p.first_row || row >= last_row) continue;
      // Eight columns from a multiple of eight on share a scale, and the padding of a row holds the last of them.
      codes[r][0] = load_four_codes<Encoding>(p.matrix, row, k);
      codes[r][1] = load_four_codes<Encoding>(p.matrix, row, k + 4);
      scales[r] = load_scale<Encoding>(p.matrix, row, k);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = (first_block + block) * kBlockRows + threadIdx.y + kPairs * r;
      if (row < p.first_row || row >= last_row) continue;
      float values[kWidth];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float four[4];
        decode_four<Encoding>(codes[r][half], scales[r], four);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[4 * half + i] = four[i];
      }
      const int64_t start = (row - p.first_row) * p.output_stride;
      if (vectors && column + kWidth <= p.columns) {
        store_elements(p.output, p.output_dtype, start + column, values);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i >= p.columns) break;
        const int64_t to = p.order == nullptr ? column + i : p.order[column + i];
        store_element(p.output, p.output_dtype, start + to, values[i]);
      }
    }
  }
}

// Blocks as a file has them: a thread turns four neighbours of a row into floats, which are one store where the
// output's rows are aligned.
template <uint32_t Format>
__global__ void __launch_bounds__(kLanes* kPairs) dequantize_blocks(const nvb_dequantize_params p, const bool vectors) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * 4;
  if (column >= p.columns) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kPairs + threadIdx.y; row < p.rows;
       row += static_cast<int64_t>(gridDim.y) * kPairs) {
    float values[4];
    load_four<Format>(p.matrix, p.first_row + row, p.first_column + column, values);
    if (vectors && column + 4 <= p.columns) {
      store_elements(p.output, p.output_dtype, row * p.output_stride + column, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.columns)
        store_element(p.output, p.output_dtype, row * p.output_stride + column + i, values[i]);
    }
  }
}

template <uint32_t Format>
cudaError_t launch_blocks(const nvb_dequantize_params& p, const nvb_launch& launch) {
  const dim3 grid(static_cast<unsigned>((p.columns + 4 * kLanes - 1) / (4 * kLanes)),
                  static_cast<unsigned>(std::min<int64_t>((p.rows + kPairs - 1) / kPairs, 65535)));
  const bool vectors = is_aligned16(p.output, p.output_stride, float_dtype_bytes(p.output_dtype));
  dequantize_blocks<Format><<<grid, dim3(kLanes, kPairs), 0, launch.stream>>>(p, vectors);
  return cudaPeekAtLastError();
}

template <uint32_t Encoding>
cudaError_t launch_encoding(const nvb_dequantize_params& p, const nvb_launch& launch) {
  const int64_t blocks = (p.first_row + p.rows + kBlockRows - 1) / kBlockRows - p.first_row / kBlockRows;
  const dim3 grid(static_cast<unsigned>((p.columns + kBlockColumns - 1) / kBlockColumns),
                  static_cast<unsigned>(std::min<int64_t>(blocks, 65535)));
  const bool vectors = p.order == nullptr && is_aligned16(p.output, p.output_stride, float_dtype_bytes(p.output_dtype));
  dequantize<Encoding><<<grid, dim3(kLanes, kPairs), 0, launch.stream>>>(p, vectors);
  return cudaPeekAtLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_dequantize(const nvb_dequantize_params* params, const nvb_launch* launch) noexcept {
  const nvb_dequantize_params& p = *params;
  const nvb_quantized_matrix& matrix = p.matrix;
  const bool part = p.first_row >= 0 && p.rows >= 0 && p.first_row + p.rows <= matrix.rows && p.first_column >= 0 &&
                    p.columns >= 0 && p.first_column + p.columns <= matrix.columns && p.first_column % 8 == 0 &&
                    (p.order == nullptr || p.columns == matrix.columns);
  if (!part || !nvb_is_valid_quantized(matrix.encoding, matrix.scale_kind, matrix.group, matrix.zero_points) ||
      nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  switch (matrix.encoding) {
    case NVB_FP8_E4M3:
      return nvb::launch_encoding<NVB_FP8_E4M3>(p, *launch);
    case NVB_FP8_E5M2:
      return nvb::launch_encoding<NVB_FP8_E5M2>(p, *launch);
    case NVB_INT8:
      return nvb::launch_encoding<NVB_INT8>(p, *launch);
    case NVB_SFP:
      return nvb::launch_encoding<NVB_SFP>(p, *launch);
    case NVB_INT4:
      return nvb::launch_encoding<NVB_INT4>(p, *launch);
    default:
      // Blocks have no order of columns.
      if (p.order != nullptr) return cudaErrorInvalidValue;
      return nvb::with_block_format(
          matrix.encoding, [&](auto format) { return nvb::launch_blocks<decltype(format)::value>(p, *launch); });
  }
}
