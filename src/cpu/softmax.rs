//! exp(s·x − max) / Σ exp(s·x − max) over each row.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::softmax::Softmax;
use crate::simd::{dispatch, math, Kernel, Simd};
use std::ops::Range;

pub fn softmax(threads: &Threads, op: &Softmax) {
    for_rows(threads, op.input.rows, op.input.columns, |rows, _| {
        // SAFETY: the descriptor is validated, and tasks write different rows.
        unsafe { dispatch(Rows { op, rows }) }
    });
}

/// Vectors whose weights are added in f32 before they join the sum: over the 262,144 logits of a Gemma one f32 sum
/// drifts by 1e-5 of its value.
const BLOCK: usize = 64;

struct Rows<'a> {
    op: &'a Softmax,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows } = self;
        let columns = op.input.columns;
        let scale = S::splat(op.scale);
        for row in rows {
            let (input, output) = (Row::of(&op.input, row), Row::of(&op.output, row));
            let max = S::splat(row_max::<S>(input, columns, op.scale));
            let (mut sum, mut block) = (0.0f64, S::zero());
            for (i, (at, lanes)) in vectors::<S>(columns).enumerate() {
                let weight = math::exp::<S>(S::sub(S::mul(input.load::<S>(at, lanes), scale), max));
                block = S::add(block, S::first(lanes, weight, S::zero()));
                if i % BLOCK == BLOCK - 1 {
                    sum += f64::from(S::sum(block));
                    block = S::zero();
                }
            }
            sum += f64::from(S::sum(block));
            // A row of −∞ has no weight at all.
            let inverse = S::splat(if sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 });
            for (at, lanes) in vectors::<S>(columns) {
                let weight = math::exp::<S>(S::sub(S::mul(input.load::<S>(at, lanes), scale), max));
                output.store::<S>(at, S::mul(weight, inverse), lanes);
            }
        }
    }
}

/// The largest of scale · x that is a number; 0 if there is none above −∞.
///
/// # Safety
/// The CPU has `S`; the row is readable.
#[inline(always)]
pub unsafe fn row_max<S: Simd>(row: Row, columns: usize, scale: f32) -> f32 {
    let lowest = S::splat(f32::NEG_INFINITY);
    let mut max = lowest;
    for (at, lanes) in vectors::<S>(columns) {
        let value = S::mul(row.load::<S>(at, lanes), S::splat(scale));
        let value = S::first(lanes, value, lowest);
        max = S::select_less(max, value, value, max);
    }
    let max = S::max_lane(max);
    if max == f32::NEG_INFINITY {
        0.0
    } else {
        max
    }
}
