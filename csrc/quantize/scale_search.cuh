// The scale of an Int4 group, and with zero points its zero point, with which the group's codes lose least: the search
// of src/weight/scale_search.rs, bit for bit, so that a weight does not depend on where it was quantised.
//
// The four lanes of a quad hold a group: lane q has elements 16 j + 4 q + i, j < Subtiles, i < 4, of it. The host adds
// up 16 lanes of every 16th element before it adds these in pairs at distances 8, 4, 2 and 1; here element i of lane q
// is host lane 4 q + i, so distances 8 and 4 are exchanges within the quad and 2 and 1 stay within a lane. Products and
// sums are rounded one by one (`__fmul_rn`, `__fadd_rn`), because a fused multiply-add would choose another code where
// two fits are nearly equal. About 27 passes over the registers of a group, each with 24 or 40 shuffles a warp for its
// 8 groups. Shared memory: none.
#pragma once

#include "quantize_encode.cuh"

namespace nvb {
namespace quantize {

// What a code stands for: scale * code + zero point; without zero points codes count from -8 on.
struct Step {
  float scale;
  float zero_point;
};

// The full range's scale. The largest magnitude gets the code 0, which is -8 and has no positive counterpart; with
// zero points the codes span the range.
template <bool ZeroPoints>
__device__ __forceinline__ Step step_for(float low, float high) {
  if (ZeroPoints) {
    const float half = (high - low) * 0.5f;
    return {__half2float(stored_scale(half / 7.5f)), __half2float(__float2half_rn((high + low) * 0.5f - half))};
  }
  const float most = fmaxf(high, -low);
  return {__half2float(stored_scale(high > -low ? most / -8.0f : most / 8.0f)), 0.0f};
}

// All lanes of a warp take part in every call: quads search side by side, and one that has finished keeps what it has.
template <int Subtiles, bool ZeroPoints>
class ScaleSearch {
 public:
  // `count` of the group's elements exist; bit 4 j + i of `present` says which of this lane's do. `low` and `high` are
  // the group's range.
  __device__ __forceinline__ ScaleSearch(const float (&values)[Subtiles][4], uint32_t present, int count, float low,
                                         float high)
      : values_(values), present_(present), count_(count), low_(low), high_(high) {}

  __device__ __forceinline__ Step best() const {
    const Step full = step_for<ZeroPoints>(low_, high_);
    const float unit = inverse_of(full.scale);
    const bool searchable = is_finite(full) && unit != 0.0f;

    // The full range, the starts, then fits to the codes of the best fit, until one no longer loses less.
    Fit best = {full, CUDART_INF};
    bool improves = true;
    Start start;
#pragma unroll 1
    for (int i = 0; i <= kStarts + kRefinements; ++i) {
      const Fit next = fit(i == 0 ? full : i <= kStarts ? begin(start) : best.step, unit);
      const bool better = i == 0 || next.loss < best.loss;
      if (i > kStarts) improves = improves && better;
      if (better && improves) best = next;
      if (i != 0 && i < kStarts) start.advance();
    }

    // What is stored: the full range's, the best fit, and where rounding to f16 moves values by so much of a step that
    // fits are worth little, the starts themselves.
    const bool coarse = is_coarse(full);
    const int last = __any_sync(0xffffffffu, searchable && coarse) ? 1 + kStarts : 1;
    const Step fitted = store(best.step);
    Step chosen = full;
    double least = CUDART_INF;
    start = Start();
#pragma unroll 1
    for (int i = 0; i <= last; ++i) {
      const Step step = i == 0 ? full : i == 1 ? fitted : rounded(begin(start));
      const double lost = loss(step, unit);
      const bool wanted = i <= 1 || coarse;
      if (i == 0 || (wanted && lost < least && is_finite(step))) chosen = step, least = lost;
      if (i > 1 && i < last) start.advance();
    }
    return searchable ? chosen : full;
  }

