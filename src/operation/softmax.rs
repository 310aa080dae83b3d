//! `softmax`: output = exp(s·x − max) / Σ exp(s·x − max) over the last axis; a row of −inf gives zeros.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Softmax {
    pub input: Matrix,
    pub output: Matrix,
    pub scale: f32,
}

impl Softmax {
    pub fn new(input: Tensor, output: Tensor, scale: f32) -> Result<Softmax> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        output.expect_float("output")?;
        output.expect_writable("output")?;
        if !scale.is_finite() {
            return Err(Error::invalid(format!("scale is {scale}; a finite value is needed")));
        }
        let (input, output) = (input.as_matrix("input")?, output.as_matrix("output")?);
        output.expect_size("output", input.rows, input.columns)?;
        expect_extent("the number of rows", input.rows)?;
        expect_extent("the number of columns", input.columns)?;
        Ok(Softmax { input, output, scale })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("input", Some(&self.input), &["output"]);
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.input.rows * self.input.columns) as f64;
        Cost {
            operations: elements * 5.0,
            bytes: elements * (self.input.dtype.size() + self.output.dtype.size()) as f64,
        }
    }
}
