// argmax: the largest ranked logit (row_chunks.cuh) of a row.
//
// Shapes: logits [rows, columns] float, tokens i32[rows]; vectors of 8, 4 or 1 elements by alignment.
// Work: a few rows are cut into chunks so that all multiprocessors take part: `argmax_chunk_kernel` writes one ranked
// logit a chunk to the workspace, `argmax_row_kernel` takes the largest, a warp a row. Many rows, or short ones, are
// one chunk each and the first kernel writes the token. A maximum of integers is the same in any order. Shared memory:
// 128 bytes.
#include "../common/programmatic_launch.cuh"
#include "../common/row_chunks.cuh"
#include "argmax.h"

namespace nvb {
namespace {

constexpr int kThreads = 512;
constexpr int kRowsPerBlock = 8;  // of the second kernel
constexpr int64_t kMinimumChunk = 8192;
constexpr int64_t kMaximumColumns = int64_t{1} << 30;
static_assert(kMaximumChunks == 64, "argmax_row_kernel reads two chunks a lane");

template <int Width>
__global__ void __launch_bounds__(kThreads) argmax_chunk_kernel(const nvb_argmax_params p, const row_chunks chunks) {
  __shared__ uint64_t scratch[kThreads / 32];
  begin_overlapped();
  const int64_t row = blockIdx.x / chunks.count;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % chunks.count) * chunks.columns;
  const int32_t end = min(begin + chunks.columns, static_cast<int32_t>(p.columns));

  // This thread's largest; 0 is below every ranked logit.
  uint64_t largest = 0;
  const void* logits = element_address(p.logits, p.logits_dtype, row * p.logits_stride);
  visit_columns<Width>(logits, p.logits_dtype, begin, end, [&](float value, int32_t column) {
    const uint64_t ranked = rank_logit(value, column);
    largest = ranked > largest ? ranked : largest;
  });

  // The block's.
  const int lane = threadIdx.x % 32;
  largest = warp_max_ranked(largest);
  if (lane == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  largest = warp_max_ranked(lane < kThreads / 32 ? scratch[lane] : 0);
  if (lane != 0) return;
  if (chunks.count == 1) {
    p.tokens[row] = ranked_index(largest);
  } else {
    static_cast<uint64_t*>(p.workspace)[blockIdx.x] = largest;
  }
}

__global__ void __launch_bounds__(kRowsPerBlock * 32)
    argmax_row_kernel(const nvb_argmax_params p, const row_chunks chunks) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
  begin_overlapped();
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const uint64_t* partial = static_cast<const uint64_t*>(p.workspace) + row * chunks.count;
  const uint64_t first = lane < chunks.count ? partial[lane] : 0;
  const uint64_t second = lane + 32 < chunks.count ? partial[lane + 32] : 0;
  const uint64_t largest = warp_max_ranked(first > second ? first : second);
  if (lane == 0) p.tokens[row] = ranked_index(largest);
}

template <int Width>
cudaError_t enqueue(const nvb_argmax_params& p, const nvb_launch* launch) {
  const row_chunks chunks = divide_row(p.rows, p.columns, kMinimumChunk, launch);
  const int64_t blocks = p.rows * chunks.count;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const cudaError_t error = launch_overlapped(argmax_chunk_kernel<Width>, dim3(static_cast<unsigned>(blocks)),
                                              dim3(kThreads), 0, launch, p, chunks);
  if (error != cudaSuccess || chunks.count == 1) return error;
  const unsigned grid = static_cast<unsigned>((p.rows + kRowsPerBlock - 1) / kRowsPerBlock);
  return launch_overlapped(argmax_row_kernel, dim3(grid), dim3(kRowsPerBlock * 32), 0, launch, p, chunks);
}

}  // namespace
}  // namespace nvb

extern "C" size_t nvb_cuda_argmax_workspace(const nvb_argmax_params* params, const nvb_launch* launch) noexcept {
  if (params->rows <= 0 || params->columns <= 0) return 0;
  const nvb::row_chunks chunks = nvb::divide_row(params->rows, params->columns, nvb::kMinimumChunk, launch);
  return chunks.count == 1 ? 0 : sizeof(uint64_t) * static_cast<size_t>(params->rows) * chunks.count;
}

extern "C" cudaError_t nvb_cuda_argmax(const nvb_argmax_params* params, const nvb_launch* launch) noexcept {
  const nvb_argmax_params& p = *params;
  if (p.rows <= 0) return cudaSuccess;
  if (nvb::float_dtype_bytes(p.logits_dtype) == 0 || p.columns < 1 || p.columns > nvb::kMaximumColumns) {
    return cudaErrorInvalidValue;
  }
  switch (nvb::widest_vector(p.columns, {{p.logits, p.logits_stride, p.logits_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
