//! The product of a float matrix with a weight, to one float output: what kernels of `linear` are chosen for, whatever
//! stands before and after it.

use super::{expect_extent, Activation};
use crate::error::{Error, Result};
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy)]
pub struct LinearProduct {
    /// [M, K]
    pub input: Matrix,
    /// [N, K] of any encoding; gated: rows 2i and 2i+1 are row i of gate and of up. A float weight has the input's dtype
    /// unless that is F32.
    pub weight: WeightView,
    /// [N]
    pub bias: Option<Tensor>,
    pub activation: Activation,
    /// As `output`, which it may be.
    pub residual: Option<Matrix>,
    /// [M, N], gated [M, N/2]
    pub output: Matrix,
    /// Whether this product may round its input to 8 bits where the executor's choices leave that to products
    /// (`Choices::may_round_input`).
    pub rounds_input: bool,
}

impl LinearProduct {
    pub fn new(
        input: Tensor,
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        output: Tensor,
    ) -> Result<LinearProduct> {
        let input = expect_product(input, &weight, bias, output)?;
        let output = output.as_matrix("output")?;
        output.expect_size("output", input.rows, weight.output_columns())?;
        Ok(LinearProduct { input, weight, bias, activation, residual: None, output, rounds_input: false })
    }

    /// The product with this added, if it is there.
    pub fn with_residual(self, residual: Option<Tensor>) -> Result<LinearProduct> {
        let size = (self.output.rows, self.output.columns);
        let residual = residual.map(|residual| expect_residual(residual, size, Some(&self.output))).transpose()?;
        Ok(LinearProduct { residual, ..self })
    }

    /// `count` rows of the product from `first` on, to an output of as many.
    pub fn part(&self, first: usize, count: usize, output: Matrix) -> LinearProduct {
        let residual = self.residual.map(|residual| residual.part(first, count));
        LinearProduct { input: self.input.part(first, count), residual, output, ..*self }
    }

    /// Whether the product is the result.
    pub fn is_plain(&self) -> bool {
        let epilogue = self.bias.is_some() || self.activation != Activation::None || self.residual.is_some();
        !self.weight.gated && !epilogue
    }
}

/// The residual of a product of this size: apart from its float output or in the place of it.
pub(super) fn expect_residual(
    residual: Tensor,
    (rows, columns): (usize, usize),
    output: Option<&Matrix>,
) -> Result<Matrix> {
    residual.expect_float("residual")?;
    residual.expect_readable("residual")?;
    let residual = residual.as_matrix("residual")?;
    residual.expect_size("residual", rows, columns)?;
    let layout = |matrix: &Matrix| (matrix.dtype, matrix.row_stride);
    let Some(output) = output else { return Ok(residual) };
    if residual.data == output.data && !residual.data.is_null() && layout(&residual) != layout(output) {
        return Err(Error::invalid(format!(
            "tensors `residual` and `output` are the same memory with other elements: {} with rows {} apart and {} with \
             rows {} apart; one dtype and stride is needed",
            residual.dtype, residual.row_stride, output.dtype, output.row_stride
        )));
    }
    Ok(residual)
}

/// What products with a weight ask of their tensors, sizes of the output apart.
pub(super) fn expect_product(
    input: Tensor,
    weight: &WeightView,
    bias: Option<Tensor>,
    output: Tensor,
) -> Result<Matrix> {
    let input = expect_input(input, weight)?;
    output.expect_float("output")?;
    output.expect_writable("output")?;
    expect_weight_terms(("input", input.rows, input.columns), weight, bias)?;
    Ok(input)
}

/// An input of floats of the weight's dtype or F32.
pub(super) fn expect_input(input: Tensor, weight: &WeightView) -> Result<Matrix> {
    input.expect_float("input")?;
    input.expect_readable("input")?;
    if let Some(dtype) = weight.dtype().filter(|&dtype| dtype != input.dtype && input.dtype != DType::F32) {
        return Err(Error::invalid(format!(
            "tensor `input` has dtype {}; f32 or the weight's {dtype} is needed",
            input.dtype
        )));
    }
    input.as_matrix("input")
}

/// An input of `rows` and `columns` that fit the weight, and a bias that does.
pub(super) fn expect_weight_terms(
    (name, rows, columns): (&str, usize, usize),
    weight: &WeightView,
    bias: Option<Tensor>,
) -> Result<()> {
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
