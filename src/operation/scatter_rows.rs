//! `scatter_rows`: rows go to the places that a tensor of row numbers names.
//!
//! output[i, j, rows[i mod, j mod, t]] = input[i, j, t], rounded to the output's dtype

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor};

/// Four axes each, those in front of the tensors' own with an extent of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScatterRows {
    /// [i, j, t, width]
    pub input: Tensor,
    /// I32 [1, i or a divisor, j or a divisor, t]
    pub rows: Tensor,
    /// [i, j, rows, width]
    pub output: Tensor,
}

impl ScatterRows {
    pub fn new(input: Tensor, rows: Tensor, output: Tensor) -> Result<ScatterRows> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        rows.expect_dtype("rows", DType::I32)?;
        output.expect_float("output")?;
        output.expect_readable("output")?;
        output.expect_elements_apart("output")?;
        if rows.rank > 3 {
            return Err(Error::invalid(format!("tensor `rows` has rank {}; at most 3 is needed", rows.rank)));
        }
        let (input, rows, output) = (input.with_four_axes(), rows.with_four_axes(), output.with_four_axes());
        let [outer, inner, tokens, width] = input.shape;
        output.expect_shape("output", &[outer, inner, output.shape[2], width])?;
        let fits = |extent: usize, of: usize| if extent == 0 { of == 0 } else { of.is_multiple_of(extent) };
        if rows.shape[3] != tokens || !fits(rows.shape[1], outer) || !fits(rows.shape[2], inner) {
            return Err(Error::invalid(format!(
                "tensor `rows` has shape {:?}; [{outer}, {inner}, {tokens}] or divisors of the first two are needed",
                &rows.shape[1..]
            )));
        }
        for (name, extent) in [
            ("the number of rows to write", outer.saturating_mul(inner).saturating_mul(tokens)),
            ("the number of rows", output.shape[2]),
            ("the number of columns", width),
        ] {
            expect_extent(name, extent)?;
        }
        rows.expect_apart("rows", "output", &output)?;
        Ok(ScatterRows { input, rows, output })
    }

    pub fn is_empty(&self) -> bool {
        self.input.is_empty()
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        visit.read("rows", Some(&self.rows));
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let width = self.input.dtype.size() + self.output.dtype.size();
        let bytes = self.input.elements() * width + self.rows.elements() * self.rows.dtype.size();
        Cost { operations: 0.0, bytes: bytes as f64 }
    }
}
