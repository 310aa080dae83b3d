//! `sum_rows`: output = scale · Σ input over each row.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::Tensor;

/// Four axes each, those in front of the tensors' own with an extent of 1: [.., rows, columns].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SumRows {
    /// Any strides.
    pub input: Tensor,
    /// [.., rows, 1], any strides
    pub output: Tensor,
    pub scale: f32,
}

impl SumRows {
    pub fn new(input: Tensor, output: Tensor, scale: f32) -> Result<SumRows> {
        input.expect_float("input")?;
        output.expect_float("output")?;
        output.expect_elements_apart("output")?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        let [first, second, third, columns] = input.shape;
        if output.shape != [first, second, third, 1] {
            return Err(Error::invalid(format!(
                "tensor `output` has shape {:?}; [{first}, {second}, {third}, 1] is needed",
                output.shape()
            )));
        }
        if !scale.is_finite() {
            return Err(Error::invalid(format!("scale is {scale}; a finite number is needed")));
        }
        expect_extent("the number of rows", first.saturating_mul(second).saturating_mul(third))?;
        expect_extent("the number of columns", columns)?;
        Ok(SumRows { input, output, scale })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = self.input.elements() as f64;
        let written = (self.output.elements() * self.output.dtype.size()) as f64;
        Cost { operations: elements, bytes: elements * self.input.dtype.size() as f64 + written }
    }
}
