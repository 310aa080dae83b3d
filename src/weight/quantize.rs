//! Quantising: the scale of a group of values, their quantised values, and what is lost.
//!
//! The scale is rounded to what is stored before the quantised values are found, which are the nearest, ties to even.
//! With clipping, the scale is the one of a search (`scale_search`) that loses least: a few large values then lose
//! precision for the sake of all others.

use super::encoding::{Encoding, BLOCK};
use super::format::{Format, Granularity};
use super::scale_search::search;
use super::stripe::Stripe;
use super::{fp8, int4, int8, sfp};
use crate::error::{Error, Result};
use half::f16;

/// Smallest and largest of some values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    pub low: f32,
    pub high: f32,
}

impl Range {
    pub const NOTHING: Range = Range { low: f32::INFINITY, high: f32::NEG_INFINITY };

    pub fn of(values: &[f32]) -> Range {
        let both = |range: Range, &value: &f32| Range { low: range.low.min(value), high: range.high.max(value) };
        values.iter().fold(Range::NOTHING, both)
    }

    pub fn join(self, other: Range) -> Range {
        Range { low: self.low.min(other.low), high: self.high.max(other.high) }
    }

    fn magnitude(self) -> f32 {
        self.high.max(-self.low)
    }
}

/// A scale, and what is added to scale · q.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub scale: f32,
    pub zero_point: f32,
}

pub(super) fn stored(format: &Format, value: f32) -> f32 {
    if format.has_f16_scales() {
        f16::from_f32(value).to_f32()
    } else {
        value
    }
}

/// A scale as it is stored: to nearest, but away from zero where f16 has few digits left, or the largest values would be
/// clipped by more than half a step.
pub(super) fn stored_scale(format: &Format, value: f32) -> f32 {
    let near = stored(format, value);
    if format.has_f16_scales() && near.abs() < value.abs() && value.abs() < f16::MIN_POSITIVE.to_f32() {
        f16::from_bits(f16::from_f32(value).to_bits() + 1).to_f32()
    } else {
        near
    }
}

/// The scale with which `range` spans the quantised values, after it was shrunk to `ratio`.
pub(super) fn step(format: &Format, range: Range, ratio: f32) -> Step {
    if format.zero_points {
        let (half, middle) = ((range.high - range.low) / 2.0 * ratio, (range.high + range.low) / 2.0);
        return Step { scale: stored_scale(format, half / 7.5), zero_point: stored(format, middle - half) };
    }
    let most = range.magnitude() * ratio;
    let scale = match format.encoding {
        Encoding::Int8 => most / int8::MAX,
        // The value of the largest magnitude gets the quantised value −8, which has no positive counterpart.
        Encoding::Int4 if range.high > -range.low => most / -8.0,
        Encoding::Int4 => most / 8.0,
        Encoding::Fp8E4m3 => most / fp8::E4M3_MAX,
        Encoding::Sfp => most / sfp::MAX,
        _ => most / fp8::E5M2_MAX,
    };
    Step { scale: stored_scale(format, scale), zero_point: 0.0 }
}

pub(super) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() {
        inverse
    } else {
        0.0
    }
}

fn encode(format: &Format, step: Step, values: &[f32], quantized: &mut [u8]) {
    let inverse = inverse(step.scale);
    let fill = |quantized: &mut [u8], encode: &dyn Fn(f32) -> u8| {
        for (q, &value) in quantized.iter_mut().zip(values) {
            *q = encode(value);
        }
    };
    match format.encoding {
        Encoding::Int8 => {
            for (q, &value) in quantized.iter_mut().zip(values) {
                *q = int8::encode(value, inverse);
            }
        }
        Encoding::Int4 if format.zero_points => {
            for (q, &value) in quantized.iter_mut().zip(values) {
                *q = int4::encode_from(value, step.zero_point, inverse);
            }
        }
        Encoding::Int4 => {
            for (q, &value) in quantized.iter_mut().zip(values) {
                *q = int4::encode(value, inverse);
            }
        }
        Encoding::Fp8E4m3 => fill(quantized, &|value| fp8::e4m3_from_f32(value * inverse)),
        Encoding::Sfp => fill(quantized, &|value| sfp::from_f32(value * inverse)),
        _ => fill(quantized, &|value| fp8::e5m2_from_f32(value * inverse)),
    }
}

fn choose(format: &Format, range: Range, values: &[f32]) -> Step {
    if format.clipping {
        search(format, range, values)
    } else {
        step(format, range, 1.0)
    }
}

