//! FP8 and INT8 values as checkpoints have them: one byte an element, row-major, and scales for the tensor, for rows,
//! for groups of a row (INT8) or for blocks of 128 × 128 (FP8). All are kept; scales of groups are rounded to f16.

use super::encoding::{Encoding, BLOCK};
use super::format::{Format, Granularity};
use super::fp8;
use super::grouped::FloatBytes;
use super::rows::{f16_scale, QuantizedSource, RowSource, Shape};
use super::sfp::expect_rows;
use super::stripe::Stripe;
use crate::error::{Error, Result};

pub struct ByteRows<'a> {
    rows: usize,
    columns: usize,
    row_stride: usize,
    data: &'a [u8],
    scales: FloatBytes<'a>,
    format: Format,
    exact: bool,
}

impl<'a> ByteRows<'a> {
    /// `scales`: 1, [rows], [rows][⌈columns / group⌉] or [⌈rows / 128⌉][⌈columns / 128⌉], as `granularity` says.
    pub fn new(
        encoding: Encoding,
        granularity: Granularity,
        rows: usize,
        columns: usize,
        row_stride: usize,
        data: &'a [u8],
        scales: FloatBytes<'a>,
    ) -> Result<ByteRows<'a>> {
        let format = Format::new(encoding, granularity, false, false)?;
        expect_rows(&encoding.to_string(), data.len(), rows, columns, row_stride)?;
        let (scale_rows, in_row) = match granularity {
            Granularity::Tensor => (1, 1),
            Granularity::Rows => (rows, 1),
            Granularity::Groups(size) => (rows, columns.div_ceil(size)),
            Granularity::Blocks => (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)),
        };
        scales.expect("the scales", scale_rows, in_row)?;
        let largest = match encoding {
            Encoding::Fp8E4m3 => fp8::E4M3_MAX,
            Encoding::Fp8E5m2 => fp8::E5M2_MAX,
            _ => -f32::from(i8::MIN),
        };
        let mut exact = true;
        for at in 0..scale_rows * in_row {
            let scale = scales.get(at);
            if !(scale * largest).is_finite() {
                return Err(Error::invalid(format!(
                    "scale {at} is {scale:e}; the value of the largest element, {largest} times it, must be finite"
                )));
            }
            if format.has_f16_scales() {
                let column = at % in_row * format.stored_group();
                exact &= f16_scale(scale, "scale", at / in_row, column)? == scale;
            }
        }
        Ok(ByteRows { rows, columns, row_stride, data, scales, format, exact })
    }

    fn scale(&self, row: usize, i: usize) -> f32 {
        let in_row = self.format.scales_in_row(self.columns);
        self.scales.get(match self.format.granularity {
            Granularity::Tensor => 0,
            Granularity::Blocks => row / BLOCK * in_row + i,
            _ => row * in_row + i,
        })
    }
}

impl RowSource for ByteRows<'_> {
    fn shape(&self) -> Shape {
        Shape { rows: self.rows, columns: self.columns, format: self.format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let mut stripe = Stripe::new(self.format, 1, self.columns).unwrap();
        self.read(row, &mut stripe.quantized, |i| stripe.scales[i] = self.scale(row, i));
        stripe.values(0, values);
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        Some(self)
    }
}

impl ByteRows<'_> {
    fn read(&self, row: usize, quantized: &mut [u8], scale: impl FnMut(usize)) {
        quantized.copy_from_slice(&self.data[row * self.row_stride..][..self.columns]);
        (0..self.format.scales_in_row(self.columns)).for_each(scale);
    }
}

