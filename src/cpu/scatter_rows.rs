//! Rows to the places that row numbers name.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::error::{Error, Result};
use crate::operation::scatter_rows::ScatterRows;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::Tensor;
use std::ops::Range;

/// An error names the first row that is outside the output; nothing is written then.
pub fn scatter_rows(threads: &Threads, op: &ScatterRows) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let [outer, inner, tokens, width] = op.input.shape;
    let count = outer * inner * tokens;
    for row in 0..count {
        // SAFETY: a validated descriptor's row numbers.
        let (to, rows) = (unsafe { place(op, row) }, op.output.shape[2]);
        if to < 0 || to as usize >= rows {
            return Err(Error::invalid(format!("row {row} goes to row {to}; the output has {rows} rows"))
                .with_limit(to.max(0) as u64, rows as u64));
        }
    }
    for_rows(threads, count, width, |rows, _| {
        // SAFETY: the descriptor is validated, and so is where rows go. Tasks write different rows unless the caller names one
        // row twice, of which he then gets a mixture.
        unsafe { dispatch(Rows { op, rows }) }
    });
    Ok(())
}

/// Places on the three axes in front of the columns.
fn split(op: &ScatterRows, row: usize) -> [usize; 3] {
    let [_, inner, tokens, _] = op.input.shape;
    [row / tokens / inner, row / tokens % inner, row % tokens]
}

/// # Safety
/// The descriptor is validated, and the row is one of its input's.
unsafe fn place(op: &ScatterRows, row: usize) -> i32 {
    let [outer, inner, token] = split(op, row);
    let Tensor { data, shape, strides, .. } = op.rows;
    let at = outer % shape[1] * strides[1] + inner % shape[2] * strides[2] + token * strides[3];
    data.cast::<i32>().add(at).read()
}

struct Rows<'a> {
    op: &'a ScatterRows,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows } = self;
        for row in rows {
            let [outer, inner, token] = split(op, row);
            let line = |tensor: &Tensor, row: usize| {
                let [first, second, third, _] = tensor.strides;
                Row::raw(tensor.data, tensor.dtype).skip(outer * first + inner * second + row * third)
            };
            let (from, to) = (line(&op.input, token), line(&op.output, place(op, row) as usize));
            for (at, lanes) in vectors::<S>(op.input.shape[3]) {
                to.store::<S>(at, from.load::<S>(at, lanes), lanes);
            }
        }
    }
}
