//! Layer normalisation with the residual addition in front of it; the formulas are in `ops/layer_norm.rs`.

use super::row::{for_rows, vectors, Row};
use super::simd::{dispatch, Kernel, Simd};
use super::threads::{Scratch, Threads};
use crate::ops::layer_norm::LayerNorm;
use crate::tensor::Tensor;
use std::ops::Range;

pub fn layer_norm(threads: &Threads, op: &LayerNorm) {
    for_rows(threads, op.input.rows, op.input.columns, |rows, scratch| {
        // SAFETY: the descriptor is validated, and tasks read and write different rows.
        unsafe { dispatch(Rows { op, rows, scratch }) }
    });
}

struct Rows<'a> {
    op: &'a LayerNorm,
    rows: Range<usize>,
    /// Holds one row, at most `ops::rms_norm::MAX_COLUMNS`.
    scratch: &'a mut Scratch,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows, scratch } = self;
        let sum = Row::vector(&Tensor::of(&mut scratch.floats()[..op.input.columns], &[op.input.columns]));
        for row in rows {
            one_row::<S>(op, row, sum);
        }
    }
}

#[inline(always)]
unsafe fn one_row<S: Simd>(op: &LayerNorm, row: usize, sum: Row) {
    let columns = op.input.columns;
    let input = Row::of(&op.input, row);
    let residual = op.residual.map(|residual| Row::of(&residual, row));
    let residual_output = op.residual_output.map(|output| Row::of(&output, row));
    // The residual sum, kept in f32 for the norm.
    let mut total = S::zero();
    for (at, lanes) in vectors::<S>(columns) {
        let mut value = input.load::<S>(at, lanes);
        if let Some(residual) = residual {
            value = S::add(residual.load::<S>(at, lanes), value);
        }
        if let Some(output) = residual_output {
            output.store::<S>(at, value, lanes);
        }
        sum.store::<S>(at, value, lanes);
        total = S::add(total, value);
    }
    let Some(output) = op.output else { return };
    let output = Row::of(&output, row);
    // The variance is that of the differences, without the cancellation of E[s²] − mean².
    let mean = S::splat(S::sum(total) / columns as f32);
    let mut squares = S::zero();
    for (at, lanes) in vectors::<S>(columns) {
        let difference = S::first(lanes, S::sub(sum.load::<S>(at, lanes), mean), S::zero());
        squares = S::fma(difference, difference, squares);
    }
    let inverse = S::splat(1.0 / (S::sum(squares) / columns as f32 + op.epsilon).sqrt());
    for (at, lanes) in vectors::<S>(columns) {
        let mut value = S::mul(S::sub(sum.load::<S>(at, lanes), mean), inverse);
        if let Some(weight) = op.weight {
            value = S::mul(value, Row::vector(&weight).load::<S>(at, lanes));
        }
        if let Some(bias) = op.bias {
            value = S::add(value, Row::vector(&bias).load::<S>(at, lanes));
        }
        output.store::<S>(at, value, lanes);
    }
}