impl QuantizedSource for ByteRows<'_> {
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        _zero_points: &mut [f32],
    ) -> Result<()> {
        let f16_scales = self.format.has_f16_scales();
        // Products on tensor cores read every quantised value as a number.
        let value: fn(u8) -> f32 = match self.format.encoding {
            Encoding::Fp8E4m3 => fp8::e4m3_to_f32,
            Encoding::Fp8E5m2 => fp8::e5m2_to_f32,
            _ => f32::from,
        };
        self.read(row, quantized, |i| {
            let scale = self.scale(row, i);
            scales[i] = if f16_scales { half::f16::from_f32(scale).to_f32() } else { scale };
        });
        match quantized.iter().position(|&q| !value(q).is_finite()) {
            None => Ok(()),
            Some(k) => Err(Error::invalid(format!(
                "row {row}, column {k} is {}; only finite values can be kept",
                value(quantized[k])
            ))),
        }
    }

    fn is_exact(&self) -> bool {
        self.exact
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::testing::{both, bytes};
    use super::*;
    use crate::tensor::DType;
    use crate::weight::fp8;

    fn floats(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| (0.5 + i as f32 * 0.25).to_le_bytes()).collect()
    }

    #[test]
    fn each_granularity_finds_its_scale() {
        let (rows, columns, stride) = (200, 300, 320);
        let quantized: Vec<u8> = bytes(rows * stride, 9).iter().map(|q| q & 0xbf).collect();
        let cases = [
            (Encoding::Fp8E4m3, Granularity::Tensor, 1),
            (Encoding::Fp8E5m2, Granularity::Rows, rows),
            (Encoding::Fp8E4m3, Granularity::Blocks, 6),
            (Encoding::Int8, Granularity::Groups(64), rows * 5),
        ];
        for (encoding, granularity, count) in cases {
            let scales = floats(count);
            let scales = FloatBytes { bytes: &scales, dtype: DType::F32 };
            let source = ByteRows::new(encoding, granularity, rows, columns, stride, &quantized, scales).unwrap();
            for (row, column) in [(0, 0), (3, 299), (127, 128), (128, 127), (199, 256)] {
                let (values, packed) = both(&source, row).unwrap();
                let q = quantized[row * stride + column];
                let decoded = match encoding {
                    Encoding::Int8 => f32::from(q as i8),
                    Encoding::Fp8E4m3 => fp8::e4m3_to_f32(q),
                    _ => fp8::e5m2_to_f32(q),
                };
                let at = match granularity {
                    Granularity::Tensor => 0,
                    Granularity::Rows => row,
                    Granularity::Blocks => row / 128 * 3 + column / 128,
                    Granularity::Groups(size) => row * 5 + column / size,
                };
                assert_eq!(values[column], decoded * scales.get(at), "{encoding} {granularity:?} {row} {column}");
                assert_eq!(packed[column], values[column]);
            }
            let short = FloatBytes { bytes: &scales.bytes[1..], ..scales };
            assert!(ByteRows::new(encoding, granularity, rows, columns, stride, &quantized, short).is_err());
        }
        let with_scale = |encoding, scale: f32| {
            let scales = FloatBytes { bytes: &scale.to_le_bytes(), dtype: DType::F32 };
            ByteRows::new(encoding, Granularity::Tensor, 1, 1, 1, &quantized, scales).map(|_| ())
        };
        assert!(with_scale(Encoding::Int8, f32::INFINITY).expect_err("refused").message.contains("scale 0 is inf"));
        // -128 times this is the largest f32 and what follows it.
        let (most, more) = (f32::MAX / 128.0, (f32::MAX / 128.0).next_up());
        assert!(with_scale(Encoding::Int8, -most).is_ok());
        assert!(with_scale(Encoding::Int8, -more).expect_err("refused").message.contains("scale 0 is -2.65"));
        assert!(with_scale(Encoding::Fp8E4m3, most / 4.0).is_ok());
        assert!(with_scale(Encoding::Fp8E4m3, most / 3.0).is_err());
        assert!(with_scale(Encoding::Fp8E5m2, most / 448.0).is_ok());
        assert!(with_scale(Encoding::Fp8E5m2, most / 447.0).is_err());
    }

    #[test]
    fn codes_of_no_number_are_refused() {
        let scales = FloatBytes { bytes: &1f32.to_le_bytes(), dtype: DType::F32 };
        let cases = [
            (Encoding::Fp8E4m3, 0x7f, "is NaN"),
            (Encoding::Fp8E4m3, 0xff, "is NaN"),
            (Encoding::Fp8E5m2, 0xfc, "is -inf"),
            (Encoding::Fp8E5m2, 0x7e, "is NaN"),
        ];
        for (encoding, q, problem) in cases {
            let mut quantized = [0x3a; 12];
            quantized[7] = q;
            let source = ByteRows::new(encoding, Granularity::Tensor, 3, 4, 4, &quantized, scales).unwrap();
            let read = |row: usize| source.quantized_row(row, &mut [0; 4], &mut [0.0], &mut []);
            assert!(read(0).is_ok() && read(2).is_ok());
            let message = read(1).expect_err("refused").message;
            assert!(message.contains("row 1, column 3") && message.contains(problem), "{message}");
        }
    }
}
