//! The scale, and with zero points the zero point, with which the integers of a group lose least.
//!
//! Ranges a little wider and narrower than the full one are tried, for Int4 with the quantised value −8 at either end.
//! Each gives nearest integers q, and these the scale and zero point that fit them best by least squares. The best fit
//! is rounded to what is stored, and taken where it loses less than the full range does.
//!
//! With t = (x − zero point) / scale and d = t − q, the fit is that of d by α·q + β, and what it leaves over is counted
//! in steps: sums of d hold the digits that sums of x would cancel.

use super::encoding::{Encoding, BLOCK};
use super::format::Format;
use super::int8;
use super::quantize::{inverse, step, stored, stored_scale, Range, Step};
use crate::simd::{dispatch, Kernel, Simd};
use half::f16;

/// Parts of the full range that are tried. Above 1 the quantised value −8 is left to the largest value's other side.
const RATIOS: [f32; 11] = {
    let (mut ratios, mut i) = ([0.0; 11], 0);
    while i < ratios.len() {
        ratios[i] = 1.0 - 0.05 * (i as f32 - WIDER as f32);
        i += 1;
    }
    ratios
};

/// How many of them are wider than the full range.
const WIDER: usize = 2;

/// With zero points: how far from its middle the low and the high end of the range are, in parts of half of it. Down to
/// 0.8 each moves by itself, at most a step from the other; below that both move together.
const ENDS: [(f32, f32); 20] = {
    let (mut ends, mut count) = ([(0.0, 0.0); 20], 0);
    let mut i = -1;
    while i <= 8 {
        let mut j = -1;
        while j <= 8 {
            if i == j || i <= 4 && j <= 4 && i - j <= 1 && j - i <= 1 {
                ends[count] = (1.0 - 0.05 * i as f32, 1.0 - 0.05 * j as f32);
                count += 1;
            }
            j += 1;
        }
        i += 1;
    }
    assert!(count == ends.len());
    ends
};

/// Fits of the best range's integers to a new scale, new integers and so on; each loses less or is the last.
const REFINEMENTS: usize = 4;

/// Lanes of partial sums. One order of additions for all CPUs, which then choose the same scales.
const LANES: usize = 16;

/// The step for values of this range: `step(format, range, 1.0)` or one that loses less.
pub(super) fn search(format: &Format, range: Range, values: &[f32]) -> Step {
    // SAFETY: the kernel has no pointers of its own.
    unsafe { dispatch(Search { format, range, values }) }
}

struct Search<'a> {
    format: &'a Format,
    range: Range,
    values: &'a [f32],
}

impl Kernel for Search<'_> {
    type Output = Step;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Step {
        let range = QuantizedRange::of(self.format);
        if self.format.zero_points {
            self.best::<true>(range)
        } else {
            self.best::<false>(range)
        }
    }
}

/// The smallest and the largest quantised value.
#[derive(Clone, Copy)]
struct QuantizedRange {
    low: f32,
    high: f32,
}

impl QuantizedRange {
    fn of(format: &Format) -> QuantizedRange {
        match format.encoding {
            Encoding::Int8 => QuantizedRange { low: -int8::MAX, high: int8::MAX },
            _ if format.zero_points => QuantizedRange { low: 0.0, high: 15.0 },
            _ => QuantizedRange { low: -8.0, high: 7.0 },
        }
    }

    /// The values in steps, and the quantised values nearest to them. Not `clamp`, whose check keeps the loop from
    /// vectors.
    #[inline(always)]
    fn nearest(self, values: &[f32; LANES], zero_point: f32, inverse: f32) -> ([f32; LANES], [f32; LANES]) {
        let (mut steps, mut rounded) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            let t = (values[lane] - zero_point) * inverse;
            let above = if t > self.low { t } else { self.low };
            steps[lane] = t;
            rounded[lane] = int8::round(if above < self.high { above } else { self.high });
        }
        (steps, rounded)
    }
}

/// Sums over the values of a group, in steps.
#[derive(Clone, Copy, Default)]
struct Sums {
    d: f64,
    dd: f64,
    dq: f64,
    q: f64,
    qq: f64,
}

/// A fit and the squared error that it leaves, before the scale and the zero point are rounded.
#[derive(Clone, Copy)]
struct Fit {
    step: Step,
    loss: f64,
}

