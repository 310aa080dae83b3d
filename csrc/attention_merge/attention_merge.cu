// attention_merge: the weighted sum of attention's partial results (formula in attention_merge.h).
//
// Shapes: [parts, tokens, heads, head_dim] to [tokens, heads, head_dim], dtypes per operand, vectors of 8, 4 or 1
// elements by alignment. Work: a warp a row of one token and head, four to a block. Its lanes share the parts for the
// maximum and the sum of weights, then the columns, for which every lane computes each part's weight: one load that
// the warp shares and one exponential for up to 512 columns. Memory bounds it.
// Registers: a vector of sums a lane. No shared memory.
#include "../common/reduce.cuh"
#include "../common/row_block.cuh"
#include "../common/runtime_vector.cuh"
#include "attention_merge.h"

namespace nvb {
namespace {

constexpr int kRowsPerBlock = kWarpRowsPerBlock;

template <int Width>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    attention_merge_kernel(const __grid_constant__ nvb_attention_merge_params p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (row >= static_cast<int64_t>(p.tokens) * p.heads) return;
  const int64_t token = row / p.heads;
  const int64_t head = row - token * p.heads;
  const int lane = threadIdx.x;
  const float* const lses = p.lses + token * p.lse_token_stride + head * p.lse_head_stride;

  // The largest lse. fmaxf drops a NaN, which the sum below brings back.
  float most = -CUDART_INF_F;
  for (int part = lane; part < p.parts; part += 32) most = fmaxf(most, lses[part * p.lse_part_stride]);
  most = warp_max(most);

  // The sum of the parts' weights relative to it.
  float total = 0.0f;
  for (int part = lane; part < p.parts; part += 32) {
    const float lse = lses[part * p.lse_part_stride];
    if (lse != -CUDART_INF_F) total += expf(lse - most);
  }
  total = warp_sum(total);
  const float reciprocal = 1.0f / total;

  // The columns.
  const int64_t input = token * p.token_stride + head * p.head_stride;
  const int64_t output = token * p.output_token_stride + head * p.output_head_stride;
  for (int column = lane * Width; column < p.head_dim; column += 32 * Width) {
    float sums[Width] = {};
    for (int part = 0; part < p.parts; ++part) {
      const float lse = lses[part * p.lse_part_stride];
      if (lse == -CUDART_INF_F) continue;
      const float weight = expf(lse - most) * reciprocal;
      float values[Width];
      load_vector<Width>(p.outputs, p.input_dtype, part * p.part_stride + input + column, values);
#pragma unroll
      for (int i = 0; i < Width; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    store_vector<Width>(p.output, p.output_dtype, output + column, sums);
  }
  if (lane == 0 && p.lse != nullptr) p.lse[row] = most + logf(total);
}

template <int Width>
cudaError_t enqueue(const nvb_attention_merge_params& p, const nvb_launch* launch) {
  const int64_t blocks = ceiling_divide(static_cast<int64_t>(p.tokens) * p.heads, kRowsPerBlock);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  attention_merge_kernel<Width><<<static_cast<unsigned>(blocks), dim3(32, kRowsPerBlock), 0, launch->stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_attention_merge(const nvb_attention_merge_params* params,
                                                const nvb_launch* launch) noexcept {
  const nvb_attention_merge_params& p = *params;
  if (nvb::float_dtype_bytes(p.input_dtype) == 0 || nvb::float_dtype_bytes(p.output_dtype) == 0 || p.parts < 1 ||
      p.head_dim < 1 || p.head_dim > 512) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens <= 0 || p.heads <= 0) return cudaSuccess;
  switch (nvb::widest_vector(p.head_dim, {{p.outputs, p.part_stride, p.input_dtype},
                                          {p.outputs, p.token_stride, p.input_dtype},
                                          {p.outputs, p.head_stride, p.input_dtype},
                                          {p.output, p.output_token_stride, p.output_dtype},
                                          {p.output, p.output_head_stride, p.output_dtype}})) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
