//! Dtypes as f64 values, and how far an output may be from its reference.

use half::{bf16, f16};
use nvbackend::tensor::{fp8, DType};

pub const FLOATS: [DType; 3] = DType::FLOATS;

/// Largest accepted ‖out − reference‖ / ‖reference‖ of an output of this dtype.
pub fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        DType::Bf16 => 5e-3,
        DType::I32 => 0.0,
        // Only keys and values are of these types, and whoever reads them computes in f32.
        DType::F8E4m3 | DType::F8E5m2 | DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => 1e-5,
    }
}

/// Half the smallest subnormal: what rounding may take from a value that is too small for the dtype.
fn floor(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-150),
        DType::F16 => 2f64.powi(-25),
        DType::Bf16 => 2f64.powi(-134),
        DType::I32 | DType::F8E4m3 | DType::F8E5m2 | DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => 0.0,
    }
}

/// F32 with the last bit set wherever a bit was lost, so that rounding it once more rounds the value itself.
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if nearest as f64 == value || value.is_nan() {
        return nearest;
    }
    let towards_zero = nearest.to_bits() - (nearest.abs() as f64 > value.abs()) as u32;
    f32::from_bits(towards_zero | 1)
}

pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| {
            let word = match dtype {
                DType::F32 => (value as f32).to_bits(),
                DType::F16 => f16::from_f32(to_odd(value)).to_bits().into(),
                DType::Bf16 => bf16::from_f32(to_odd(value)).to_bits().into(),
                DType::I32 => value as i32 as u32,
                DType::F8E4m3 => fp8::e4m3_from_f32(to_odd(value)).into(),
                DType::F8E5m2 => fp8::e5m2_from_f32(to_odd(value)).into(),
                DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => unreachable!("a row is more than its elements"),
            };
            word.to_le_bytes().into_iter().take(dtype.size())
        })
        .collect()
}

pub fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let mut word = [0; 4];
    word[..dtype.size()].copy_from_slice(&bytes[..dtype.size()]);
    let word = u32::from_le_bytes(word);
    match dtype {
        DType::F32 => f32::from_bits(word).into(),
        DType::F16 => f16::from_bits(word as u16).to_f64(),
        DType::Bf16 => bf16::from_bits(word as u16).to_f64(),
        DType::I32 => word as i32 as f64,
        DType::F8E4m3 => fp8::e4m3_to_f32(word as u8).into(),
        DType::F8E5m2 => fp8::e5m2_to_f32(word as u8).into(),
        DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => unreachable!("a row is more than its elements"),
    }
}

/// To nearest, ties to even, as a store of the dtype rounds.
pub fn round(dtype: DType, value: f64) -> f64 {
    decode(dtype, &encode(dtype, &[value]))
}

/// Whether `out`, of `dtype`, is the unrounded `reference` but for an error of `bound`: relative in the Euclidean norm (of n
/// elements 1 + 2 / √n of it), and no element off by more than the bound of itself plus four root mean squares. What the reference has as NaN or
/// infinite after rounding must be so in `out`. `slack`, if not empty, is forgiven of each element's error.
pub fn compare(dtype: DType, out: &[f64], reference: &[f64], bound: f64, slack: &[f64]) -> Result<(), String> {
    compare_rows(dtype, out, reference, bound, slack, reference.len())
}

/// The same for rows that differ in size, as those of attention do, whose first rows average few values: no element is off
/// by more than the bound of itself plus four root mean squares of its own row, or of all, whichever is more.
pub fn compare_rows(
    dtype: DType,
    out: &[f64],
    reference: &[f64],
    bound: f64,
    slack: &[f64],
    row: usize,
) -> Result<(), String> {
    if out.len() != reference.len() {
        return Err(format!("{} values, {} expected", out.len(), reference.len()));
    }
    let (mut error_square, mut reference_square, mut finite) = (0.0, 0.0, 0usize);
    let mut errors = Vec::with_capacity(out.len());
    for (i, (&out, &reference)) in out.iter().zip(reference).enumerate() {
        let rounded = round(dtype, reference);
        if out.is_finite() && reference.is_finite() && (rounded.is_finite() || relative(out, reference) < bound) {
            let forgiven = floor(dtype) + slack.get(i).copied().unwrap_or(0.0);
            let error = ((out - reference).abs() - forgiven).max(0.0);
            errors.push((i, error));
            error_square += error * error;
            reference_square += reference * reference;
            finite += 1;
        } else if !(out == rounded || out.is_nan() && rounded.is_nan()) {
            // At the end of the dtype's range a permitted error decides between the largest number and infinity.
            let edge = reference.is_finite() && out.is_infinite() && round(dtype, reference * (1.0 + bound)) == out;
            if !edge {
                return Err(format!("element {i} is {out:e}; {reference:e} is expected"));
            }
        }
    }
    let error = if error_square == 0.0 { 0.0 } else { (error_square / reference_square).sqrt() };
    // The norm of few errors scatters: of 8 elements, which average 4,100 values, one of some 500 in BF16 was at 1.07 of the bound.
    let of_all = bound * (1.0 + 2.0 / (finite.max(1) as f64).sqrt());
    let typical = (reference_square / finite.max(1) as f64).sqrt();
    let of_rows: Vec<f64> = reference.chunks(row.max(1)).map(root_mean_square).collect();
    let typical = |i: usize| of_rows[i / row.max(1)].max(typical);
    let excess = |&(i, error): &(usize, f64)| error - bound * (reference[i].abs() + 4.0 * typical(i));
    let worst = errors.iter().max_by(|a, b| excess(a).total_cmp(&excess(b)));
    if let Some(worst) = worst.filter(|worst| error.is_nan() || error > of_all || excess(worst) > 0.0) {
        let i = worst.0;
        return Err(format!(
            "relative error {error:.3e} (bound {of_all:.1e}); element {i} of {} is {:e}; {:e} is expected (max abs error {:.3e})",
            out.len(),
            out[i],
            reference[i],
            worst.1
        ));
    }
    Ok(())
}

