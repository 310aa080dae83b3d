// The epilogue of linear_wgmma.cuh: from a warpgroup's sums to the output, scales, bias, activation, gating, residual
// and rounding in registers, and then through shared memory, so that whole rows of 128 bytes are stored.
#pragma once

#include <type_traits>

#include "linear_wgmma_tile.cuh"

namespace nvb {
namespace linear_wgmma {

// 2^x and 1 / x to within some 2 units of f32's last place: the accurate ones take several times the instructions,
// which in a kernel of this kind nothing hides.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float quick_inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

constexpr float kLog2E = 1.4426950408889634f;

// What GELU's tanh form divides x by.
__device__ __forceinline__ float gelu_denominator(float x) {
  constexpr float kFirst = -2.0f * kLog2E * 0.7978845608028654f, kThird = kFirst * 0.044715f;
  return 1.0f + quick_exp2(x * fmaf(kThird * x, x, kFirst));
}

// The functions of activation.cuh.
template <uint32_t Activation>
__device__ __forceinline__ float quick_activate(float x) {
  if constexpr (Activation == NVB_GELU_TANH) {
    return x * quick_inverse(gelu_denominator(x));
  } else if constexpr (Activation == NVB_SILU) {
    return x * quick_inverse(1.0f + quick_exp2(-kLog2E * x));
  } else {
    return x;
  }
}

// GELU of both with one reciprocal: 1 / a = b / (a b). False, with results not to be used, if the product of the
// denominators is 2^125 or more, infinite or NaN: that of one x alone is so from about -10 down, at -infinity (where
// the formula is -infinity times 0, NaN) and for NaN, and would spoil the other result. Otherwise each is off by two
// more roundings at most: denominators are at least 1, so that the product, its reciprocal (2^-125 or more, a normal
// number) and 1 / a itself neither overflow nor underflow. At +infinity the denominator is 1.
__device__ __forceinline__ bool gelu_both(float& first, float& second) {
  const float a = gelu_denominator(first), b = gelu_denominator(second), product = a * b;
  const float inverse = quick_inverse(product);
  first *= inverse * b;
  second *= inverse * a;
  return product < 0x1p125f;
}

// The columns of a tile that a thread fetches bias and scales for while the products run.
struct ColumnTerms {
  float bias[kColumns / 128];
  float scales[kColumns / 128];

  __device__ __forceinline__ void load(const Arguments& arguments, int64_t first, int thread) {
#pragma unroll
    for (int i = 0; i < kColumns / 128; ++i) {
      const int64_t column = first + thread + 128 * i;
      const bool inside = column < arguments.n;
      bias[i] = inside && arguments.epilogue.bias != nullptr
                    ? load_element(arguments.epilogue.bias, arguments.epilogue.bias_dtype, column)
                    : 0.0f;
      scales[i] = inside && arguments.column_scales != nullptr ? arguments.column_scales[column] : 1.0f;
    }
  }
};

// Waits for the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ uint32_t round_pair(uint32_t dtype, float first, float second) {
  return dtype == NVB_F16 ? pack_pair<__half>(first, second) : pack_pair<__nv_bfloat16>(first, second);
}

// Stores the part that lies in `part`, from (row, column) of the output on.
__device__ __forceinline__ void store_part(const Arguments& arguments, const uint16_t* part, int64_t row,
                                           int64_t column, int64_t columns, int lane) {
  const LinearEpilogue& epilogue = arguments.epilogue;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Eight lanes a row.
    const int down = lane / 8 + 4 * i, across = 8 * (lane % 8);
    if (row + down >= arguments.m) continue;
    const uint16_t* const from = part + down * kPartPitch + across;
    uint16_t* const to =
        static_cast<uint16_t*>(epilogue.output) + (row + down) * epilogue.output_stride + column + across;
    if (epilogue.vectors && column + across + 8 <= columns) {
      store16(to, load16(from));
    } else {
      for (int j = 0; j < 8 && column + across + j < columns; ++j) to[j] = from[j];
    }
  }
}

// The residual of a lane's sums of a part, where they lie in memory: pairs of columns of two rows; zeros past the ends.
// All of it is asked for before the part's first store, which may be to the same memory.
constexpr int kPartPairs = kPartColumns / 8;
__device__ __forceinline__ void load_residual(const Arguments& arguments, int64_t row, int64_t column,
                                              float (&added)[kPartPairs][2][2]) {
  const LinearEpilogue& epilogue = arguments.epilogue;
#pragma unroll
  for (int j = 0; j < kPartPairs; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float(&pair)[2] = added[j][i];
      pair[0] = pair[1] = 0.0f;
      if (row + 8 * i >= arguments.m || column + 8 * j >= arguments.n) continue;
      const int64_t at = (row + 8 * i) * epilogue.residual_stride + column + 8 * j;
      if (epilogue.residual_vectors && column + 8 * j + 2 <= arguments.n) {
        load_elements(epilogue.residual, epilogue.residual_dtype, at, pair);
      } else {
        pair[0] = load_element(epilogue.residual, epilogue.residual_dtype, at);
        if (column + 8 * j + 1 < arguments.n)
          pair[1] = load_element(epilogue.residual, epilogue.residual_dtype, at + 1);
      }
    }
  }
}

