//! The index of each row's largest value.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::argmax::Argmax;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::Matrix;

pub fn argmax(threads: &Threads, op: &Argmax) {
    for_rows(threads, op.logits.rows, op.logits.columns, |rows, _| {
        for row in rows {
            // SAFETY: the descriptor is validated; tasks write different tokens.
            unsafe {
                let (_, token) = largest(&op.logits, row);
                op.tokens.data.cast::<i32>().add(row).write(token as i32);
            }
        }
    });
}

/// The largest number of a row and its lowest index; (−∞, 0) for a row of NaN.
///
/// # Safety
/// The row is readable and not empty.
pub unsafe fn largest(logits: &Matrix, row: usize) -> (f32, usize) {
    dispatch(Largest { row: Row::of(logits, row), columns: logits.columns })
}

struct Largest {
    row: Row,
    columns: usize,
}

/// Elements whose maximum is taken together; only the winning block is searched for the index.
const BLOCK: usize = 1024;

impl Kernel for Largest {
    type Output = (f32, usize);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> (f32, usize) {
        let Largest { row, columns } = self;
        let lowest = S::splat(f32::NEG_INFINITY);
        let (mut best, mut block) = (f32::NEG_INFINITY, 0);
        for begin in (0..columns).step_by(BLOCK) {
            let mut max = lowest;
            for (at, lanes) in vectors::<S>(BLOCK.min(columns - begin)) {
                let value = S::first(lanes, row.load::<S>(begin + at, lanes), lowest);
                // A NaN is less than nothing and is passed over.
                max = S::select_less(max, value, value, max);
            }
            let max = S::max_lane(max);
            if max > best {
                (best, block) = (max, begin);
            }
        }
        // Where nothing is above −∞, the first −∞ wins over a NaN; it may be in any block.
        let end = if best == f32::NEG_INFINITY { columns } else { columns.min(block + BLOCK) };
        let index = (block..end).find(|&i| row.get(i) as f32 == best);
        (best, index.unwrap_or(0))
    }
}
