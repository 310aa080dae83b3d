// scatter_rows: conversion and scatter of rows, as keys and values go into a cache that is a plain tensor.
//
// Work: tiles of columns by rows; a thread converts up to four vectors of 8, 4 or 1 elements of one row. The row's
// number is read by all of its threads, which the first level of cache serves. Shared memory: none.
#include "../common/programmatic_launch.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "scatter_rows.h"

namespace nvb {
namespace {

constexpr int kVectors = 4;

template <int Width>
__global__ void __launch_bounds__(kTileThreads)
    scatter_rows_kernel(const nvb_scatter_rows_params p, const int64_t rows, const uint32_t column_tiles) {
  begin_overlapped();
  const int64_t row = static_cast<int64_t>(blockIdx.x / column_tiles) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const int64_t token = row % p.shape[2];
  const int64_t inner = row / p.shape[2] % p.shape[1];
  const int64_t outer = row / p.shape[2] / p.shape[1];
  const int64_t number = p.rows[outer % p.rows_shape[1] * p.rows_strides[1] +
                                inner % p.rows_shape[2] * p.rows_strides[2] + token * p.rows_strides[3]];
  if (number < 0 || number >= p.output_rows) return;
  const int64_t from = outer * p.input_strides[0] + inner * p.input_strides[1] + token * p.input_strides[2];
  const int64_t to = outer * p.output_strides[0] + inner * p.output_strides[1] + number * p.output_strides[2];
  const int64_t tile = blockIdx.x % column_tiles;
  const int64_t first = (tile * kVectors * blockDim.x + threadIdx.x) * Width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;
  uint4 raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (column < p.shape[3]) raw[v] = load_raw<Width>(p.input, p.input_dtype, from + column);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    float values[Width];
    unpack_raw<Width>(raw[v], p.input_dtype, values);
    if (column < p.shape[3]) store_vector<Width>(p.output, p.output_dtype, to + column, values);
  }
}

template <int Width>
cudaError_t enqueue(const nvb_scatter_rows_params& p, const nvb_launch* launch) {
  const int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  const tile_grid grid = make_tile_grid(rows, p.shape[3], Width, kVectors);
  if (!fits_grid(grid.blocks)) return cudaErrorInvalidValue;
  return launch_overlapped(scatter_rows_kernel<Width>, dim3(static_cast<unsigned>(grid.blocks)), grid.block, 0, launch,
                           p, rows, static_cast<uint32_t>(grid.column_tiles));
}

// The widest vectors for which rows of every outer place are aligned.
int widest(const nvb_scatter_rows_params& p) {
  int width = 8;
  for (int axis = 0; axis < 3; ++axis) {
    const int fits =
        widest_vector(p.shape[3], {{p.input, p.shape[axis] == 1 ? 0 : p.input_strides[axis], p.input_dtype},
                                   {p.output, p.output_strides[axis], p.output_dtype}});
    width = fits < width ? fits : width;
  }
  return width;
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_scatter_rows(const nvb_scatter_rows_params* params, const nvb_launch* launch) noexcept {
  const nvb_scatter_rows_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0) {
    return cudaErrorInvalidValue;
  }
  switch (nvb::widest(p)) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
