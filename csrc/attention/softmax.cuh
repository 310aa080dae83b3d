// The pieces of an online softmax: base-2 exponential, soft cap, and which keys a query row sees.
#pragma once

#include <math_constants.h>
#include <stdint.h>

namespace nvb {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// A running maximum is raised only when a score passes it by this much (in powers of two). Until then the
// exponentials reach 2^8 instead of 1, which f16 and f32 hold without loss, and the output is not rescaled.
inline constexpr float kRescaleThreshold = 8.0f;

// 2^x, relative error 2^-22; 2^-inf = 0. Results under 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), relative error near 1e-6. tanh.approx would be one instruction, but its relative error of 2^-11 times a cap
// of 50 moves a score by more than f16 probabilities resolve. Near 0 the quotient cancels, and an error that stays the
// same while a large cap multiplies it ruins the score, so there the first terms of the series answer.
__device__ __forceinline__ float tanh_fast(float x) {
  const float square = x * x;
  const float series = x * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f)));
  const float quotient = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2.0f * kLog2E)));
  return square < 0.01f ? series : quotient;
}

// The base to subtract in exponents: a row that has seen no key has maximum -inf, and -inf - -inf is NaN.
__device__ __forceinline__ float exponent_base(float maximum) {
  return maximum == -CUDART_INF_F ? 0.0f : maximum;
}

// The widest heads of queries and keys, and of values, that the launchers take.
inline constexpr int kMaxHeadDim = 576;
inline constexpr int kMaxValueDim = 512;

// The launchers refuse lengths above this and cut windows to it, so that sums of two stay within 32 bits.
inline constexpr int kMaxLength = 1 << 30;

// The keys first ..= last that the query at `position` sees; none if last < first. Both ends grow with the position.
struct KeyRange {
  int first;
  int last;
};
__device__ __forceinline__ KeyRange visible_keys(int position, int kv_length, int causal, int window) {
  KeyRange range{0, kv_length - 1};
  if (window > 0) {
    range.first = max(0, position - window + 1);
    range.last = min(range.last, position + window - 1);
  }
  if (causal) range.last = min(range.last, position);
  return range;
}

// The same with a prefix of keys that are behind no causal mask, and with chunks, of which the query's begins at
// `chunk_start`; 0: none.
__device__ __forceinline__ KeyRange visible_keys(int position, int kv_length, int causal, int window, int prefix,
                                                 int chunk, int chunk_start) {
  KeyRange range = visible_keys(position, kv_length, causal, window);
  if (causal && position < prefix) {
    range.last = min(prefix, kv_length) - 1;
    if (window > 0) range.last = min(range.last, position + window - 1);
  }
  if (chunk > 0) {
    // No chunk begins before key 0. A chunk is no longer than the largest length, so its end is a number.
    range.first = max(range.first, chunk_start);
    range.last = position < 0 ? -1 : min(range.last, chunk_start + chunk - 1);
  }
  return range;
}

}  // namespace nvb
