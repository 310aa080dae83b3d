// FP8 with an f32 scale for 128 x 128 elements.
//
// A thread block takes one of them: warps walk its rows, four columns a lane, and keep what they have read in registers
// (64 values a thread) until the largest magnitude is known. Shared memory: 32 bytes.
#include "quantize_encode.cuh"

namespace nvb {
namespace quantize {
namespace {

constexpr int kBlock = 128;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kBlock / kWarps;  // of a warp

template <uint32_t Encoding>
__global__ void __launch_bounds__(kThreads) quantize_blocks(const nvb_quantize_params p) {
  __shared__ float scratch[kWarps];
  const nvb_quantized_matrix& matrix = p.matrix;
  const int64_t in_row = (matrix.columns + kBlock - 1) / kBlock;
  const int64_t k = blockIdx.x % in_row * kBlock + threadIdx.x % 32 * 4;
  const int64_t first_row = blockIdx.x / in_row * kBlock + threadIdx.x / 32;
  float values[kRows][4];
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first_row + i * kWarps;
    if (row >= matrix.rows) break;
    load_four_sources(p, source_row(p, row), k, 0.0f, values[i]);
    most = fmaxf(most, magnitude_of(values[i]));
  }
  const float scale = scale_for<Encoding>(block_max<kThreads>(most, scratch));
  if (threadIdx.x == 0) static_cast<float*>(const_cast<void*>(matrix.scales))[blockIdx.x] = scale;

  Findings findings(p.report);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first_row + i * kWarps;
    if (row >= matrix.rows || k >= matrix.row_bytes) break;
    *reinterpret_cast<uint32_t*>(static_cast<char*>(const_cast<void*>(matrix.data)) + row * matrix.row_bytes + k) =
        encode_four<Encoding>(values[i], scale, k, matrix.columns, findings);
  }
  findings.report();
}

template <uint32_t Encoding>
cudaError_t launch_encoding(const nvb_quantize_params& params, const nvb_launch& launch) {
  const nvb_quantized_matrix& matrix = params.matrix;
  const int64_t blocks = ((matrix.rows + kBlock - 1) / kBlock) * ((matrix.columns + kBlock - 1) / kBlock);
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  quantize_blocks<Encoding><<<static_cast<unsigned>(blocks), kThreads, 0, launch.stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t launch_blocks(const nvb_quantize_params& params, const nvb_launch& launch) {
  if (params.matrix.encoding == NVB_FP8_E4M3) return launch_encoding<NVB_FP8_E4M3>(params, launch);
  return launch_encoding<NVB_FP8_E5M2>(params, launch);
}

}  // namespace quantize
}  // namespace nvb
