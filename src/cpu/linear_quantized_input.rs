//! `linear` of an input in 8 bits: the input as f32, a block of rows at a time, and the product with that.

use super::quantized_rows;
use crate::error::{Error, Result, Status};
use crate::operation::linear_product::LinearProduct;
use crate::operation::quantized_rows::QuantizedRows;
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

/// `product` computes one block of the product of these rows, whose shape `op` has in the place of its input. The sums of a
/// row do not depend on the rows beside it, so neither on the blocks.
pub fn linear_quantized_input(
    input: &QuantizedRows,
    op: &LinearProduct,
    mut product: impl FnMut(&LinearProduct),
) -> Result<()> {
    let &QuantizedRows { rows, columns, .. } = input;
    let block = (BLOCK_VALUES / columns.max(1)).clamp(1, rows.max(1));
    let mut values = row_values(block, columns)?;
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        // SAFETY: rows of a validated descriptor, and a block holds as many.
        unsafe { quantized_rows::dequantize(input, first..first + count, &mut values) };
        let data = values.as_mut_ptr().cast();
        let input = Matrix { data, dtype: DType::F32, rows: count, columns, row_stride: columns };
        product(&LinearProduct { input, ..op.part(first, count, op.output.part(first, count)) });
    }
    Ok(())
}