impl Search<'_> {
    #[inline(always)]
    fn best<const ZERO_POINTS: bool>(&self, range: QuantizedRange) -> Step {
        let full = step(self.format, self.range, 1.0);
        let unit = inverse(full.scale);
        if !full.scale.is_finite() || !full.zero_point.is_finite() || unit == 0.0 {
            return full;
        }
        let mut best = self.fit::<ZERO_POINTS>(range, full, unit);
        // Closures would be compiled apart, without this CPU's vectors: loops.
        for i in 0..self.start_count() {
            let fit = self.fit::<ZERO_POINTS>(range, self.start(i), unit);
            if fit.loss < best.loss {
                best = fit;
            }
        }
        for _ in 0..REFINEMENTS {
            let fit = self.fit::<ZERO_POINTS>(range, best.step, unit);
            if fit.loss >= best.loss {
                break;
            }
            best = fit;
        }

        let (mut chosen, mut least) = (full, self.loss(range, full, unit));
        let unfitted = if self.is_coarse(full) { self.start_count() } else { 0 };
        for i in 0..=unfitted {
            let step = if i == 0 {
                self.store::<ZERO_POINTS>(range, best.step)
            } else {
                let Step { scale, zero_point } = self.start(i - 1);
                Step { scale: stored_scale(self.format, scale), zero_point: stored(self.format, zero_point) }
            };
            let loss = self.loss(range, step, unit);
            if loss < least && step.scale.is_finite() && step.zero_point.is_finite() {
                (chosen, least) = (step, loss);
            }
        }
        chosen
    }

    #[inline(always)]
    fn start_count(&self) -> usize {
        match self.format.encoding {
            Encoding::Int8 => RATIOS.len() - WIDER,
            _ if self.format.zero_points => ENDS.len(),
            _ => 2 * RATIOS.len(),
        }
    }

    /// A start whose ratio is the one of `step` is equal to that in every bit.
    #[inline(always)]
    fn start(&self, i: usize) -> Step {
        let Range { low, high } = self.range;
        if self.format.zero_points {
            let (half, middle) = ((high - low) / 2.0, (high + low) / 2.0);
            let (below, above) = (half * ENDS[i].0, half * ENDS[i].1);
            return Step { scale: (below + above) / 15.0, zero_point: middle - below };
        }
        let most = high.max(-low);
        let scale = match self.format.encoding {
            Encoding::Int8 => most * RATIOS[WIDER + i] / int8::MAX,
            _ => most * RATIOS[i / 2] / [8.0, -8.0][i % 2],
        };
        Step { scale, zero_point: 0.0 }
    }

    /// Whether rounding to f16 moves values by so much of a step that fits are worth little, or the best fit may be more
    /// than f16 holds where a narrower range is not.
    fn is_coarse(&self, full: Step) -> bool {
        self.format.has_f16_scales()
            && (self.format.encoding == Encoding::Int8
                || full.scale.abs() < 2.0 * f16::MIN_POSITIVE.to_f32()
                || full.scale.abs().max(full.zero_point.abs()) > f16::MAX.to_f32() / 2.0
                || full.zero_point.abs() > 16.0 * full.scale.abs())
    }

    /// Rounds to what is stored; the scale is fitted to the rounded zero point.
    #[inline(always)]
    fn store<const ZERO_POINTS: bool>(&self, range: QuantizedRange, step: Step) -> Step {
        let mut scale = step.scale;
        let zero_point = stored(self.format, step.zero_point);
        if ZERO_POINTS {
            let sums = self.sums::<false>(range, Step { scale, zero_point });
            if sums.qq > 0.0 {
                scale += scale * (sums.dq / sums.qq) as f32;
            }
        }
        Step { scale: stored(self.format, scale), zero_point }
    }

    /// `unit`: what errors are multiplied by, so that they are neither too small nor too large to be squared.
    #[inline(always)]
    fn fit<const ZERO_POINTS: bool>(&self, range: QuantizedRange, start: Step, unit: f32) -> Fit {
        let (sums, count) = (self.sums::<ZERO_POINTS>(range, start), self.values.len() as f64);
        let (mut slope, mut shift) = (0.0, 0.0);
        if ZERO_POINTS {
            let determinant = count * sums.qq - sums.q * sums.q;
            if determinant > 0.0 {
                slope = (count * sums.dq - sums.d * sums.q) / determinant;
                shift = (sums.d - slope * sums.q) / count;
            }
        } else if sums.qq > 0.0 {
            slope = sums.dq / sums.qq;
        }
        let left = (sums.dd - slope * sums.dq - shift * sums.d).max(0.0);
        let Step { scale, zero_point } = start;
        let step = Step { scale: scale + scale * slope as f32, zero_point: zero_point + scale * shift as f32 };
        Fit { step, loss: left * f64::from(scale * unit).powi(2) }
    }

    #[inline(always)]
    fn sums<const ZERO_POINTS: bool>(&self, range: QuantizedRange, step: Step) -> Sums {
        let inverse = inverse(step.scale);
        let mut sums = Sums::default();
        for block in self.values.chunks(BLOCK) {
            let [mut d, mut dd, mut dq, mut q, mut qq] = [[0f32; LANES]; 5];
            for values in block.chunks(LANES) {
                let (t, rounded) = range.nearest(&filled(values, step.zero_point), step.zero_point, inverse);
                for lane in 0..LANES {
                    let lost = t[lane] - rounded[lane];
                    dd[lane] += lost * lost;
                    dq[lane] += lost * rounded[lane];
                    qq[lane] += rounded[lane] * rounded[lane];
                    if ZERO_POINTS {
                        d[lane] += lost;
                        q[lane] += rounded[lane];
                    }
                }
            }
            sums.dd += sum(dd);
            sums.dq += sum(dq);
            sums.qq += sum(qq);
            if ZERO_POINTS {
                sums.d += sum(d);
                sums.q += sum(q);
            }
        }
        sums
    }

    /// The squared error of the values that come back.
    #[inline(always)]
    fn loss(&self, range: QuantizedRange, step: Step, unit: f32) -> f64 {
        let inverse = inverse(step.scale);
        let mut total = 0.0;
        for block in self.values.chunks(BLOCK) {
            let mut squares = [0f32; LANES];
            for values in block.chunks(LANES) {
                let values = filled(values, step.zero_point);
                let (_, rounded) = range.nearest(&values, step.zero_point, inverse);
                for lane in 0..LANES {
                    let lost = (step.scale * rounded[lane] + step.zero_point - values[lane]) * unit;
                    squares[lane] += lost * lost;
                }
            }
            total += sum(squares);
        }
        total
    }
}

