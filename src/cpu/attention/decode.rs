//! Attention of one or a few query rows a sequence: the time is that of reading the cache.
//!
//! Rows of one sequence are computed like those of different ones, each over the keys that it sees.
//!
//! The keys of a sequence are cut into chunks (`chunks`). A chunk gives, for each query head of a group, the
//! shift of its weights, their sum and the weighted values; chunks are merged in their order. With many sequences a task
//! does all chunks of one key/value head; with few, all chunks of the call are one list that is cut into equal tasks, however
//! long the sequences are, and the merge follows. Both ways compute the same.
//!
//! Within a chunk a few keys at a time meet the queries and then their values the weights, so that keys and values stream
//! from memory side by side; both ask for the cache lines [`AHEAD`] of them.

use super::chunks::{check, Call, Tokens, CHUNK};
use super::softmax::{finish, Added, RunningSoftmax, Scores};
use super::values::{self, Values};
use super::{lse_of, unpack_row};
use crate::cpu::dot_tile::{DotTile, COLUMNS};
use crate::cpu::row::{integers, vectors, Row};
use crate::cpu::threads::{Scratch, Threads};
use crate::error::{Error, Result, Status};
use crate::operation::attention::{AttentionDecode, SequenceSpan};
use crate::simd::{dispatch, math, with_kv, Kernel, Simd, VectorElement};
use crate::tensor::{DType, MAX_HEAD_DIM, MAX_VALUE_DIM};
use half::bf16;
use std::ops::Range;
use std::ptr::null;

/// Keys between two turns of keys and values: about as many bytes, in whole vectors of any level.
const STEP_BYTES: usize = 4096;
const MIN_STEP: usize = 16;
const MAX_STEP: usize = 64;
/// How far ahead keys and values are asked for, in bytes: two steps.
const AHEAD: usize = 8192;
/// Query heads computed at a time: what the scratch holds at the largest head_dim.
const MAX_HEADS: usize = 48;
/// Tasks a thread, so that threads that run at different speeds end together, of so many bytes of the cache at least: a task's
/// first lines are asked for by nobody before it needs them.
const TASKS: usize = 4;
const TASK_BYTES: usize = 256 * 1024;
/// Floats of partial results up to which their merge is not worth waking threads for.
const QUICK_MERGE: usize = 32 * 1024;

/// `workspace` is grown as needed and reused. An error names the first row whose sequence, position or page is out of range.
pub fn decode(threads: &Threads, op: &AttentionDecode, workspace: &mut Vec<f32>) -> Result<()> {
    let sequences = check(op)?;
    let kv_heads = op.config.kv_heads;
    let units = sequences.len() * kv_heads;
    let call = Call { op, sequences: &sequences, scores: Scores::with(&op.config, op.terms.slopes.is_some()) };
    let chunks = call.chunks();
    if units >= TASKS * threads.count() || chunks <= units {
        threads.run(units, |unit, scratch| {
            let work = Work::Whole(unit);
            // SAFETY: the descriptor is validated and sequences and positions are within the cache; tasks write
            // different rows and heads.
            unsafe { dispatch(Task { call: &call, work, scratch }) }
        });
        return Ok(());
    }
    let group_floats = call.group_floats();
    let needed = chunks * group_floats;
    if workspace.len() < needed {
        workspace.try_reserve(needed - workspace.len()).map_err(|_| {
            Error::new(Status::OutOfMemory, "attention_decode: no memory for the chunks' results")
                .with_limit(4 * needed as u64, 0)
        })?;
        workspace.resize(needed, 0.0);
    }
    let partials = Partials(workspace.as_mut_ptr());
    let chunk_bytes = CHUNK * op.cache.token_bytes();
    let enough = (chunks * chunk_bytes / TASK_BYTES).clamp(threads.count(), TASKS * threads.count());
    let tasks = chunks.min(enough);
    threads.run(tasks, |task, scratch| {
        let work = Work::Chunks(task * chunks / tasks..(task + 1) * chunks / tasks, partials);
        // SAFETY: as above; each chunk has its own part of the workspace.
        unsafe { dispatch(Task { call: &call, work, scratch }) }
    });
    let tasks = if needed <= QUICK_MERGE { 1 } else { units };
    threads.run(tasks, |task, scratch| {
        for unit in task * units / tasks..(task + 1) * units / tasks {
            // SAFETY: as above.
            unsafe { dispatch(Task { call: &call, work: Work::Merge(unit, partials), scratch }) }
        }
    });
    Ok(())
}

