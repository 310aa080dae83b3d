//! Rows of f32 in 8 bits with a scale a row, and back; the formulas are in `ops/quantized_rows.rs`.

use crate::operation::quantized_rows::QuantizedRows;
use crate::weight::{fp8, int8, Encoding};
use std::ops::Range;

/// The bits of the largest magnitude among `values`, which are ordered as magnitudes are, with NaN above all; `most` is
/// that of the values before.
#[inline(always)]
pub fn largest(values: &[f32], most: u32) -> u32 {
    values.iter().fold(most, |most, value| most.max(value.to_bits() & 0x7fff_ffff))
}

/// Stores the scale of a row with this largest magnitude, unless it is given; returns what its values are multiplied by.
///
/// # Safety
/// The row is one of a validated descriptor's.
pub unsafe fn store_scale(rows: &QuantizedRows, row: usize, most: u32) -> f32 {
    let range = if rows.encoding == Encoding::Int8 { int8::MAX } else { fp8::E4M3_MAX };
    let scale = match rows.given_scales {
        true => rows.scales.add(row).read(),
        false => f32::from_bits(most) / range,
    };
    if !rows.given_scales {
        rows.scales.add(row).write(scale);
    }
    let inverse = 1.0 / scale;
    if inverse.is_finite() {
        inverse
    } else {
        0.0
    }
}

/// Stores the quantised values of columns `first ..` of a row.
///
/// # Safety
/// The columns are a validated descriptor's, and nobody else uses them.
#[inline(always)]
pub unsafe fn store_quantized(rows: &QuantizedRows, row: usize, first: usize, values: &[f32], inverse: f32) {
    let quantized = rows.data.cast::<u8>().add(row * rows.row_stride + first);
    let quantized = std::slice::from_raw_parts_mut(quantized, values.len());
    if rows.encoding == Encoding::Int8 {
        for (q, &value) in quantized.iter_mut().zip(values) {
            // `max` takes the other side of NaN: the quantised value of a NaN, which the scale speaks for, is the same
            // on all devices.
            *q = int8::encode((value * inverse).max(-int8::MAX), 1.0);
        }
    } else {
        for (q, &value) in quantized.iter_mut().zip(values) {
            *q = fp8::e4m3_from_f32(value * inverse);
        }
    }
}

/// Scale and quantised values of a whole row, if it has any.
///
/// # Safety
/// The conditions of `store_quantized` hold.
#[inline(always)]
pub unsafe fn quantize_row(rows: &QuantizedRows, row: usize, values: &[f32]) {
    if values.is_empty() {
        return;
    }
    let inverse = store_scale(rows, row, largest(values, 0));
    store_quantized(rows, row, 0, values, inverse);
}

/// scale · q of some rows, without gaps.
///
/// # Safety
/// The rows are a validated descriptor's, and `values` holds as many.
pub unsafe fn dequantize(rows: &QuantizedRows, range: Range<usize>, values: &mut [f32]) {
    for (row, values) in range.zip(values.chunks_exact_mut(rows.columns.max(1))) {
        let quantized = std::slice::from_raw_parts(rows.data.cast::<u8>().add(row * rows.row_stride), rows.columns);
        let scale = rows.scales.add(row).read();
        let decode = if rows.encoding == Encoding::Int8 { int8::decode } else { fp8::e4m3_to_f32 };
        for (value, &q) in values.iter_mut().zip(quantized) {
            *value = scale * decode(q);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(encoding: Encoding, values: &[f32]) -> (Vec<u8>, f32, Vec<f32>) {
        let (mut quantized, mut scale) = (vec![0u8; values.len()], [f32::MAX]);
        let rows = QuantizedRows {
            data: quantized.as_mut_ptr().cast(),
            scales: scale.as_mut_ptr(),
            given_scales: false,
            encoding,
            rows: 1,
            columns: values.len(),
            row_stride: values.len(),
        };
        let mut back = vec![0.0; values.len()];
        // SAFETY: one row in host memory, of as many columns as there are values.
        unsafe {
            quantize_row(&rows, 0, values);
            dequantize(&rows, 0..1, &mut back);
        }
        (quantized, scale[0], back)
    }

    #[test]
    fn the_largest_magnitude_gets_the_largest_code() {
        let values = [1.0, -4.0, 0.25, 0.0];
        assert_eq!(
            quantized(Encoding::Int8, &values),
            (
                vec![32, 129, 8, 0],
                4.0 / 127.0,
                vec![32.0, -127.0, 8.0, 0.0].into_iter().map(|q: f32| 4.0 / 127.0 * q).collect()
            )
        );
        let (quantized, scale, back) = quantized(Encoding::Fp8E4m3, &values);
        assert_eq!((quantized[1], scale), (0xfe, 4.0 / 448.0));
        assert_eq!(back, values);
    }

    #[test]
    fn special_rows() {
        for encoding in [Encoding::Int8, Encoding::Fp8E4m3] {
            assert_eq!(quantized(encoding, &[0.0; 5]), (vec![0; 5], 0.0, vec![0.0; 5]));
            // The inverse of this scale is infinite.
            assert_eq!(quantized(encoding, &[1e-40; 2]).0, [0; 2]);
            let (_, scale, back) = quantized(encoding, &[1.0, f32::NAN, f32::INFINITY]);
            assert!(scale.is_nan() && back.iter().all(|value| value.is_nan()));
            let (_, scale, back) = quantized(encoding, &[1.0, f32::NEG_INFINITY]);
            assert!(scale == f32::INFINITY && back.iter().all(|value| !value.is_finite()));
            assert_eq!(quantized(encoding, &[]).1, f32::MAX, "an empty row has no scale");
        }
    }
}
