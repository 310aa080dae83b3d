//! Attention of one query row a sequence: the time is that of reading the cache once.
//!
//! The keys of a sequence are cut into chunks of fixed size. A chunk gives, for each query head of a group, the largest
//! score, the sum of weights and the weighted values; chunks are merged in their order. With many sequences a task does
//! all chunks of one; with few, chunks are tasks of their own and the merge follows. Both ways compute the same.

use super::{finish, lse_of, RunningSoftmax};
use crate::allocation::gathered;
use crate::cpu::dot_tile::{DotTile, COLUMNS};
use crate::cpu::outer_tile::Outer;
use crate::cpu::row::{integers, vectors, Row};
use crate::cpu::threads::{Scratch, Threads};
use crate::error::{Error, Result, Status};
use crate::operation::attention::{AttentionDecode, SequenceSpan};
use crate::simd::{dispatch, math, with_float, Kernel, Simd, VectorElement};
use crate::tensor::KvView;
use std::ops::Range;

/// Keys of a chunk.
const CHUNK: usize = 256;
/// Keys whose values are summed in registers before they join the chunk's.
const VALUE_KEYS: usize = 64;
/// How far ahead of the products keys are asked for, in bytes.
const AHEAD: usize = 2048;
/// Query heads computed at a time: what the scratch holds at the largest head_dim.
const MAX_HEADS: usize = 48;

/// `workspace` is grown as needed and reused. An error names the first row whose sequence, position or page is out of range.
pub fn decode(threads: &Threads, op: &AttentionDecode, workspace: &mut Vec<f32>) -> Result<()> {
    let rows = op.query.tokens;
    let sequences = check(op, rows)?;
    let kv_heads = op.config.kv_heads;
    let units = rows * kv_heads;
    let chunks = op.max_kv_length.div_ceil(CHUNK);
    if chunks == 1 || units >= 2 * threads.count() {
        threads.run(units, |unit, scratch| {
            let (sequence, kv_head) = (&sequences[unit / kv_heads], unit % kv_heads);
            // SAFETY: the descriptor is validated and sequences and positions are within the cache; tasks write
            // different rows and heads.
            unsafe { dispatch(Unit { op, sequence, kv_head, work: Work::Whole, scratch }) }
        });
        return Ok(());
    }
    let group_floats = op.config.group() * partial_floats(op.config.head_dim);
    let needed = units * chunks * group_floats;
    if workspace.len() < needed {
        workspace.try_reserve(needed - workspace.len()).map_err(|_| {
            Error::new(Status::OutOfMemory, "attention_decode: no memory for the chunks' results")
                .with_limit(4 * needed as u64, 0)
        })?;
        workspace.resize(needed, 0.0);
    }
    let partials = Partials(workspace.as_mut_ptr());
    threads.run(units * chunks, |task, scratch| {
        let (unit, chunk) = (task / chunks, task % chunks);
        let (sequence, kv_head) = (&sequences[unit / kv_heads], unit % kv_heads);
        let partials = partials.at(task * group_floats);
        // SAFETY: as above; each task has its own part of the workspace.
        unsafe { dispatch(Unit { op, sequence, kv_head, work: Work::Chunk(chunk, partials), scratch }) }
    });
    threads.run(units, |unit, scratch| {
        let (sequence, kv_head) = (&sequences[unit / kv_heads], unit % kv_heads);
        let partials = partials.at(unit * chunks * group_floats);
        // SAFETY: as above.
        unsafe { dispatch(Unit { op, sequence, kv_head, work: Work::Merge(partials), scratch }) }
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct Partials(*mut f32);

// SAFETY: an address of the workspace, whose parts different tasks use.
unsafe impl Sync for Partials {}

impl Partials {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// One row of the call.
struct Sequence {
    row: usize,
    /// Where the cache has its tokens.
    origin: usize,
    /// The keys that it sees.
    keys: Range<usize>,
}

fn check(op: &AttentionDecode, rows: usize) -> Result<Vec<Sequence>> {
    // SAFETY: validated tensors of one integer a row.
    let (positions, places) = unsafe { (integers(&op.positions), op.sequences.as_ref().map(|all| integers(all))) };
    let sequences = (0..rows).map(|row| {
        let context = |error: Error| error.context(format_args!("row {row}"));
        let position = op.cache.check_position(positions[row]).map_err(context)?;
        if position >= op.max_kv_length {
            return Err(Error::invalid(format!(
                "row {row}: position {position}; max_kv_length is {}",
                op.max_kv_length
            ))
            .with_limit(position as u64, op.max_kv_length as u64));
        }
        let sequence = op.cache.check_sequence(places.map_or(row as i32, |places| places[row])).map_err(context)?;
        let (begin, end) = op.config.visible(position, position + 1);
        let origin = op.cache.origin(sequence);
        // SAFETY: on the CPU a table is in host memory; sequence and positions are within it.
        unsafe { op.cache.key_view().check_pages(origin, begin..end) }.map_err(context)?;
        Ok(Sequence { row, origin, keys: begin..end })
    });
    gathered(sequences, "the rows of a decode")
}

/// A chunk's result for one query head: the maximum, the sum of weights (and padding), the weighted values.
fn partial_floats(head_dim: usize) -> usize {
    16 + head_dim.next_multiple_of(16)
}

struct Unit<'a> {
    op: &'a AttentionDecode,
    sequence: &'a Sequence,
    kv_head: usize,
    work: Work,
    scratch: &'a mut Scratch,
}

#[derive(Clone, Copy)]
enum Work {
    /// Every chunk, the merge and the output.
    Whole,
    /// One chunk's partial results of every head of the group.
    Chunk(usize, *mut f32),
    /// The merge of all chunks' partial results, and the output.
    Merge(*const f32),
}

impl Kernel for Unit<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Unit { op, sequence, kv_head, work, scratch } = self;
        let group = op.config.group();
        for first in (0..group).step_by(MAX_HEADS) {
            let heads = kv_head * group + first..kv_head * group + (first + MAX_HEADS).min(group);
            Heads::new(op, sequence, kv_head, heads, scratch).run::<S>(work, first);
        }
    }
}

/// Some query heads that share a key/value head, and their working memory.
struct Heads<'a> {
    op: &'a AttentionDecode,
    sequence: &'a Sequence,
    kv_head: usize,
    heads: Range<usize>,
    /// [heads, stride], scaled
    query: *mut f32,
    /// [heads, CHUNK]
    scores: *mut f32,
    /// A chunk's partial results, [heads, stride]
    partial: *mut f32,
    /// The merged ones, [heads, stride]
    merged: *mut f32,
    stride: usize,
}

