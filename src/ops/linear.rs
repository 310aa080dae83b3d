//! `linear`: y = activation(x · Wᵀ + bias) + residual, and its gated form y = activation(gate) · up + residual over
//! interleaved rows of W.

use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
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
    /// As `output`, which it may be.
    pub residual: Option<Matrix>,
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
        Ok(Linear { input, weight, bias, activation, residual: None, output })
    }

    /// The same with this added, if it is there.
    pub fn with_residual(self, residual: Option<Tensor>) -> Result<Linear> {
        let residual = residual.map(|residual| expect_residual(residual, &self.output)).transpose()?;
        Ok(Linear { residual, ..self })
    }

    /// `count` rows of the product from `first` on, to an output of as many.
    pub fn part(&self, first: usize, count: usize, output: Matrix) -> Linear {
        let residual = self.residual.map(|residual| residual.part(first, count));
        Linear { input: self.input.part(first, count), residual, output, ..*self }
    }

    /// Whether the product is the result.
    pub fn is_plain(&self) -> bool {
        let epilogue = self.bias.is_some() || self.activation != Activation::None || self.residual.is_some();
        !self.weight.gated && !epilogue
    }

    /// What a product with this weight reads beside its input.
    pub(super) fn visit_terms(&self, visit: &mut impl Visit) {
        visit.read_weight("weight", &self.weight);
        visit.read("bias", self.bias.as_ref());
        visit.read_before("residual", self.residual.as_ref(), &["output"]);
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        self.visit_terms(visit);
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let Cost { operations, bytes } = product_cost(&self.input, &self.weight, self.weight.rows, &self.output);
        Cost { operations, bytes: bytes + residual_bytes(self.residual) }
    }
}

/// The residual of a product with this output: of its size, apart from it or in its place.
pub(super) fn expect_residual(residual: Tensor, output: &Matrix) -> Result<Matrix> {
    residual.expect_float("residual")?;
    residual.expect_readable("residual")?;
    let residual = residual.as_matrix("residual")?;
    residual.expect_size("residual", output.rows, output.columns)?;
    let layout = |matrix: &Matrix| (matrix.dtype, matrix.row_stride);
    if residual.data == output.data && !residual.data.is_null() && layout(&residual) != layout(output) {
        return Err(Error::invalid(format!(
            "tensors `residual` and `output` are the same memory with other elements: {} with rows {} apart and {} with \
             rows {} apart; one dtype and stride is needed",
            residual.dtype, residual.row_stride, output.dtype, output.row_stride
        )));
    }
    Ok(residual)
}

pub(super) fn residual_bytes(residual: Option<Matrix>) -> f64 {
    residual.map_or(0.0, |residual| (residual.rows * residual.columns * residual.dtype.size()) as f64)
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
