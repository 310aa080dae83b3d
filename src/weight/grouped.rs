//! What AWQ and GPTQ have in common: 4-bit values of a matrix [K, N] in 32-bit words, and for groups of k a scale and
//! an integer zero for each output. The value of element (n, k) is scale · (q − zero).
//!
//! Quantised values are kept. With zeros other than 8 the zero point −scale · zero is stored as f16, which may round
//! it.

use super::encoding::Encoding;
use super::format::{Format, Granularity, GROUP_SIZES};
use super::int4::ZERO;
use super::rows::{expect_bytes, f16_scale, QuantizedSource, RowSource, Shape};
use crate::error::{Error, Result};
use crate::tensor::DType;
use half::{bf16, f16};

/// Floats as bytes, of any alignment.
#[derive(Clone, Copy)]
pub struct FloatBytes<'a> {
    pub bytes: &'a [u8],
    pub dtype: DType,
}

impl FloatBytes<'_> {
    pub fn get(&self, at: usize) -> f32 {
        let bytes = &self.bytes[at * self.dtype.size()..];
        match self.dtype {
            DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }

    /// Whether there are `count` of them, or an error that names them.
    pub fn expect(&self, what: &str, rows: usize, columns: usize) -> Result<()> {
        let needed = rows.checked_mul(columns).and_then(|count| count.checked_mul(self.dtype.size()));
        expect_bytes(what, self.bytes.len(), needed, rows, columns)
    }
}

/// Where a format has its nibbles.
pub trait Nibbles: Sync {
    fn quantized_at(&self, k: usize, n: usize) -> u8;
    /// `None`: all zeros are 8.
    fn zero(&self, group: usize, n: usize) -> Option<u8>;
}

/// Nibble `at` of the little-endian word `word`.
pub fn nibble(bytes: &[u8], word: usize, at: usize) -> u8 {
    bytes[word * 4 + at / 2] >> (at % 2 * 4) & 15
}

/// Elements of a group; a group size of 0 stands for all of K.
pub(super) fn group_length(group_size: usize, columns: usize) -> usize {
    if group_size == 0 {
        columns.max(1)
    } else {
        group_size
    }
}

pub struct Grouped<'a, N> {
    nibbles: N,
    rows: usize,
    columns: usize,
    /// Elements of a group in the source.
    group: usize,
    scales: FloatBytes<'a>,
    format: Format,
    exact: bool,
    order: Option<Vec<i32>>,
}

impl<'a, N: Nibbles> Grouped<'a, N> {
    /// `group_size` 0: one group, the whole of K. `order`: the columns sorted by group, where they are not.
    pub fn new(
        nibbles: N,
        rows: usize,
        columns: usize,
        group_size: usize,
        scales: FloatBytes<'a>,
        order: Option<Vec<i32>>,
    ) -> Result<Grouped<'a, N>> {
        let group = group_length(group_size, columns);
        let granularity = match GROUP_SIZES.into_iter().rev().find(|size| group.is_multiple_of(*size)) {
            _ if group >= columns => Granularity::Rows,
            Some(size) => Granularity::Groups(size),
            None => return Err(Error::invalid(format!("group_size is {group}; a multiple of 32 is needed"))),
        };
        let groups = columns.div_ceil(group);
        scales.expect("the scales", groups, rows)?;
        let each = || (0..groups).flat_map(|g| (0..rows).map(move |n| (g, n)));
        let zero_points = each().any(|(g, n)| nibbles.zero(g, n).is_some_and(|zero| zero != ZERO));
        let mut exact = true;
        for (g, n) in each() {
            let scale = scales.get(g * rows + n);
            exact &= f16_scale(scale, "scale", n, g * group)? == scale;
            if zero_points {
                let zero_point = -scale * f32::from(nibbles.zero(g, n).unwrap_or(ZERO));
                exact &= f16_scale(zero_point, "scale times zero", n, g * group)? == zero_point;
            }
        }
        let format = Format { encoding: Encoding::Int4, granularity, zero_points, clipping: false };
        Ok(Grouped { nibbles, rows, columns, group, scales, format, exact, order })
    }

    fn step(&self, group: usize, n: usize) -> (f32, f32) {
        let scale = self.scales.get(group * self.rows + n);
        (scale, f32::from(self.nibbles.zero(group, n).unwrap_or(ZERO)))
    }
}

impl<N: Nibbles> RowSource for Grouped<'_, N> {
    fn shape(&self) -> Shape {
        Shape { rows: self.rows, columns: self.columns, format: self.format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        for g in 0..self.columns.div_ceil(self.group) {
            let (scale, zero) = self.step(g, row);
            for at in g * self.group..((g + 1) * self.group).min(self.columns) {
                let k = self.order.as_ref().map_or(at, |order| order[at] as usize);
                values[k] = scale * (f32::from(self.nibbles.quantized_at(k, row)) - zero);
            }
        }
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        Some(self)
    }
}

impl<N: Nibbles> QuantizedSource for Grouped<'_, N> {
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        zero_points: &mut [f32],
    ) -> Result<()> {
        for (at, q) in quantized.iter_mut().enumerate() {
            let k = self.order.as_ref().map_or(at, |order| order[at] as usize);
            *q = self.nibbles.quantized_at(k, row);
        }
        for (i, to) in scales.iter_mut().enumerate() {
            let (scale, zero) = self.step(i * self.format.stored_group() / self.group, row);
            *to = f16::from_f32(scale).to_f32();
            if let Some(zero_point) = zero_points.get_mut(i) {
                *zero_point = f16::from_f32(-scale * zero).to_f32();
            }
        }
        Ok(())
    }

    fn order(&self) -> Option<&[i32]> {
        self.order.as_deref()
    }

    fn is_exact(&self) -> bool {
        self.exact
    }
}
