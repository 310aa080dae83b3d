//! `elementwise`: add, multiply, scale, soft cap, conversion and activations over rows.

use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ElementwiseKind {
    /// a + b
    Add,
    /// a · b
    Multiply,
    /// a · factor
    Scale(f32),
    /// cap · tanh(a / cap), Gemma 2's bound on logits
    SoftCap(f32),
    /// a, rounded to the output's dtype
    Convert,
    Activation(Activation),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Elementwise {
    pub kind: ElementwiseKind,
    pub input: Matrix,
    /// The second operand of `Add` and `Multiply`; one row of it may serve all rows.
    pub second: Option<Matrix>,
    pub output: Matrix,
}

impl Elementwise {
    pub fn new(kind: ElementwiseKind, input: Tensor, second: Option<Tensor>, output: Tensor) -> Result<Elementwise> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        output.expect_float("output")?;
        output.expect_writable("output")?;
        let (input, output) = (input.as_matrix("input")?, output.as_matrix("output")?);
        output.expect_size("output", input.rows, input.columns)?;
        expect_extent("the number of rows", input.rows)?;
        expect_extent("the number of columns", input.columns)?;
        let binary = matches!(kind, ElementwiseKind::Add | ElementwiseKind::Multiply);
        let second = match (binary, second) {
            (true, Some(second)) => {
                second.expect_float("second")?;
                second.expect_readable("second")?;
                let mut second = second.as_matrix("second")?;
                if second.rows == 1 && input.rows != 1 {
                    second.rows = input.rows;
                    second.row_stride = 0;
                }
                second.expect_size("second", input.rows, input.columns)?;
                Some(second)
            }
            (true, None) => return Err(Error::invalid("`second` is missing: add and multiply take two tensors")),
            (false, Some(_)) => return Err(Error::invalid("`second` is given to an operation of one tensor")),
            (false, None) => None,
        };
        match kind {
            ElementwiseKind::Scale(factor) if !factor.is_finite() => {
                return Err(Error::invalid(format!("factor is {factor}; a finite value is needed")))
            }
            ElementwiseKind::SoftCap(cap) => super::expect_finite_positive("cap", cap)?,
            _ => {}
        }
        Ok(Elementwise { kind, input, second, output })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("input", Some(&self.input), &["output"]);
        visit.read_before("second", self.second.as_ref(), &["output"]);
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.input.rows * self.input.columns) as f64;
        let width =
            self.input.dtype.size() + self.output.dtype.size() + self.second.map_or(0, |second| second.dtype.size());
        Cost { operations: elements, bytes: elements * width as f64 }
    }
}