/// Quantises `rows` ([stripe.rows][stripe.columns]), all finite, into the stripe. `tensor`: the range of the tensor that
/// each row belongs to, for scales per tensor.
pub fn quantize(stripe: &mut Stripe, values: &[f32], tensor: &dyn Fn(usize) -> Range) -> Result<()> {
    let (format, columns, rows) = (stripe.format, stripe.columns, stripe.rows);
    let in_row = stripe.scales_in_row();
    if format.granularity == Granularity::Blocks {
        for block in 0..in_row {
            let span = block * BLOCK..((block + 1) * BLOCK).min(columns);
            let parts = || (0..rows).map(|row| &values[row * columns..][span.clone()]);
            let range = parts().map(Range::of).fold(Range::NOTHING, Range::join);
            let step = step(&format, range, 1.0);
            stripe.scales[block] = step.scale;
            for (row, values) in parts().enumerate() {
                encode(&format, step, values, &mut stripe.quantized[row * columns..][span.clone()]);
            }
        }
        return Ok(());
    }
    let Granularity::Groups(group) = format.granularity else {
        for row in 0..rows {
            let values = &values[row * columns..][..columns];
            let step = match format.granularity {
                Granularity::Tensor => step(&format, tensor(row), 1.0),
                _ => choose(&format, Range::of(values), values),
            };
            expect_storable(step, row, 0)?;
            stripe.scales[row * in_row..][..in_row].fill(step.scale);
            if format.zero_points {
                stripe.zero_points[row * in_row..][..in_row].fill(step.zero_point);
            }
            encode(&format, step, values, &mut stripe.quantized[row * columns..][..columns]);
        }
        return Ok(());
    };
    for row in 0..rows {
        let (values, quantized) =
            (&values[row * columns..][..columns], &mut stripe.quantized[row * columns..][..columns]);
        for (i, (values, quantized)) in values.chunks(group).zip(quantized.chunks_mut(group)).enumerate() {
            let step = choose(&format, Range::of(values), values);
            expect_storable(step, row, i * group)?;
            stripe.scales[row * in_row + i] = step.scale;
            if format.zero_points {
                stripe.zero_points[row * in_row + i] = step.zero_point;
            }
            encode(&format, step, values, quantized);
        }
    }
    Ok(())
}

