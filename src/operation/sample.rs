//! `sample`: draws one token a row: temperature, then top-k, then top-p, then the draw.
//!
//! Temperature divides the logits before the softmax. top-k keeps the k largest; top-p keeps the smallest prefix in
//! descending order whose probabilities, renormalised over what top-k kept, reach p, and at least one token. Ties are
//! ordered by index, lowest first. The random number is a pure function of (seed, sequence, position), so that a run
//! can be repeated whatever else the batch holds: Philox4x32-10 (Salmon et al. 2011) with the seed as key and
//! (position, sequence, 0, 0) as counter; u = (first word >> 8) · 2⁻²⁴.

use super::argmax::{check_logits, check_tokens};
use super::Cost;
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};

#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// [B, V]
    pub logits: Matrix,
    pub options: SampleOptions,
    /// i32 [B]; absent: the row number
    pub sequences: Option<Tensor>,
    /// i32 [B]; absent: 0
    pub positions: Option<Tensor>,
    /// i32 [B]
    pub tokens: Tensor,
    /// f32 [B]: the chosen token's probability after temperature and before truncation
    pub probabilities: Option<Tensor>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleOptions {
    /// 0 chooses the largest logit.
    pub temperature: f32,
    /// 0: off
    pub top_k: u32,
    /// 1 or more: off
    pub top_p: f32,
    pub seed: u64,
}

impl Sample {
    pub fn new(
        logits: Tensor,
        options: SampleOptions,
        sequences: Option<Tensor>,
        positions: Option<Tensor>,
        tokens: Tensor,
        probabilities: Option<Tensor>,
    ) -> Result<Sample> {
        if !(options.temperature.is_finite() && options.temperature >= 0.0) {
            return Err(Error::invalid(format!(
                "temperature is {}; a finite value of at least 0 is needed",
                options.temperature
            )));
        }
        if options.top_p.is_nan() || options.top_p <= 0.0 {
            return Err(Error::invalid(format!("top_p is {}; a value above 0 is needed (1: off)", options.top_p)));
        }
        let logits = check_logits(logits)?;
        check_tokens(tokens, logits.rows)?;
        for (name, tensor) in [("sequences", sequences), ("positions", positions)] {
            if let Some(tensor) = tensor {
                tensor.expect_dtype(name, DType::I32)?;
                tensor.expect_shape(name, &[logits.rows])?;
                tensor.expect_readable(name)?;
            }
        }
        if let Some(probabilities) = probabilities {
            probabilities.expect_dtype("probabilities", DType::F32)?;
            probabilities.expect_shape("probabilities", &[logits.rows])?;
            probabilities.expect_writable("probabilities")?;
        }
        Ok(Sample { logits, options, sequences, positions, tokens, probabilities })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("logits", Some(&self.logits));
        visit.read("sequences", self.sequences.as_ref());
        visit.read("positions", self.positions.as_ref());
        visit.write("tokens", Some(&self.tokens));
        visit.write("probabilities", self.probabilities.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.logits.rows * self.logits.columns) as f64;
        Cost {
            operations: elements * 4.0,
            bytes: elements * self.logits.dtype.size() as f64 + self.logits.rows as f64 * 4.0,
        }
    }
}
