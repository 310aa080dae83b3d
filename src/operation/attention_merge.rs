//! `attention_merge`: the attention over all keys, from the results over parts of them.
//!
//! With the parts' outputs Oₚ and lseₚ = ln Σ exp(score), lse = ln Σₚ exp(lseₚ) and O = Σₚ exp(lseₚ − lse) · Oₚ ("flash-decoding",
//! Dao et al. 2023; FlashAttention 2 has the same sum within a kernel). A part that saw no key has lse −∞ and counts nothing,
//! whatever its output holds; where no part saw one, O is 0 and lse −∞. Sums are f32, in the order of the parts.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Heads, Tensor, MAX_VALUE_DIM};

#[derive(Debug, Clone, Copy)]
pub struct AttentionMerge {
    /// [P, T, heads, head_dim]
    pub outputs: Tensor,
    /// f32 [P, T, heads]
    pub lses: Tensor,
    /// [T, heads, head_dim]
    pub output: Heads,
    /// f32 [T, heads], contiguous
    pub lse: Option<Tensor>,
}

impl AttentionMerge {
    pub fn new(outputs: Tensor, lses: Tensor, output: Tensor, lse: Option<Tensor>) -> Result<AttentionMerge> {
        outputs.expect_float("outputs")?;
        outputs.expect_rank("outputs", 4)?;
        outputs.expect_readable("outputs")?;
        let [parts, tokens, heads, head_dim] = outputs.shape;
        if parts == 0 {
            return Err(Error::invalid("`outputs` has no parts; 1 or more are needed"));
        }
        if head_dim == 0 || head_dim > MAX_VALUE_DIM {
            return Err(Error::invalid(format!("head_dim is {head_dim}; 1 to {MAX_VALUE_DIM} is supported"))
                .with_limit(head_dim as u64, MAX_VALUE_DIM as u64));
        }
        expect_extent("the number of parts", parts)?;
        expect_extent("the number of tokens times heads", tokens.saturating_mul(heads))?;
        lses.expect_dtype("lses", DType::F32)?;
        lses.expect_shape("lses", &[parts, tokens, heads])?;
        lses.expect_readable("lses")?;
        output.expect_shape("output", &[tokens, heads, head_dim])?;
        output.expect_writable("output")?;
        let output = Heads::new("output", output, tokens, head_dim)?;
        super::attention::check_lse(lse, tokens, heads)?;
        Ok(AttentionMerge { outputs, lses, output, lse })
    }

    pub fn parts(&self) -> usize {
        self.outputs.shape[0]
    }

    /// The parts' outputs as rows of heads: of part `part`.
    pub fn part(&self, part: usize) -> Heads {
        let Tensor { data, dtype, shape, strides, .. } = self.outputs;
        Heads {
            data: data.wrapping_byte_add(part * strides[0] * dtype.size()),
            dtype,
            tokens: shape[1],
            heads: shape[2],
            head_dim: shape[3],
            token_stride: strides[1],
            head_stride: strides[2],
        }
    }

    pub fn is_empty(&self) -> bool {
        self.output.tokens == 0 || self.output.heads == 0
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("outputs", Some(&self.outputs));
        visit.read("lses", Some(&self.lses));
        visit.write("output", Some(&self.output));
        visit.write("lse", self.lse.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let rows = (self.output.tokens * self.output.heads) as f64;
        let (parts, head_dim) = (self.parts() as f64, self.output.head_dim as f64);
        let read = parts * (head_dim * self.outputs.dtype.size() as f64 + DType::F32.size() as f64);
        let sums = if self.lse.is_some() { DType::F32.size() as f64 } else { 0.0 };
        Cost {
            operations: rows * parts * (2.0 * head_dim + 3.0),
            bytes: rows * (read + head_dim * self.output.dtype.size() as f64 + sums),
        }
    }
}
