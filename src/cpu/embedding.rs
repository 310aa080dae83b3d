//! output[t] = table[tokens[t]] · scale.

use super::row::{for_rows, integers, vectors, Row};
use super::simd::{dispatch, Kernel, Simd};
use super::threads::Threads;
use crate::error::{Error, Result};
use crate::ops::embedding::Embedding;
use std::ops::Range;

/// An error names the first token that is not in the table; nothing is written then.
pub fn embedding(threads: &Threads, op: &Embedding) -> Result<()> {
    check(op)?;
    for_rows(threads, op.output.rows, op.output.columns, |rows, _| {
        // SAFETY: the descriptor is validated, the tokens are in the table, and tasks write different rows.
        unsafe { dispatch(Gather { op, rows }) }
    });
    Ok(())
}

fn check(op: &Embedding) -> Result<()> {
    // SAFETY: a validated descriptor's tokens.
    let tokens = unsafe { integers(&op.tokens) };
    let vocabulary = op.table.rows;
    match tokens.iter().position(|&token| token < 0 || token as usize >= vocabulary) {
        None => Ok(()),
        Some(t) => Err(Error::invalid(format!("tokens[{t}] is {}; the table has {vocabulary} rows", tokens[t]))
            .with_limit(tokens[t].max(0) as u64, vocabulary as u64)),
    }
}

struct Gather<'a> {
    op: &'a Embedding,
    rows: Range<usize>,
}

impl Kernel for Gather<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Gather { op, rows } = self;
        let tokens = integers(&op.tokens);
        let scale = S::splat(op.scale);
        for t in rows {
            let from = Row::raw(op.table.data, op.table.dtype).skip(tokens[t] as usize * op.table.row_stride);
            let to = Row::of(&op.output, t);
            for (at, lanes) in vectors::<S>(op.output.columns) {
                to.store::<S>(at, S::mul(from.load::<S>(at, lanes), scale), lanes);
            }
        }
    }
}

/// The formula, for tensors in host memory and tokens within the table.
pub fn reference(op: &Embedding) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        for (t, &token) in integers(&op.tokens).iter().enumerate() {
            let row = Row::raw(op.table.data, op.table.dtype).skip(token as usize * op.table.row_stride);
            for i in 0..op.output.columns {
                Row::of(&op.output, t).set(i, row.get(i) * f64::from(op.scale));
            }
        }
    }
}
