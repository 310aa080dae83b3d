//! `rms_norm`: root-mean-square normalisation with the residual additions around it in one pass.
//!
//! norm(x, w) = x · rsqrt(mean(x²) + ε) · (offset + w), Zhang and Sennrich 2019; Gemma stores w with offset 1.
//!
//! b = post_weight ? norm(input, post_weight) : input
//! s = residual ? residual + b : b, written to residual_output if given
//! output = norm(s, weight), if given; quantized_output = the same in 8 bits, if given
//!
//! Llama and Gemma 1 use it without `post_weight`; Gemma 2 and 3 normalise the branch before it joins the residual
//! stream, and the next layer's norm follows at once. All of it is f32 inside, with one rounding at each store.

use super::norm::{NormRows, NormTensors};
use super::quantized_rows::QuantizedRows;
use super::{expect_weight_offset, Cost};
use crate::error::Result;
use crate::operation::access::Visit;
use crate::tensor::{Matrix, Tensor};

/// `RmsNorm<Tensor>` is a call before validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm<T = Matrix> {
    pub input: T,
    pub post_weight: Option<Tensor>,
    pub residual: Option<T>,
    pub residual_output: Option<T>,
    pub weight: Option<Tensor>,
    pub output: Option<T>,
    /// The unrounded values that `output` rounds, quantised.
    pub quantized_output: Option<QuantizedRows>,
    pub epsilon: f32,
    pub weight_offset: f32,
}

impl RmsNorm<Tensor> {
    pub fn validated(&self) -> Result<RmsNorm> {
        let &RmsNorm { ref input, quantized_output, epsilon, post_weight, weight, weight_offset, .. } = self;
        let (residual, residual_output) = (self.residual.as_ref(), self.residual_output.as_ref());
        let output = self.output.as_ref();
        let tensors = NormTensors { input, residual, residual_output, output, quantized_output, epsilon };
        let rows = NormRows::new("rms_norm", tensors)?;
        expect_weight_offset(weight_offset)?;
        rows.expect_vectors([("post_weight", self.post_weight.as_ref()), ("weight", self.weight.as_ref())])?;
        let NormRows { input, residual, residual_output, output, .. } = rows;
        Ok(RmsNorm {
            input,
            post_weight,
            residual,
            residual_output,
            weight,
            output,
            quantized_output,
            epsilon,
            weight_offset,
        })
    }
}

impl RmsNorm {
    /// Whether norm(s, weight) is wanted in some form.
    pub fn normalises_sum(&self) -> bool {
        self.output.is_some() || self.quantized_output.is_some()
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("input", Some(&self.input), &["output", "residual_output"]);
        visit.read("post_weight", self.post_weight.as_ref());
        visit.read_before("residual", self.residual.as_ref(), &["residual_output", "output"]);
        visit.read("weight", self.weight.as_ref());
        visit.write("residual_output", self.residual_output.as_ref());
        visit.write("output", self.output.as_ref());
        visit.write_quantized("quantized_output", self.quantized_output.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let &RmsNorm { input, residual, residual_output, output, quantized_output, .. } = self;
        let norms = self.post_weight.is_some() as usize + self.normalises_sum() as usize;
        NormRows { input, residual, residual_output, output, quantized_output }.cost(4.0 * norms as f64)
    }
}
