// elementwise: add, multiply, scale, soft_cap, convert and the activations on [rows, columns].
//
// A soft cap's input of less than cap / 4096 is its result: tanh is its argument there, and input / cap may underflow.
//
// Dtypes: every operand its own; vectors of 8, 4 or 1 elements by alignment. Work: tiles (row_block.cuh), four vectors
// a thread; tensors without gaps between rows are one long row. The operation is a branch uniform over the grid, taken
// once a thread: these kernels wait for memory, not for it. Shared memory: none.
#include "../common/activation.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "elementwise.h"

namespace nvb {
namespace {

constexpr int kVectors = 4;

// values = function(values), element by element.
template <int Width, typename Function>
__device__ __forceinline__ void map(float (&values)[kVectors][Width], Function function) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < Width; ++i) values[v][i] = function(values[v][i]);
  }
}

// values = function(values, others), element by element.
template <int Width, typename Function>
__device__ __forceinline__ void combine(float (&values)[kVectors][Width], const uint4 (&others)[kVectors],
                                        uint32_t dtype, Function function) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float other[Width];
    unpack_raw<Width>(others[v], dtype, other);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[v][i] = function(values[v][i], other[i]);
  }
}

template <int Width>
__device__ __forceinline__ void apply(const nvb_elementwise_params& p, float (&values)[kVectors][Width],
                                      const uint4 (&others)[kVectors]) {
  switch (p.operation) {
    case NVB_ELEMENTWISE_ADD:
      combine<Width>(values, others, p.other_dtype, [](float x, float y) { return x + y; });
      break;
    case NVB_ELEMENTWISE_MULTIPLY:
      combine<Width>(values, others, p.other_dtype, [](float x, float y) { return x * y; });
      break;
    case NVB_ELEMENTWISE_SCALE:
      map<Width>(values, [&](float x) { return x * p.scalar; });
      break;
    case NVB_ELEMENTWISE_SOFT_CAP:
      map<Width>(values, [&](float x) {
        const float ratio = x / p.scalar;
        return fabsf(ratio) < 1.0f / 4096.0f ? x : p.scalar * tanhf(ratio);
      });
      break;
    case NVB_ELEMENTWISE_ACTIVATION:
      map<Width>(values, [&](float x) { return activate(p.activation, x); });
      break;
    default:
      break;
  }
}

template <int Width>
__global__ void __launch_bounds__(kTileThreads)
    elementwise_kernel(const nvb_elementwise_params p, const uint32_t column_tiles) {
  const int64_t row = static_cast<int64_t>(blockIdx.x / column_tiles) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int64_t tile = blockIdx.x % column_tiles;
  const int64_t first = (tile * kVectors * blockDim.x + threadIdx.x) * Width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;

  // Load everything first: an output that is also an operand would otherwise hold back the later loads.
  uint4 input[kVectors];
  uint4 other[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    input[v] = other[v] = make_uint4(0, 0, 0, 0);
    if (column < p.columns) {
      input[v] = load_raw<Width>(p.input, p.input_dtype, row * p.input_stride + column);
      if (p.other != nullptr) other[v] = load_raw<Width>(p.other, p.other_dtype, row * p.other_stride + column);
    }
  }

  // Compute.
  float values[kVectors][Width];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) unpack_raw<Width>(input[v], p.input_dtype, values[v]);
  apply<Width>(p, values, other);

  // Store.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v * step;
    if (column < p.columns) {
      store_vector<Width>(p.output, p.output_dtype, row * p.output_stride + column, values[v]);
    }
  }
}

template <int Width>
cudaError_t enqueue(const nvb_elementwise_params& p, const nvb_launch* launch) {
  const tile_grid grid = make_tile_grid(p.rows, p.columns, Width, kVectors);
  if (!fits_grid(grid.blocks)) return cudaErrorInvalidValue;
  elementwise_kernel<Width>
      <<<static_cast<unsigned>(grid.blocks), grid.block, 0, launch->stream>>>(p, grid.column_tiles);
  return cudaGetLastError();
}

bool is_supported(const nvb_elementwise_params& p) {
  if (p.operation < NVB_ELEMENTWISE_ADD || p.operation > NVB_ELEMENTWISE_ACTIVATION) return false;
  if (p.operation == NVB_ELEMENTWISE_ACTIVATION && p.activation > NVB_SILU) return false;
  const bool binary = p.operation == NVB_ELEMENTWISE_ADD || p.operation == NVB_ELEMENTWISE_MULTIPLY;
  if (binary != (p.other != nullptr) || (binary && float_dtype_bytes(p.other_dtype) == 0)) return false;
  return float_dtype_bytes(p.input_dtype) != 0 && float_dtype_bytes(p.output_dtype) != 0;
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_elementwise(const nvb_elementwise_params* params, const nvb_launch* launch) noexcept {
  nvb_elementwise_params p = *params;
  if (!nvb::is_supported(p)) return cudaErrorInvalidValue;
  if (p.rows <= 0 || p.columns <= 0) return cudaSuccess;
  const bool gapless = p.input_stride == p.columns && p.output_stride == p.columns &&
                       (p.other == nullptr || p.other_stride == p.columns);
  if (gapless) {
    p.columns *= p.rows;
    p.rows = 1;
  }
  if (p.rows == 1) p.input_stride = p.other_stride = p.output_stride = 0;  // no longer steps, so they need no alignment
  switch (nvb::widest_vector(p.columns, {{p.input, p.input_stride, p.input_dtype},
                                         {p.other, p.other_stride, p.other_dtype},
                                         {p.output, p.output_stride, p.output_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
