// sort_rows: columns in the order of their elements, by keys of 64 bits that no two columns of a row share: the element
// as an integer that orders alike, above the column. So every sort is stable.
//
// Up to 4,096 columns a block sorts a row's keys in shared memory (Batcher's bitonic sort, 1968): 8 bytes a key of the
// next power of two, 32 KiB at most. Longer rows count for each key how many are smaller, which is its place; that
// takes columns squared comparisons, but no workspace, and any number of columns. It is the plain way, not the fast
// one.
#include <algorithm>

#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "sort_rows.h"

namespace nvb {
namespace {

constexpr int64_t kMostSorted = 4096;
constexpr int kMostThreads = 512;
constexpr int kCountThreads = 256;
constexpr int kCountKeys = 2048;  // of a row in shared memory at a time, 16 KiB

constexpr uint64_t kBehindAll = ~uint64_t{0};

struct row_places {
  int64_t input;
  int64_t output;
};

__device__ __forceinline__ row_places places_of(const nvb_sort_rows_params& p, int64_t row) {
  const int64_t a = row / p.shape[2] / p.shape[1];
  const int64_t b = row / p.shape[2] % p.shape[1];
  const int64_t c = row % p.shape[2];
  return {a * p.input_strides[0] + b * p.input_strides[1] + c * p.input_strides[2],
          a * p.output_strides[0] + b * p.output_strides[1] + c * p.output_strides[2]};
}

__device__ __forceinline__ uint64_t key_of(const nvb_sort_rows_params& p, int64_t row_start, int64_t column) {
  const float value = load_element(p.input, p.input_dtype, row_start + column);
  uint32_t order = 0xffffffffu;
  if (!isnan(value)) {
    // Adding 0 makes -0 into +0.
    const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
    order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    if (p.descending != 0) order = ~order;
  }
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(column);
}

// `keys` is the power of two of keys that the row is filled up to.
__global__ void __launch_bounds__(kMostThreads) sort_kernel(const nvb_sort_rows_params p, int keys) {
  extern __shared__ uint64_t sorted[];
  const row_places row = places_of(p, blockIdx.x);
  const int columns = static_cast<int>(p.shape[3]);
  for (int i = threadIdx.x; i < keys; i += blockDim.x) sorted[i] = i < columns ? key_of(p, row.input, i) : kBehindAll;
  __syncthreads();
  // Runs of `run` keys are sorted up and down in turn; a merge halves the distance of what it compares.
  for (int run = 2; run <= keys; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < keys / 2; pair += blockDim.x) {
        const int low = pair / distance * distance * 2 + pair % distance;
        const int high = low + distance;
        const bool rising = (low & run) == 0;
        const uint64_t one = sorted[low];
        const uint64_t other = sorted[high];
        if ((one > other) == rising) {
          sorted[low] = other;
          sorted[high] = one;
        }
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.output[row.output + i] = static_cast<int32_t>(sorted[i]);
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(const nvb_sort_rows_params p, int64_t tiles) {
  __shared__ uint64_t keys[kCountKeys];
  const int64_t columns = p.shape[3];
  const int64_t row_tiles = (columns + kCountThreads - 1) / kCountThreads;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const row_places row = places_of(p, tile / row_tiles);
    const int64_t column = tile % row_tiles * kCountThreads + threadIdx.x;
    const uint64_t mine = column < columns ? key_of(p, row.input, column) : kBehindAll;
    int64_t smaller = 0;
    for (int64_t begin = 0; begin < columns; begin += kCountKeys) {
      const int filled = static_cast<int>(min(columns - begin, static_cast<int64_t>(kCountKeys)));
      // The keys before these are still being read.
      __syncthreads();
      for (int i = threadIdx.x; i < filled; i += kCountThreads) keys[i] = key_of(p, row.input, begin + i);
      __syncthreads();
      int here = 0;
      for (int i = 0; i < filled; ++i) here += keys[i] < mine;
      smaller += here;
    }
    if (column < columns && smaller < p.count) p.output[row.output + smaller] = static_cast<int32_t>(column);
  }
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_sort_rows(const nvb_sort_rows_params* params, const nvb_launch* launch) noexcept {
  const nvb_sort_rows_params& p = *params;
  const int64_t columns = p.shape[3];
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || p.count < 1 || p.count > columns) return cudaErrorInvalidValue;
  const int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  if (!nvb::fits_grid(rows)) return cudaErrorInvalidValue;
  if (columns <= nvb::kMostSorted) {
    int keys = 2;
    while (keys < columns) keys *= 2;
    const int threads = std::min(std::max(keys / 2, 32), nvb::kMostThreads);
    nvb::sort_kernel<<<static_cast<unsigned>(rows), threads, keys * sizeof(uint64_t), launch->stream>>>(p, keys);
    return cudaGetLastError();
  }
  const int64_t tiles = rows * nvb::ceiling_divide(columns, nvb::kCountThreads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, 0x7fffffff));
  nvb::count_kernel<<<blocks, nvb::kCountThreads, 0, launch->stream>>>(p, tiles);
  return cudaGetLastError();
}
