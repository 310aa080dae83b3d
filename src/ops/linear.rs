//! `linear`: y = activation(x · Wᵀ + bias), and its gated form y = activation(gate) · up over interleaved rows of W.

use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// [M, K]
    pub input: Matrix,
    /// [N, K] of any encoding; gated: rows 2i and 2i+1 are row i of gate and of up. A float weight has the input's dtype
    /// unless that is F32.
    pub weight: WeightView,
    /// [N]
    pub bias: Option<Tensor>,
    pub activation: Activation,
    /// [M, N], gated [M, N/2]
    pub output: Matrix,
}

impl Linear {
    pub fn new(
        input: Tensor,
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        output: Tensor,
    ) -> Result<Linear> {
        let input = expect_product(input, &weight, bias, output)?;
        let output = output.as_matrix("output")?;
        output.expect_size("output", input.rows, weight.output_columns())?;
        Ok(Linear { input, weight, bias, activation, output })
    }

    pub fn cost(&self) -> Cost {
        product_cost(&self.input, &self.weight, self.weight.rows, &self.output)
    }
}

/// What products with a weight ask of their tensors, sizes of the output apart.
pub(super) fn expect_product(
    input: Tensor,
    weight: &WeightView,
    bias: Option<Tensor>,
    output: Tensor,
) -> Result<Matrix> {
    input.expect_float("input")?;
    input.expect_readable("input")?;
    if let Some(dtype) = weight.dtype().filter(|&dtype| dtype != input.dtype && input.dtype != DType::F32) {
        return Err(Error::invalid(format!(
            "tensor `input` has dtype {}; f32 or the weight's {dtype} is needed",
            input.dtype
        )));
    }
    let input = input.as_matrix("input")?;
    expect_terms(("input", input.rows, input.columns), weight, bias, output)?;
    Ok(input)
}

/// The same of all tensors but the input, and that its `rows` and `columns` fit.
pub(super) fn expect_terms(
    (name, rows, columns): (&str, usize, usize),
    weight: &WeightView,
    bias: Option<Tensor>,
    output: Tensor,
) -> Result<()> {
    output.expect_float("output")?;
    output.expect_writable("output")?;
    if columns != weight.columns {
        return Err(Error::invalid(format!(
            "tensor `{name}` has {columns} columns; the weight [{}, {}] needs {}",
            weight.rows, weight.columns, weight.columns
        )));
    }
    if let Some(bias) = bias {
        bias.expect_float("bias")?;
        bias.expect_shape("bias", &[weight.rows])?;
        bias.expect_readable("bias")?;
    }
    expect_extent("the number of input rows", rows)
}

/// With one row of `input` for each of `output`, the weight's `rows` all read once.
pub(super) fn product_cost(input: &Matrix, weight: &WeightView, rows: usize, output: &Matrix) -> Cost {
    let (m, n, k) = (input.rows as f64, rows as f64, weight.columns as f64);
    let bytes = m * k * input.dtype.size() as f64
        + weight.read_bytes() as f64
        + m * output.columns as f64 * output.dtype.size() as f64;
    Cost { operations: 2.0 * m * n * k, bytes }
}
