// Rows sorted by expert, gathered in that order and put back. grouped_linear_sort.h has what is computed.
//
// The sort counts: one block, whose warps have neighbouring parts of the rows each, counts its parts, adds the counts
// up by expert and within an expert by warp, and gives each row its place. A warp goes through its part in order and
// finds equal experts among its lanes by a vote, so that rows of an expert stay in order whatever runs first. One block
// is enough: 4096 rows are 128 a warp, which are loaded at once, and the product of many more takes far longer.
// Shared memory: a count for each warp and expert, and one more for rows of no expert, at most 48 KiB; with many
// experts the block has fewer warps.
//
// A move copies rows, a warp each, in 16 bytes where all rows begin at multiples of them, else in two. Bound by memory.
// Shared memory: none.
#include <algorithm>

#include "../common/programmatic_launch.cuh"
#include "../common/vector.cuh"
#include "grouped_linear_sort.h"

namespace nvb {
namespace grouped {
namespace {

constexpr int kMostSortWarps = 32;
constexpr int kSortCounts = 48 * 1024 / 4;
constexpr int kBatch = 4;  // rows whose numbers a lane loads at a time

// The expert of a row of y, or p.experts for what is no expert's number.
__device__ __forceinline__ int32_t bin_of(const nvb_grouped_linear_sort_params& p, int64_t row) {
  const uint32_t place = static_cast<uint32_t>(row), used = static_cast<uint32_t>(p.used), token = place / used;
  const int32_t expert = p.expert_ids[token * p.token_stride + (place - token * used) * p.used_stride];
  return expert >= 0 && expert < p.experts ? expert : p.experts;
}

// Calls `take` with the bins of 32 rows at a time, the lane's own or -1 past the part's end, and the lane's row.
template <typename Take>
__device__ __forceinline__ void visit_part(const nvb_grouped_linear_sort_params& p, int64_t first, int64_t last,
                                           Take&& take) {
  const int lane = threadIdx.x % 32;
  for (int64_t at = first; at < last; at += 32 * kBatch) {
    int32_t bins[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t row = at + 32 * i + lane;
      bins[i] = row < last ? bin_of(p, row) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) take(bins[i], static_cast<int32_t>(at + 32 * i + lane));
  }
}

__global__ void __launch_bounds__(32 * kMostSortWarps) grouped_linear_sort(const nvb_grouped_linear_sort_params p) {
  extern __shared__ int32_t shared[];
  const int bins = p.experts + 1, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t* const begins = shared;         // of each bin
  int32_t* const counts = shared + bins;  // [warp][bin]
  int32_t* const own = counts + warp * bins;
  for (int i = threadIdx.x; i < warps * bins; i += blockDim.x) counts[i] = 0;
  begin_overlapped();
  __syncthreads();

  // Counts.
  const int64_t each = ((p.rows + warps - 1) / warps + 31) / 32 * 32;
  const int64_t first = min(each * warp, p.rows), last = min(first + each, p.rows);
  visit_part(p, first, last, [&](int32_t bin, int32_t) {
    if (bin >= 0) atomicAdd(&own[bin], 1);
  });
  __syncthreads();

  // Where each warp's rows of a bin begin among the bin's, and the bin's rows.
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
    int32_t sum = 0;
    for (int i = 0; i < warps; ++i) {
      const int32_t count = counts[i * bins + bin];
      counts[i * bins + bin] = sum;
      sum += count;
    }
    begins[bin] = sum;
  }
  __syncthreads();

  // Where the bins begin: each lane adds up neighbouring ones.
  if (warp == 0) {
    const int share = (bins + 31) / 32, begin = min(lane * share, bins), end = min(begin + share, bins);
    int32_t sum = 0;
    for (int bin = begin; bin < end; ++bin) sum += begins[bin];
    int32_t through = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += other;
    }
    int32_t before = through - sum;
    for (int bin = begin; bin < end; ++bin) {
      const int32_t count = begins[bin];
      begins[bin] = before;
      before += count;
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) p.expert_offsets[bin] = begins[bin];

  // Places.
  visit_part(p, first, last, [&](int32_t bin, int32_t row) {
    const uint32_t equal = __match_any_sync(~0u, bin);
    const int rank = __popc(equal & ((1u << lane) - 1));
    const int32_t place = bin >= 0 ? own[bin] : 0;
    __syncwarp();
    if (bin >= 0) {
      if (rank == 0) own[bin] = place + __popc(equal);
      p.order[begins[bin] + place + rank] = row;
    }
    __syncwarp();
  });
}

constexpr int kMoveWarps = 8;

template <typename Unit>
__global__ void __launch_bounds__(32 * kMoveWarps) grouped_linear_move(const nvb_grouped_linear_move_params p) {
  begin_overlapped();
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kMoveWarps + threadIdx.x / 32;
  if (place >= p.rows || place >= *p.sorted_rows) return;
  const int64_t row = p.order[place];
  const int64_t from_row = p.back != 0 ? place : row / p.used, to_row = p.back != 0 ? row : place;
  const auto* const from =
      reinterpret_cast<const Unit*>(static_cast<const uint8_t*>(p.input) + from_row * p.input_stride);
  auto* const to = reinterpret_cast<Unit*>(static_cast<uint8_t*>(p.output) + to_row * p.output_stride);
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  constexpr int kLoads = 4;
  for (int64_t at = threadIdx.x % 32; at < units; at += 32 * kLoads) {
    Unit values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (at + 32 * i < units) values[i] = from[at + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (at + 32 * i < units) to[at + 32 * i] = values[i];
    }
  }
}

}  // namespace
}  // namespace grouped
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_grouped_linear_sort(const nvb_grouped_linear_sort_params* params,
                                                    const nvb_launch* launch) noexcept {
  using namespace nvb::grouped;
  const nvb_grouped_linear_sort_params& p = *params;
  if (p.experts < 1 || p.experts > NVB_MOST_SORTED_EXPERTS || p.used < 1 || p.rows < 1 || p.rows > INT32_MAX)
    return cudaErrorInvalidValue;
  const int bins = p.experts + 1, room = (kSortCounts - bins) / bins;
  const int64_t needed = (p.rows + 31) / 32;
  const int warps = static_cast<int>(std::min<int64_t>({kMostSortWarps, room, needed}));
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(bins) * (warps + 1);
  return nvb::launch_overlapped(grouped_linear_sort, dim3(1), dim3(32 * warps), bytes, launch, p);
}

extern "C" cudaError_t nvb_cuda_grouped_linear_move(const nvb_grouped_linear_move_params* params,
                                                    const nvb_launch* launch) noexcept {
  using namespace nvb::grouped;
  const nvb_grouped_linear_move_params& p = *params;
  const int64_t blocks = (p.rows + kMoveWarps - 1) / kMoveWarps;
  if (p.rows < 1 || p.used < 1 || p.row_bytes < 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto bits = [](int64_t stride, const void* address) {
    return static_cast<uint64_t>(stride) | reinterpret_cast<uintptr_t>(address);
  };
  const uint64_t all =
      bits(p.input_stride, p.input) | bits(p.output_stride, p.output) | static_cast<uint64_t>(p.row_bytes);
  if (all % 2 != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks)), block(32 * kMoveWarps);
  return all % 16 == 0 ? nvb::launch_overlapped(grouped_linear_move<uint4>, grid, block, 0, launch, p)
                       : nvb::launch_overlapped(grouped_linear_move<uint16_t>, grid, block, 0, launch, p);
}