// Scales, bias, activation, gating, residual, rounding and storing of a warp's 16 rows.
template <bool Scaled, uint32_t Activation, bool Gated, bool Residual, typename Sum, int Count>
__device__ __forceinline__ void epilogue_warp(const Arguments& arguments, const Sum (&sums)[Count], const float* bias,
                                              const float* scales, uint16_t* part, int64_t first_row,
                                              int64_t first_column) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const uint32_t dtype = arguments.epilogue.output_dtype;
  constexpr int kSources = Gated ? 2 : 1;  // columns of sums for one of results
  const int64_t columns = arguments.n / kSources, first_result = first_column / kSources;
  float row_scales[2] = {1.0f, 1.0f};
  if constexpr (Scaled) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first_row + group + 8 * i;
      if (row < arguments.m) row_scales[i] = arguments.row_scales[row];
    }
  }
  // Two neighbouring columns of rows group and group + 8, with scales and bias.
  const auto load_pairs = [&](int chunk, int j, float2(&pairs)[2]) {
    const int column = chunk * kPartColumns * kSources + 8 * j + 2 * quad;
    const int at = (chunk * kPartColumns * kSources / 8 + j) * 4;
    const float2 added = *reinterpret_cast<const float2*>(bias + column);
    float2 factors = make_float2(1.0f, 1.0f);
    if constexpr (Scaled) factors = *reinterpret_cast<const float2*>(scales + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float first = static_cast<float>(sums[at + 2 * i]), second = static_cast<float>(sums[at + 2 * i + 1]);
      if constexpr (Scaled) first *= row_scales[i] * factors.x, second *= row_scales[i] * factors.y;
      pairs[i] = make_float2(first + added.x, second + added.y);
    }
  };
#pragma unroll
  for (int chunk = 0; chunk < kColumns / (kPartColumns * kSources); ++chunk) {
    if (first_result + chunk * kPartColumns >= columns) break;
    [[maybe_unused]] float residual[kPartPairs][2][2];
    if constexpr (Residual) {
      static_assert(!Gated, "a pair of sums is a pair of results");
      load_residual(arguments, first_row + group, first_column + chunk * kPartColumns + 2 * quad, residual);
    }
    if constexpr (Gated && Activation == NVB_GELU_TANH) {
      bool done[2] = {true, true};
#pragma unroll
      for (int j = 0; j < kPartColumns * kSources / 8; j += 2) {
        float2 pairs[2], next[2];
        load_pairs(chunk, j, pairs);
        load_pairs(chunk, j + 1, next);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint16_t* const row = part + (group + 8 * i) * kPartPitch;
          if (!gelu_both(pairs[i].x, next[i].x)) done[i] = false;
          row[4 * j + quad] = static_cast<uint16_t>(round_pair(dtype, pairs[i].x * pairs[i].y, 0.0f));
          row[4 * (j + 1) + quad] = static_cast<uint16_t>(round_pair(dtype, next[i].x * next[i].y, 0.0f));
        }
      }
      // One by one where that does not do, whatever the other row holds: a row does not depend on its neighbours.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (done[i]) continue;
#pragma unroll
        for (int j = 0; j < kPartColumns * kSources / 8; ++j) {
          float2 pairs[2];
          load_pairs(chunk, j, pairs);
          const float result = quick_activate<Activation>(pairs[i].x) * pairs[i].y;
          part[(group + 8 * i) * kPartPitch + 4 * j + quad] = static_cast<uint16_t>(round_pair(dtype, result, 0.0f));
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPartColumns * kSources / 8; ++j) {
        float2 pairs[2];
        load_pairs(chunk, j, pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float first = quick_activate<Activation>(pairs[i].x), second = pairs[i].y;
          uint16_t* const row = part + (group + 8 * i) * kPartPitch;
          if constexpr (Gated) {
            row[4 * j + quad] = static_cast<uint16_t>(round_pair(dtype, first * second, 0.0f));
          } else {
            second = quick_activate<Activation>(second);
            if constexpr (Residual) first += residual[j][i][0], second += residual[j][i][1];
            const uint32_t pair = round_pair(dtype, first, second);
            *reinterpret_cast<uint32_t*>(row + 8 * j + 2 * quad) = pair;
          }
        }
      }
    }
    __syncwarp();
    store_part(arguments, part, first_row, first_result + chunk * kPartColumns, columns, lane);
    __syncwarp();
  }
}

template <bool Scaled, typename Sum, int Count>
__device__ __forceinline__ void epilogue_block(const Arguments& arguments, Shared& shared, const Sum (&sums)[Count],
                                               const ColumnTerms& terms, int64_t first_row, int64_t first_column,
                                               int warpgroup) {
  const int thread = threadIdx.x % 128, warp = thread / 32;
#pragma unroll
  for (int i = 0; i < kColumns / 128; ++i) {
    shared.bias[warpgroup][thread + 128 * i] = terms.bias[i];
    if constexpr (Scaled) shared.scales[warpgroup][thread + 128 * i] = terms.scales[i];
  }
  warpgroup_barrier(warpgroup);
  const auto with = [&](auto activation, auto gated, auto residual) {
    epilogue_warp<Scaled, decltype(activation)::value, decltype(gated)::value, decltype(residual)::value>(
        arguments, sums, shared.bias[warpgroup], shared.scales[warpgroup], shared.parts[4 * warpgroup + warp],
        first_row + 16 * warp, first_column);
  };
  const auto with_activation = [&](auto activation) {
    arguments.epilogue.gated ? with(activation, std::true_type(), std::false_type())
                             : with(activation, std::false_type(), std::false_type());
  };
  constexpr std::integral_constant<uint32_t, NVB_NONE> kNone;
  switch (arguments.epilogue.activation) {
    case NVB_GELU_TANH:
      with_activation(std::integral_constant<uint32_t, NVB_GELU_TANH>());
      break;
    case NVB_SILU:
      with_activation(std::integral_constant<uint32_t, NVB_SILU>());
      break;
    default:
      if (arguments.epilogue.residual != nullptr) {
        with(kNone, std::false_type(), std::true_type());
      } else {
        with_activation(kNone);
      }
  }
  warpgroup_barrier(warpgroup);
}

}  // namespace linear_wgmma
}  // namespace nvb