/// Of the finite values.
fn root_mean_square(values: &[f64]) -> f64 {
    let finite = || values.iter().filter(|value| value.is_finite());
    (finite().map(|value| value * value).sum::<f64>() / finite().count().max(1) as f64).sqrt()
}

fn relative(out: f64, reference: f64) -> f64 {
    (out - reference).abs() / reference.abs()
}

#[test]
fn rounding_is_to_nearest_even() {
    // A bit past halfway between two BF16 numbers, and the tie itself: the `half` crate's from_f64 loses that bit.
    let (tie, past) = (1.0 + 2f64.powi(-8), 1.0 + 2f64.powi(-8) + 2f64.powi(-40));
    assert_eq!((round(DType::Bf16, tie), round(DType::Bf16, past)), (1.0, 1.0 + 2f64.powi(-7)));
    assert_eq!((round(DType::F16, -2049.0), round(DType::F16, -2049.000001)), (-2048.0, -2050.0));
    assert_eq!((round(DType::F16, 65519.999), round(DType::F16, 65520.0)), (65504.0, f64::INFINITY));
    assert_eq!((round(DType::Bf16, 1e39), round(DType::F16, 2f64.powi(-25) * 1.01)), (f64::INFINITY, 2f64.powi(-24)));
}

#[test]
fn the_comparison_sees_what_it_must() {
    let close = |out: &[f64], reference: &[f64]| compare(DType::F32, out, reference, 1e-5, &[]).is_ok();
    assert!(close(&[], &[]) && close(&[0.0], &[0.0]) && close(&[1.0, 2.0], &[1.0, 2.000001]));
    assert!(!close(&[1.0], &[1.001]) && !close(&[1.0, 1.0], &[1.0]) && !close(&[1e-9], &[0.0]));
    assert!(!close(&[f64::NAN], &[1.0]) && !close(&[1.0], &[f64::NAN]) && close(&[f64::NAN], &[f64::NAN]));
    assert!(!close(&[f64::INFINITY], &[1.0]) && !close(&[f64::INFINITY], &[f64::NEG_INFINITY]));
    assert!(close(&[f64::INFINITY], &[f64::INFINITY]) && close(&[f64::INFINITY], &[1e39]) && !close(&[1e38], &[1e39]));
    let mut out = vec![1.0; 10_000];
    out[7] = 1.0005;
    assert!(!close(&out, &[1.0; 10_000]), "one wrong element among many counts");
    let (mut large, mut small) = (vec![1.0; 100], vec![0.01; 9_900]);
    large[7] += 4e-5;
    small[7] += 1e-5;
    let reference: Vec<f64> = [vec![1.0; 100], vec![0.01; 9_900]].concat();
    let rows = |out: &[f64]| compare_rows(DType::F32, out, &reference, 1e-5, &[], 100).is_ok();
    assert!(!close(&[large.clone(), vec![0.01; 9_900]].concat(), &reference), "far off for most of its neighbours");
    assert!(rows(&[large, vec![0.01; 9_900]].concat()), "near for its own row");
    assert!(!rows(&[vec![1.0; 100], small].concat()), "far off in a row of small values");
    assert!(compare(DType::F16, &[0.0], &[2e-8], 1e-3, &[]).is_ok(), "less than half a subnormal rounds to 0");
    assert!(
        compare(DType::F16, &[65504.0], &[65519.0], 1e-3, &[]).is_ok()
            && compare(DType::F16, &[f64::INFINITY], &[65519.0], 1e-3, &[]).is_ok()
    );
}
