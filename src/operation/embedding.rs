//! `embedding`: output[t] = table[tokens[t]] · scale, a gather of rows.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embedding {
    /// i32, contiguous, `output.rows` of them.
    pub tokens: Tensor,
    /// [vocabulary, width] of any encoding
    pub table: WeightView,
    pub scale: f32,
    /// [T, width]
    pub output: Matrix,
}

impl Embedding {
    pub fn new(tokens: Tensor, table: WeightView, scale: f32, output: Tensor) -> Result<Embedding> {
        tokens.expect_dtype("tokens", DType::I32)?;
        tokens.expect_rank("tokens", 1)?;
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
        output.expect_size("output", tokens.shape[0], table.columns)?;
        expect_extent("the number of tokens", output.rows)?;
        Ok(Embedding { tokens, table, scale, output })
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