 private:
  // Eleven parts of the full range with the code -8 at either end; or 20 pairs of ends.
  static constexpr int kStarts = ZeroPoints ? 20 : 22;
  static constexpr int kRefinements = 4;
  static constexpr float kLowest = ZeroPoints ? 0.0f : -8.0f, kHighest = ZeroPoints ? 15.0f : 7.0f;

  // A fit and the squared error that it leaves, before the scale and the zero point are rounded.
  struct Fit {
    Step step;
    double loss;
  };
  // Over the group: d is what a value in steps has beyond its code q.
  struct Sums {
    double d, dd, dq, q, qq;
  };

  static __device__ __forceinline__ bool is_finite(const Step& step) {
    return fabsf(step.scale) < CUDART_INF_F && fabsf(step.zero_point) < CUDART_INF_F;
  }

  // 1 - i / 20, rounded as the host's table is.
  static __device__ __forceinline__ float ratio(int i) {
    return __fsub_rn(1.0f, __fmul_rn(0.05f, static_cast<float>(i)));
  }

  // Which part of the full range is tried, by steps of a twentieth. With zero points both ends move: from a step beyond
  // the range down to a fifth within, each by itself and at most a step from the other, and below that together.
  struct Start {
    int i = ZeroPoints ? -1 : 0;
    int j = -1;

    __device__ __forceinline__ void advance() {
      do {
        if (ZeroPoints && j < min(i + 1, 8)) {
          ++j;
        } else {
          ++i, j = i - 1;
        }
      } while (ZeroPoints && i != j && max(i, j) > 4);
    }
  };

  __device__ __forceinline__ Step begin(const Start& start) const {
    if (!ZeroPoints) {
      const float most = __fmul_rn(fmaxf(high_, -low_), ratio(start.i / 2 - 2));
      return {most / (start.i % 2 == 0 ? 8.0f : -8.0f), 0.0f};
    }
    const float half = __fsub_rn(high_, low_) / 2.0f, middle = __fadd_rn(high_, low_) / 2.0f;
    const float below = __fmul_rn(half, ratio(start.i)), above = __fmul_rn(half, ratio(start.j));
    return {__fadd_rn(below, above) / 15.0f, __fsub_rn(middle, below)};
  }

  static __device__ __forceinline__ float stored(float value) { return __half2float(__float2half_rn(value)); }

  static __device__ __forceinline__ Step rounded(const Step& step) {
    return {__half2float(stored_scale(step.scale)), stored(step.zero_point)};
  }

  static __device__ __forceinline__ bool is_coarse(const Step& full) {
    const float scale = fabsf(full.scale), zero_point = fabsf(full.zero_point);
    return scale < 0x1p-13f || fmaxf(scale, zero_point) > 65504.0f / 2.0f || zero_point > 16.0f * scale;
  }

  // To what is stored; the scale is fitted to the rounded zero point.
  __device__ __forceinline__ Step store(const Step& step) const {
    Step result = {step.scale, stored(step.zero_point)};
    if (ZeroPoints) {
      const Sums all = sums<false>(result);
      if (all.qq > 0.0) {
        const float slope = __double2float_rn(all.dq / all.qq);
        result.scale = __fadd_rn(result.scale, __fmul_rn(result.scale, slope));
      }
    }
    result.scale = stored(result.scale);
    return result;
  }

