// block_rows: blocks become floats, or floats blocks, by rows.
//
// Work, decoding: a thread turns eight times four neighbours of a row into floats, as block_element.cuh reads them, so
// that finding the row costs little beside them. Encoding: a thread makes a block of 32 elements, which it reads twice,
// so that the values need no registers; the second time they come from the first level of cache. Bound by memory where
// rows are long; a cache's rows of a decode step are too few to matter. Shared memory: none.
#include <cuda_fp16.h>

#include "../common/block_element.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "block_rows.h"
#include "encode_block.cuh"

namespace nvb {
namespace {

constexpr int kThreads = 256;

struct row_place {
  int64_t floats;  // in elements
  int64_t blocks;  // in bytes
  bool known;
};

__device__ __forceinline__ row_place find_row(const nvb_block_rows_params& p, int64_t row) {
  const int64_t token = row % p.shape[2];
  const int64_t inner = row / p.shape[2] % p.shape[1];
  const int64_t outer = row / p.shape[2] / p.shape[1];
  int64_t number = token;
  if (p.rows != nullptr) {
    number = p.rows[outer % p.rows_shape[1] * p.rows_strides[1] + inner % p.rows_shape[2] * p.rows_strides[2] +
                    token * p.rows_strides[3]];
  }
  return {outer * p.float_strides[0] + inner * p.float_strides[1] + token * p.float_strides[2],
          outer * p.block_strides[0] + inner * p.block_strides[1] + number * p.block_strides[2],
          number >= 0 && number < p.block_rows};
}

constexpr int kDecodeLanes = 64;
constexpr int kDecodeRows = kThreads / kDecodeLanes;
constexpr int kDecodeSteps = 8;

template <uint32_t Format>
__global__ void __launch_bounds__(kThreads)
    decode_rows(const nvb_block_rows_params p, const int64_t rows, const bool vectors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kDecodeRows + threadIdx.y;
  if (row >= rows) return;
  const row_place place = find_row(p, row);
  if (!place.known) return;
  const char* const blocks = static_cast<const char*>(p.blocks) + place.blocks;
  int64_t column = 4 * (static_cast<int64_t>(blockIdx.y) * kDecodeLanes * kDecodeSteps + threadIdx.x);
#pragma unroll 4
  for (int step = 0; step < kDecodeSteps; ++step, column += 4 * kDecodeLanes) {
    if (column >= p.shape[3]) return;
    float values[4];
    load_four_of_blocks<Format>(blocks, column, values);
    if (vectors) {
      store_vector<4>(p.floats, p.dtype, place.floats + column, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_element(p.floats, p.dtype, place.floats + (column + i) * p.float_strides[3], values[i]);
    }
  }
}

template <uint32_t Format>
__global__ void __launch_bounds__(kThreads) encode_rows(const nvb_block_rows_params p, const int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t blocks = p.shape[3] / 32;
  const row_place place = find_row(p, at / blocks);
  if (!place.known) return;
  const int64_t block = at % blocks;
  const int64_t first = place.floats + block * 32 * p.float_strides[3];
  const auto value = [&](int i) { return load_element(p.floats, p.dtype, first + i * p.float_strides[3]); };
  uint8_t* const to = static_cast<uint8_t*>(p.blocks) + place.blocks + block * BlockElement<Format>::kBytes;
  EncodeBlock<Format>::store(to, value);
}

bool launch_grid(int64_t count, unsigned* blocks) {
  const int64_t needed = (count + kThreads - 1) / kThreads;
  *blocks = static_cast<unsigned>(needed);
  return fits_grid(needed);
}

// Whether every row of floats takes whole vectors of four elements.
bool has_vectors(const nvb_block_rows_params& p) {
  bool fits = p.float_strides[3] == 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride = p.shape[axis] == 1 ? 0 : p.float_strides[axis];
    fits = fits && widest_vector(p.shape[3], {{p.floats, stride, p.dtype}}) >= 4;
  }
  return fits;
}

template <uint32_t Format>
cudaError_t decode(const nvb_block_rows_params& p, const nvb_launch& launch) {
  const int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  const int64_t row_blocks = (rows + kDecodeRows - 1) / kDecodeRows;
  constexpr int64_t kColumns = 4 * kDecodeLanes * kDecodeSteps;
  const int64_t column_blocks = (p.shape[3] + kColumns - 1) / kColumns;
  if (p.shape[3] % BlockElement<Format>::kElements != 0 || !fits_grid(row_blocks) || column_blocks > 65535) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(row_blocks), static_cast<unsigned>(column_blocks));
  decode_rows<Format><<<grid, dim3(kDecodeLanes, kDecodeRows), 0, launch.stream>>>(p, rows, has_vectors(p));
  return cudaPeekAtLastError();
}

template <uint32_t Format>
cudaError_t encode(const nvb_block_rows_params& p, const nvb_launch& launch) {
  const int64_t count = p.shape[0] * p.shape[1] * p.shape[2] * (p.shape[3] / 32);
  unsigned blocks = 0;
  if (p.shape[3] % 32 != 0 || !launch_grid(count, &blocks)) return cudaErrorInvalidValue;
  encode_rows<Format><<<blocks, kThreads, 0, launch.stream>>>(p, count);
  return cudaPeekAtLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_block_rows(const nvb_block_rows_params* params, const nvb_launch* launch) noexcept {
  const nvb_block_rows_params& p = *params;
  if (nvb::float_dtype_bytes(p.dtype) == 0) return cudaErrorInvalidValue;
  if (p.encode == 0) {
    return nvb::with_block_format(p.format,
                                  [&](auto format) { return nvb::decode<decltype(format)::value>(p, *launch); });
  }
  switch (p.format) {
    case NVB_BLOCKS_Q4_0:
      return nvb::encode<NVB_BLOCKS_Q4_0>(p, *launch);
    case NVB_BLOCKS_Q4_1:
      return nvb::encode<NVB_BLOCKS_Q4_1>(p, *launch);
    case NVB_BLOCKS_Q5_0:
      return nvb::encode<NVB_BLOCKS_Q5_0>(p, *launch);
    case NVB_BLOCKS_Q5_1:
      return nvb::encode<NVB_BLOCKS_Q5_1>(p, *launch);
    case NVB_BLOCKS_Q8_0:
      return nvb::encode<NVB_BLOCKS_Q8_0>(p, *launch);
    case NVB_BLOCKS_IQ4_NL:
      return nvb::encode<NVB_BLOCKS_IQ4_NL>(p, *launch);
    default:
      return cudaErrorInvalidValue;
  }
}
