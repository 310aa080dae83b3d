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

// Blocks as a file has them. A warp has 256 neighbouring columns of a row, a unit, at a time: it copies the unit's
// bytes to shared memory, 16 at a time, those of its next row while it turns these into floats, and a lane has eight
// columns, which are one or two stores where the output's rows are aligned. (Read from global memory, the bytes of a
// block's scales are many small loads for four columns, which reached 1.3 TB/s on an H200.)
constexpr int kUnitColumns = 256;

template <uint32_t Format>
struct UnitBytes {
  static constexpr int kBytes = kUnitColumns / BlockElement<Format>::kElements * BlockElement<Format>::kBytes;
  static constexpr int kChunks = (kBytes + 15 + 14) / 16;  // a unit begins anywhere within 16 bytes

  // The 16 bytes that are the lane's of those around `from`; what lies behind `end` is not read.
  static __device__ __forceinline__ uint4 load(const uint8_t* from, const uint8_t* end) {
    const uint8_t* const at = from - (reinterpret_cast<uintptr_t>(from) & 15u) + threadIdx.x * 16;
    if (threadIdx.x >= kChunks || at >= end) return make_uint4(0, 0, 0, 0);
    if (at + 16 <= end) return *reinterpret_cast<const uint4*>(at);
    uint32_t words[4] = {};
    for (int i = 0; at + i < end; ++i) words[i / 4] |= static_cast<uint32_t>(at[i]) << (i % 4 * 8);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Warps of a block have `units` units of one row, as many of the next, and so on.
template <uint32_t Format>
__global__ void __launch_bounds__(kLanes* kPairs)
    dequantize_blocks(const nvb_dequantize_params p, const int units, const bool vectors) {
  using Unit = UnitBytes<Format>;
  __shared__ uint4 shared[kPairs][Unit::kChunks];
  const int rows = kPairs / units, part = threadIdx.y / units;
  const int64_t unit = p.first_column / kUnitColumns + static_cast<int64_t>(blockIdx.x) * units + threadIdx.y % units;
  const int64_t column = unit * kUnitColumns + threadIdx.x * kWidth - p.first_column;
  if (part >= rows || unit * kUnitColumns >= p.first_column + p.columns) return;
  const uint8_t* const matrix = static_cast<const uint8_t*>(p.matrix.data);
  const int64_t row_bytes = p.matrix.columns / BlockElement<Format>::kElements * BlockElement<Format>::kBytes;
  const uint8_t* const end = matrix + (p.matrix.rows - 1) * p.matrix.row_bytes + row_bytes;
  const int64_t step = static_cast<int64_t>(gridDim.y) * rows;
  int64_t row = static_cast<int64_t>(blockIdx.y) * rows + part;
  if (row >= p.rows) return;
  const uint8_t* from = matrix + (p.first_row + row) * p.matrix.row_bytes + unit * Unit::kBytes;
  uint4 raw = Unit::load(from, end);
  for (; row < p.rows; row += step) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15u);
    if (threadIdx.x < Unit::kChunks) shared[threadIdx.y][threadIdx.x] = raw;
    __syncwarp();
    from += step * p.matrix.row_bytes;
    if (row + step < p.rows) raw = Unit::load(from, end);
    const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(shared[threadIdx.y]) + past;
    float values[kWidth];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
      load_four_of_blocks<Format>(bytes, threadIdx.x * kWidth + 4 * half, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * half + i] = four[i];
    }
    __syncwarp();  // the bytes have been read
    const int64_t start = row * p.output_stride;
    if (vectors && column >= 0 && column + kWidth <= p.columns) {
      store_elements(p.output, p.output_dtype, start + column, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i >= 0 && column + i < p.columns)
        store_element(p.output, p.output_dtype, start + column + i, values[i]);
    }
  }
}

template <uint32_t Format>
cudaError_t launch_blocks(const nvb_dequantize_params& p, const nvb_launch& launch) {
  constexpr int kBlocks = 8;  // of a multiprocessor, more than run at once
  const int64_t all = (p.first_column + p.columns + kUnitColumns - 1) / kUnitColumns - p.first_column / kUnitColumns;
  const int64_t across = (all + kPairs - 1) / kPairs, units = (all + across - 1) / across;
  const int64_t rows = kPairs / units, most = std::max<int64_t>(1, int64_t{kBlocks} * launch.multiprocessors / across);
  const int64_t down = std::min<int64_t>({(p.rows + rows - 1) / rows, most, 65535});
  const bool vectors = is_aligned16(p.output, p.output_stride, float_dtype_bytes(p.output_dtype));
  dequantize_blocks<Format>
      <<<dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(kLanes, kPairs), 0, launch.stream>>>(
          p, static_cast<int>(units), vectors);
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
