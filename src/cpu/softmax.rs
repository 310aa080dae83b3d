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

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &Softmax) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        for row in 0..op.input.rows {
            let scaled: Vec<f64> =
                (0..op.input.columns).map(|i| Row::of(&op.input, row).get(i) * f64::from(op.scale)).collect();
            let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
            let sum: f64 = scaled.iter().map(|x| (x - shift).exp()).sum();
            for (i, x) in scaled.iter().enumerate() {
                Row::of(&op.output, row).set(i, if sum == 0.0 { 0.0 } else { (x - shift).exp() / sum });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn rows_match_the_reference() {
        let inf = f32::INFINITY;
        at_every_level(|level| {
            for (dtype, columns, scale) in
                [(DType::F32, 1, 1.0), (DType::F32, 5, -3.0), (DType::Bf16, 1000, 20.0), (DType::F16, 257, 0.5)]
            {
                let mut values = Buffer::random(dtype, 7 * columns, 5).values();
                values[0] = -inf;
                values[columns..2 * columns].fill(-inf);
                values[2 * columns] = f32::NAN;
                values[3 * columns..4 * columns].fill(3e4);
                let mut input = Buffer::from(dtype, &values);
                let (mut output, mut expected) =
                    (Buffer::poisoned(DType::F32, 7 * columns), Buffer::poisoned(DType::F32, 7 * columns));
                let mut op =
                    |y: &mut Buffer| Softmax::new(input.tensor(&[7, columns]), y.tensor(&[7, columns]), scale).unwrap();
                softmax(threads(), &op(&mut output));
                reference(&op(&mut expected));
                if scale > 0.0 {
                    assert_close(&output, &expected, &format!("{level:?} {dtype} {columns}"));
                    assert!(output.values()[columns..2 * columns].iter().all(|&y| y == 0.0));
                    assert!(output.values()[2 * columns..3 * columns].iter().all(|y| y.is_nan()));
                }
            }
        });
    }
}