impl<'a> Heads<'a> {
    fn new(
        op: &'a AttentionDecode,
        sequence: &'a Sequence,
        kv_head: usize,
        heads: Range<usize>,
        scratch: &mut Scratch,
    ) -> Heads<'a> {
        let stride = partial_floats(op.config.head_dim);
        let (query, rest) = scratch.floats().split_at_mut(heads.len() * stride);
        let (scores, rest) = rest.split_at_mut(heads.len() * CHUNK);
        let (partial, rest) = rest.split_at_mut(heads.len() * stride);
        let (query, scores, partial, merged) =
            (query.as_mut_ptr(), scores.as_mut_ptr(), partial.as_mut_ptr(), rest.as_mut_ptr());
        Heads { op, sequence, kv_head, heads, query, scores, partial, merged, stride }
    }

    #[inline(always)]
    unsafe fn run<S: Simd>(&self, work: Work, first: usize) {
        let keys = &self.sequence.keys;
        let chunks = keys.start / CHUNK..keys.end.div_ceil(CHUNK);
        let group = self.op.config.group();
        match work {
            Work::Whole => {
                self.load_queries::<S>();
                self.clear::<S>(self.merged);
                for chunk in chunks {
                    self.chunk::<S>(chunk, self.partial);
                    self.merge::<S>(self.partial);
                }
                self.finish::<S>();
            }
            // The bound on the lengths may be far above this sequence's.
            Work::Chunk(chunk, _) if !chunks.contains(&chunk) => {}
            Work::Chunk(chunk, partials) => {
                self.load_queries::<S>();
                self.chunk::<S>(chunk, partials.add(first * self.stride));
            }
            Work::Merge(partials) => {
                self.clear::<S>(self.merged);
                for chunk in chunks {
                    self.merge::<S>(partials.add((chunk * group + first) * self.stride));
                }
                self.finish::<S>();
            }
        }
    }

    #[inline(always)]
    unsafe fn load_queries<S: Simd>(&self) {
        let scale = S::splat(self.op.config.scale);
        for (i, head) in self.heads.clone().enumerate() {
            let from = Row::head(&self.op.query, self.sequence.row, head);
            for (at, lanes) in vectors::<S>(self.op.config.head_dim) {
                S::store(self.query.add(i * self.stride + at), S::mul(from.load::<S>(at, lanes), scale));
            }
        }
    }

    /// Maximum −∞, no weight, no values.
    #[inline(always)]
    unsafe fn clear<S: Simd>(&self, partial: *mut f32) {
        for i in 0..self.heads.len() {
            for at in (0..self.stride).step_by(S::LANES) {
                S::store(partial.add(i * self.stride + at), S::zero());
            }
            *partial.add(i * self.stride) = f32::NEG_INFINITY;
        }
    }

    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, chunk: usize, partial: *mut f32) {
        with_float!(self.op.cache.dtype, T => self.chunk_of::<S, T>(chunk, partial))
    }

    /// One chunk's scores, weights and weighted values.
    #[inline(always)]
    unsafe fn chunk_of<S: Simd, T: VectorElement>(&self, chunk: usize, partial: *mut f32) {
        let (cache, dim) = (&self.op.cache, self.op.config.head_dim);
        let begin = (chunk * CHUNK).max(self.sequence.keys.start);
        let keys = self.sequence.keys.end.min((chunk + 1) * CHUNK) - begin;
        let of = |view: KvView| view.head(self.sequence.origin, self.kv_head);
        let (key_view, value_view) = (of(cache.key_view()), of(cache.value_view()));
        let heads = self.heads.len();
        let mut rows = [std::ptr::null::<T>(); CHUNK];
        let mut at = 0;
        while at < keys {
            let (address, count) = key_view.run(begin + at);
            let count = count.min(keys - at);
            for (i, row) in rows[at..at + count].iter_mut().enumerate() {
                *row = address.cast::<T>().add(i * cache.token_stride);
            }
            at += count;
        }
        // Scores, four keys at a time; past the last key they repeat it and are masked.
        for four in (0..keys).step_by(COLUMNS) {
            let key = |i: usize| rows[(four + i).min(keys - 1)];
            let four_keys = [key(0), key(1), key(2), key(3)];
            for first in (0..heads).step_by(S::DOT_ROWS) {
                let query = self.query.add(first * self.stride);
                let scores = self.scores.add(first * CHUNK + four);
                let rows = S::DOT_ROWS.min(heads - first);
                let tile = DotTile { x: query.cast_const(), x_stride: self.stride, w: four_keys, k: dim, ahead: AHEAD };
                for (i, products) in tile.compute::<S>(rows).into_iter().enumerate().take(rows) {
                    scores.add(i * CHUNK).cast::<[f32; COLUMNS]>().write_unaligned(products);
                }
            }
        }
        // Weights.
        self.clear::<S>(partial);
        for i in 0..heads {
            let part = partial.add(i * self.stride);
            let mut sums = [0f32; 16];
            let mut softmax =
                RunningSoftmax { max: part, sums: sums.as_mut_ptr(), output: part.add(16), width: self.stride - 16 };
            softmax.add::<S>(self.scores.add(i * CHUNK), 0..keys, keys, self.op.config.soft_cap);
            *part.add(1) = S::sum(S::load(sums.as_ptr()));
        }
        // Weighted values, a few keys at a time, so that their values are still near for every vector of the head.
        let whole = dim / S::LANES;
        let mut first = 0;
        while first < keys {
            let (address, count) = value_view.run(begin + first);
            let (value, count) = (address.cast::<T>(), count.min(VALUE_KEYS).min(keys - first));
            for head in (0..heads).step_by(S::OUTER_ROWS) {
                let rows = S::OUTER_ROWS.min(heads - head);
                let values = Outer {
                    a: self.scores.add(head * CHUNK + first).cast_const(),
                    a_stride: CHUNK,
                    b: value.cast_const(),
                    b_stride: cache.token_stride,
                    k: count,
                    c: partial.add(head * self.stride + 16),
                    c_stride: self.stride,
                    accumulate: true,
                };
                values.run::<S>(rows, whole);
            }
            // The rest of a head that is no whole number of vectors.
            for (head, key) in (0..heads).flat_map(|head| (0..count).map(move |key| (head, key))) {
                let rest = dim - whole * S::LANES;
                if rest > 0 {
                    let output = partial.add(head * self.stride + 16 + whole * S::LANES);
                    let weight = S::splat(*self.scores.add(head * CHUNK + first + key));
                    let row = T::load_partial::<S>(value.add(key * cache.token_stride + whole * S::LANES), rest);
                    S::store(output, S::fma(weight, row, S::load(output)));
                }
            }
            first += count;
        }
    }

    /// Joins a chunk's partial results to the merged ones.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, partial: *const f32) {
        for i in 0..self.heads.len() {
            let (from, to) = (partial.add(i * self.stride), self.merged.add(i * self.stride));
            let max = (*from).max(*to);
            if max == f32::NEG_INFINITY {
                continue;
            }
            let (old, new) = (math::exp::<S>(S::splat(*to - max)), math::exp::<S>(S::splat(*from - max)));
            for at in (0..self.stride).step_by(S::LANES) {
                let sum = S::fma(S::load(from.add(at)), new, S::mul(S::load(to.add(at)), old));
                S::store(to.add(at), sum);
            }
            *to = max;
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self) {
        let (op, row) = (self.op, self.sequence.row);
        for (i, head) in self.heads.clone().enumerate() {
            let merged = self.merged.add(i * self.stride);
            let output = Row::head(&op.output, row, head);
            let lse = lse_of(op.lse, row, head);
            finish::<S>(merged.add(16), *merged, *merged.add(1), output, op.config.head_dim, lse);
        }
    }
}

/// The formula in f64, for tensors in host memory and positions and sequences within the cache.
pub fn reference(op: &AttentionDecode) {
    // SAFETY: validated tensors of one integer a row.
    let (positions, places) = unsafe { (integers(&op.positions), op.sequences.as_ref().map(|all| integers(all))) };
    for (row, &position) in positions.iter().enumerate() {
        let sequence = places.map_or(row, |places| places[row] as usize);
        let span = SequenceSpan {
            query_start: row,
            query_count: 1,
            kv_offset: op.cache.origin(sequence),
            kv_length: position as usize + 1,
        };
        let views = (&op.query, &op.cache.key_view(), &op.cache.value_view(), &op.output);
        super::reference(&op.config, views, op.lse, &span);
    }
}
