// C = alpha * op(A) * op(B) over a batch, for where no vendor library is.
//
// F16 and BF16: a block of 128 threads computes a 64 x 64 tile of one C on the tensor cores (product_tile.cuh), eight
// neighbouring elements of an operand a load where rows are aligned, element by element otherwise. F32, and all
// dtypes before compute capability 8.0: a block of 256 threads, 4 x 4 sums each, operands through 8.5 KiB of shared
// memory in f32. grid.x: tiles of columns, grid.y: of rows, grid.z: matrices.
#include "../common/product_tile.cuh"
#include "matmul.h"

namespace nvb {
namespace {

constexpr int kPlainThreads = 256;
constexpr int kPlainDepth = 16;
constexpr int kPlainPitch = kTileSide + 4;

// One matrix of the batch: element (row, k) of op(A), or (column, k) of op(B).
struct operand {
  const void* data;
  int64_t stride;
  int64_t rows;  // of op(A); columns of op(B)
  int64_t depth;
  bool vectors;  // whole aligned vectors of eight
};

template <typename T, bool Transposed>
__device__ __forceinline__ T load_operand(const operand& matrix, int64_t row, int64_t k) {
  if (row >= matrix.rows || k >= matrix.depth) return from_float<T>(0.0f);
  return static_cast<const T*>(matrix.data)[Transposed ? k * matrix.stride + row : row * matrix.stride + k];
}

// Eight elements as they lie in memory: along k, transposed along the rows.
template <typename T, bool Transposed>
__device__ __forceinline__ uint4 load_operand8(const operand& matrix, int64_t row, int64_t k) {
  if (matrix.vectors) {
    if (row >= matrix.rows || k >= matrix.depth) return make_uint4(0, 0, 0, 0);
    return load16(static_cast<const T*>(matrix.data) +
                  (Transposed ? k * matrix.stride + row : row * matrix.stride + k));
  }
  __align__(16) T values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = Transposed ? load_operand<T, true>(matrix, row + i, k) : load_operand<T, false>(matrix, row, k + i);
  }
  return *reinterpret_cast<const uint4*>(values);
}

__device__ __forceinline__ int64_t batch_offset(const int64_t (&strides)[2], int64_t first, int64_t second) {
  return first * strides[0] + second * strides[1];
}

// This block's matrices; C's as an element offset.
struct problem {
  operand a;
  operand b;
  int64_t output;
};

template <typename T>
__device__ __forceinline__ problem this_problem(const nvb_matmul_params& p, bool vectors_a, bool vectors_b) {
  const int64_t first = blockIdx.z / p.batch[1];
  const int64_t second = blockIdx.z % p.batch[1];
  return {
      {static_cast<const T*>(p.a) + batch_offset(p.a_batch_strides, first, second), p.a_stride, p.m, p.k, vectors_a},
      {static_cast<const T*>(p.b) + batch_offset(p.b_batch_strides, first, second), p.b_stride, p.n, p.k, vectors_b},
      batch_offset(p.output_batch_strides, first, second)};
}

template <typename T, bool TransposeA, bool TransposeB>
__global__ void __launch_bounds__(kTileThreadCount)
    matmul_mma(const nvb_matmul_params p, const bool vectors_a, const bool vectors_b) {
#if __CUDA_ARCH__ >= 800
  __shared__ product_tile_shared<T> shared;
  const problem matrices = this_problem<T>(p, vectors_a, vectors_b);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTileSide;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTileSide;
  float sums[2][4][4] = {};
  multiply_tile<T, TransposeA, !TransposeB>(
      shared, p.k, [&](int row, int64_t k) { return load_operand8<T, TransposeA>(matrices.a, first_row + row, k); },
      [&](int column, int64_t k) { return load_operand8<T, !TransposeB>(matrices.b, first_column + column, k); }, sums);
  visit_tile(sums, [&](int row, int column, const float(&pair)[2]) {
    if (first_row + row >= p.m) return;
    const int64_t start = matrices.output + (first_row + row) * p.output_stride + first_column + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first_column + column + i < p.n) store_element(p.output, p.output_dtype, start + i, p.alpha * pair[i]);
    }
  });
#endif
}

