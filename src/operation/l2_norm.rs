//! `l2_norm`: output = input / max(‖input‖₂, ε) over each row, as PyTorch's `normalize` has it.

use super::{expect_extent, expect_finite_positive, Cost};
use crate::error::Result;
use crate::operation::access::Visit;
use crate::tensor::Tensor;

/// Four axes each, those in front of the tensors' own with an extent of 1: [.., rows, columns], any strides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct L2Norm {
    pub input: Tensor,
    pub output: Tensor,
    pub epsilon: f32,
}

impl L2Norm {
    pub fn new(input: Tensor, output: Tensor, epsilon: f32) -> Result<L2Norm> {
        input.expect_float("input")?;
        output.expect_float("output")?;
        output.expect_shape("output", input.shape())?;
        output.expect_elements_apart("output")?;
        expect_finite_positive("epsilon", epsilon)?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        let [first, second, third, columns] = input.shape;
        expect_extent("the number of rows", first.saturating_mul(second).saturating_mul(third))?;
        expect_extent("the number of columns", columns)?;
        Ok(L2Norm { input, output, epsilon })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        match self.input.strides == self.output.strides && self.input.dtype == self.output.dtype {
            true => visit.read_before("input", Some(&self.input), &["output"]),
            false => visit.read("input", Some(&self.input)),
        }
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = self.input.elements() as f64;
        let width = self.input.dtype.size() + self.output.dtype.size();
        Cost { operations: elements * 3.0, bytes: elements * width as f64 }
    }
}