/// Chunks that a row's keys are cut into, at most, and merged from.
pub fn splits(op: &AttentionDecode) -> usize {
    let longest = op.rows.max_kv_length;
    let (begin, end) = op.config.visible(longest - 1, longest);
    end.div_ceil(CHUNK) - begin / CHUNK + usize::from(op.config.sinks_before(begin) > 0)
}

/// Every chunk's partial results, each [group, stride].
#[derive(Clone, Copy)]
struct Partials(*mut f32);

// SAFETY: an address of the workspace, whose parts different tasks use.
unsafe impl Sync for Partials {}
// SAFETY: as above.
unsafe impl Send for Partials {}

enum Work {
    /// Every chunk of a unit, their merge and the output.
    Whole(usize),
    /// Some chunks' partial results.
    Chunks(Range<usize>, Partials),
    /// The merge of a unit's partial results, and the output.
    Merge(usize, Partials),
}

struct Task<'a> {
    call: &'a Call<'a>,
    work: Work,
    scratch: &'a mut Scratch,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Task { call, work, scratch } = self;
        let group = call.op.config.group();
        for first in (0..group).step_by(MAX_HEADS) {
            Heads::new::<S>(call, first..(first + MAX_HEADS).min(group), scratch).run::<S>(&work);
        }
    }
}

/// Some query heads of every group, and their working memory.
struct Heads<'a> {
    call: &'a Call<'a>,
    op: &'a AttentionDecode,
    /// Within the group.
    heads: Range<usize>,
    dim: usize,
    value_dim: usize,
    /// Whether the queries stay BF16 for the CPU's own products.
    pairs: bool,
    /// [heads, query_stride]
    query: *mut f32,
    query_stride: usize,
    /// [heads, MAX_STEP]
    scores: *mut f32,
    /// A chunk's partial results, [heads, stride]
    partial: *mut f32,
    /// The merged ones, [heads, stride]
    merged: *mut f32,
    stride: usize,
    /// Of a step whose rows have to be unpacked: its keys, then its values.
    unpacked: *mut f32,
}

