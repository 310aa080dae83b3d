// Int8 and FP8 with one f32 scale a row, the row's own or its part's: weights per channel and per tensor.
//
// A block takes a row: the largest magnitude, then the codes. The second pass finds the row in L1 or L2, which spares
// keeping rows of any length in registers. Shared memory: 32 bytes.
#include <algorithm>

#include "quantize_encode.cuh"

namespace nvb {
namespace quantize {
namespace {

constexpr int kThreads = 256;

// Bits of magnitudes are ordered as the magnitudes are, with NaN above all: a row with NaN gets NaN for its scale, and
// so do the products with it, though an integer code cannot say so.
__device__ __forceinline__ uint32_t warp_max_bits(uint32_t bits) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
  return bits;
}

// The largest magnitude that a warp meets in its part of a row.
__device__ __forceinline__ uint32_t warp_magnitude(const nvb_quantize_params& p, const SourceRow& source) {
  uint32_t most = 0;
  for (int64_t k = 4 * threadIdx.x; k < p.matrix.columns; k += 4 * kThreads) {
    float values[4];
    load_four_sources(p, source, k, 0.0f, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(values[i]) & 0x7fffffffu);
  }
  return warp_max_bits(most);
}

// Over the block; every thread receives it.
__device__ __forceinline__ float row_magnitude(const nvb_quantize_params& p, const SourceRow& source,
                                               uint32_t* scratch) {
  const uint32_t most = warp_magnitude(p, source);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __uint_as_float(warp_max_bits(lane < kThreads / 32 ? scratch[lane] : 0));
}

// The largest magnitude of each part.
__global__ void __launch_bounds__(kThreads) quantize_range(const nvb_quantize_params p) {
  for (int64_t row = blockIdx.x; row < p.matrix.rows; row += gridDim.x) {
    const SourceRow source = source_row(p, row);
    const uint32_t most = warp_magnitude(p, source);
    if (threadIdx.x % 32 == 0) atomicMax(&p.report->maxima[source.part], most);
  }
}

template <uint32_t Encoding>
__global__ void __launch_bounds__(kThreads) quantize_rows(const nvb_quantize_params p) {
  __shared__ uint32_t scratch[kThreads / 32];
  Findings findings(p.report);
  for (int64_t row = blockIdx.x; row < p.matrix.rows; row += gridDim.x) {
    const SourceRow source = source_row(p, row);
    const float most =
        p.per_tensor ? __uint_as_float(p.report->maxima[source.part]) : row_magnitude(p, source, scratch);
    const float scale = scale_for<Encoding>(most);
    if (threadIdx.x == 0) static_cast<float*>(const_cast<void*>(p.matrix.scales))[row] = scale;
    uint32_t* const codes =
        reinterpret_cast<uint32_t*>(static_cast<char*>(const_cast<void*>(p.matrix.data)) + row * p.matrix.row_bytes);
    for (int64_t k = 4 * threadIdx.x; k < p.matrix.row_bytes; k += 4 * kThreads) {
      float values[4];
      load_four_sources(p, source, k, 0.0f, values);
      codes[k / 4] = encode_four<Encoding>(values, scale, k, p.matrix.columns, findings);
    }
  }
  findings.report();
}

template <uint32_t Encoding>
cudaError_t launch_encoding(const nvb_quantize_params& params, const nvb_launch& launch) {
  // Eight blocks fill a multiprocessor; more rows are walked.
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(params.matrix.rows, static_cast<int64_t>(launch.multiprocessors) * 8));
  if (params.per_tensor) quantize_range<<<blocks, kThreads, 0, launch.stream>>>(params);
  quantize_rows<Encoding><<<blocks, kThreads, 0, launch.stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t launch_rows(const nvb_quantize_params& params, const nvb_launch& launch) {
  if (params.matrix.encoding == NVB_INT8) return launch_encoding<NVB_INT8>(params, launch);
  if (params.matrix.encoding == NVB_FP8_E4M3) return launch_encoding<NVB_FP8_E4M3>(params, launch);
  return launch_encoding<NVB_FP8_E5M2>(params, launch);
}

}  // namespace quantize
}  // namespace nvb
