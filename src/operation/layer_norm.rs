//! `layer_norm`: layer normalisation with the residual addition in front of it in one pass.
//!
//! s = residual ? residual + input : input, written to residual_output if given
//! output = (s − mean(s)) · rsqrt(variance(s) + ε) · weight + bias, if given
//!
//! Ba, Kiros and Hinton 2016, with the variance over all columns. All of it is f32 inside, with one rounding at each
//! store.

use super::norm::{NormRows, NormTensors};
use super::Cost;
use crate::error::Result;
use crate::operation::access::Visit;
use crate::tensor::{Matrix, Tensor};

/// `LayerNorm<Tensor>` is a call before validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNorm<T = Matrix> {
    pub input: T,
    pub residual: Option<T>,
    pub residual_output: Option<T>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub output: Option<T>,
    pub epsilon: f32,
}

impl LayerNorm<Tensor> {
    pub fn validated(&self) -> Result<LayerNorm> {
        let &LayerNorm { ref input, weight, bias, epsilon, .. } = self;
        let (residual, residual_output) = (self.residual.as_ref(), self.residual_output.as_ref());
        let output = self.output.as_ref();
        let tensors = NormTensors { input, residual, residual_output, output, quantized_output: None, epsilon };
        let rows = NormRows::new("layer_norm", tensors)?;
        rows.expect_vectors([("bias", bias.as_ref()), ("weight", weight.as_ref())])?;
        let NormRows { input, residual, residual_output, output, .. } = rows;
        Ok(LayerNorm { input, residual, residual_output, weight, bias, output, epsilon })
    }
}

impl LayerNorm {
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("input", Some(&self.input), &["output"]);
        visit.read_before("residual", self.residual.as_ref(), &["residual_output"]);
        visit.read("weight", self.weight.as_ref());
        visit.read("bias", self.bias.as_ref());
        visit.write("residual_output", self.residual_output.as_ref());
        visit.write("output", self.output.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let &LayerNorm { input, residual, residual_output, output, .. } = self;
        NormRows { input, residual, residual_output, output, quantized_output: None }.cost(7.0)
    }
}