  // The least-squares fit to the codes of `start`. `unit` is what errors are multiplied by, so that they are neither
  // too small nor too large to be squared.
  __device__ __forceinline__ Fit fit(const Step& start, float unit) const {
    const Sums all = sums<ZeroPoints>(start);
    double slope = 0.0, shift = 0.0;
    if (ZeroPoints) {
      const double count = count_;
      const double determinant = __dsub_rn(__dmul_rn(count, all.qq), __dmul_rn(all.q, all.q));
      if (determinant > 0.0) {
        slope = __dsub_rn(__dmul_rn(count, all.dq), __dmul_rn(all.d, all.q)) / determinant;
        shift = __dsub_rn(all.d, __dmul_rn(slope, all.q)) / count;
      }
    } else if (all.qq > 0.0) {
      slope = all.dq / all.qq;
    }
    const double fitted = __dsub_rn(all.dd, __dmul_rn(slope, all.dq));
    const double left = fmax(__dsub_rn(fitted, __dmul_rn(shift, all.d)), 0.0);
    const Step step = {__fadd_rn(start.scale, __fmul_rn(start.scale, __double2float_rn(slope))),
                       __fadd_rn(start.zero_point, __fmul_rn(start.scale, __double2float_rn(shift)))};
    const double factor = static_cast<double>(__fmul_rn(start.scale, unit));
    return {step, __dmul_rn(left, __dmul_rn(factor, factor))};
  }

  // A value in steps, and the code nearest to it, ties to even: 1.5 * 2^23 leaves no digits behind the point.
  static __device__ __forceinline__ float nearest(float steps) {
    constexpr float kRound = 12582912.0f;
    return __fsub_rn(__fadd_rn(fminf(fmaxf(steps, kLowest), kHighest), kRound), kRound);
  }

  template <bool WithZeroPoints>
  __device__ __forceinline__ Sums sums(const Step& step) const {
    const float inverse = inverse_of(step.scale);
    float d[4] = {}, dd[4] = {}, dq[4] = {}, q[4] = {}, qq[4] = {};
#pragma unroll
    for (int j = 0; j < Subtiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(present_ >> (4 * j + i) & 1u)) continue;
        const float steps = __fmul_rn(__fsub_rn(values_[j][i], step.zero_point), inverse);
        const float code = nearest(steps), lost = __fsub_rn(steps, code);
        dd[i] = __fadd_rn(dd[i], __fmul_rn(lost, lost));
        dq[i] = __fadd_rn(dq[i], __fmul_rn(lost, code));
        qq[i] = __fadd_rn(qq[i], __fmul_rn(code, code));
        if (WithZeroPoints) {
          d[i] = __fadd_rn(d[i], lost);
          q[i] = __fadd_rn(q[i], code);
        }
      }
    }
    Sums result = {};
    result.dd = sum(dd), result.dq = sum(dq), result.qq = sum(qq);
    if (WithZeroPoints) result.d = sum(d), result.q = sum(q);
    return result;
  }

  // The squared error of the values that come back.
  __device__ __forceinline__ double loss(const Step& step, float unit) const {
    const float inverse = inverse_of(step.scale);
    float squares[4] = {};
#pragma unroll
    for (int j = 0; j < Subtiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(present_ >> (4 * j + i) & 1u)) continue;
        const float value = values_[j][i];
        const float code = nearest(__fmul_rn(__fsub_rn(value, step.zero_point), inverse));
        const float back = __fadd_rn(__fmul_rn(step.scale, code), step.zero_point);
        const float lost = __fmul_rn(__fsub_rn(back, value), unit);
        squares[i] = __fadd_rn(squares[i], __fmul_rn(lost, lost));
      }
    }
    return sum(squares);
  }

  // Over the quad, in the host's order; every lane receives the result.
  static __device__ __forceinline__ double sum(const float (&lanes)[4]) {
    float quarters[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float half = __fadd_rn(lanes[i], __shfl_xor_sync(0xffffffffu, lanes[i], 2));
      quarters[i] = __fadd_rn(half, __shfl_xor_sync(0xffffffffu, half, 1));
    }
    return static_cast<double>(__fadd_rn(__fadd_rn(quarters[0], quarters[2]), __fadd_rn(quarters[1], quarters[3])));
  }

  const float (&values_)[Subtiles][4];
  const uint32_t present_;
  const int count_;
  const float low_, high_;
};

}  // namespace quantize
}  // namespace nvb
