//! gemma.cpp's 8-bit formats (compression/types.h).
//!
//! - SFP, "switching floating point": a sign; bit 6 set: 3 bits of exponent from 2^-7 on and 3 of mantissa; clear: 4 bits of
//!   exponent from 2^-23 on and 2 of mantissa, 0 being zero. 0x80 is reserved. The largest is 1.875; one f32 scale a tensor.
//!   Without the scale it is exactly a BF16. It is kept as it is.
//! - I8: the elements of all rows in sequence, in groups of 128: BF16 inverse scale, BF16 zero, 128 signed bytes. Value
//!   inverse · q − zero · inverse. With zeros of 0 and rows of whole groups the quantised values are kept.

use super::encoding::Encoding;
use super::format::{Format, Granularity};
use super::rows::{expect_bytes, f16_scale, QuantizedSource, RowSource, Shape};
use crate::error::{Error, Result};
use crate::simd::sfp_bits;
use half::{bf16, f16};

/// The largest value of an SFP byte, before the scale.
pub const MAX: f32 = 1.875;

/// The value of a byte that is not 0x80.
pub fn to_f32(q: u8) -> f32 {
    bf16::from_bits(sfp_bits(q)).to_f32()
}

/// The byte of the nearest value, ties to even bytes; what exceeds [`MAX`] becomes it.
pub fn from_f32(value: f32) -> u8 {
    let size = value.abs().min(MAX);
    let bits = size.to_bits();
    // The fields of an f32 with so many bits less of mantissa, whose carry is that of the exponent.
    let rounded = |fewer: u32| (bits + (1 << (fewer - 1)) - 1 + (bits >> fewer & 1)) >> fewer;
    let (least, lowest_large) = (1.25 / 8_388_608.0, 1.0 / 128.0);
    let code = if size >= lowest_large {
        rounded(20) - (120 << 3) + 64
    } else if size >= least {
        rounded(21) - (104 << 2)
    } else {
        u32::from(size > least / 2.0)
    };
    let sign = if value < 0.0 && code != 0 { 0x80 } else { 0 };
    code as u8 | sign
}

fn expect_no_reserved(quantized: &[u8], row: usize) -> Result<()> {
    match quantized.iter().position(|&q| q == 0x80) {
        None => Ok(()),
        Some(at) => Err(Error::invalid(format!("SFP row {row}, column {at} is 0x80, which is reserved"))),
    }
}

pub struct SfpRows<'a> {
    rows: usize,
    columns: usize,
    row_stride: usize,
    data: &'a [u8],
    scale: f32,
}

impl<'a> SfpRows<'a> {
    /// `scale`: of the whole tensor.
    pub fn new(rows: usize, columns: usize, row_stride: usize, data: &'a [u8], scale: f32) -> Result<SfpRows<'a>> {
        expect_rows("SFP", data.len(), rows, columns, row_stride)?;
        if !(scale * MAX).is_finite() {
            return Err(Error::invalid(format!(
                "the scale of an SFP tensor is {scale:e}; {MAX} times it must be a finite value"
            )));
        }
        Ok(SfpRows { rows, columns, row_stride, data, scale })
    }
}

/// Whether one byte an element fits.
pub(super) fn expect_rows(what: &str, bytes: usize, rows: usize, columns: usize, row_stride: usize) -> Result<()> {
    if row_stride < columns {
        return Err(Error::invalid(format!("{what}: row_stride is {row_stride}; a row has {columns} elements")));
    }
    let needed = rows.saturating_sub(1).checked_mul(row_stride).and_then(|bytes| bytes.checked_add(columns));
    expect_bytes(what, bytes, needed, rows, columns)
}

impl RowSource for SfpRows<'_> {
    fn shape(&self) -> Shape {
        let granularity = Granularity::Tensor;
        let format = Format { encoding: Encoding::Sfp, granularity, zero_points: false, clipping: false };
        Shape { rows: self.rows, columns: self.columns, format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let quantized = self.row(row);
        expect_no_reserved(quantized, row)?;
        for (value, &q) in values.iter_mut().zip(quantized) {
            *value = to_f32(q) * self.scale;
        }
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        Some(self)
    }
}

impl SfpRows<'_> {
    fn row(&self, row: usize) -> &[u8] {
        &self.data[row * self.row_stride..][..self.columns]
    }
}

