//! The merge of attention's partial results; the formula is in `operation/attention_merge.rs`.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::attention_merge::AttentionMerge;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{DType, MAX_VALUE_DIM};
use std::ops::Range;

pub fn attention_merge(threads: &Threads, op: &AttentionMerge) {
    if op.is_empty() {
        return;
    }
    for_rows(threads, op.output.tokens * op.output.heads, op.parts() * op.output.head_dim, |rows, _| {
        // SAFETY: the descriptor is validated, and tasks write different rows.
        unsafe { dispatch(Rows { op, rows }) }
    });
}

struct Rows<'a> {
    op: &'a AttentionMerge,
    /// By token, then by head.
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut sums = [0f32; MAX_VALUE_DIM];
        for row in self.rows {
            merge::<S>(self.op, row / self.op.output.heads, row % self.op.output.heads, &mut sums);
        }
    }
}

#[inline(always)]
unsafe fn merge<S: Simd>(op: &AttentionMerge, token: usize, head: usize, sums: &mut [f32; MAX_VALUE_DIM]) {
    let head_dim = op.output.head_dim;
    let [part_stride, token_stride, head_stride, _] = op.lses.strides;
    let first = op.lses.data.cast::<f32>().wrapping_add(token * token_stride + head * head_stride);
    let lse = |part: usize| *first.wrapping_add(part * part_stride);
    // A NaN stays, where `max` of two would drop it.
    let larger = |most: f32, lse: f32| if lse > most || lse.is_nan() { lse } else { most };
    let most = (0..op.parts()).map(lse).fold(f32::NEG_INFINITY, larger);
    let weight = |lse: f32| (lse - most).exp();
    let seen = |part: &usize| lse(*part) != f32::NEG_INFINITY;
    let total: f32 = (0..op.parts()).filter(seen).map(|part| weight(lse(part))).sum();
    let sum = Row::raw(sums.as_mut_ptr().cast(), DType::F32);
    for (at, lanes) in vectors::<S>(head_dim) {
        sum.store::<S>(at, S::zero(), lanes);
    }
    for part in (0..op.parts()).filter(seen) {
        let factor = S::splat(weight(lse(part)) / total);
        let output = Row::head(&op.part(part), token, head);
        for (at, lanes) in vectors::<S>(head_dim) {
            sum.store::<S>(at, S::fma(factor, output.load::<S>(at, lanes), sum.load::<S>(at, lanes)), lanes);
        }
    }
    let output = Row::head(&op.output, token, head);
    for (at, lanes) in vectors::<S>(head_dim) {
        output.store::<S>(at, sum.load::<S>(at, lanes), lanes);
    }
    if let Some(joint) = &op.lse {
        // Without a key that is −∞ + ln 0.
        joint.data.cast::<f32>().wrapping_add(token * op.output.heads + head).write(most + total.ln());
    }
}
