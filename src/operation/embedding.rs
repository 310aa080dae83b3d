//! `embedding`: output[t] = table[tokens[t]] · scale, a gather of rows, in batches from a part of the table each.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embedding {
    /// i32 [T], contiguous, or [batches, T / batches], of which rows are.
    pub tokens: Tensor,
    /// [vocabulary, width] of any encoding; with batches [batches · vocabulary, width] of floats.
    pub table: WeightView,
    pub scale: f32,
    /// [T, width]
    pub output: Matrix,
}

impl Embedding {
    pub fn new(tokens: Tensor, table: WeightView, scale: f32, output: Tensor) -> Result<Embedding> {
        tokens.expect_dtype("tokens", DType::I32)?;
        if tokens.rank != 2 {
            tokens.expect_rank("tokens", 1)?;
        }
        tokens.expect_readable("tokens")?;
        output.expect_float("output")?;
        output.expect_writable("output")?;
        if table.gated {
            return Err(Error::invalid("a gated weight has interleaved rows and cannot be an embedding table"));
        }
        if !table.order.is_null() {
            return Err(Error::invalid("a weight whose columns are in another order cannot be an embedding table"));
        }
        if !scale.is_finite() {
            return Err(Error::invalid(format!("scale is {scale}; a finite value is needed")));
        }
        tokens.expect_apart("tokens", "output", &output)?;
        let output = output.as_matrix("output")?;
        if tokens.rank == 2 && (!table.encoding.is_float() || !table.rows.is_multiple_of(tokens.shape[0].max(1))) {
            return Err(Error::invalid(format!(
                "{} batches of tokens need a table of floats whose rows they divide; this one has {} of {}",
                tokens.shape[0], table.rows, table.encoding
            )));
        }
        output.expect_size("output", tokens.shape[0] * tokens.shape[1], table.columns)?;
        expect_extent("the number of tokens", output.rows)?;
        Ok(Embedding { tokens, table, scale, output })
    }

    pub fn batches(&self) -> usize {
        match self.tokens.rank {
            2 => self.tokens.shape[0],
            _ => 1,
        }
    }

    /// Of a batch, all of which have as many.
    pub fn vocabulary(&self) -> usize {
        self.table.rows / self.batches().max(1)
    }

    pub fn tokens_of_a_batch(&self) -> usize {
        self.output.rows / self.batches().max(1)
    }

    /// From one batch's tokens to the next's.
    pub fn token_stride(&self) -> usize {
        match self.tokens.rank {
            2 => self.tokens.strides[0],
            _ => 0,
        }
    }

    /// Where the number of row `t` lies among the tokens, and which row of the table has number 0 there.
    pub fn place_of(&self, t: usize) -> (usize, usize) {
        let (batch, at) = (t / self.tokens_of_a_batch(), t % self.tokens_of_a_batch());
        (batch * self.token_stride() + at, batch * self.vocabulary())
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("tokens", Some(&self.tokens));
        visit.read_weight("table", &self.table);
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.output.rows * self.output.columns) as f64;
        let read = self.output.rows * self.table.encoding.bytes(self.output.columns);
        let bytes = read as f64 + elements * self.output.dtype.size() as f64 + self.output.rows as f64 * 4.0;
        Cost { operations: elements, bytes }
    }
}
