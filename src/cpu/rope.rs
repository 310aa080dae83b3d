//! q/k norm, rotation and the append to the KV cache; the formulas are in `ops/rope.rs`.

use super::mean::mean_square;
use super::row::{for_rows, integers, vectors, Row};
use super::threads::Threads;
use crate::error::{Error, Result};
use crate::operation::attention::EMPTY_ROW;
use crate::operation::rope::{Append, Rope, Rotation};
use crate::simd::{dispatch, math, Kernel, Simd};
use crate::tensor::{kv_row, CacheLayer, DType, Heads, KvView, Tensor, MAX_HEAD_DIM};
use std::ops::Range;

const MAX_PAIRS: usize = MAX_HEAD_DIM / 2;

/// An error names the first token whose sequence or position is outside the cache, or that has the place of the token before
/// it; nothing is written then.
pub fn rope(threads: &Threads, op: &Rope) -> Result<()> {
    // SAFETY: a validated descriptor's positions.
    let positions = unsafe { integers(&op.positions) };
    if let Some(append) = &op.append {
        check_places(append, positions)?;
    }
    let frequencies = op.rotation.map(|rotation| inverse_frequencies(&rotation, op.head_dim));
    let heads = |heads: Option<Heads>| heads.map_or(0, |heads| heads.heads);
    let width = (heads(op.query) + heads(op.key) + heads(op.value)) * op.head_dim;
    for_rows(threads, op.tokens, width, |tokens, _| {
        // SAFETY: the descriptor is validated, positions and sequences are within the cache, tasks write different tokens.
        unsafe { dispatch(Tokens { op, positions, frequencies: frequencies.as_ref(), tokens }) }
    });
    Ok(())
}

/// Refuses the first token that has no place in the cache, and the first whose place its predecessor has too: tasks write
/// their tokens at once, so which of the two stayed would be chance. That is how rows of several sequences look whose
/// `sequences` were forgotten.
fn check_places(append: &Append, positions: &[i32]) -> Result<()> {
    let mut before = None;
    for (t, &position) in positions.iter().enumerate().filter(|(_, &position)| position != EMPTY_ROW) {
        let sequence = sequence(append, t);
        check(&append.cache, sequence, position).map_err(|error| error.context(format_args!("token {t}")))?;
        if before == Some((sequence, position)) {
            return Err(Error::invalid(format!(
                "token {t} has the place of the token before it, sequence {sequence}, position {position}{}",
                if append.sequences.is_none() { "; without `sequences` every token is of sequence 0" } else { "" }
            )));
        }
        before = Some((sequence, position));
    }
    Ok(())
}

/// Refuses a token that has no place in the cache.
fn check(cache: &CacheLayer, sequence: i32, position: i32) -> Result<()> {
    let position = cache.check_position(position)?;
    let origin = cache.origin(cache.check_sequence(sequence)?);
    // SAFETY: on the CPU every table is in host memory; sequence and position are within it.
    unsafe { cache.key_view().check_pages(origin, position..position + 1) }
}

fn sequence(append: &Append, token: usize) -> i32 {
    // SAFETY: a validated descriptor's sequences.
    append.sequences.map_or(0, |sequences| unsafe { integers(&sequences) }[token])
}

/// θ^(−2i/rotary_dim), in f32 as HF transformers computes it.
struct Frequencies {
    values: [f32; MAX_PAIRS],
    pairs: usize,
    position_scale: f32,
}

fn inverse_frequencies(rotation: &Rotation, head_dim: usize) -> Frequencies {
    let rotary_dim = if rotation.rotary_dim == 0 { head_dim } else { rotation.rotary_dim };
    let mut values = [0.0; MAX_PAIRS];
    for (i, value) in values[..rotary_dim / 2].iter_mut().enumerate() {
        *value = 1.0 / rotation.base.powf((2 * i) as f32 / rotary_dim as f32);
    }
    Frequencies { values, pairs: rotary_dim / 2, position_scale: rotation.position_scale }
}

