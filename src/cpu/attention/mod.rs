//! Attention on the CPU: [`prefill`] in tiles with the softmax carried from tile to tile, [`decode`] at the speed at
//! which the cache is read. What both share is a row's running softmax.

pub mod decode;
pub mod prefill;
#[cfg(test)]
mod tests;

use super::row::Row;
use crate::operation::attention::{AttentionConfig, SequenceSpan};
use crate::simd::{math, Simd};
use crate::tensor::{Heads, KvView, Tensor};
use std::ops::Range;

/// One row's softmax so far: the largest score and the sum of e^(score − max) in vector lanes, beside the weighted
/// values that the caller holds.
struct RunningSoftmax {
    max: *mut f32,
    /// `S::LANES` partial sums.
    sums: *mut f32,
    /// The row's weighted values, `width` f32.
    output: *mut f32,
    width: usize,
}

impl RunningSoftmax {
    /// Turns a row of scores, of which `visible` count, into weights relative to the new maximum, and rescales what was
    /// there to it. `scores` is readable and writable up to the next multiple of the lanes from `visible.end`.
    #[inline(always)]
    unsafe fn add<S: Simd>(&mut self, scores: *mut f32, visible: Range<usize>, keys: usize, soft_cap: f32) {
        let lowest = S::splat(f32::NEG_INFINITY);
        let masked = visible.start > 0 || visible.end < keys.next_multiple_of(S::LANES);
        let (begin, end) = (visible.start as f32, visible.end as f32);
        let mut max = lowest;
        for at in (0..keys).step_by(S::LANES) {
            let mut score = S::load(scores.add(at));
            if soft_cap > 0.0 {
                score = math::soft_cap::<S>(score, soft_cap);
            }
            if masked {
                let number = S::add(S::lane_numbers(), S::splat(at as f32));
                score = S::select_less(number, S::splat(end), score, lowest);
                score = S::select_less(number, S::splat(begin), lowest, score);
            }
            if masked || soft_cap > 0.0 {
                S::store(scores.add(at), score);
            }
            max = S::max(max, score);
        }
        let max = S::max_lane(max);
        let old = *self.max;
        if max > old {
            *self.max = max;
            if old > f32::NEG_INFINITY {
                let factor = math::exp::<S>(S::splat(old - max));
                S::store(self.sums, S::mul(S::load(self.sums), factor));
                for at in (0..self.width).step_by(S::LANES) {
                    S::store(self.output.add(at), S::mul(S::load(self.output.add(at)), factor));
                }
            }
        }
        // While nothing is visible every weight is e^(−∞ − 0) = 0.
        let shift = S::splat(if *self.max == f32::NEG_INFINITY { 0.0 } else { *self.max });
        let mut sums = S::load(self.sums);
        for at in (0..keys).step_by(S::LANES) {
            let weight = math::exp::<S>(S::sub(S::load(scores.add(at)), shift));
            S::store(scores.add(at), weight);
            sums = S::add(sums, weight);
        }
        S::store(self.sums, sums);
    }
}

/// Stores weighted values over the sum of weights, and ln of the sum in the scale of the scores.
#[inline(always)]
unsafe fn finish<S: Simd>(values: *const f32, max: f32, sum: f32, output: Row, head_dim: usize, lse: Option<*mut f32>) {
    // A row that saw no key has no weight.
    let inverse = S::splat(if sum == 0.0 { 0.0 } else { 1.0 / sum });
    for (at, lanes) in super::row::vectors::<S>(head_dim) {
        // The buffer is padded to whole vectors.
        output.store::<S>(at, S::mul(S::load(values.add(at)), inverse), lanes);
    }
    if let Some(lse) = lse {
        lse.write(max + sum.ln());
    }
}

/// Where the lse of a row goes, if it is wanted.
fn lse_of(lse: Option<Tensor>, row: usize, head: usize) -> Option<*mut f32> {
    lse.map(|lse| lse.data.cast::<f32>().wrapping_add(row * lse.shape[1] + head))
}

/// A sequence's key or value of one token and head.
///
/// # Safety
/// The token's page was checked.
unsafe fn kv_row(view: &KvView, origin: usize, token: usize, head: usize) -> Row {
    // SAFETY: the caller's contract; on the CPU a table is in host memory.
    Row::raw(unsafe { view.head(origin, head).run(token) }.0, view.dtype)
}

/// The keys that a query row of the sequence sees. Without a causal mask there may be more rows than keys; the first ones
/// then stand before every key, and see what a window of theirs still reaches.
fn visible(config: &AttentionConfig, span: &SequenceSpan, query: usize) -> Range<usize> {
    let SequenceSpan { query_count, kv_length, .. } = *span;
    let (begin, end) = match (kv_length + query).checked_sub(query_count) {
        Some(position) => config.visible(position, kv_length),
        None if config.window == 0 => (0, kv_length),
        None => (0, kv_length.min(config.window.saturating_sub(query_count - kv_length - query))),
    };
    begin..end
}

/// One sequence by the formula, in f64, for tensors in host memory.
fn reference(
    config: &AttentionConfig,
    (query, key, value, output): (&Heads, &KvView, &KvView, &Heads),
    lse: Option<Tensor>,
    span: &SequenceSpan,
) {
    let SequenceSpan { query_start, query_count, kv_offset, .. } = *span;
    for (i, head) in (0..query_count).flat_map(|i| (0..config.query_heads).map(move |head| (i, head))) {
        let (row, kv_head) = (query_start + i, head / config.group());
        let visible = visible(config, span, i);
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
        unsafe {
            let query = Row::head(query, row, head);
            let score = |token: usize| {
                let key = kv_row(key, kv_offset, token, kv_head);
                let dot: f64 = (0..config.head_dim).map(|d| query.get(d) * key.get(d)).sum();
                let (score, cap) = (dot * f64::from(config.scale), f64::from(config.soft_cap));
                if cap > 0.0 {
                    cap * (score / cap).tanh()
                } else {
                    score
                }
            };
            let scores: Vec<f64> = visible.clone().map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            for d in 0..config.head_dim {
                let weigh = |(token, score): (usize, &f64)| {
                    (score - max).exp() * kv_row(value, kv_offset, token, kv_head).get(d)
                };
                let total: f64 = visible.clone().zip(&scores).map(weigh).sum();
                Row::head(output, row, head).set(d, if visible.is_empty() { 0.0 } else { total / sum });
            }
            if let Some(lse) = lse_of(lse, row, head) {
                lse.write((max + sum.ln()) as f32);
            }
        }
    }
}