/// Up to `LANES` values and the zero point, which in every sum is the quantised value 0 without an error.
#[inline(always)]
fn filled(values: &[f32], zero_point: f32) -> [f32; LANES] {
    if let Ok(whole) = values.try_into() {
        return whole;
    }
    let mut padded = [zero_point; LANES];
    padded[..values.len()].copy_from_slice(values);
    padded
}

#[inline(always)]
fn sum(lanes: [f32; LANES]) -> f64 {
    let mut halves = [0.0; LANES / 2];
    for (i, half) in halves.iter_mut().enumerate() {
        *half = lanes[i] + lanes[i + LANES / 2];
    }
    let [a, b, c, d, e, f, g, h] = halves;
    f64::from(((a + e) + (c + g)) + ((b + f) + (d + h)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::at_every_level;
    use crate::weight::format::Granularity;
    use proptest::prelude::*;

    fn formats() -> Vec<Format> {
        let formats = [
            (Encoding::Int8, Granularity::Rows, false),
            (Encoding::Int8, Granularity::Groups(32), false),
            (Encoding::Int4, Granularity::Groups(32), false),
            (Encoding::Int4, Granularity::Groups(32), true),
        ];
        formats
            .map(|(encoding, granularity, zero_points)| Format::new(encoding, granularity, zero_points, true).unwrap())
            .into()
    }

    /// The squared error in f64, of the quantised values that quantising takes.
    fn lost(format: &Format, step: Step, values: &[f32]) -> f64 {
        let range = QuantizedRange::of(format);
        let each = |&value: &f32| {
            let rounded = int8::round(((value - step.zero_point) * inverse(step.scale)).clamp(range.low, range.high));
            (f64::from(step.scale) * f64::from(rounded) + f64::from(step.zero_point) - f64::from(value)).powi(2)
        };
        values.iter().map(each).sum()
    }

    fn searched(format: &Format, values: &[f32]) -> f64 {
        lost(format, search(format, Range::of(values), values), values)
    }

    /// The best of nine ranges, without a fit.
    fn best_range(format: &Format, values: &[f32]) -> f64 {
        let ratios = (0..9).map(|i| 1.0 - 0.05 * i as f32);
        let losses = ratios.map(|ratio| lost(format, step(format, Range::of(values), ratio), values));
        losses.fold(f64::INFINITY, f64::min)
    }

    /// About normal: sums of twelve uniform numbers.
    fn normals(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_search_loses_no_more_than_the_best_of_nine_ranges(
            (count, seed) in (1..140usize, any::<u64>()),
            magnitude in -9..6i32,
            mean in prop_oneof![Just(0f32), -3.0..3f32, -100.0..100f32],
            outlier in prop_oneof![Just(1f32), 1.0..50f32],
        ) {
            let scale = 10f32.powi(magnitude);
            let mut values: Vec<f32> = normals(count, seed).iter().map(|x| (x + mean) * scale).collect();
            values[count / 2] *= outlier;
            for format in formats() {
                let full = step(&format, Range::of(&values), 1.0);
                if !full.scale.is_finite() || !full.zero_point.is_finite() {
                    continue;
                }
                let (plain, best, found) =
                    (lost(&format, full, &values), best_range(&format, &values), searched(&format, &values));
                // Rounding a scale to f16 moves values by up to 1 / 500 of a step.
                let rounding = count as f64 * (f64::from(full.scale) * 4e-3).powi(2);
                prop_assert!(found <= plain * (1.0 + 1e-5), "{format}: {found:e} of {plain:e}");
                prop_assert!(found <= best * 1.001 + rounding, "{format}: {found:e}, {best:e} by ranges alone");
            }
        }
    }

    #[test]
    fn what_the_search_gains_for_normal_values() {
        let values = normals(32 * 500, 7);
        let gain = |format: &Format| {
            let (mut found, mut plain) = (0.0, 0.0);
            for group in values.chunks(32) {
                found += searched(format, group);
                plain += lost(format, step(format, Range::of(group), 1.0), group);
            }
            (found / plain).sqrt()
        };
        let [_, int8, int4, zero_points] = formats().try_into().expect("four formats");
        assert!(gain(&int8) < 0.99 && gain(&int4) < 0.95 && gain(&zero_points) < 0.9);
    }

    /// No other scale does better by more than the distance of the candidates explains.
    #[test]
    fn the_search_is_near_the_best_scale_there_is() {
        let int4 = formats()[2];
        let values = normals(32 * 60, 3);
        let (mut found, mut best) = (0.0, 0.0);
        for group in values.chunks(32) {
            found += searched(&int4, group);
            let most = group.iter().fold(0f32, |most, x| most.max(x.abs())) / 8.0;
            let scales = (500..1300).flat_map(|i| [1.0, -1.0].map(|sign| sign * most * i as f32 / 1000.0));
            best +=
                scales.map(|scale| lost(&int4, Step { scale, zero_point: 0.0 }, group)).fold(f64::INFINITY, f64::min);
        }
        assert!(found < best * 1.02, "{found} for {best}");
    }

    #[test]
    fn odd_groups() {
        let mut outlier = [0.01f32; 32];
        outlier[5] = -30.0;
        let subnormal: Vec<f32> = (0..32).map(|i| (i as f32 - 11.0) * 3e-7).collect();
        for format in formats() {
            assert_eq!(searched(&format, &[0.0; 32]), 0.0, "{format}");
            if format.encoding == Encoding::Int4 {
                assert_eq!(searched(&format, &[0.75; 32]), 0.0, "{format}");
            }
            assert!(searched(&format, &[1e-9, -1e-9]) <= 2e-18, "{format}");
            for values in [&outlier[..], &subnormal, &[5e-8], &[-3.0, 1e-30]] {
                assert!(searched(&format, values) <= best_range(&format, values) * 1.0001, "{format}: {values:?}");
            }
            if format.has_f16_scales() {
                assert!(search(&format, Range { low: -1e8, high: 1e8 }, &[1e8, -1e8]).scale.is_infinite());
            }
        }
    }

    #[test]
    fn every_instruction_set_finds_the_same() {
        let values = normals(777, 11);
        for format in formats() {
            let portable = std::cell::OnceCell::new();
            at_every_level(|level| {
                let found = search(&format, Range::of(&values), &values);
                assert_eq!(&found, portable.get_or_init(|| found), "{format}, {level:?}");
            });
        }
    }
}
