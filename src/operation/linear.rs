//! `linear`: y = activation(x · Wᵀ + bias) + residual, and its gated form y = activation(gate) · up + residual over
//! interleaved rows of W.
//!
//! x is a matrix of floats, or one in 8 bits: then the result is that of the input scale · q, which it also is where a
//! product rounds the same values to 8 bits itself. y is left as floats, in 8 bits, or as both: the quantised values
//! are those of the unrounded f32 values, as a norm or a gated activation leaves them.

use super::linear_product::{expect_input, expect_residual, expect_weight_terms, LinearProduct};
use super::quantized_rows::QuantizedRows;
use super::{Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Linear {
    /// [M, K]
    pub input: LinearInput,
    /// [N, K] of any encoding, as in [`LinearProduct`].
    pub weight: WeightView,
    /// [N]
    pub bias: Option<Tensor>,
    pub activation: Activation,
    /// As `output`, which it may be.
    pub residual: Option<Matrix>,
    /// [M, N], gated [M, N/2]. It or `quantized_output` is there.
    pub output: Option<Matrix>,
    /// Of the same size.
    pub quantized_output: Option<QuantizedRows>,
    /// As in [`LinearProduct`]; a graph's conversion to FP8 sets it.
    pub rounds_input: bool,
}

/// What is multiplied with the weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinearInput {
    /// Of the weight's dtype or F32; with a quantised weight any float.
    Floats(Matrix),
    Quantized(QuantizedRows),
}

/// The tensors of a call before validation; `None` where the caller gave none.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearTensors {
    pub input: Option<Tensor>,
    pub quantized_input: Option<QuantizedRows>,
    pub bias: Option<Tensor>,
    pub residual: Option<Tensor>,
    pub output: Option<Tensor>,
    pub quantized_output: Option<QuantizedRows>,
}

impl Linear {
    pub fn new(tensors: LinearTensors, weight: WeightView, activation: Activation) -> Result<Linear> {
        let LinearTensors { input, quantized_input, bias, residual, output, quantized_output } = tensors;
        let input = match (input, quantized_input) {
            (Some(input), None) => LinearInput::Floats(expect_input(input, &weight)?),
            (None, Some(rows)) => {
                rows.expect_valid("quantized_input")?;
                LinearInput::Quantized(rows)
            }
            (None, None) => return Err(Error::invalid("tensor `input` is missing, and so is `quantized_input`")),
            _ => return Err(Error::invalid("`input` and `quantized_input` are both given; one of them is needed")),
        };
        if output.is_none() && quantized_output.is_none() {
            return Err(Error::invalid("tensor `output` is missing, and so is `quantized_output`"));
        }
        let (name, (rows, columns)) = (input.name(), input.size());
        expect_weight_terms((name, rows, columns), &weight, bias)?;
        let columns = weight.output_columns();
        let written = |output: Tensor| {
            output.expect_float("output")?;
            output.expect_writable("output")?;
            let output = output.as_matrix("output")?;
            output.expect_size("output", rows, columns)?;
            Ok(output)
        };
        let output = output.map(written).transpose()?;
        let residual = residual.map(|residual| expect_residual(residual, (rows, columns), output.as_ref()));
        let residual = residual.transpose()?;
        if let Some(quantized) = quantized_output {
            quantized.expect_valid("quantized_output")?;
            quantized.expect_size("quantized_output", rows, columns)?;
        }
        Ok(Linear { input, weight, bias, activation, residual, output, quantized_output, rounds_input: false })
    }

    /// [M, N], gated [M, N/2]
    pub fn output_size(&self) -> (usize, usize) {
        (self.input.size().0, self.weight.output_columns())
    }

    /// `count` rows of the product from `first` on with floats for its input, of which a quantised one has none yet, to
    /// this output.
    pub fn product(&self, first: usize, count: usize, output: Matrix) -> LinearProduct {
        let &Linear { weight, bias, activation, rounds_input, .. } = self;
        let input = self.input.part(first, count).as_floats(&weight);
        let residual = self.residual.map(|residual| residual.part(first, count));
        LinearProduct { input, weight, bias, activation, residual, output, rounds_input }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        match &self.input {
            LinearInput::Floats(input) => visit.read("input", Some(input)),
            LinearInput::Quantized(rows) => visit.read_quantized("quantized_input", Some(rows)),
        }
        visit.read_weight("weight", &self.weight);
        visit.read("bias", self.bias.as_ref());
        visit.read_before("residual", self.residual.as_ref(), &["output"]);
        visit.write("output", self.output.as_ref());
        visit.write_quantized("quantized_output", self.quantized_output.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let (rows, columns) = self.input.size();
        let floats = |matrix: Option<Matrix>| {
            matrix.map_or(0.0, |matrix| (matrix.rows * matrix.columns * matrix.dtype.size()) as f64)
        };
        let input = match self.input {
            LinearInput::Floats(input) => floats(Some(input)),
            LinearInput::Quantized(rows) => rows.bytes(),
        };
        let quantized = self.quantized_output.map_or(0.0, |rows| rows.bytes());
        let weight = self.weight.read_bytes() as f64;
        Cost {
            operations: 2.0 * rows as f64 * columns as f64 * self.weight.rows as f64,
            bytes: input + weight + floats(self.residual) + floats(self.output) + quantized,
        }
    }
}

impl From<LinearProduct> for Linear {
    fn from(op: LinearProduct) -> Linear {
        let LinearProduct { input, weight, bias, activation, residual, output, rounds_input } = op;
        let (input, output) = (LinearInput::Floats(input), Some(output));
        Linear { input, weight, bias, activation, residual, output, quantized_output: None, rounds_input }
    }
}

impl LinearInput {
    fn name(&self) -> &'static str {
        match self {
            LinearInput::Floats(_) => "input",
            LinearInput::Quantized(_) => "quantized_input",
        }
    }

    /// [M, K]
    pub fn size(&self) -> (usize, usize) {
        match self {
            LinearInput::Floats(input) => (input.rows, input.columns),
            LinearInput::Quantized(rows) => (rows.rows, rows.columns),
        }
    }

    /// `count` rows from `first` on.
    pub fn part(&self, first: usize, count: usize) -> LinearInput {
        match self {
            LinearInput::Floats(input) => LinearInput::Floats(input.part(first, count)),
            LinearInput::Quantized(rows) => LinearInput::Quantized(rows.part(first, count)),
        }
    }

    /// The floats, or the shape that dequantised rows have where no kernel multiplies them as they are: in the weight's
    /// float dtype or BF16, and without memory.
    fn as_floats(&self, weight: &WeightView) -> Matrix {
        match *self {
            LinearInput::Floats(input) => input,
            LinearInput::Quantized(QuantizedRows { rows, columns, .. }) => {
                let dtype = weight.dtype().unwrap_or(DType::Bf16);
                Matrix::without_memory(dtype, rows, columns)
            }
        }
    }
}
