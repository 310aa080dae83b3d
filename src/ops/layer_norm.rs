//! `layer_norm`: layer normalisation with the residual addition in front of it in one pass.
//!
//! s = residual ? residual + input : input, written to residual_output if given
//! output = (s − mean(s)) · rsqrt(variance(s) + ε) · weight + bias, if given
//!
//! Ba, Kiros and Hinton 2016, with the variance over all columns. All of it is f32 inside, with one rounding at each
//! store.

use super::rms_norm::MAX_COLUMNS;
use super::{expect_extent, expect_finite_positive, Cost};
use crate::error::{Error, Result};
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy)]
pub struct LayerNorm {
    pub input: Matrix,
    pub residual: Option<Matrix>,
    pub residual_output: Option<Matrix>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub output: Option<Matrix>,
    pub epsilon: f32,
}

/// The tensors of a call before validation; `None` where the caller gave none.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormTensors {
    pub input: Tensor,
    pub residual: Option<Tensor>,
    pub residual_output: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub output: Option<Tensor>,
}

impl LayerNorm {
    pub fn new(tensors: LayerNormTensors, epsilon: f32) -> Result<LayerNorm> {
        let LayerNormTensors { input, residual, residual_output, weight, bias, output } = tensors;
        if residual_output.is_none() && output.is_none() {
            return Err(Error::invalid("layer_norm needs `output`, `residual_output` or both"));
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
        if let (Some(weight), Some(bias)) = (weight, bias) {
            bias.expect_dtype("bias", weight.dtype)?;
        }
        if let (Some(residual), Some(residual_output)) = (residual, residual_output) {
            residual_output.expect_dtype("residual_output", residual.dtype)?;
        }
        let vector = |name: &str, tensor: Option<Tensor>| -> Result<Option<Tensor>> {
            if let Some(tensor) = tensor {
                tensor.expect_float(name)?;
                tensor.expect_shape(name, &[input.columns])?;
                tensor.expect_readable(name)?;
            }
            Ok(tensor)
        };
        let matrix = |name: &str, tensor: Option<Tensor>, written: bool| -> Result<Option<Matrix>> {
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
        Ok(LayerNorm {
            input,
            residual: matrix("residual", residual, false)?,
            residual_output: matrix("residual_output", residual_output, true)?,
            weight: vector("weight", weight)?,
            bias: vector("bias", bias)?,
            output: matrix("output", output, true)?,
            epsilon,
        })
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.input.rows * self.input.columns) as f64;
        let matrices = [Some(self.input), self.residual, self.residual_output, self.output];
        let width: usize = matrices.iter().flatten().map(|matrix| matrix.dtype.size()).sum();
        Cost { operations: elements * 7.0, bytes: elements * width as f64 }
    }
}
