// embedding: output[t] = table[tokens[t]] * scale.
//
// Shapes: tokens i32[T], table [V, D], output [T, D], or batches of these; dtypes float, any pair; vectors of 8, 4 or 1
// elements by alignment. Work: tiles (row_block.cuh), two vectors a thread. A token is read by every thread of its row,
// from L1 after the first. Shared memory: none.
#include "../common/programmatic_launch.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "embedding.h"

namespace nvb {
namespace {

constexpr int kVectors = 2;

template <int Width>
__global__ void __launch_bounds__(kTileThreads)
    embedding_kernel(const nvb_embedding_params p, const uint32_t column_tiles) {
  const int64_t row = static_cast<int64_t>(blockIdx.x / column_tiles) * blockDim.y + threadIdx.y;
  int64_t place = row, first_row = 0;
  if (p.batch_tokens != p.rows) {
    const int64_t batch = row / p.batch_tokens;
    place = batch * p.token_stride + (row - batch * p.batch_tokens);
    first_row = batch * p.vocabulary;
  }
  begin_overlapped();
  if (row >= p.rows) return;
  const int64_t tile = blockIdx.x % column_tiles;
  const int64_t first = (tile * kVectors * blockDim.x + threadIdx.x) * Width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;
  const int64_t token = p.tokens[place];
  const bool known = token >= 0 && token < p.vocabulary;

  // Gather: all loads before the first use. Zero bytes are zero in every float dtype.
  uint4 raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (known && column < p.columns) {
      raw[v] = load_raw<Width>(p.table, p.table_dtype, (first_row + token) * p.table_stride + column);
    }
  }

  // Scale and store. A row of zeros stays zero whatever the scale, and a scale of 1 keeps every bit of an F32 row.
  const float scale = known ? p.scale : 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    if (column >= p.columns) break;
    float values[Width];
    unpack_raw<Width>(raw[v], p.table_dtype, values);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = scale == 1.0f ? values[i] : values[i] * scale;
    store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values);
  }
}

template <int Width>
cudaError_t enqueue(const nvb_embedding_params& p, const nvb_launch* launch) {
  const tile_grid grid = make_tile_grid(p.rows, p.columns, Width, kVectors);
  if (!fits_grid(grid.blocks)) return cudaErrorInvalidValue;
  return launch_overlapped(embedding_kernel<Width>, dim3(static_cast<unsigned>(grid.blocks)), grid.block, 0, launch, p,
                           grid.column_tiles);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_embedding(const nvb_embedding_params* params, const nvb_launch* launch) noexcept {
  const nvb_embedding_params& p = *params;
  if (nvb::float_dtype_bytes(p.table_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows <= 0 || p.columns <= 0) return cudaSuccess;
  if (p.batch_tokens <= 0 || p.rows % p.batch_tokens != 0) return cudaErrorInvalidValue;
  switch (nvb::widest_vector(p.columns,
                             {{p.table, p.table_stride, p.table_dtype}, {p.output, p.output_stride, p.output_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
