// What the tensor-core kernels do about infinities where they add scale q x and zero point x apart, or scale (q - 8) x
// and (8 scale + zero point) x: that is inf - inf for an infinite x though the weight that it meets is an ordinary
// number. A sum that is not finite is therefore computed again, from the elements of W.
#pragma once

#include <math_constants.h>

#include "quantized_element.cuh"
#include "quantized_product.h"

namespace nvb {
namespace quantized {

// Σ_k x(k) W[row][k].
template <uint32_t Encoding, typename Element>
__device__ __forceinline__ float sum_products(const nvb_linear_quantized_params& p, int64_t row, const Element& x) {
  const nvb_quantized_matrix weight = {p.weight,        p.scales,   p.zero_points, p.n,     p.k,
                                       p.weight_stride, p.encoding, p.scale_kind,  p.group, 0};
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t k = 0; k < p.k && sum == sum; k += 4) {
    float w[4];
    load_four<Encoding>(weight, row, k, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(x(k + i), w[i], sum);
  }
  return sum;
}

// That of a token of x. Not inlined: hardly any sum takes it.
template <typename T, uint32_t Encoding>
__device__ __noinline__ float sum_of_elements(const nvb_linear_quantized_params& p, int64_t token, int64_t row) {
  const T* const x = static_cast<const T*>(p.input) + token * p.input_stride;
  return sum_products<Encoding>(p, row, [&](int64_t k) { return to_float(x[k]); });
}

// Puts `Count` sums of a token right, from column `column` on; columns past the end are left alone.
template <bool Apart, typename T, uint32_t Encoding = NVB_INT4, int Count>
__device__ __forceinline__ void repair_sums(const nvb_linear_quantized_params& p, int64_t token, int64_t column,
                                            float (&sums)[Count]) {
  if constexpr (Apart) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (!(fabsf(sums[i]) < CUDART_INF_F) && column + i < p.n) {
        sums[i] = sum_of_elements<T, Encoding>(p, token, column + i);
      }
    }
  }
}

}  // namespace quantized
}  // namespace nvb
