//! `linear` whose result is left in 8 bits, beside a float output or instead of it: the codes of the unrounded f32 values,
//! as a norm or a gated activation leaves them.

use super::linear::{expect_residual, Linear};
use super::linear_codes::LinearCodes;
use super::quantized_rows::QuantizedRows;
use super::{Activation, Cost};
use crate::error::Result;
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

/// What is multiplied with the weight.
#[derive(Debug, Clone, Copy)]
pub enum LinearInput {
    Floats(Tensor),
    Codes(QuantizedRows),
}

/// The product behind the codes.
#[derive(Debug, Clone, Copy)]
pub enum LinearProduct {
    Floats(Linear),
    Codes(LinearCodes),
}

#[derive(Debug, Clone, Copy)]
pub struct LinearToCodes {
    /// Its output is a shape without memory, in f32: executors put rows of their own there ([`LinearProduct::part`]).
    pub product: LinearProduct,
    /// What the values are rounded to as well.
    pub output: Option<Matrix>,
    pub quantized_output: QuantizedRows,
}

impl LinearToCodes {
    pub fn new(
        input: LinearInput,
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        residual: Option<Tensor>,
        output: Option<Tensor>,
        quantized_output: QuantizedRows,
    ) -> Result<LinearToCodes> {
        let values = |rows: usize| {
            let nowhere = std::ptr::dangling_mut::<f32>().cast();
            Tensor::new(nowhere, DType::F32, &[rows, weight.output_columns()])
        };
        let product = match input {
            LinearInput::Floats(input) => {
                let rows = input.as_matrix("input")?.rows;
                let op = Linear::new(input, weight, bias, activation, values(rows))?;
                LinearProduct::Floats(op.with_residual(residual)?)
            }
            LinearInput::Codes(input) => {
                let op = LinearCodes::new(input, weight, bias, activation, values(input.rows))?;
                LinearProduct::Codes(op.with_residual(residual)?)
            }
        };
        let Matrix { rows, columns, .. } = *product.output();
        let written = |output: Tensor| {
            output.expect_float("output")?;
            output.expect_writable("output")?;
            let output = output.as_matrix("output")?;
            output.expect_size("output", rows, columns)?;
            residual.map(|residual| expect_residual(residual, &output)).transpose()?;
            Ok(output)
        };
        let output = output.map(written).transpose()?;
        quantized_output.expect_valid("quantized_output")?;
        quantized_output.expect_size("quantized_output", rows, columns)?;
        Ok(LinearToCodes { product, output, quantized_output })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        match &self.product {
            LinearProduct::Floats(op) => {
                visit.read("input", Some(&op.input));
                op.visit_terms(visit);
            }
            LinearProduct::Codes(op) => {
                visit.read_quantized("quantized_input", Some(&op.input));
                op.with_input(op.output).visit_terms(visit);
            }
        }
        visit.write("output", self.output.as_ref());
        visit.write_quantized("quantized_output", Some(&self.quantized_output));
    }

    pub fn cost(&self) -> Cost {
        let Cost { operations, bytes } = match &self.product {
            LinearProduct::Floats(op) => op.cost(),
            LinearProduct::Codes(op) => op.cost(),
        };
        let values = self.product.output();
        let size = (values.rows * values.columns) as f64;
        let floats = self.output.map_or(0.0, |output| size * output.dtype.size() as f64);
        Cost { operations, bytes: bytes - size * DType::F32.size() as f64 + floats + self.quantized_output.bytes() }
    }
}

impl LinearProduct {
    /// [M, N], gated [M, N/2]
    pub fn output(&self) -> &Matrix {
        match self {
            LinearProduct::Floats(op) => &op.output,
            LinearProduct::Codes(op) => &op.output,
        }
    }

    /// `count` rows of the product from `first` on, to an output of as many.
    pub fn part(&self, first: usize, count: usize, output: Matrix) -> LinearProduct {
        match self {
            LinearProduct::Floats(op) => LinearProduct::Floats(op.part(first, count, output)),
            LinearProduct::Codes(op) => LinearProduct::Codes(op.part(first, count, output)),
        }
    }
}
