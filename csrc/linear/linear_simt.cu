// y[m][n] = act(Σ_k x[m][k] W[n][k] + bias[n]) on the ordinary f32 units: F32, mixed dtypes, and whatever the
// tensor-core kernels cannot take (compute capability 7.5, odd k, unaligned rows).
//
// Shapes: x [m, k], W [n, k], any sizes, strides and alignment. A block computes a 64 x 64 tile in steps of 16 along k;
// a thread holds 8 x 4 sums. Both tiles are stored transposed (k first), so that a thread reads its rows as vectors.
//
// Shared memory: 2 * 16 * 68 * 4 bytes = 8.5 KiB, one stage; the next tile waits in registers (16 values a thread).
#include "../common/linear_epilogue.cuh"
#include "../common/vector.cuh"
#include "linear_kernels.h"

namespace nvb {
namespace {

constexpr int kThreads = 128;
constexpr int kBlock = 64;  // rows of x and rows of W
constexpr int kBlockK = 16;
constexpr int kRows = 8;     // of the tile, a thread
constexpr int kColumns = 4;  // of the tile, a thread
constexpr int kPitch = kBlock + 4;
constexpr int kLoads = kBlock * kBlockK / kThreads;  // elements of each operand a thread loads
static_assert((kBlock / kRows) * (kBlock / kColumns) == kThreads, "the threads cover the tile");
static_assert(kPitch % 4 == 0, "rows of the tiles are read as 16-byte vectors");

// A thread loads kLoads neighbouring elements of one row: thread t elements 8 (t % 2).. of row t / 2.
constexpr int kThreadsPerRow = kBlockK / kLoads;
static_assert(kThreads / kThreadsPerRow == kBlock && kLoads == 8, "one pass loads a tile");

// The loads of one operand into registers; zeros past the end of the rows and of k.
template <typename T>
__device__ __forceinline__ void fetch(const T* row, bool row_exists, int64_t k, int64_t columns, bool aligned,
                                      float (&values)[kLoads]) {
  if (row_exists && aligned && k + kLoads <= columns) {
#pragma unroll
    for (int i = 0; i < kLoads; i += kVector<T>) {
      float part[kVector<T>];
      load16_as_float(row + k + i, part);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) values[i + j] = part[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) values[i] = row_exists && k + i < columns ? to_float(row[k + i]) : 0.0f;
}

template <typename Input, typename Weight>
__global__ void __launch_bounds__(kThreads, 4)
    linear_simt(const nvb_linear_params p, const LinearEpilogue epilogue, const int64_t tiles_m,
                const bool input_aligned, const bool weight_aligned) {
  __shared__ __align__(16) float x_tile[kBlockK][kPitch];
  __shared__ __align__(16) float w_tile[kBlockK][kPitch];

  const int64_t first_m = blockIdx.x % tiles_m * kBlock;
  const int64_t first_n = blockIdx.x / tiles_m * kBlock;
  const int load_row = threadIdx.x / kThreadsPerRow;
  const int load_k = threadIdx.x % kThreadsPerRow * kLoads;
  const bool x_exists = first_m + load_row < p.m;
  const bool w_exists = first_n + load_row < p.n;
  const Input* const x_source =
      static_cast<const Input*>(p.input) + (x_exists ? first_m + load_row : 0) * p.input_stride;
  const Weight* const w_source =
      static_cast<const Weight*>(p.weight) + (w_exists ? first_n + load_row : 0) * p.weight_stride;

  const int row = threadIdx.x / (kBlock / kColumns) * kRows;
  const int column = threadIdx.x % (kBlock / kColumns) * kColumns;
  float sums[kRows][kColumns] = {};
  float x_next[kLoads], w_next[kLoads];
  fetch(x_source, x_exists, load_k, p.k, input_aligned, x_next);
  fetch(w_source, w_exists, load_k, p.k, weight_aligned, w_next);

  for (int64_t k = 0; k < p.k; k += kBlockK) {
    // Store the tile that has arrived, and ask for the next one.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      x_tile[load_k + i][load_row] = x_next[i];
      w_tile[load_k + i][load_row] = w_next[i];
    }
    __syncthreads();
    if (k + kBlockK < p.k) {
      fetch(x_source, x_exists, k + kBlockK + load_k, p.k, input_aligned, x_next);
      fetch(w_source, w_exists, k + kBlockK + load_k, p.k, weight_aligned, w_next);
    }

    // Multiply.
#pragma unroll
    for (int i = 0; i < kBlockK; ++i) {
      const float4 x_low = *reinterpret_cast<const float4*>(&x_tile[i][row]);
      const float4 x_high = *reinterpret_cast<const float4*>(&x_tile[i][row + 4]);
      const float4 w_four = *reinterpret_cast<const float4*>(&w_tile[i][column]);
      const float x[kRows] = {x_low.x, x_low.y, x_low.z, x_low.w, x_high.x, x_high.y, x_high.z, x_high.w};
      const float w[kColumns] = {w_four.x, w_four.y, w_four.z, w_four.w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] = fmaf(x[r], w[c], sums[r][c]);
      }
    }
    __syncthreads();
  }

  if (first_n + column >= p.n) return;
  float bias[kColumns];
  load_bias(epilogue, first_n + column, bias);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_m + row + r < p.m) store_columns(epilogue, first_m + row + r, first_n + column, sums[r], bias);
  }
}

template <typename Input, typename Weight>
cudaError_t launch(const nvb_linear_params& params, const nvb_launch& launch) {
  const int64_t tiles_m = (params.m + kBlock - 1) / kBlock;
  const int64_t tiles_n = (params.n + kBlock - 1) / kBlock;
  linear_simt<Input, Weight><<<static_cast<unsigned>(tiles_m * tiles_n), kThreads, 0, launch.stream>>>(
      params, make_epilogue(params, params.n), tiles_m, is_aligned16(params.input, params.input_stride, sizeof(Input)),
      is_aligned16(params.weight, params.weight_stride, sizeof(Weight)));
  return cudaPeekAtLastError();
}

template <typename Weight>
cudaError_t launch_input(const nvb_linear_params& params, const nvb_launch& nvb_launch) {
  if (params.input_dtype == NVB_F32) return launch<float, Weight>(params, nvb_launch);
  return launch<Weight, Weight>(params, nvb_launch);
}

}  // namespace

cudaError_t launch_linear_simt(const nvb_linear_params& params, const nvb_launch& launch) {
  if (params.weight_dtype == NVB_F16) return launch_input<__half>(params, launch);
  if (params.weight_dtype == NVB_BF16) return launch_input<__nv_bfloat16>(params, launch);
  return launch_input<float>(params, launch);
}

}  // namespace nvb