fn expect_storable(step: Step, row: usize, column: usize) -> Result<()> {
    if step.scale.is_finite() && step.zero_point.is_finite() {
        return Ok(());
    }
    // The caller knows which row of the weight this is.
    Err(Error::invalid(format!(
        "the values from row {row}, column {column} on need a scale above {}, f16's largest",
        f16::MAX
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::format::GROUP_SIZES;
    use proptest::prelude::*;

    fn quantized(format: Format, rows: usize, columns: usize, values: &[f32]) -> Vec<f32> {
        let mut stripe = Stripe::new(format, rows, columns).unwrap();
        let range = Range::of(values);
        quantize(&mut stripe, values, &|_| range).unwrap();
        let mut back = vec![0.0; values.len()];
        for (row, values) in back.chunks_mut(columns.max(1)).enumerate() {
            stripe.values(row, values);
        }
        for scale in stripe.scales.iter().chain(&stripe.zero_points).filter(|_| format.has_f16_scales()) {
            assert_eq!(f16::from_f32(*scale).to_f32(), *scale);
        }
        back
    }

    fn squared_error(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a - b).powi(2)).sum()
    }

    fn formats() -> Vec<Format> {
        let mut formats = Vec::new();
        for encoding in Encoding::QUANTIZED {
            let all = [Granularity::Tensor, Granularity::Rows, Granularity::Blocks];
            for granularity in all.into_iter().chain(GROUP_SIZES.map(Granularity::Groups)) {
                for (zero_points, clipping) in [(false, false), (true, false), (false, true), (true, true)] {
                    formats.extend(Format::new(encoding, granularity, zero_points, clipping));
                }
            }
        }
        formats
    }

    /// Half a step of the coarsest part of the range, and what rounding the scale to f16 adds.
    fn bound(format: &Format, most: f32) -> f32 {
        let steps = match format.encoding {
            Encoding::Int8 => 127.0 * 2.0,
            Encoding::Int4 => 14.0,
            Encoding::Fp8E4m3 | Encoding::Sfp => 28.0,
            _ => 14.0,
        };
        // The quantised value 8 does not exist: a value of the other sign and the same magnitude is a whole step off.
        let clipped = if format.encoding == Encoding::Int4 && !format.zero_points { 2.0 } else { 1.0 };
        most * clipped / steps * 1.01 + most * 2e-3 + 1e-6
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn values_come_back_within_half_a_step(
            rows in 1..5usize,
            columns in 1..300usize,
            magnitude in -3..3i32,
            seed in prop::collection::vec(-1.0..1.0f32, 1500),
        ) {
            let values: Vec<f32> =
                seed.iter().cycle().take(rows * columns).map(|x| x * 10f32.powi(magnitude)).collect();
            let most = Range::of(&values).magnitude();
            for format in formats().into_iter().filter(|format| !format.clipping) {
                let back = quantized(format, rows, columns, &values);
                for (a, b) in values.iter().zip(&back) {
                    prop_assert!((a - b).abs() <= bound(&format, most), "{format}: {a} became {b} of {most}");
                }
            }
        }

        #[test]
        fn clipping_never_loses_more(values in prop::collection::vec(-1.0..1.0f32, 256), outlier in 1.0..40.0f32) {
            let mut values = values;
            values[7] = outlier;
            for clipped in formats().into_iter().filter(|format| format.clipping) {
                let plain = quantized(Format { clipping: false, ..clipped }, 1, 256, &values);
                let searched = quantized(clipped, 1, 256, &values);
                let (searched, plain) = (squared_error(&searched, &values), squared_error(&plain, &values));
                prop_assert!(searched <= plain * 1.0001, "{clipped}: {searched} > {plain}");
            }
        }
    }

    /// Quantised values times a scale that can be stored are found again exactly.
    #[test]
    fn quantised_values_stay_as_they_are() {
        for format in formats() {
            let columns = 384;
            let decoded: Vec<f32> = match format.encoding {
                Encoding::Int8 => (0..columns).map(|i| ((i * 37 + 127) % 255) as f32 - 127.0).collect(),
                Encoding::Int4 => (0..columns).map(|i| ((i * 7) % 16) as f32 - 8.0).collect(),
                Encoding::Fp8E4m3 => (0..columns).map(|i| fp8::e4m3_to_f32((i * 5 % 127) as u8)).collect(),
                Encoding::Sfp => (0..columns).map(|i| sfp::to_f32((i * 5 % 128) as u8)).collect(),
                _ => (0..columns).map(|i| fp8::e5m2_to_f32((i * 5 % 124) as u8)).collect(),
            };
            let full = |group: &[f32]| {
                let most = Range::of(group).magnitude();
                let top = decoded.iter().fold(0f32, |top, x| top.max(x.abs()));
                most == top
            };
            let group = if format.stored_group() == 0 { columns } else { format.stored_group() };
            let values: Vec<f32> = decoded.iter().map(|x| x * 0.125).collect();
            let back = quantized(format, 1, columns, &values);
            for (i, (wanted, got)) in values.chunks(group).zip(back.chunks(group)).enumerate() {
                if full(&decoded[i * group..][..wanted.len()]) && !format.clipping {
                    assert_eq!(wanted, got, "{format}, group {i}");
                }
            }
        }
    }

    #[test]
    fn odd_groups() {
        let int4 = Format::new(Encoding::Int4, Granularity::Groups(32), false, false).unwrap();
        let zero_points = Format { zero_points: true, ..int4 };
        assert_eq!(quantized(int4, 1, 40, &[0.0; 40]), [0.0; 40]);
        assert_eq!(quantized(zero_points, 1, 40, &[0.75; 40]), [0.75; 40]);
        let mut stripe = Stripe::new(int4, 1, 2).unwrap();
        let error = quantize(&mut stripe, &[1e6, 0.0], &|_| Range::NOTHING).unwrap_err();
        assert!(error.message.contains("row 0, column 0") && error.message.contains("65504"), "{error}");
        // Values below half of f16's smallest become 0.
        assert_eq!(quantized(int4, 1, 2, &[1e-9, -1e-9]), [0.0; 2]);
    }

    /// Where f16 has only a few digits, scales are rounded away from zero: nothing is clipped.
    #[test]
    fn tiny_values_lose_at_most_half_a_step() {
        let smallest = f16::from_bits(1).to_f32();
        for encoding in [Encoding::Int8, Encoding::Int4] {
            let format = Format::new(encoding, Granularity::Groups(32), false, false).unwrap();
            for i in 1..2000 {
                let value = i as f32 * smallest * 0.37;
                for value in [value, -value] {
                    let back = quantized(format, 1, 1, &[value])[0];
                    let steps = if encoding == Encoding::Int8 { int8::MAX } else { 8.0 };
                    let step = stored_scale(&format, value.abs() / steps);
                    assert!((back - value).abs() <= step / 2.0, "{format}: {value:e} became {back:e}, step {step:e}");
                }
            }
        }
    }
}
