//! `linear` of an input that is in 8 bits already: the products of codes, with both sides' scales applied to the sums.
//!
//! The result is that of `linear` with the input scale · code, and that which `linear` has when it rounds the same values
//! to 8 bits itself.

use super::linear::{expect_residual, expect_terms, Linear};
use super::quantized_rows::QuantizedRows;
use super::{Activation, Cost};
use crate::error::Result;
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy)]
pub struct LinearCodes {
    /// [M, K]
    pub input: QuantizedRows,
    /// As in [`Linear`].
    pub weight: WeightView,
    pub bias: Option<Tensor>,
    pub activation: Activation,
    pub residual: Option<Matrix>,
    pub output: Matrix,
}

impl LinearCodes {
    pub fn new(
        input: QuantizedRows,
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        output: Tensor,
    ) -> Result<LinearCodes> {
        input.expect_valid("quantized_input")?;
        expect_terms(("quantized_input", input.rows, input.columns), &weight, bias, output)?;
        let output = output.as_matrix("output")?;
        output.expect_size("output", input.rows, weight.output_columns())?;
        Ok(LinearCodes { input, weight, bias, activation, residual: None, output })
    }

    /// The same with this added, if it is there.
    pub fn with_residual(self, residual: Option<Tensor>) -> Result<LinearCodes> {
        let residual = residual.map(|residual| expect_residual(residual, &self.output)).transpose()?;
        Ok(LinearCodes { residual, ..self })
    }

    /// `count` rows of the product from `first` on, to an output of as many.
    pub fn part(&self, first: usize, count: usize, output: Matrix) -> LinearCodes {
        let residual = self.residual.map(|residual| residual.part(first, count));
        LinearCodes { input: self.input.part(first, count), residual, output, ..*self }
    }

    /// The product with floats in the place of the codes.
    pub fn with_input(&self, input: Matrix) -> Linear {
        let &LinearCodes { weight, bias, activation, residual, output, .. } = self;
        Linear { input, weight, bias, activation, residual, output }
    }

    /// The product with no input yet, in the dtype that an executor without a kernel for the codes gives it.
    pub fn shape(&self) -> Linear {
        let QuantizedRows { rows, columns, .. } = self.input;
        self.with_input(Matrix {
            data: std::ptr::null_mut(),
            dtype: self.weight.dtype().unwrap_or(DType::Bf16),
            rows,
            columns,
            row_stride: columns,
        })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_quantized("quantized_input", Some(&self.input));
        self.with_input(self.output).visit_terms(visit);
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let Cost { operations, bytes } = self.shape().cost();
        let floats = (self.input.rows * self.input.columns * self.shape().input.dtype.size()) as f64;
        Cost { operations, bytes: bytes - floats + self.input.bytes() }
    }
}
