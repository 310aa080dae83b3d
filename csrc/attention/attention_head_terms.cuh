// What heads add to the softmax: slopes by the distance of a key (ALiBi), and sinks, a term of the sum without a value.
#pragma once

#include "softmax.cuh"

namespace nvb {

// A head's slope in powers of two; 0 without slopes.
__device__ __forceinline__ float slope_of(const float* slopes, int head) {
  return slopes != nullptr ? slopes[head] * kLog2E : 0.0f;
}

// ln of what a row's weights are divided by: `keys` is that of its keys alone. A NaN of either stays NaN.
__device__ __forceinline__ float lse_with_sink(float keys, float sink) {
  const float most = fmaxf(keys, sink);
  if (keys == sink && most == -CUDART_INF_F) return most;
  return most + log1pf(expf(-fabsf(keys - sink)));
}

// What a row's output and lse are made from: `maximum` in powers of two, as of the exponents of `sum`.
struct RowEnd {
  float inverse;  // multiplies the weighted values
  float lse;
};
__device__ __forceinline__ RowEnd row_end(float maximum, float sum, const float* sinks, int head) {
  // An empty row has sum 0; a NaN stays NaN.
  RowEnd end{sum == 0.0f ? 0.0f : 1.0f / sum, sum == 0.0f ? -CUDART_INF_F : maximum * kLn2 + logf(sum)};
  if (sinks != nullptr) {
    const float lse = lse_with_sink(end.lse, sinks[head]);
    // Both are -inf where neither a key nor the sink counts.
    end.inverse *= lse == -CUDART_INF_F ? 1.0f : expf(end.lse - lse);
    end.lse = lse;
  }
  return end;
}

}  // namespace nvb
