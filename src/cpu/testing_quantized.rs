//! Quantised weights for the tests of products and of embeddings.

use super::dequantize::CHUNK;
use crate::weight::{Encoding, Scales, WeightView, BLOCK};
use half::f16;

/// A weight with every quantised value and scales of several sizes, and the memory behind it.
#[allow(dead_code)] // The vectors are kept, not read.
pub struct Quantized {
    pub quantized: Vec<u8>,
    groups: Vec<f16>,
    zero_points: Vec<f16>,
    factors: Vec<f32>,
    order: Vec<i32>,
    pub view: WeightView,
}

#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub encoding: Encoding,
    /// The elements of a group; 0: one scale a row; `usize::MAX`: blocks.
    pub size: usize,
    pub zero_points: bool,
}

pub const BLOCKS: usize = usize::MAX;

pub const FORMATS: [Format; 14] = [
    Format { encoding: Encoding::Int8, size: 0, zero_points: false },
    Format { encoding: Encoding::Int8, size: 32, zero_points: false },
    Format { encoding: Encoding::Int8, size: 128, zero_points: false },
    Format { encoding: Encoding::Int4, size: 32, zero_points: false },
    Format { encoding: Encoding::Int4, size: 64, zero_points: false },
    Format { encoding: Encoding::Int4, size: 128, zero_points: false },
    Format { encoding: Encoding::Int4, size: 32, zero_points: true },
    Format { encoding: Encoding::Int4, size: 64, zero_points: true },
    Format { encoding: Encoding::Int4, size: 128, zero_points: true },
    Format { encoding: Encoding::Fp8E4m3, size: 0, zero_points: false },
    Format { encoding: Encoding::Fp8E4m3, size: BLOCKS, zero_points: false },
    Format { encoding: Encoding::Fp8E5m2, size: 0, zero_points: false },
    Format { encoding: Encoding::Fp8E5m2, size: BLOCKS, zero_points: false },
    Format { encoding: Encoding::Sfp, size: 0, zero_points: false },
];

impl Quantized {
    pub fn new(format: Format, rows: usize, columns: usize, gated: bool) -> Quantized {
        let int4 = format.encoding == Encoding::Int4;
        // Rows of bytes lie at odd distances, so that none but the first is aligned.
        let row_stride = if int4 { columns.next_multiple_of(CHUNK) } else { columns + 5 };
        let mut quantized: Vec<u8> =
            (0..rows * row_stride).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 23) as u8).collect();
        if int4 {
            quantized.truncate(rows * row_stride / 2);
        } else if format.encoding == Encoding::Sfp {
            quantized.iter_mut().filter(|q| **q == 0x80).for_each(|q| *q = 0);
        } else if format.encoding != Encoding::Int8 {
            // No NaN and no infinity, and no value so large that the sum is only it.
            quantized.iter_mut().for_each(|q| *q &= if format.encoding == Encoding::Fp8E4m3 { 0xdf } else { 0xbf });
        }
        let groups_of = |size: usize| rows * columns.div_ceil(size);
        let factor = |i: usize| 0.004 + (i * 7 % 11) as f32 * 0.001;
        let (mut groups, mut zero_points, mut factors) = (Vec::new(), Vec::new(), Vec::new());
        let scales = match format.size {
            0 => {
                factors = (0..rows).map(factor).collect();
                Scales::Rows(factors.as_ptr())
            }
            BLOCKS => {
                factors = (0..rows.div_ceil(BLOCK) * columns.div_ceil(BLOCK)).map(factor).collect();
                Scales::Blocks(factors.as_ptr())
            }
            size => {
                groups = (0..groups_of(size)).map(|i| f16::from_f32(factor(i))).collect();
                Scales::Groups { size, data: groups.as_ptr() }
            }
        };
        if format.zero_points {
            zero_points = groups.iter().map(|scale| f16::from_f32(scale.to_f32() * -6.7)).collect();
        }
        let view = WeightView {
            data: quantized.as_mut_ptr().cast(),
            encoding: format.encoding,
            rows,
            columns,
            row_stride,
            gated,
            scales,
            zero_points: if format.zero_points { zero_points.as_ptr() } else { std::ptr::null() },
            order: std::ptr::null(),
            settled: false,
        };
        Quantized { quantized, groups, zero_points, factors, order: Vec::new(), view }
    }

    /// Its columns stand for those of the input from the last to the first.
    pub fn reordered(mut self) -> Quantized {
        let columns = self.view.columns;
        self.order = (0..columns).map(|k| (columns - 1 - k) as i32).collect();
        self.view.order = self.order.as_ptr();
        self
    }
}
