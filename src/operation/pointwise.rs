//! `pointwise`: a function of one or two tensors, element by element, over four axes with any strides, repeating what is
//! smaller than the output.
//!
//! output[i] = f(input[i mod extents], second[i mod extents])

use super::{expect_extent, Cost};
use crate::error::{numbered, Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor, MAX_RANK};

numbered! {
    /// `nvb_pointwise_code` of csrc/pointwise/pointwise.h; the numbers are `NVB_POINTWISE_*` of the C ABI too.
    pub enum Function: u32 {
        /// x, rounded to the output's dtype
        Copy = 1,
        Add = 2,
        Subtract = 3,
        Multiply = 4,
        Divide = 5,
        /// x · alpha + beta
        Scale = 6,
        /// min(max(x, alpha), beta)
        Clamp = 7,
        Negate = 8,
        Absolute = 9,
        Square = 10,
        SquareRoot = 11,
        Exponential = 12,
        Tanh = 13,
        Sigmoid = 14,
        /// max(x, 0)
        Relu = 15,
        Silu = 16,
        GeluTanh = 17,
        GeluErf = 18,
        /// x · sigmoid(1.702 · x)
        GeluSigmoid = 19,
    }
}

impl Function {
    pub fn is_binary(self) -> bool {
        matches!(self, Function::Add | Function::Subtract | Function::Multiply | Function::Divide)
    }
}

/// Four axes, those in front of the tensor's own with an extent of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pointwise {
    pub function: Function,
    pub alpha: f32,
    pub beta: f32,
    pub input: Tensor,
    /// Of what is binary.
    pub second: Option<Tensor>,
    pub output: Tensor,
}

impl Pointwise {
    /// The tensors may have any strides.
    pub fn new(
        (function, alpha, beta): (Function, f32, f32),
        input: Tensor,
        second: Option<Tensor>,
        output: Tensor,
    ) -> Result<Pointwise> {
        let moves = function == Function::Copy && input.dtype == DType::I32 && output.dtype == DType::I32;
        if !moves {
            input.expect_float("input")?;
            output.expect_float("output")?;
        }
        output.expect_elements_apart("output")?;
        match (function.is_binary(), &second) {
            (true, None) => return Err(Error::invalid("`second` is missing: the function takes two tensors")),
            (false, Some(_)) => return Err(Error::invalid("`second` is given to a function of one tensor")),
            (true, Some(second)) => second.expect_float("second")?,
            (false, None) => {}
        }
        let output = output.with_four_axes();
        for (name, operand) in [("input", Some(input)), ("second", second)] {
            let Some(operand) = operand else { continue };
            let repeats = |axis: usize| match operand.with_four_axes().shape[axis] {
                0 => output.shape[axis] == 0,
                extent => output.shape[axis].is_multiple_of(extent),
            };
            if !(0..MAX_RANK).all(repeats) {
                return Err(Error::invalid(format!(
                    "tensor `{name}` has shape {:?}, which does not repeat to the output's {:?}",
                    operand.shape(),
                    output.shape()
                )));
            }
        }
        for extent in output.shape {
            expect_extent("an extent of the output", extent)?;
        }
        let finite = match function {
            Function::Scale => alpha.is_finite() && beta.is_finite(),
            // Either may be infinite: a bound that bounds nothing.
            Function::Clamp => alpha <= beta,
            _ => true,
        };
        if !finite {
            return Err(Error::invalid(format!(
                "alpha and beta are {alpha} and {beta}; finite numbers are needed, and of a clamp no bounds that cross"
            )));
        }
        let (input, second) = (input.with_four_axes(), second.map(|second| second.with_four_axes()));
        Ok(Pointwise { function, alpha, beta, input, second, output })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        for (name, operand) in [("input", Some(self.input)), ("second", self.second)] {
            let Some(operand) = operand else { continue };
            let in_place = operand.shape == self.output.shape
                && operand.strides == self.output.strides
                && operand.dtype == self.output.dtype;
            match in_place {
                true => visit.read_before(name, Some(&operand), &["output"]),
                false => visit.read(name, Some(&operand)),
            }
        }
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let bytes = |tensor: &Tensor| (tensor.elements() * tensor.dtype.size()) as f64;
        let operations = if self.function == Function::Copy { 0.0 } else { self.output.elements() as f64 };
        Cost { operations, bytes: bytes(&self.input) + self.second.as_ref().map_or(0.0, bytes) + bytes(&self.output) }
    }
}
