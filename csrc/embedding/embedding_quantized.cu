// embedding_quantized: output[t] = table[tokens[t]] * scale, the table in 8 or 4 bits or in blocks of a file.
//
// Shapes: as embedding.h says. Work: a warp takes 128 columns of a token, four a lane, and a block four tokens, since a
// row of a table is short and the rows are far apart. Shared memory: none.
#include "../common/quantized_element.cuh"
#include "../common/row_block.cuh"
#include "embedding.h"

namespace nvb {
namespace {

constexpr int kWidth = 4;
constexpr int kLanes = 32;
constexpr int kTokens = 4;  // of a block

template <uint32_t Encoding>
__global__ void __launch_bounds__(kLanes* kTokens)
    embedding_quantized(const nvb_embedding_quantized_params p, const uint32_t column_tiles, const bool vectors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x / column_tiles) * kTokens + threadIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x % column_tiles * kLanes + threadIdx.x) * kWidth;
  if (row >= p.rows || column >= p.table.columns) return;
  const int64_t token = p.tokens[row];
  float values[kWidth] = {};
  if (token >= 0 && token < p.table.rows) {
    load_four<Encoding>(p.table, token, column, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= p.scale;
  }
  const int64_t start = row * p.output_stride + column;
  if (vectors && column + kWidth <= p.table.columns) {
    return store_elements(p.output, p.output_dtype, start, values);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (column + i < p.table.columns) store_element(p.output, p.output_dtype, start + i, values[i]);
  }
}

template <uint32_t Encoding>
cudaError_t launch_encoding(const nvb_embedding_quantized_params& p, const nvb_launch& launch) {
  const int64_t column_tiles = ceiling_divide(p.table.columns, kLanes * kWidth);
  const int64_t blocks = column_tiles * ceiling_divide(p.rows, kTokens);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  const bool vectors = is_aligned16(p.output, p.output_stride, float_dtype_bytes(p.output_dtype));
  embedding_quantized<Encoding><<<static_cast<unsigned>(blocks), dim3(kLanes, kTokens), 0, launch.stream>>>(
      p, static_cast<uint32_t>(column_tiles), vectors);
  return cudaPeekAtLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_embedding_quantized(const nvb_embedding_quantized_params* params,
                                                    const nvb_launch* launch) noexcept {
  const nvb_embedding_quantized_params& p = *params;
  const nvb_quantized_matrix& table = p.table;
  if (!nvb_is_valid_quantized(table.encoding, table.scale_kind, table.group, table.zero_points) ||
      nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows <= 0 || table.columns <= 0) return cudaSuccess;
  switch (table.encoding) {
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
      return nvb::with_block_format(
          table.encoding, [&](auto format) { return nvb::launch_encoding<decltype(format)::value>(p, *launch); });
  }
}
