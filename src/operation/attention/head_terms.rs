//! What each query head adds to its scores: a learned logit that takes weight and has no value (an attention sink), and a
//! slope by the distance of a key (ALiBi).

use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor};

/// f32 [query_heads] each, contiguous.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadTerms {
    /// exp(sink) is a term of the sum that weights are divided by, and of the lse.
    pub sinks: Option<Tensor>,
    /// slope · |q − k| is taken from the capped score.
    pub slopes: Option<Tensor>,
}

impl HeadTerms {
    /// `outputs`: what the call writes.
    pub(super) fn new(
        [sinks, slopes]: [Option<Tensor>; 2],
        query_heads: usize,
        outputs: [Option<Tensor>; 2],
    ) -> Result<HeadTerms> {
        for (name, tensor) in [("sinks", sinks), ("alibi_slopes", slopes)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(name, DType::F32)?;
            tensor.expect_shape(name, &[query_heads])?;
            tensor.expect_readable(name)?;
            if !tensor.is_contiguous() {
                return Err(Error::invalid(format!("tensor `{name}` is strided; a contiguous one is needed")));
            }
            for (written, output) in ["output", "lse"].into_iter().zip(&outputs) {
                output.iter().try_for_each(|output| tensor.expect_apart(name, written, output))?;
            }
        }
        Ok(HeadTerms { sinks, slopes })
    }

    /// A head's sink, for an executor that computes on the host.
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| of_head(sinks, head))
    }

    /// A head's slope, likewise.
    pub fn slope(&self, head: usize) -> Option<f32> {
        self.slopes.map(|slopes| of_head(slopes, head))
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("sinks", self.sinks.as_ref());
        visit.read("alibi_slopes", self.slopes.as_ref());
    }

    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        [&mut self.sinks, &mut self.slopes].into_iter().flatten()
    }
}

fn of_head(tensor: Tensor, head: usize) -> f32 {
    // SAFETY: a validated tensor of f32 with an entry for each head.
    unsafe { tensor.data.cast::<f32>().add(head).read_unaligned() }
}
