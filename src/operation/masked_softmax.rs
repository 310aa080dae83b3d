//! `masked_softmax`: softmax of attention scores with a mask that is added, ALiBi and sinks.
//!
//! s = scale · input + slope(h) · mask;  output = exp(s − max) / (Σ exp(s − max) + exp(sink[h] − max))
//!
//! slope(h) is 1 without ALiBi; with it (Press, Smith and Lewis 2022) it is 2^(−bias · (h + 1) / n) for h < n and 2^(−bias · (2 ·
//! (h − n) + 1) / 2n) from there on, n being the largest power of two that is at most the number of heads. The maximum is of
//! the sink too. A row without weight, as of −inf alone, gives zeros.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor};

/// Four axes each, those in front of the tensors' own with an extent of 1: [batch, heads, rows, columns].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskedSoftmax {
    pub input: Tensor,
    /// Its extents divide those of the input; places repeat.
    pub mask: Option<Tensor>,
    /// F32 [heads]
    pub sinks: Option<Tensor>,
    pub output: Tensor,
    pub scale: f32,
    /// ALiBi's largest bias; 0: none.
    pub alibi_bias: f32,
}

impl MaskedSoftmax {
    pub fn new(
        (input, output): (Tensor, Tensor),
        mask: Option<Tensor>,
        sinks: Option<Tensor>,
        (scale, alibi_bias): (f32, f32),
    ) -> Result<MaskedSoftmax> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        output.expect_float("output")?;
        output.expect_readable("output")?;
        output.expect_shape("output", input.shape())?;
        output.expect_elements_apart("output")?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        let [batch, heads, rows, columns] = input.shape;
        let mask = mask.map(|mask| mask.with_four_axes());
        if let Some(mask) = mask {
            mask.expect_float("mask")?;
            mask.expect_readable("mask")?;
            let fits = |axis: usize| match mask.shape[axis] {
                0 => input.shape[axis] == 0,
                extent => input.shape[axis].is_multiple_of(extent),
            };
            if mask.shape[3] != columns || !(0..3).all(fits) {
                return Err(Error::invalid(format!(
                    "tensor `mask` has shape {:?}; [{batch}, {heads}, {rows}, {columns}] or divisors of the first three are needed",
                    mask.shape()
                )));
            }
        }
        if let Some(sinks) = sinks {
            sinks.expect_dtype("sinks", DType::F32)?;
            sinks.expect_shape("sinks", &[heads])?;
            sinks.expect_readable("sinks")?;
        }
        if !scale.is_finite() || !alibi_bias.is_finite() || alibi_bias < 0.0 {
            return Err(Error::invalid(format!(
                "scale and alibi_bias are {scale} and {alibi_bias}; finite numbers are needed, of the latter none below 0"
            )));
        }
        expect_extent("the number of rows", batch.saturating_mul(heads).saturating_mul(rows))?;
        expect_extent("the number of columns", columns)?;
        Ok(MaskedSoftmax { input, mask, sinks, output, scale, alibi_bias })
    }

    /// What multiplies the mask of a head.
    pub fn slope(&self, head: usize) -> f32 {
        if self.alibi_bias == 0.0 {
            return 1.0;
        }
        let power = 1usize << self.input.shape[1].max(1).ilog2();
        let bias = f64::from(self.alibi_bias);
        let exponent = match head < power {
            true => bias / power as f64 * (head + 1) as f64,
            false => bias / 2.0 / power as f64 * (2 * (head - power) + 1) as f64,
        };
        (-exponent).exp2() as f32
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        match self.input.strides == self.output.strides && self.input.dtype == self.output.dtype {
            true => visit.read_before("input", Some(&self.input), &["output"]),
            false => visit.read("input", Some(&self.input)),
        }
        visit.read("mask", self.mask.as_ref());
        visit.read("sinks", self.sinks.as_ref());
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = self.input.elements() as f64;
        let width = (self.input.dtype.size() + self.output.dtype.size()) as f64;
        let mask = self.mask.map_or(0.0, |mask| (mask.elements() * mask.dtype.size()) as f64);
        Cost { operations: elements * 7.0, bytes: elements * width + mask }
    }
}
