//! A stripe: up to 128 rows of a weight between their source and their layout, one byte a quantised value and f32
//! scales.

use super::encoding::{Encoding, BLOCK};
use super::format::{Format, Granularity};
use super::{fp8, int4, int8, sfp};
use crate::allocation::filled;
use crate::error::Result;

/// Rows of a stripe: a row of blocks, and a multiple of the 16 rows of a fragment tile.
pub const STRIPE_ROWS: usize = BLOCK;

/// Quantised values of a stripe's rows. Where scales are stored as f16, these are numbers that f16 has.
#[derive(Debug, Clone, PartialEq)]
pub struct Stripe {
    pub format: Format,
    pub rows: usize,
    pub columns: usize,
    /// [rows][columns]
    pub quantized: Vec<u8>,
    /// [rows][scales in a row]; of blocks: [blocks in a row], for all rows.
    pub scales: Vec<f32>,
    /// With zero points: as `scales`.
    pub zero_points: Vec<f32>,
}

impl Stripe {
    pub fn new(format: Format, rows: usize, columns: usize) -> Result<Stripe> {
        let scale_rows = if format.granularity == Granularity::Blocks { 1 } else { rows };
        let scales = scale_rows * format.scales_in_row(columns);
        Ok(Stripe {
            format,
            rows,
            columns,
            quantized: filled(0, rows * columns, "the quantised values of a weight's rows")?,
            scales: filled(0.0, scales, "the scales of a weight's rows")?,
            zero_points: filled(
                0.0,
                if format.zero_points { scales } else { 0 },
                "the zero points of a weight's rows",
            )?,
        })
    }

    pub fn scales_in_row(&self) -> usize {
        self.format.scales_in_row(self.columns)
    }

    /// Where the scales of a row begin.
    pub fn scale_row(&self, row: usize) -> usize {
        if self.format.granularity == Granularity::Blocks {
            0
        } else {
            row * self.scales_in_row()
        }
    }

    /// The values of a row. Int4 with zero points rounds scale · q + zero point once more to f32; all else is one
    /// product.
    pub fn values(&self, row: usize, values: &mut [f32]) {
        let group = match self.format.stored_group() {
            0 => self.columns.max(1),
            size => size,
        };
        let (quantized, first) = (&self.quantized[row * self.columns..][..self.columns], self.scale_row(row));
        for (i, (quantized, values)) in quantized.chunks(group).zip(values.chunks_mut(group)).enumerate() {
            let scale = self.scales[first + i];
            match self.format.encoding {
                Encoding::Int8 => fill(values, quantized, |q| scale * int8::decode(q)),
                Encoding::Int4 if self.format.zero_points => {
                    let zero_point = self.zero_points[first + i];
                    fill(values, quantized, |q| scale * f32::from(q) + zero_point)
                }
                Encoding::Int4 => fill(values, quantized, |q| scale * int4::decode(q)),
                Encoding::Fp8E4m3 => fill(values, quantized, |q| scale * fp8::e4m3_to_f32(q)),
                Encoding::Fp8E5m2 => fill(values, quantized, |q| scale * fp8::e5m2_to_f32(q)),
                Encoding::Sfp => fill(values, quantized, |q| scale * sfp::to_f32(q)),
                Encoding::Float(_) | Encoding::Blocks(_) => {
                    unreachable!("floats and blocks have no quantised values of their own")
                }
            }
        }
    }
}

fn fill(values: &mut [f32], quantized: &[u8], decode: impl Fn(u8) -> f32) {
    for (value, &q) in values.iter_mut().zip(quantized) {
        *value = decode(q);
    }
}

/// Sums for the relative error of a weight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SquaredError {
    pub difference: f64,
    pub norm: f64,
}

impl SquaredError {
    pub fn add(&mut self, actual: &[f32], wanted: &[f32]) {
        for (&actual, &wanted) in actual.iter().zip(wanted) {
            self.difference += f64::from(actual - wanted).powi(2);
            self.norm += f64::from(wanted).powi(2);
        }
    }

    pub fn merge(&mut self, other: SquaredError) {
        self.difference += other.difference;
        self.norm += other.norm;
    }

    /// ‖actual − wanted‖ / ‖wanted‖; 0 for a weight of zeros.
    pub fn relative(&self) -> f64 {
        if self.difference == 0.0 {
            0.0
        } else {
            (self.difference / self.norm).sqrt()
        }
    }
}