template <typename T, bool TransposeA, bool TransposeB>
__global__ void __launch_bounds__(kPlainThreads) matmul_plain(const nvb_matmul_params p) {
  __shared__ __align__(16) float a[kPlainDepth][kPlainPitch];
  __shared__ __align__(16) float b[kPlainDepth][kPlainPitch];
  constexpr int kItems = kTileSide * kPlainDepth / kPlainThreads;
  const problem matrices = this_problem<T>(p, false, false);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTileSide;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTileSide;
  const int row = threadIdx.x / 16 * 4;
  const int column = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
  for (int64_t k = 0; k < p.k; k += kPlainDepth) {
    // Neighbouring threads read neighbouring elements.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * kPlainThreads + static_cast<int>(threadIdx.x);
      const int along_k[2] = {item / kPlainDepth, item % kPlainDepth};
      const int along_rows[2] = {item % kTileSide, item / kTileSide};
      const int(&at_a)[2] = TransposeA ? along_rows : along_k;
      const int(&at_b)[2] = TransposeB ? along_k : along_rows;
      a[at_a[1]][at_a[0]] = to_float(load_operand<T, TransposeA>(matrices.a, first_row + at_a[0], k + at_a[1]));
      b[at_b[1]][at_b[0]] = to_float(load_operand<T, !TransposeB>(matrices.b, first_column + at_b[0], k + at_b[1]));
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kPlainDepth; ++step) {
      const float4 x = *reinterpret_cast<const float4*>(&a[step][row]);
      const float4 w = *reinterpret_cast<const float4*>(&b[step][column]);
      const float xs[4] = {x.x, x.y, x.z, x.w};
      const float ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(xs[i], ws[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first_row + row + i >= p.m) break;
    const int64_t start = matrices.output + (first_row + row + i) * p.output_stride + first_column + column;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first_column + column + j < p.n) {
        store_element(p.output, p.output_dtype, start + j, p.alpha * sums[i][j]);
      }
    }
  }
}

bool supports_mma(const nvb_matmul_params& p, const nvb_launch& launch) {
  return p.dtype != NVB_F32 && launch.capability >= 80;
}

// `extent` is that of the contiguous axis.
bool supports_vectors(const void* data, int64_t stride, const int64_t (&batch_strides)[2], int64_t extent) {
  return extent % 8 == 0 && is_aligned16(data, stride, 2) && batch_strides[0] % 8 == 0 && batch_strides[1] % 8 == 0;
}

template <typename T, bool TransposeA, bool TransposeB>
cudaError_t enqueue(const nvb_matmul_params& p, const nvb_launch& launch) {
  const int64_t rows = (p.m + kTileSide - 1) / kTileSide;
  const int64_t matrices = p.batch[0] * p.batch[1];
  if (rows > 65535 || matrices > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((p.n + kTileSide - 1) / kTileSide), static_cast<unsigned>(rows),
                  static_cast<unsigned>(matrices));
  if constexpr (sizeof(T) == 2) {
    if (supports_mma(p, launch)) {
      matmul_mma<T, TransposeA, TransposeB><<<grid, kTileThreadCount, 0, launch.stream>>>(
          p, supports_vectors(p.a, p.a_stride, p.a_batch_strides, TransposeA ? p.m : p.k),
          supports_vectors(p.b, p.b_stride, p.b_batch_strides, TransposeB ? p.k : p.n));
      return cudaPeekAtLastError();
    }
  }
  matmul_plain<T, TransposeA, TransposeB><<<grid, kPlainThreads, 0, launch.stream>>>(p);
  return cudaPeekAtLastError();
}

template <typename T>
cudaError_t enqueue_dtype(const nvb_matmul_params& p, const nvb_launch& launch) {
  if (p.transpose_a != 0) {
    return p.transpose_b != 0 ? enqueue<T, true, true>(p, launch) : enqueue<T, true, false>(p, launch);
  }
  return p.transpose_b != 0 ? enqueue<T, false, true>(p, launch) : enqueue<T, false, false>(p, launch);
}

bool is_valid(const nvb_matmul_params& p) {
  return p.m >= 0 && p.n >= 0 && p.k >= 0 && p.batch[0] >= 0 && p.batch[1] >= 0 && float_dtype_bytes(p.dtype) != 0 &&
         float_dtype_bytes(p.output_dtype) != 0;
}

bool is_empty(const nvb_matmul_params& p) {
  return p.m == 0 || p.n == 0 || p.batch[0] == 0 || p.batch[1] == 0;
}

}  // namespace
}  // namespace nvb

extern "C" const char* nvb_cuda_matmul_kernel_name(const nvb_matmul_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params) || nvb::is_empty(*params)) return "none";
  return nvb::supports_mma(*params, *launch) ? "matmul_mma" : "matmul_plain";
}

extern "C" cudaError_t nvb_cuda_matmul(const nvb_matmul_params* params, const nvb_launch* launch) noexcept {
  const nvb_matmul_params& p = *params;
  if (!nvb::is_valid(p)) return cudaErrorInvalidValue;
  if (nvb::is_empty(p)) return cudaSuccess;
  switch (p.dtype) {
    case NVB_F16:
      return nvb::enqueue_dtype<__half>(p, *launch);
    case NVB_BF16:
      return nvb::enqueue_dtype<__nv_bfloat16>(p, *launch);
    default:
      return nvb::enqueue_dtype<float>(p, *launch);
  }
}
