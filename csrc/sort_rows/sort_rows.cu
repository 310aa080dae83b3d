// sort_rows: columns in the order of their elements, by keys of 64 bits that no two columns of a row share: the element
// as an integer that orders alike, above the column. So every sort is stable.
//
// A block sorts up to 4,096 keys in shared memory (Batcher's bitonic sort, 1968): 8 bytes a key of the next power of
// two, 32 KiB at most. A longer row is sorted in chunks of 4,096 columns, each a list in the workspace; then lists are
// merged two by two, from one half of the workspace to the other. A key's place among two lists is its own number and
// the number of the other list's smaller keys, which a binary search counts: every key is a thread's alone, and
// neighbours read the same addresses. No list keeps more keys than are asked for, so the first few of a long row cost
// little more than its chunks.
//
// The keys of a row of up to 256 columns, such as the scores of a mixture's experts, are counted instead: a key's place
// is the number of the row's smaller keys. Of 128 columns that takes one barrier where the sort takes 28, which were 8
// us on an H200.
//
//   kernel         block           work
//   rank_columns   a thread a key  a short row
//   sort_chunks    512 threads     a chunk of a row: its first keys to the workspace, or their columns to the output
//   merge_lists    256 threads     a key each: from a list to its place in the list of two
#include <algorithm>
#include <utility>

#include "../common/programmatic_launch.cuh"
#include "../common/row_block.cuh"
#include "../common/vector.cuh"
#include "sort_rows.h"

namespace nvb {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int kMostThreads = 512;
constexpr int kMergeThreads = 256;
constexpr int kMostRanked = 256;
// Rows are sorted some at a time, so that both halves of the workspace stay in the second-level cache.
constexpr int64_t kMostKeys = (int64_t{32} << 20) / 2 / sizeof(uint64_t);

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

// Lists of one row, each of the keys of `span` columns, of which it keeps the first `kept`.
struct row_lists {
  int64_t span;
  int64_t kept;
  int64_t count;
};

__host__ __device__ row_lists lists_of(const nvb_sort_rows_params& p, int64_t span) {
  return {span, span < p.count ? span : p.count, (p.shape[3] + span - 1) / span};
}

// Between rows of the workspace. Lists of more columns lie one behind the other in as many: the last one ends where its
// keys do, though there would be no room for another of its size.
__host__ __device__ int64_t row_keys(const nvb_sort_rows_params& p) {
  const row_lists lists = lists_of(p, kChunk);
  return lists.count * lists.kept;
}

__device__ __forceinline__ int64_t length_of(const nvb_sort_rows_params& p, const row_lists& lists, int64_t list) {
  return min(lists.kept, p.shape[3] - list * lists.span);
}

// A block a row.
__global__ void __launch_bounds__(kMostRanked) rank_columns(const __grid_constant__ nvb_sort_rows_params p) {
  __shared__ __align__(16) uint64_t keys[kMostRanked];
  begin_overlapped();
  const row_places row = places_of(p, blockIdx.x);
  const int column = threadIdx.x, columns = static_cast<int>(p.shape[3]);
  const uint64_t key = column < columns ? key_of(p, row.input, column) : kBehindAll;
  keys[column] = key;
  __syncthreads();
  int place = 0;
#pragma unroll 4
  for (int other = 0; other < columns; other += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(keys + other);
    place += (two.x < key) + (two.y < key);
  }
  if (column < columns && place < p.count) p.output[row.output + place] = column;
}

// A block a chunk. `keys` is the power of two of keys that a chunk is filled up to; `to` is null where rows have one.
__global__ void __launch_bounds__(kMostThreads)
    sort_chunks(const nvb_sort_rows_params p, int64_t first_row, int keys, uint64_t* to) {
  extern __shared__ uint64_t sorted[];
  const row_lists lists = lists_of(p, kChunk);
  const int64_t chunk = blockIdx.x % lists.count;
  const row_places row = places_of(p, first_row + blockIdx.x / lists.count);
  const int64_t first_column = chunk * kChunk;
  const int columns = static_cast<int>(min(kChunk, p.shape[3] - first_column));
  for (int i = threadIdx.x; i < keys; i += blockDim.x)
    sorted[i] = i < columns ? key_of(p, row.input, first_column + i) : kBehindAll;
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
  if (to == nullptr) {
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.output[row.output + i] = static_cast<int32_t>(sorted[i]);
    return;
  }
  uint64_t* list = to + blockIdx.x * lists.kept;
  const int length = static_cast<int>(length_of(p, lists, chunk));
  for (int i = threadIdx.x; i < length; i += blockDim.x) list[i] = sorted[i];
}

// A thread a key of `rows` rows of lists of `span` columns. `to` is null where two lists are a whole row.
__global__ void __launch_bounds__(kMergeThreads)
    merge_lists(const nvb_sort_rows_params p, int64_t first_row, int64_t rows, int64_t span, const uint64_t* from,
                uint64_t* to) {
  const row_lists lists = lists_of(p, span);
  const row_lists merged = lists_of(p, 2 * span);
  const int64_t number = blockIdx.x * int64_t{kMergeThreads} + threadIdx.x;
  const int64_t place = number % lists.kept;
  const int64_t list = number / lists.kept % lists.count;
  const int64_t row = number / lists.kept / lists.count;
  if (row >= rows || place >= length_of(p, lists, list)) return;
  const uint64_t* own = from + row * row_keys(p);
  const uint64_t key = own[list * lists.kept + place];
  int64_t smaller = 0;
  const int64_t other = list ^ 1;
  if (other < lists.count) {
    const uint64_t* others = own + other * lists.kept;
    int64_t end = length_of(p, lists, other);
    while (smaller < end) {
      const int64_t middle = (smaller + end) / 2;
      if (others[middle] < key) {
        smaller = middle + 1;
      } else {
        end = middle;
      }
    }
  }
  const int64_t merged_place = place + smaller;
  if (merged_place >= merged.kept) return;
  if (to == nullptr) {
    p.output[places_of(p, first_row + row).output + merged_place] = static_cast<int32_t>(key);
  } else {
    to[row * row_keys(p) + list / 2 * merged.kept + merged_place] = key;
  }
}

int64_t rows_of(const nvb_sort_rows_params& p) {
  return p.shape[0] * p.shape[1] * p.shape[2];
}

int64_t rows_at_a_time(const nvb_sort_rows_params& p) {
  return std::clamp(kMostKeys / row_keys(p), int64_t{1}, rows_of(p));
}

}  // namespace
}  // namespace nvb

