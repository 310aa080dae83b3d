//! `linear` of an input in 8 bits: the input as f32, a block of rows at a time, and the product with that.

use super::quantized_rows;
use crate::error::{Error, Result, Status};
use crate::ops::linear::Linear;
use crate::ops::linear_codes::LinearCodes;
use crate::tensor::{DType, Matrix};

/// Values of a block; the weight is read once a block.
pub const BLOCK_VALUES: usize = 8 << 20;

/// Memory for the values of a block of rows.
pub fn row_values(rows: usize, columns: usize) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    values.try_reserve_exact(rows * columns).map_err(|_| {
        Error::new(Status::OutOfMemory, format!("{rows} rows of {columns} values do not fit in memory"))
    })?;
    values.resize(rows * columns, 0f32);
    Ok(values)
}

/// `product` computes one block. The sums of a row do not depend on the rows beside it, so neither on the blocks.
pub fn linear_codes(op: &LinearCodes, mut product: impl FnMut(&Linear) -> Result<()>) -> Result<()> {
    let (rows, columns) = (op.input.rows, op.input.columns);
    let block = (BLOCK_VALUES / columns.max(1)).clamp(1, rows.max(1));
    let mut values = row_values(block, columns)?;
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        // SAFETY: rows of a validated descriptor, and a block holds as many.
        unsafe { quantized_rows::dequantize(&op.input, first..first + count, &mut values) };
        let data = values.as_mut_ptr().cast();
        let input = Matrix { data, dtype: DType::F32, rows: count, columns, row_stride: columns };
        let part = op.part(first, count, op.output.part(first, count));
        product(&part.with_input(input))?;
    }
    Ok(())
}
