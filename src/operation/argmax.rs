//! `argmax`: the index of each row's largest value. The lowest index wins ties; NaN never wins unless all are NaN.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Argmax {
    /// [B, V]
    pub logits: Matrix,
    /// i32 [B]
    pub tokens: Tensor,
}

impl Argmax {
    pub fn new(logits: Tensor, tokens: Tensor) -> Result<Argmax> {
        let logits = check_logits(logits)?;
        check_tokens(tokens, logits.rows)?;
        Ok(Argmax { logits, tokens })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("logits", Some(&self.logits));
        visit.write("tokens", Some(&self.tokens));
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.logits.rows * self.logits.columns) as f64;
        Cost { operations: elements, bytes: elements * self.logits.dtype.size() as f64 + self.logits.rows as f64 * 4.0 }
    }
}

pub(super) fn check_logits(logits: Tensor) -> Result<Matrix> {
    logits.expect_float("logits")?;
    logits.expect_readable("logits")?;
    let logits = logits.as_matrix("logits")?;
    if logits.columns == 0 {
        return Err(Error::invalid("tensor `logits` has no columns: there is nothing to choose from"));
    }
    expect_extent("the number of rows", logits.rows)?;
    expect_extent("the number of columns", logits.columns)?;
    Ok(logits)
}

pub(super) fn check_tokens(tokens: Tensor, rows: usize) -> Result<()> {
    tokens.expect_dtype("tokens", DType::I32)?;
    tokens.expect_shape("tokens", &[rows])?;
    tokens.expect_writable("tokens")
}
