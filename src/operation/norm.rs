//! What `rms_norm` and `layer_norm` have in common: rows of one width that join a residual stream, and are normalised
//! as a whole.

use super::quantized_rows::QuantizedRows;
use super::{expect_extent, expect_finite_positive, Cost};
use crate::error::{Error, Result};
use crate::tensor::{Matrix, Tensor};

/// The kernels keep one row in the registers of one block.
const MAX_COLUMNS: usize = 65_536;

/// The matrices of a norm, all of one size. One of the outputs is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct NormRows {
    pub input: Matrix,
    pub residual: Option<Matrix>,
    /// The sum with the residual, in the residual's dtype.
    pub residual_output: Option<Matrix>,
    pub output: Option<Matrix>,
    pub quantized_output: Option<QuantizedRows>,
}

/// The tensors of a norm before validation.
pub(super) struct NormTensors<'a> {
    pub input: &'a Tensor,
    pub residual: Option<&'a Tensor>,
    pub residual_output: Option<&'a Tensor>,
    pub output: Option<&'a Tensor>,
    pub quantized_output: Option<QuantizedRows>,
    pub epsilon: f32,
}

impl NormRows {
    pub fn new(operation: &str, tensors: NormTensors) -> Result<NormRows> {
        let NormTensors { input, residual, residual_output, output, quantized_output, epsilon } = tensors;
        if residual_output.is_none() && output.is_none() && quantized_output.is_none() {
            return Err(Error::invalid(format!(
                "{operation} has nothing to write: `output`, `residual_output` and all others are absent"
            )));
        }
        expect_finite_positive("epsilon", epsilon)?;
        input.expect_float("input")?;
        input.expect_readable("input")?;
        let input = input.as_matrix("input")?;
        expect_extent("the number of rows", input.rows)?;
        if input.columns > MAX_COLUMNS {
            return Err(Error::invalid(format!(
                "`input` has {} columns; at most {MAX_COLUMNS} are supported",
                input.columns
            ))
            .with_limit(input.columns as u64, MAX_COLUMNS as u64));
        }
        if let (Some(residual), Some(residual_output)) = (residual, residual_output) {
            residual_output.expect_dtype("residual_output", residual.dtype)?;
        }
        let matrix = |name: &str, tensor: Option<&Tensor>, written: bool| -> Result<Option<Matrix>> {
            let Some(tensor) = tensor else { return Ok(None) };
            tensor.expect_float(name)?;
            if written {
                tensor.expect_writable(name)?;
            } else {
                tensor.expect_readable(name)?;
            }
            let matrix = tensor.as_matrix(name)?;
            matrix.expect_size(name, input.rows, input.columns)?;
            Ok(Some(matrix))
        };
        if let Some(rows) = quantized_output {
            rows.expect_valid("quantized_output")?;
            rows.expect_size("quantized_output", input.rows, input.columns)?;
        }
        Ok(NormRows {
            input,
            residual: matrix("residual", residual, false)?,
            residual_output: matrix("residual_output", residual_output, true)?,
            output: matrix("output", output, true)?,
            quantized_output,
        })
    }

    /// Two tensors of one dtype that hold an element for each column, where they are given.
    pub fn expect_vectors(&self, vectors: [(&str, Option<&Tensor>); 2]) -> Result<()> {
        if let [(name, Some(tensor)), (_, Some(other))] = vectors {
            tensor.expect_dtype(name, other.dtype)?;
        }
        for (name, tensor) in vectors {
            let Some(tensor) = tensor else { continue };
            tensor.expect_float(name)?;
            tensor.expect_shape(name, &[self.input.columns])?;
            tensor.expect_readable(name)?;
        }
        Ok(())
    }

    /// The cost of `operations` for an element, with every matrix read or written once.
    pub fn cost(&self, operations: f64) -> Cost {
        let elements = (self.input.rows * self.input.columns) as f64;
        let matrices = [Some(self.input), self.residual, self.residual_output, self.output];
        let width: usize = matrices.iter().flatten().map(|matrix| matrix.dtype.size()).sum();
        let quantized = self.quantized_output.map_or(0.0, |rows| rows.bytes());
        Cost { operations: elements * operations, bytes: elements * width as f64 + quantized }
    }
}