impl QuantizedSource for SfpRows<'_> {
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        _zero_points: &mut [f32],
    ) -> Result<()> {
        quantized.copy_from_slice(self.row(row));
        scales.fill(self.scale);
        expect_no_reserved(quantized, row)
    }

    fn is_exact(&self) -> bool {
        true
    }
}

const GROUP: usize = 128;
const GROUP_BYTES: usize = 4 + GROUP;

pub struct I8Rows<'a> {
    rows: usize,
    columns: usize,
    data: &'a [u8],
    keeps_quantized: bool,
    exact: bool,
}

impl<'a> I8Rows<'a> {
    pub fn new(rows: usize, columns: usize, data: &'a [u8]) -> Result<I8Rows<'a>> {
        let elements = rows.checked_mul(columns);
        let needed = elements.and_then(|count| count.div_ceil(GROUP).checked_mul(4)?.checked_add(count));
        expect_bytes("I8", data.len(), needed, rows, columns)?;
        let mut source = I8Rows { rows, columns, data, keeps_quantized: columns.is_multiple_of(GROUP), exact: true };
        for group in 0..(rows * columns).div_ceil(GROUP) {
            let (inverse, zero) = source.step(group);
            let at = group * GROUP;
            if !inverse.is_finite() || !zero.is_finite() {
                return Err(Error::invalid(format!(
                    "the I8 group of row {}, column {} has the scale {inverse} and the zero {zero}",
                    at / columns,
                    at % columns
                )));
            }
            source.keeps_quantized &= zero == 0.0 && f16::from_f32(inverse).is_finite();
            source.exact &= f16::from_f32(inverse).to_f32() == inverse;
        }
        Ok(source)
    }

    /// Inverse scale and zero.
    fn step(&self, group: usize) -> (f32, f32) {
        let bytes = &self.data[group * GROUP_BYTES..];
        let value = |at: usize| bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        (value(0), value(2))
    }

    fn quantized_at(&self, element: usize) -> u8 {
        self.data[element / GROUP * GROUP_BYTES + 4 + element % GROUP]
    }
}

impl RowSource for I8Rows<'_> {
    fn shape(&self) -> Shape {
        let granularity = Granularity::Groups(GROUP);
        let format = Format { encoding: Encoding::Int8, granularity, zero_points: false, clipping: false };
        Shape { rows: self.rows, columns: self.columns, format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let first = row * self.columns;
        for (i, value) in values.iter_mut().enumerate() {
            let (inverse, zero) = self.step((first + i) / GROUP);
            *value = inverse * f32::from(self.quantized_at(first + i) as i8) - zero * inverse;
        }
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        self.keeps_quantized.then_some(self as &dyn QuantizedSource)
    }
}

impl QuantizedSource for I8Rows<'_> {
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        _zero_points: &mut [f32],
    ) -> Result<()> {
        let first = row * self.columns;
        for (i, q) in quantized.iter_mut().enumerate() {
            *q = self.quantized_at(first + i);
        }
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = f16_scale(self.step(first / GROUP + i).0, "scale", row, i * GROUP)?;
        }
        Ok(())
    }

    fn is_exact(&self) -> bool {
        self.exact
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::testing::{both, bytes};
    use super::*;

    /// All bytes, in their order: magnitudes rise, each step is that of its binade.
    #[test]
    fn every_sfp_code() {
        let value = to_f32;
        assert_eq!((value(0), value(0x7f), value(0xff)), (0.0, 1.875, -1.875));
        for q in 1..128u8 {
            let (mantissa_bits, lowest) = if q < 64 { (2, -23) } else { (3, -7) };
            let fields = i32::from(q & 63);
            let exponent = (fields >> mantissa_bits) + lowest;
            let mantissa = (fields & ((1 << mantissa_bits) - 1)) as f32 / (1 << mantissa_bits) as f32;
            assert_eq!(value(q), (1.0 + mantissa) * 2f32.powi(exponent), "{q}");
            assert_eq!(value(q | 0x80), -value(q));
            assert!(value(q) > value(q - 1));
        }
    }

    /// Each code comes back, what lies between two becomes the nearer one, and the middle the even one.
    #[test]
    fn the_nearest_sfp_code() {
        for q in 1..128u8 {
            let (below, here) = (to_f32(q - 1), to_f32(q));
            let middle = (below + here) / 2.0;
            let even = if q % 2 == 0 { q } else { q - 1 };
            for (value, code) in [(here, q), (middle, even), (middle.next_up(), q), (middle.next_down(), q - 1)] {
                assert_eq!(from_f32(value), code, "{value:e} between {below:e} and {here:e}");
                assert_eq!(from_f32(-value), if code == 0 { 0 } else { code | 0x80 });
            }
        }
        for (value, code) in [(0.0, 0), (-0.0, 0), (1e-30, 0), (-1e-30, 0), (2.0, 0x7f), (-1e30, 0xff)] {
            assert_eq!(from_f32(value), code, "{value:e}");
        }
    }

    #[test]
    fn sfp_rows_have_a_stride_and_a_scale() {
        let data = [0x40, 0x7f, 0, 0xc0, 0, 1, 0x80];
        let source = SfpRows::new(2, 3, 4, &data[..], 2.0).unwrap();
        let mut values = [0.0; 3];
        source.values(0, &mut values).unwrap();
        assert_eq!(values, [2.0 / 128.0, 3.75, 0.0]);
        let (kept, packed) = both(&source, 0).unwrap();
        assert_eq!((kept, packed), (values.to_vec(), values.to_vec()));
        let error = source.values(1, &mut values).unwrap_err();
        let again = both(&source, 1).unwrap_err();
        assert_eq!(error.message, again.message);
        assert!(error.message.contains("row 1, column 2"), "{error}");
        for (stride, bytes, scale) in [(2, 7, 1.0), (4, 6, 1.0), (4, 7, f32::NAN)] {
            assert!(SfpRows::new(2, 3, stride, &data[..bytes], scale).is_err());
        }
    }

    fn i8_groups(elements: usize, zero: f32) -> Vec<u8> {
        let mut data = Vec::new();
        for (i, quantized) in bytes(elements, 7).chunks(GROUP).enumerate() {
            data.extend(bf16::from_f32(0.01 * (i + 1) as f32).to_le_bytes());
            data.extend(bf16::from_f32(zero).to_le_bytes());
            data.extend(quantized);
        }
        data
    }

    #[test]
    fn i8_codes_are_kept_without_zeros() {
        let data = i8_groups(3 * 256, 0.0);
        let source = I8Rows::new(3, 256, &data).unwrap();
        for row in 0..3 {
            let (values, packed) = both(&source, row).unwrap();
            assert_eq!(values, packed);
        }
        let mut values = [0.0; 256];
        source.values(2, &mut values).unwrap();
        assert_eq!(values[130], bf16::from_f32(0.06).to_f32() * f32::from(data[5 * GROUP_BYTES + 4 + 2] as i8));
    }

    #[test]
    fn i8_groups_run_over_the_ends_of_rows() {
        let data = i8_groups(3 * 100, 5.0);
        let source = I8Rows::new(3, 100, &data).unwrap();
        assert!(source.quantized().is_none());
        let mut values = [0.0; 100];
        source.values(1, &mut values).unwrap();
        // Element 128 of all is the first of the second group.
        let inverse = bf16::from_f32(0.02).to_f32();
        assert_eq!(values[28], inverse * f32::from(data[GROUP_BYTES + 4] as i8) - 5.0 * inverse);
        assert!(I8Rows::new(3, 100, &data[1..]).err().expect("refused").message.contains("312"));
        let mut broken = data.clone();
        broken[GROUP_BYTES..GROUP_BYTES + 2].copy_from_slice(&bf16::NAN.to_le_bytes());
        assert!(I8Rows::new(3, 100, &broken).err().expect("refused").message.contains("row 1, column 28"));
    }
}