struct Tokens<'a> {
    op: &'a Rope,
    positions: &'a [i32],
    frequencies: Option<&'a Frequencies>,
    tokens: Range<usize>,
}

/// One token's rotation: (cos, sin) of each pair's angle.
struct Angles {
    cosines: [f32; MAX_PAIRS],
    sines: [f32; MAX_PAIRS],
    pairs: usize,
}

impl Kernel for Tokens<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Tokens { op, positions, frequencies, tokens } = self;
        let mut angles = Angles { cosines: [0.0; MAX_PAIRS], sines: [0.0; MAX_PAIRS], pairs: 0 };
        for token in tokens {
            if let Some(frequencies) = frequencies {
                set_angles::<S>(&mut angles, frequencies, positions[token]);
            }
            one_token::<S>(op, token, positions[token], &angles);
        }
    }
}

#[inline(always)]
unsafe fn set_angles<S: Simd>(angles: &mut Angles, frequencies: &Frequencies, position: i32) {
    angles.pairs = frequencies.pairs;
    let (position, scale) = (S::splat(position as f32), S::splat(frequencies.position_scale));
    // The arrays are longer than any number of pairs, by whole vectors.
    for (at, _) in vectors::<S>(frequencies.pairs) {
        let angle = S::mul(S::mul(position, S::load(frequencies.values.as_ptr().add(at))), scale);
        let (sine, cosine) = math::sin_cos::<S>(angle);
        S::store(angles.sines.as_mut_ptr().add(at), sine);
        S::store(angles.cosines.as_mut_ptr().add(at), cosine);
    }
}

#[inline(always)]
unsafe fn one_token<S: Simd>(op: &Rope, token: usize, position: i32, angles: &Angles) {
    let mut head_buffer = [0f32; MAX_HEAD_DIM];
    let buffer = Row::raw(head_buffer.as_mut_ptr().cast(), DType::F32);
    let append = op.append.as_ref().filter(|_| position != EMPTY_ROW);
    if let (Some(query), Some(output)) = (&op.query, &op.query_output) {
        for head in 0..query.heads {
            rotate::<S>(op, Row::head(query, token, head), op.query_norm.as_ref(), angles, op.query_scale, buffer);
            copy::<S>(buffer, Row::head(output, token, head), op.head_dim);
        }
    }
    if let Some(key) = &op.key {
        for head in 0..key.heads {
            rotate::<S>(op, Row::head(key, token, head), op.key_norm.as_ref(), angles, 1.0, buffer);
            if let Some(output) = &op.key_output {
                copy::<S>(buffer, Row::head(output, token, head), op.head_dim);
            }
            if let Some(append) = append {
                let view = append.cache.key_view();
                let cache = cached(view, sequence(append, token), head, position);
                append_row::<S>(buffer, cache, op.head_dim, view.scale(head));
            }
        }
    }
    if let (Some(value), Some(append)) = (&op.value, append) {
        for head in 0..value.heads {
            let view = append.cache.value_view();
            let cache = cached(view, sequence(append, token), head, position);
            append_row::<S>(Row::head(value, token, head), cache, value.head_dim, view.scale(head));
        }
    }
}

/// Where a head's row of the keys or values lies in the cache.
///
/// # Safety
/// Sequence, position and page were checked.
unsafe fn cached(view: KvView, sequence: i32, head: usize, position: i32) -> Row {
    let head = view.head(view.origin(sequence as usize), head);
    // SAFETY: the caller's contract.
    Row::raw(unsafe { head.run(position as usize) }.0, view.dtype)
}

/// Quantises for a cache in fewer bits: division and rounding are those of the kernels on GPUs.
#[inline(always)]
unsafe fn append_row<S: Simd>(from: Row, to: Row, count: usize, scale: f32) {
    if to.dtype().is_kv_row() {
        let mut elements = [0f32; MAX_HEAD_DIM];
        copy::<S>(from, Row::raw(elements.as_mut_ptr().cast(), DType::F32), count);
        return kv_row::pack(to.dtype(), &elements[..count], to.address().cast_mut());
    }
    if !to.dtype().is_fp8() {
        return copy::<S>(from, to, count);
    }
    let scale = S::splat(scale);
    for (at, lanes) in vectors::<S>(count) {
        to.store_kv::<S>(at, S::div(from.load::<S>(at, lanes), scale), lanes);
    }
}

