//! Attention on the CPU: [`prefill`] in tiles with the softmax carried from tile to tile, [`decode`] at the speed at
//! which the cache is read. What both share is a row's running softmax.

mod chunks;
pub mod decode;
mod operands;
pub mod prefill;
mod prefix;
mod softmax;
#[cfg(test)]
mod tests;
mod values;

use super::row::{vectors, Row};
use super::threads::Threads;
use crate::allocation::filled;
use crate::error::Result;
use crate::executor::{SPLITS, STAGES, TILE_KEYS, TILE_ROWS};
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, HeadTerms, SequenceSpan};
use crate::simd::Simd;
use crate::tensor::{kv_row, DType, Heads, KvView, Tensor};
use std::ops::Range;

/// How a prefill is divided among `threads`, in the words of plans.
pub fn prefill_parameters(op: &AttentionPrefill, threads: usize) -> [(&'static str, usize); 4] {
    [(TILE_ROWS, prefill::block_rows(op, threads)), (TILE_KEYS, operands::KEYS), (SPLITS, 1), (STAGES, 1)]
}

/// How a decode is.
pub fn decode_parameters(op: &AttentionDecode) -> [(&'static str, usize); 4] {
    [(TILE_ROWS, op.config.group()), (TILE_KEYS, chunks::CHUNK), (SPLITS, decode::splits(op)), (STAGES, 1)]
}

/// A decode that may rotate and append its tokens first, or share a prefix. `workspace` is grown as needed and reused.
pub fn any_decode(threads: &Threads, op: &AttentionDecode, workspace: &mut Vec<f32>) -> Result<()> {
    if let Some(shared) = &op.prefix {
        return prefix::prefix_decode(threads, op, shared, workspace);
    }
    let Heads { dtype, tokens, heads, head_dim, .. } = op.query;
    let mut memory = Vec::<f32>::new();
    if op.rope.is_some() {
        // The rotated queries are rounded to their dtype, as the two calls would leave them.
        let floats = (tokens * heads * head_dim * dtype.size()).div_ceil(size_of::<f32>());
        memory = filled(0.0, floats, "the rotated queries of a decode")?;
    }
    let data = memory.as_mut_ptr().cast();
    let query = Heads { data, token_stride: heads * head_dim, head_stride: head_dim, ..op.query };
    let Some((rope, attention)) = op.separate(query) else {
        return decode::decode(threads, op, workspace);
    };
    // It looks at every token's place before it writes anything.
    super::rope::rope(threads, &rope)?;
    decode::decode(threads, &attention, workspace)
}

/// Whether the kernels of this level multiply pairs of BF16.
fn multiplies_bf16<S: Simd>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return S::LANES == 16 && super::bf16_tile::is_supported();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Where the lse of a row goes, if it is wanted.
fn lse_of(lse: Option<Tensor>, row: usize, head: usize) -> Option<*mut f32> {
    lse.map(|lse| lse.data.cast::<f32>().wrapping_add(row * lse.shape[1] + head))
}

/// Where the keys or values of the tokens from `first` on start, of a sequence and a head.
///
/// # Safety
/// The tokens' pages were checked.
#[inline(always)]
unsafe fn addresses(view: &KvView, origin: usize, first: usize, head: usize, to: &mut [*const u8]) {
    let (stride, head) = (view.token_stride * view.dtype.size(), view.head(origin, head));
    let mut done = 0;
    while done < to.len() {
        // SAFETY: the caller's contract; on the CPU a table is in host memory.
        let (start, tokens) = unsafe { head.run(first + done) };
        let count = tokens.min(to.len() - done);
        for (i, address) in to[done..done + count].iter_mut().enumerate() {
            *address = start.cast::<u8>().wrapping_add(i * stride);
        }
        done += count;
    }
}

/// A key or value as f32.
///
/// # Safety
/// The CPU has `S`, a whole row is readable, and `dim` floats are writable.
#[inline(always)]
unsafe fn unpack_row<S: Simd>(dtype: DType, from: *const u8, dim: usize, to: *mut f32) {
    if dtype.is_kv_row() {
        return kv_row::unpack(dtype, from, dim, to);
    }
    let (from, to) = (Row::raw(from.cast_mut().cast(), dtype), Row::raw(to.cast(), DType::F32));
    for (at, lanes) in vectors::<S>(dim) {
        to.store::<S>(at, from.load_kv::<S>(at, lanes), lanes);
    }
}

/// A sequence's key or value of one token and head.
///
/// # Safety
/// The token's page was checked.
unsafe fn kv_row(view: &KvView, origin: usize, token: usize, head: usize) -> Vec<f32> {
    // SAFETY: the caller's contract; on the CPU a table is in host memory.
    let row = unsafe { view.head(origin, head).run(token) }.0;
    let mut elements = vec![0.0; view.dim];
    if view.dtype.is_kv_row() {
        kv_row::unpack(view.dtype, row.cast(), view.dim, elements.as_mut_ptr());
        return elements;
    }
    let row = Row::raw(row, view.dtype);
    elements.iter_mut().enumerate().for_each(|(at, element)| *element = row.element(at));
    elements
}

/// The keys that a query row of the sequence sees. Without a causal mask there may be more rows than keys; the first ones
/// then stand before every key, and see what a window of theirs still reaches.
fn visible(config: &AttentionConfig, span: &SequenceSpan, query: usize) -> Range<usize> {
    let SequenceSpan { query_count, kv_length, prefix, .. } = *span;
    let (begin, end) = match (kv_length + query).checked_sub(query_count) {
        Some(position) => config.visible_with_prefix(position, kv_length, prefix),
        // No chunk begins before key 0.
        None if config.chunk > 0 => (0, 0),
        None if config.window == 0 => (0, kv_length),
        None => (0, kv_length.min(config.window.saturating_sub(query_count - kv_length - query))),
    };
    begin..end
}

/// The first row of the lse, a head's scale of its queries, what is added to the score of a row, head and key, what heads
/// add, and the keys that a row sees.
type Extras<'a> = (
    usize,
    &'a dyn Fn(usize) -> f32,
    &'a dyn Fn(usize, usize, usize) -> f64,
    &'a HeadTerms,
    &'a dyn Fn(usize) -> Range<usize>,
);

/// One sequence by the formula, in f64, for tensors in host memory. Row 0 of queries, output and lse is `first`; `bias` tells
/// what is added to the score of a row, head and key.
fn reference(
    config: &AttentionConfig,
    (query, key, value, output): (&Heads, &KvView, &KvView, &Heads),
    lse: Option<Tensor>,
    span: &SequenceSpan,
    (first, query_scale, bias, terms, visible): Extras<'_>,
) {
    let SequenceSpan { query_count, kv_start, .. } = *span;
    let (key_origin, value_origin) = (key.origin(kv_start), value.origin(kv_start));
    for (i, head) in (0..query_count).flat_map(|i| (0..config.query_heads).map(move |head| (i, head))) {
        let kv_head = head / config.group();
        let window = visible(i);
        // The first tokens, then the window.
        let seen: Vec<usize> = (0..config.sinks_before(window.start)).chain(window).collect();
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
        unsafe {
            let query = Row::head(query, i, head);
            let (key_scale, value_scale) = (f64::from(key.scale(kv_head)), f64::from(value.scale(kv_head)));
            let score = |token: usize| {
                let key = kv_row(key, key_origin, token, kv_head);
                let dot: f64 = (0..config.head_dim).map(|d| query.get(d) * f64::from(key[d])).sum();
                let dot = dot * key_scale * f64::from(query_scale(kv_head));
                let (score, cap) = (dot * f64::from(config.scale), f64::from(config.soft_cap));
                let capped = if cap > 0.0 { cap * (score / cap).tanh() } else { score };
                let distance = (span.kv_length + i) as f64 - query_count as f64 - token as f64;
                let slope = terms.slope(head).map_or(0.0, f64::from);
                capped + bias(i, head, token) - slope * distance.abs()
            };
            let scores: Vec<f64> = seen.iter().copied().map(score).collect();
            let sink = terms.sink(head).map_or(f64::NEG_INFINITY, f64::from);
            let max = scores.iter().copied().fold(sink, f64::max);
            let weight = |score: &f64| if max == f64::NEG_INFINITY { 0.0 } else { (score - max).exp() };
            let sum = scores.iter().map(weight).sum::<f64>() + weight(&sink);
            let values: Vec<Vec<f32>> = seen.iter().map(|&token| kv_row(value, value_origin, token, kv_head)).collect();
            for d in 0..config.value_dim {
                let weigh = |(value, score): (&Vec<f32>, &f64)| weight(score) * f64::from(value[d]);
                let total: f64 = values.iter().zip(&scores).map(weigh).sum();
                Row::head(output, i, head).set(d, if sum == 0.0 { 0.0 } else { total / sum * value_scale });
            }
            if let Some(lse) = lse_of(lse, first + i, head) {
                lse.write((max + sum.ln()) as f32);
            }
        }
    }
}