impl<'a> Heads<'a> {
    fn new<S: Simd>(call: &'a Call<'a>, heads: Range<usize>, scratch: &mut Scratch) -> Heads<'a> {
        let (dim, stride) = (call.op.config.head_dim, call.stride());
        let query_stride = dim.next_multiple_of(16);
        let (query, rest) = scratch.floats().split_at_mut(heads.len() * query_stride);
        let (scores, rest) = rest.split_at_mut(heads.len() * MAX_STEP);
        let (partial, rest) = rest.split_at_mut(heads.len() * stride);
        let (merged, rest) = rest.split_at_mut(heads.len() * stride);
        let (query, scores, partial, merged) =
            (query.as_mut_ptr(), scores.as_mut_ptr(), partial.as_mut_ptr(), merged.as_mut_ptr());
        let op = call.op;
        let dtypes = [op.query.dtype, op.cache.dtype, op.cache.value_dtype];
        let pairs = super::multiplies_bf16::<S>() && dtypes == [DType::Bf16; 3];
        let value_dim = call.value_dim();
        debug_assert!(rest.len() >= MAX_STEP * MIN_STEP + MIN_STEP * MAX_HEAD_DIM + MAX_STEP * MAX_VALUE_DIM);
        let unpacked = rest.as_mut_ptr();
        Heads { call, op, heads, dim, value_dim, pairs, query, query_stride, scores, partial, merged, stride, unpacked }
    }

    #[inline(always)]
    unsafe fn run<S: Simd>(&self, work: &Work) {
        match work {
            Work::Whole(unit) => {
                self.clear::<S>(self.merged);
                self.chunks::<S>(self.call.chunks_of(*unit), |_| self.partial, |partial| self.merge::<S>(partial));
                self.finish::<S>(*unit);
            }
            Work::Chunks(chunks, partials) => {
                self.chunks::<S>(chunks.clone(), |chunk| self.partial_of(*partials, chunk), |_| ());
            }
            Work::Merge(unit, partials) => {
                self.clear::<S>(self.merged);
                for chunk in self.call.chunks_of(*unit) {
                    self.merge::<S>(self.partial_of(*partials, chunk));
                }
                self.finish::<S>(*unit);
            }
        }
    }

    /// These heads' part of a chunk's partial results.
    fn partial_of(&self, partials: Partials, chunk: usize) -> *mut f32 {
        partials.0.wrapping_add(chunk * self.call.group_floats() + self.heads.start * self.stride)
    }

    /// Computes chunks one after the other.
    #[inline(always)]
    unsafe fn chunks<S: Simd>(&self, chunks: Range<usize>, place: impl Fn(usize) -> *mut f32, done: impl Fn(*mut f32)) {
        let mut tokens = Tokens { key: [null(); CHUNK], value: [null(); CHUNK], count: 0, last: 0 };
        let mut queries_of = None;
        for chunk in chunks {
            let unit = self.call.unit_of(chunk);
            if queries_of != Some(unit) {
                queries_of = Some(unit);
                self.load_queries::<S>(unit);
            }
            self.call.tokens(chunk, unit, &mut tokens);
            let partial = place(chunk);
            self.chunk::<S>(&tokens, self.query_heads(unit).1.start, partial);
            done(partial);
        }
    }

    /// The query tensor's heads of a unit.
    fn query_heads(&self, unit: usize) -> (usize, Range<usize>) {
        let (sequence, kv_head) = self.call.unit(unit);
        let first = kv_head * self.op.config.group();
        (sequence.row, first + self.heads.start..first + self.heads.end)
    }

    #[inline(always)]
    unsafe fn load_queries<S: Simd>(&self, unit: usize) {
        let (row, heads) = self.query_heads(unit);
        // Scores are linear in the keys' scale.
        let key_scale = S::splat(self.op.cache.key_view().scale(self.call.unit(unit).1));
        for (i, head) in heads.enumerate() {
            let (from, to) = (Row::head(&self.op.query, row, head), self.query.add(i * self.query_stride));
            if self.pairs {
                to.cast::<bf16>().copy_from_nonoverlapping(from.address().cast(), self.dim);
                continue;
            }
            for (at, lanes) in vectors::<S>(self.dim) {
                S::store(to.add(at), S::mul(from.load::<S>(at, lanes), key_scale));
            }
        }
    }

    /// Shift −∞, no weight, no values.
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
    unsafe fn chunk<S: Simd>(&self, tokens: &Tokens, first_head: usize, partial: *mut f32) {
        if self.pairs {
            return self.chunk_of::<S, bf16, bf16, false>(tokens, first_head, partial);
        }
        if self.op.cache.has_kv_rows() {
            return self.chunk_of::<S, f32, f32, true>(tokens, first_head, partial);
        }
        with_kv!(self.op.cache.dtype, T => self.chunk_of::<S, f32, T, false>(tokens, first_head, partial))
    }

    /// The tokens' rows as f32 behind each other, and where each begins.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(rows: &[*const u8], dtype: DType, dim: usize, to: *mut f32) -> [*const u8; MAX_STEP] {
        let mut at = [null(); MAX_STEP];
        for (i, &row) in rows.iter().enumerate() {
            let place = to.add(i * dim);
            unpack_row::<S>(dtype, row, dim, place);
            at[i] = place.cast_const().cast();
        }
        at
    }

    /// One chunk's scores, weights and weighted values. `UNPACKED`: rows become f32 first, a step at a time.
    #[inline(always)]
    unsafe fn chunk_of<S: Simd, X: VectorElement, T: VectorElement, const UNPACKED: bool>(
        &self,
        tokens: &Tokens,
        first_head: usize,
        partial: *mut f32,
    ) {
        let heads = self.heads.len();
        // Whole vectors of scores.
        let step = (STEP_BYTES / (self.dim * size_of::<T>())).next_multiple_of(MIN_STEP).min(MAX_STEP);
        self.clear::<S>(partial);
        let mut sums = [[0f32; 16]; MAX_HEADS];
        for begin in (0..tokens.count).step_by(step) {
            let keys = step.min(tokens.count - begin);
            let (mut key_at, mut value_at) = (tokens.key.as_ptr().add(begin), tokens.value.as_ptr().add(begin));
            let (key_rows, value_rows);
            if UNPACKED {
                let cache = &self.op.cache;
                let (key, value) = (&tokens.key[begin..begin + keys], &tokens.value[begin..begin + keys]);
                key_rows = Self::unpack::<S>(key, cache.dtype, self.dim, self.unpacked);
                let values = self.unpacked.add(step * self.dim);
                value_rows = Self::unpack::<S>(value, cache.value_dtype, self.value_dim, values);
                (key_at, value_at) = (key_rows.as_ptr(), value_rows.as_ptr());
            }
            // Scores, four keys at a time; past the last key they repeat it and are masked.
            for four in (0..keys).step_by(COLUMNS) {
                let key = |i: usize| (*key_at.add((four + i).min(keys - 1))).cast::<T>();
                let four_keys = [key(0), key(1), key(2), key(3)];
                for first in (0..heads).step_by(S::DOT_ROWS) {
                    let rows = S::DOT_ROWS.min(heads - first);
                    let tile = DotTile {
                        x: self.query.add(first * self.query_stride).cast::<X>().cast_const(),
                        x_stride: self.query_stride * size_of::<f32>() / size_of::<X>(),
                        w: four_keys,
                        k: self.dim,
                        ahead: AHEAD,
                    };
                    let scores = self.scores.add(first * MAX_STEP + four);
                    for (i, products) in tile.compute::<S>(rows).into_iter().enumerate().take(rows) {
                        scores.add(i * MAX_STEP).cast::<[f32; COLUMNS]>().write_unaligned(products);
                    }
                }
            }
            for (i, sums) in sums.iter_mut().enumerate().take(heads) {
                let part = partial.add(i * self.stride);
                let output = part.add(16);
                let softmax = RunningSoftmax { shift: part, sums: sums.as_mut_ptr(), output, width: self.stride - 16 };
                let slope =
                    self.op.terms.slope(first_head + i).map(|slope| (slope, (tokens.last - begin as isize) as f32));
                let added = Added { mask: None, slope, hidden: None };
                softmax.add::<S>(self.scores.add(i * MAX_STEP), 0..keys, keys, self.call.scores, added);
            }
            let values = Values {
                weights: self.scores,
                weights_stride: MAX_STEP,
                at: value_at.cast::<*const T>(),
                count: keys,
                ahead: AHEAD,
                output: partial.add(16),
                output_stride: self.stride,
            };
            values::add::<S, T>(values, heads, self.value_dim);
        }
        for (i, sums) in sums.iter().enumerate().take(heads) {
            *partial.add(i * self.stride + 1) = S::sum(S::load(sums.as_ptr()));
        }
    }

    /// Joins a chunk's partial results to the merged ones.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, partial: *const f32) {
        for i in 0..self.heads.len() {
            let (from, to) = (partial.add(i * self.stride), self.merged.add(i * self.stride));
            let shift = (*from).max(*to);
            if shift == f32::NEG_INFINITY {
                continue;
            }
            let (old, new) = (math::exp2::<S>(S::splat(*to - shift)), math::exp2::<S>(S::splat(*from - shift)));
            for at in (0..self.stride).step_by(S::LANES) {
                let sum = S::fma(S::load(from.add(at)), new, S::mul(S::load(to.add(at)), old));
                S::store(to.add(at), sum);
            }
            *to = shift;
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, unit: usize) {
        let (row, heads) = self.query_heads(unit);
        let value_scale = self.op.cache.value_view().scale(self.call.unit(unit).1);
        for (i, head) in heads.enumerate() {
            let merged = self.merged.add(i * self.stride);
            let output = Row::head(&self.op.output, row, head);
            finish::<S>(
                (merged.add(16), value_scale),
                *merged,
                *merged.add(1),
                output,
                self.value_dim,
                lse_of(self.op.lse, row, head),
                self.op.terms.sink(head),
            );
        }
    }
}

/// The formula in f64, for tensors in host memory and positions and sequences within the cache.
pub fn reference(op: &AttentionDecode) {
    // SAFETY: validated tensors of one integer a row.
    let (positions, places) =
        unsafe { (integers(&op.rows.positions), op.rows.sequences.as_ref().map(|all| integers(all))) };
    for (row, &position) in positions.iter().enumerate() {
        let sequence = row / op.rows.per_sequence;
        let sequence = places.map_or(sequence, |places| places[sequence] as usize);
        let kv_length = (position + 1) as usize;
        let span = SequenceSpan { query_start: row, query_count: 1, kv_start: sequence, kv_length, prefix: 0 };
        let (query, output) =
            (op.query.skip(row * op.query.token_stride), op.output.skip(row * op.output.token_stride));
        let views = (&query, &op.cache.key_view(), &op.cache.value_view(), &output);
        let seen = |query: usize| super::visible(&op.config, &span, query);
        super::reference(&op.config, views, op.lse, &span, (row, &|_| 1.0, &|_, _, _| 0.0, &op.terms, &seen));
    }
}
