//! `linear` with a quantised output: the product in f32, a block of rows at a time, then the quantised values of its
//! rows.

use super::linear_quantized_input::{row_values, BLOCK_VALUES};
use super::quantized_rows;
use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::error::Result;
use crate::operation::linear::Linear;
use crate::operation::quantized_rows::QuantizedRows;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{DType, Matrix};
use std::ops::Range;

/// `product` computes the rows from the first one on that its output has, of the operation without its own outputs.
pub fn linear_quantized_output(
    threads: &Threads,
    op: &Linear,
    quantized: &QuantizedRows,
    mut product: impl FnMut(usize, Matrix) -> Result<()>,
) -> Result<()> {
    let (rows, columns) = op.output_size();
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let block = (BLOCK_VALUES / columns).clamp(1, rows);
    let mut values = row_values(block, columns)?;
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        let data = values.as_mut_ptr().cast();
        let values = Matrix { data, dtype: DType::F32, rows: count, columns, row_stride: columns };
        product(first, values)?;
        let output = op.output.map(|output| output.part(first, count));
        let quantized = quantized.part(first, count);
        for_rows(threads, count, columns, |rows, _| {
            // SAFETY: a validated descriptor's rows, of which tasks write different ones.
            unsafe { dispatch(Rows { values, output, quantized, rows }) }
        });
    }
    Ok(())
}

struct Rows {
    values: Matrix,
    output: Option<Matrix>,
    quantized: QuantizedRows,
    rows: Range<usize>,
}

impl Kernel for Rows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { values, output, quantized, rows } = self;
        for row in rows {
            let from = Row::of(&values, row);
            quantized_rows::quantize_row(&quantized, row, from.floats(values.columns));
            let Some(output) = &output else { continue };
            let output = Row::of(output, row);
            for (at, lanes) in vectors::<S>(values.columns) {
                output.store::<S>(at, from.load::<S>(at, lanes), lanes);
            }
        }
    }
}
