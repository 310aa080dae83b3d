// The activation functions, in f32 with the accurate exp and erf.
#pragma once

#include "launch.h"

namespace nvb {

// x * sigmoid(x) = x / (1 + e^-x).
__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + expf(-x));
}

// 0.5 x (1 + tanh(z)) with z = sqrt(2/pi) (x + 0.044715 x^3), GELU's tanh form (Hendrycks and Gimpel,
// arXiv:1606.08415). Written as x * sigmoid(2z), the same function without the cancellation of 1 + tanh(z) for negative
// x.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float z = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-2.0f * z));
}

// x * Phi(x) = 0.5 x (1 + erf(x / sqrt(2))), with erfc to keep the negative tail.
__device__ __forceinline__ float gelu_erf(float x) {
  return 0.5f * x * erfcf(-0.7071067811865476f * x);
}

// An NVB_ACTIVATION_* code known at run time costs a branch that is uniform over the grid; a constant one folds away.
__device__ __forceinline__ float activate(uint32_t activation, float x) {
  switch (activation) {
    case NVB_GELU_TANH:
      return gelu_tanh(x);
    case NVB_GELU_ERF:
      return gelu_erf(x);
    case NVB_SILU:
      return silu(x);
    default:
      return x;
  }
}

}  // namespace nvb
