//! Softmax of scores with a mask, ALiBi and sinks, row by row in three passes: the maximum, the sum, the quotients.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::masked_softmax::MaskedSoftmax;
use crate::simd::{dispatch, math, Kernel, Simd};
use crate::tensor::Tensor;
use std::ops::Range;

pub fn masked_softmax(threads: &Threads, op: &MaskedSoftmax) {
    if op.input.is_empty() {
        return;
    }
    let [batch, heads, rows, columns] = op.input.shape;
    for_rows(threads, batch * heads * rows, columns, |rows, _| {
        // SAFETY: the descriptor is validated, and tasks write different rows.
        unsafe { dispatch(Rows { op, rows }) }
    });
}

struct Rows<'a> {
    op: &'a MaskedSoftmax,
    rows: Range<usize>,
}

/// One row of scores.
struct Scores {
    input: Row,
    mask: Option<Row>,
    scale: f32,
    slope: f32,
}

impl Scores {
    /// # Safety
    /// The CPU has `S`, and the rows have these elements.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, at: usize, lanes: usize) -> S::Vector {
        let score = S::mul(self.input.load::<S>(at, lanes), S::splat(self.scale));
        match self.mask {
            Some(mask) => S::add(score, S::mul(mask.load::<S>(at, lanes), S::splat(self.slope))),
            None => score,
        }
    }
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows } = self;
        let [_, heads, height, columns] = op.input.shape;
        for row in rows {
            let (outer, head, inner) = (row / height / heads, row / height % heads, row % height);
            let line = |tensor: &Tensor| {
                let [a, b, c, _] = tensor.strides;
                let [outer, head, inner] = [outer % tensor.shape[0], head % tensor.shape[1], inner % tensor.shape[2]];
                Row::raw(tensor.data, tensor.dtype).skip(outer * a + head * b + inner * c)
            };
            let mask = op.mask.as_ref().map(line);
            let scores = Scores { input: line(&op.input), mask, scale: op.scale, slope: op.slope(head) };
            let output = line(&op.output);

            let sink = op.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks.data.cast::<f32>().add(head).read());
            let lowest = S::splat(f32::NEG_INFINITY);
            let mut max = S::splat(sink);
            for (at, lanes) in vectors::<S>(columns) {
                let value = S::first(lanes, scores.load::<S>(at, lanes), lowest);
                max = S::select_less(max, value, value, max);
            }
            let max = S::max_lane(max);
            let max = if max == f32::NEG_INFINITY { 0.0 } else { max };

            let mut sum = f64::from((sink - max).exp());
            for (at, lanes) in vectors::<S>(columns) {
                let weight = math::exp::<S>(S::sub(scores.load::<S>(at, lanes), S::splat(max)));
                sum += f64::from(S::sum(S::first(lanes, weight, S::zero())));
            }
            let inverse = S::splat(if sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 });
            for (at, lanes) in vectors::<S>(columns) {
                let weight = math::exp::<S>(S::sub(scores.load::<S>(at, lanes), S::splat(max)));
                output.store::<S>(at, S::mul(weight, inverse), lanes);
            }
        }
    }
}