#[inline(always)]
unsafe fn copy<S: Simd>(from: Row, to: Row, count: usize) {
    for (at, lanes) in vectors::<S>(count) {
        to.store::<S>(at, from.load::<S>(at, lanes), lanes);
    }
}

/// Norm, rotation and scale of one head, into `output`.
#[inline(always)]
unsafe fn rotate<S: Simd>(op: &Rope, input: Row, norm: Option<&Tensor>, angles: &Angles, scale: f32, output: Row) {
    let mut source = input;
    if let Some(weight) = norm {
        let inverse = S::splat(1.0 / (mean_square::<S>(input, op.head_dim, 0.0) + op.epsilon).sqrt());
        let (weight, offset) = (Row::vector(weight), S::splat(op.weight_offset));
        for (at, lanes) in vectors::<S>(op.head_dim) {
            let factor = S::add(offset, weight.load::<S>(at, lanes));
            output.store::<S>(at, S::mul(S::mul(input.load::<S>(at, lanes), inverse), factor), lanes);
        }
        source = output;
    }
    let (pairs, scale) = (angles.pairs, S::splat(scale));
    for (at, lanes) in vectors::<S>(pairs) {
        let (cosine, sine) = (S::load(angles.cosines.as_ptr().add(at)), S::load(angles.sines.as_ptr().add(at)));
        let (first, second) = (source.load::<S>(at, lanes), source.load::<S>(pairs + at, lanes));
        let turned = S::sub(S::mul(first, cosine), S::mul(second, sine));
        output.store::<S>(at, S::mul(turned, scale), lanes);
        let turned = S::add(S::mul(second, cosine), S::mul(first, sine));
        output.store::<S>(pairs + at, S::mul(turned, scale), lanes);
    }
    let rest = op.head_dim - 2 * pairs;
    let (source, output) = (source.skip(2 * pairs), output.skip(2 * pairs));
    for (at, lanes) in vectors::<S>(rest) {
        output.store::<S>(at, S::mul(source.load::<S>(at, lanes), scale), lanes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{threads, Buffer};
    use super::*;
    use crate::operation::rope::RopeArguments;

    /// Appends two tokens at `positions` to a cache of one sequence of three tokens, which must fail and write nothing.
    fn append_error(positions: [f32; 2]) -> String {
        let mut x = Buffer::random(DType::F32, 2 * 4, 1);
        let mut positions = Buffer::from(DType::I32, &positions);
        let mut cache = [Buffer::poisoned(DType::F32, 12), Buffer::poisoned(DType::F32, 12)];
        let layer = CacheLayer::contiguous(
            (cache[0].tensor(&[12]).data, cache[1].tensor(&[12]).data),
            DType::F32,
            [1, 1, 3, 4],
        );
        let op = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(x.tensor(&[2, 1, 4])),
            key_output: None,
            key_norm: None,
            value: Some(x.tensor(&[2, 1, 4])),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions: positions.tensor(&[2]),
            rotation: None,
            append: Some(Append { cache: layer, sequences: None }),
        });
        let error = rope(threads(), &op.unwrap()).unwrap_err();
        assert!(cache[0].values().iter().all(|x| x.is_nan()), "nothing is written");
        error.message
    }

    #[test]
    fn a_position_outside_the_cache_is_named() {
        let message = append_error([0.0, 3.0]);
        assert!(message.contains("token 1") && message.contains("position 3"), "{message}");
    }

    #[test]
    fn two_tokens_with_one_place_are_named() {
        let message = append_error([2.0, 2.0]);
        assert!(message.contains("token 1") && message.contains("without `sequences`"), "{message}");
    }
}