extern "C" size_t nvb_cuda_sort_rows_workspace(const nvb_sort_rows_params* params) noexcept {
  const nvb_sort_rows_params& p = *params;
  if (p.shape[3] <= nvb::kChunk) return 0;
  return 2 * sizeof(uint64_t) * nvb::rows_at_a_time(p) * nvb::row_keys(p);
}

extern "C" cudaError_t nvb_cuda_sort_rows(const nvb_sort_rows_params* params, const nvb_launch* launch) noexcept {
  const nvb_sort_rows_params& p = *params;
  const int64_t columns = p.shape[3];
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || p.count < 1 || p.count > columns) return cudaErrorInvalidValue;
  const int64_t rows = nvb::rows_of(p);
  if (columns <= nvb::kMostRanked) {
    if (!nvb::fits_grid(rows)) return cudaErrorInvalidValue;
    const unsigned threads = static_cast<unsigned>((columns + 31) / 32 * 32);
    return nvb::launch_overlapped(nvb::rank_columns, dim3(static_cast<unsigned>(rows)), dim3(threads), 0, launch, p);
  }
  int keys = 2;
  while (keys < std::min(columns, nvb::kChunk)) keys *= 2;
  const int threads = std::min(std::max(keys / 2, 32), nvb::kMostThreads);
  if (columns <= nvb::kChunk) {
    if (!nvb::fits_grid(rows)) return cudaErrorInvalidValue;
    nvb::sort_chunks<<<static_cast<unsigned>(rows), threads, keys * sizeof(uint64_t), launch->stream>>>(p, 0, keys,
                                                                                                        nullptr);
    return cudaGetLastError();
  }
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const int64_t step = nvb::rows_at_a_time(p);
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t some = std::min(step, rows - first);
    auto* from = static_cast<uint64_t*>(p.workspace);
    uint64_t* to = from + step * nvb::row_keys(p);
    const int64_t chunks = some * nvb::lists_of(p, nvb::kChunk).count;
    if (!nvb::fits_grid(chunks)) return cudaErrorInvalidValue;
    nvb::sort_chunks<<<static_cast<unsigned>(chunks), threads, keys * sizeof(uint64_t), launch->stream>>>(p, first,
                                                                                                          keys, from);
    for (int64_t span = nvb::kChunk; span < columns; span *= 2) {
      const nvb::row_lists lists = nvb::lists_of(p, span);
      const int64_t blocks = nvb::ceiling_divide(some * lists.count * lists.kept, nvb::kMergeThreads);
      if (!nvb::fits_grid(blocks)) return cudaErrorInvalidValue;
      nvb::merge_lists<<<static_cast<unsigned>(blocks), nvb::kMergeThreads, 0, launch->stream>>>(
          p, first, some, span, from, 2 * span < columns ? to : nullptr);
      std::swap(from, to);
    }
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
