//! `rms_norm`: root-mean-square normalisation with the residual additions around it in one pass.
//!
//! norm(x, w) = x · rsqrt(mean(x²) + ε) · (offset + w), Zhang and Sennrich 2019; Gemma stores w with offset 1.
//!
//! b = post_weight ? norm(input, post_weight) : input
//! s = residual ? residual + b : b, written to residual_output if given
//! output = norm(s, weight), if given
//!
//! Llama and Gemma 1 use it without `post_weight`; Gemma 2 and 3 normalise the branch before it joins the residual
//! stream, and the next layer's norm follows at once. All of it is f32 inside, with one rounding at each store.

use super::{expect_extent, expect_finite_positive, expect_weight_offset, Cost};
use crate::error::{Error, Result};
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy)]
pub struct RmsNorm {
    pub input: Matrix,
    pub post_weight: Option<Tensor>,
    pub residual: Option<Matrix>,
    pub residual_output: Option<Matrix>,
    pub weight: Option<Tensor>,
    pub output: Option<Matrix>,
    pub epsilon: f32,
    pub weight_offset: f32,
}

/// The tensors of a call before validation; `None` where the caller gave none.
#[derive(Debug, Clone, Copy)]
pub struct RmsNormTensors {
    pub input: Tensor,
    pub post_weight: Option<Tensor>,
    pub residual: Option<Tensor>,
    pub residual_output: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub output: Option<Tensor>,
}

/// The kernels keep one row in the registers of one block.
pub const MAX_COLUMNS: usize = 65_536;

impl RmsNorm {
    pub fn new(tensors: RmsNormTensors, epsilon: f32, weight_offset: f32) -> Result<RmsNorm> {
        let RmsNormTensors { input, post_weight, residual, residual_output, weight, output } = tensors;
        if residual_output.is_none() && output.is_none() {
            return Err(Error::invalid("rms_norm needs `output`, `residual_output` or both"));
        }
        expect_finite_positive("epsilon", epsilon)?;
        expect_weight_offset(weight_offset)?;
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
        if let (Some(post_weight), Some(weight)) = (post_weight, weight) {
            post_weight.expect_dtype("post_weight", weight.dtype)?;
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
        Ok(RmsNorm {
            input,
            post_weight: vector("post_weight", post_weight)?,
            residual: matrix("residual", residual, false)?,
            residual_output: matrix("residual_output", residual_output, true)?,
            weight: vector("weight", weight)?,
            output: matrix("output", output, true)?,
            epsilon,
            weight_offset,
        })
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.input.rows * self.input.columns) as f64;
        let matrices = [Some(self.input), self.residual, self.residual_output, self.output];
        let width: usize = matrices.iter().flatten().map(|matrix| matrix.dtype.size()).sum();
        let norms = self.post_weight.is_some() as usize + self.output.is_some() as usize;
        Cost { operations: elements * 4.0 * norms as f64, bytes: elements * width as f64 }
    }
}
