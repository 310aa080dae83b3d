//! `dequantize`: the values of a quantised weight as a float matrix.

use crate::error::{Error, Result};
use crate::tensor::{Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy)]
pub struct Dequantize {
    /// [N, K], quantised
    pub weight: WeightView,
    /// [N, K]: the weight's rows (gated: gate and up alternate), its columns in the order of an input.
    pub output: Matrix,
}

impl Dequantize {
    pub fn new(weight: WeightView, output: Tensor) -> Result<Dequantize> {
        if let Some(dtype) = weight.dtype() {
            return Err(Error::invalid(format!("the weight is {dtype} and needs no dequantising")));
        }
        output.expect_float("output")?;
        output.expect_shape("output", &[weight.rows, weight.columns])?;
        output.expect_writable("output")?;
        Ok(Dequantize { weight, output: output.as_matrix("output")? })
    }
}
