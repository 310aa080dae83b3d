//! Whether a candidate's output is the product: held against the reference, row by row.

use crate::registry::Family;
use crate::tensor::DType;
use crate::weight::Encoding;
use std::ops::Range;

/// Root mean square of the error, in parts of that of the reference, which a right result keeps below.
///
/// A dequantised slice and an output are rounded to the input's dtype; 8 bits of input lose what those bits cannot hold.
pub fn tolerance(family: Family, encoding: Encoding, input: DType, output: DType) -> f64 {
    let of = |dtype: DType| -> f64 {
        match dtype {
            DType::Bf16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            _ => 1.0 / 16384.0,
        }
    };
    let rounding = of(input).max(of(output));
    match (family, encoding) {
        (Family::RoundedInput | Family::RoundedWgmma, Encoding::Int8) => rounding + 1.0 / 40.0,
        (Family::RoundedInput | Family::RoundedWgmma, _) => rounding + 1.0 / 16.0,
        _ => rounding,
    }
}

/// The largest error of an element in units of the tolerance, times its magnitude and the root mean square together: errors
/// of sums spread like a bell, of which millions are looked at.
const WORST: f64 = 8.0;

/// Why `output` is not `reference`; NaN is never right.
pub fn compare(output: &[f32], reference: &[f32], columns: usize, tolerance: f64) -> Result<(), String> {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let mean_square = reference.iter().copied().map(square).sum::<f64>() / reference.len() as f64;
    let scale = mean_square.sqrt();
    let mut error_square = 0.0;
    for (at, (&value, &right)) in output.iter().zip(reference).enumerate() {
        let error = (f64::from(value) - f64::from(right)).abs();
        error_square += error * error;
        let allowed = WORST * tolerance * (f64::from(right).abs() + scale);
        if error.is_nan() || error > allowed {
            let (row, column) = (at / columns, at % columns);
            return Err(format!("row {row}, column {column} is {value}, {right} by the reference"));
        }
    }
    let error = (error_square / output.len() as f64).sqrt();
    if error <= tolerance * scale {
        return Ok(());
    }
    Err(format!("its error is {:.2e} of the reference, {tolerance:.2e} is allowed", error / scale))
}

/// The rows that are compared: all of them, or parts from the start, the middle and the end that the reference can make in
/// about `operations`.
pub fn rows(m: usize, n: usize, k: usize, operations: usize) -> Vec<Range<usize>> {
    let most = (operations / n.saturating_mul(k).max(1)).max(3);
    if m <= most {
        return vec![Range { start: 0, end: m }];
    }
    let part = most / 3;
    let middle = (m - part) / 2;
    vec![0..part, middle..middle + part, m - part..m]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_element_is_enough() {
        let reference: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        let limit = tolerance(Family::FloatKernel, Encoding::Float(DType::Bf16), DType::Bf16, DType::Bf16);
        let rounded: Vec<f32> = reference.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect();
        assert_eq!(compare(&rounded, &reference, 100, limit), Ok(()));
        for wrong in [f32::NAN, f32::INFINITY, 5.0] {
            let mut output = rounded.clone();
            output[234] = wrong;
            let why = compare(&output, &reference, 100, limit).unwrap_err();
            assert!(why.starts_with("row 2, column 34 is"), "{why}");
        }
        let scaled: Vec<f32> = reference.iter().map(|&value| value * 1.02).collect();
        assert!(compare(&scaled, &reference, 100, limit).unwrap_err().starts_with("its error"));
        let zeros = vec![0.0; 10];
        assert_eq!(compare(&zeros, &zeros, 10, limit), Ok(()));
    }

    #[test]
    fn the_first_and_the_last_row_are_always_compared() {
        assert_eq!(rows(5, 10, 10, 1000), vec![Range { start: 0, end: 5 }]);
        assert_eq!(rows(100, 10, 10, 900), [0..3, 48..51, 97..100]);
        assert_eq!(rows(100, 1 << 20, 1 << 20, 1), [0..1, 49..50, 99..100]);
    }
}
