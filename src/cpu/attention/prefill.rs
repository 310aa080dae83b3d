//! Attention of many query rows, in tiles (Dao et al. 2022): scores of a few query rows with a tile of keys, their
//! weights, and the weighted values, without ever holding a whole row of scores.
//!
//! A task owns a block of query rows of one sequence and one key/value head; the query heads that share it are rows of
//! the same block. It walks over the keys that the block sees, a tile at a time, and packs the tile's keys and values once for
//! all its rows (`operands`). A strip of as many rows as a register tile holds meets the tile: scores, weights, weighted
//! values. Strips that see nothing of it are left out, and only those that see a part are masked. Tiles start at multiples of
//! [`KEYS`], so a row's sums do not depend on the block it is in.

#[cfg(target_arch = "x86_64")]
use super::multiplies_bf16;
#[cfg(target_arch = "x86_64")]
use super::operands::Pairs;
use super::operands::{Operands, Tokens, Wide, KEYS};
use super::softmax::{finish, Added, RunningSoftmax, Scores};
use super::{addresses, lse_of, visible};
use crate::allocation::push;
use crate::cpu::outer_tile::Outer;
use crate::cpu::row::Row;
use crate::cpu::threads::{Scratch, Threads, SCRATCH_FLOATS};
use crate::error::Result;
use crate::operation::attention::mask::{Mask, WORD_KEYS};
use crate::operation::attention::{AttentionPrefill, Dropout, SequenceSpan, Tree, DROPOUT_KEYS};
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{DType, Heads, KvView, MAX_HEAD_DIM, MAX_VALUE_DIM};
use std::marker::PhantomData;
use std::ops::Range;

/// Query rows of a block: enough to pay for packing the keys and values, few enough for the second cache level. Heads wider
/// than [`WIDE_HEAD`] have half as many.
const MAX_ROWS: usize = 192;
const WIDE_HEAD: usize = 256;
/// Query rows of a block when there are few of them for the threads.
const MIN_ROWS: usize = 24;

/// The working memory of a block, at most, with `dims` of keys and values together: see [`Tiles`].
const fn block_floats(rows: usize, dims: usize) -> usize {
    (rows + KEYS) * dims + rows * 17 + 2 * 6 * KEYS + 8 * 16
}

const _: () = assert!(
    block_floats(MAX_ROWS, 2 * WIDE_HEAD) <= SCRATCH_FLOATS
        && block_floats(MAX_ROWS / 2, MAX_HEAD_DIM + MAX_VALUE_DIM) <= SCRATCH_FLOATS,
    "a block fits the scratch"
);

/// A block of query rows: queries × heads of one group.
#[derive(Clone)]
struct Task {
    span: SequenceSpan,
    kv_head: usize,
    heads: Range<usize>,
    queries: Range<usize>,
}

/// An error names the first sequence whose page table has no page for a token that it sees.
pub fn prefill(threads: &Threads, op: &AttentionPrefill) -> Result<()> {
    let spans = op.spans()?;
    for span in &spans {
        let last = visible(&op.config, span, span.query_count - 1);
        for keys in [0..op.config.sinks_before(last.start), first_seen(op, span, 0)..last.end] {
            // SAFETY: on the CPU a table is in host memory; the span's sequence and keys are within it.
            unsafe { op.key.check_pages(op.key.origin(span.kv_start), keys)? };
        }
    }
    let tasks = split(op, &spans, threads.count())?;
    threads.run(tasks.len(), |task, scratch| {
        // SAFETY: the descriptor is validated; tasks write different rows and heads of the output.
        unsafe { dispatch(Block { op, task: &tasks[task], scratch }) }
    });
    Ok(())
}

/// Rows of a block: queries times the heads of a group that it has.
pub fn block_rows(op: &AttentionPrefill, threads: usize) -> usize {
    let wide = op.config.head_dim.max(op.config.value_dim) > WIDE_HEAD;
    let largest = if wide { MAX_ROWS / 2 } else { MAX_ROWS };
    // With lengths in device memory as many as there may be.
    let queries = match &op.lengths {
        None => op.sequences.iter().map(|span| span.query_count).sum(),
        Some(_) => op.query.tokens * op.blocks,
    };
    (queries * op.config.query_heads).div_ceil(threads * 4).clamp(MIN_ROWS, largest)
}

fn split(op: &AttentionPrefill, spans: &[SequenceSpan], threads: usize) -> Result<Vec<Task>> {
    let group = op.config.group();
    let rows = block_rows(op, threads);
    let (heads, queries) = (group.min(rows), (rows / group).max(1));
    let mut tasks = Vec::new();
    for span in spans {
        // The last rows of a causal sequence see the most keys: they start first, so that none is left alone at the end.
        for first in (0..span.query_count).step_by(queries).rev() {
            for kv_head in 0..op.config.kv_heads {
                for head in (0..group).step_by(heads) {
                    let task = Task {
                        span: *span,
                        kv_head,
                        heads: kv_head * group + head..kv_head * group + (head + heads).min(group),
                        queries: first..(first + queries).min(span.query_count),
                    };
                    push(&mut tasks, task, "the tasks of a prefill")?;
                }
            }
        }
    }
    Ok(tasks)
}

/// The keys that a row sees, but for those among them that a mask or the tree hides.
fn seen(op: &AttentionPrefill, span: &SequenceSpan, query: usize) -> Range<usize> {
    let seen = visible(&op.config, span, query);
    let Some(tree) = &op.tree else { return seen };
    let depth = tree.ancestors(span.query_start * op.starts.lse, query).count_ones() as usize - 1;
    visible(&op.config, span, depth).start..seen.end
}

/// Before the first key that the row or one behind it sees. Rows of a tree may stand at any depth.
fn first_seen(op: &AttentionPrefill, span: &SequenceSpan, query: usize) -> usize {
    visible(&op.config, span, if op.tree.is_some() { 0 } else { query }).start
}

struct Block<'a> {
    op: &'a AttentionPrefill,
    task: &'a Task,
    scratch: &'a mut Scratch,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, task, scratch } = self;
        #[cfg(target_arch = "x86_64")]
        if multiplies_bf16::<S>() && all_bf16(op) {
            return Tiles::<Pairs>::new::<S>(op, task, scratch).run::<S>();
        }
        Tiles::<Wide>::new::<S>(op, task, scratch).run::<S>();
    }
}

/// Then rounding the weights to BF16 costs no more than rounding the output does.
#[cfg(target_arch = "x86_64")]
fn all_bf16(op: &AttentionPrefill) -> bool {
    [op.query.dtype, op.key.dtype, op.value.dtype, op.output.dtype].iter().all(|&dtype| dtype == DType::Bf16)
}

/// A task and its working memory. Operands are cells of [`Operands`]; rows are padded to whole vectors.
struct Tiles<'a, O> {
    op: &'a AttentionPrefill,
    task: &'a Task,
    scores: Scores,
    /// From the sequence's first row on.
    query_rows: Heads,
    output_rows: Heads,
    rows: usize,
    /// Of a query and a key, and of a value.
    dim: usize,
    value_dim: usize,
    /// [rows, query_width]
    query: *mut f32,
    query_width: usize,
    /// [rows, value_width]
    output: *mut f32,
    value_width: usize,
    /// [dim, KEYS]
    key: *mut f32,
    /// [KEYS, value_width]
    value: *mut f32,
    /// [OUTER_ROWS, KEYS]
    products: *mut f32,
    weights: *mut f32,
    /// [rows]
    shift: *mut f32,
    /// [rows, LANES]
    sums: *mut f32,
    form: PhantomData<O>,
    /// With the offset of this run.
    dropout: Option<(Dropout, u64)>,
}

/// Makes 0 of the weights that are dropped, and scales the others. `first`, the key of the first weight, is a multiple of
/// `DROPOUT_KEYS`.
///
/// # Safety
/// `count` weights are readable and writable.
unsafe fn drop_weights(
    dropout: &Dropout,
    offset: u64,
    (row, head): (u32, u32),
    first: usize,
    weights: *mut f32,
    count: usize,
) {
    for at in (0..count).step_by(DROPOUT_KEYS) {
        let bytes = dropout.bytes(offset, row, head, ((first + at) / DROPOUT_KEYS) as u32);
        for (i, byte) in bytes.into_iter().enumerate().take(count - at) {
            let weight = weights.add(at + i);
            *weight = if byte < dropout.threshold { 0.0 } else { *weight * dropout.scale };
        }
    }
}

impl<'a, O: Operands> Tiles<'a, O> {
    fn new<S: Simd>(op: &'a AttentionPrefill, task: &'a Task, scratch: &mut Scratch) -> Tiles<'a, O> {
        let rows = task.queries.len() * task.heads.len();
        let (dim, value_dim) = (op.config.head_dim, op.config.value_dim);
        let (query_width, value_width) =
            (dim.div_ceil(O::DEPTH).next_multiple_of(S::LANES), value_dim.next_multiple_of(S::LANES));
        let mut rest = scratch.floats();
        let mut take = |count: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(count.next_multiple_of(16));
            rest = tail;
            part.as_mut_ptr()
        };
        Tiles {
            op,
            task,
            scores: Scores::with(&op.config, op.mask.is_some() || op.terms.slopes.is_some() || op.tree.is_some()),
            query_rows: op.query.skip(task.span.query_start * op.starts.query),
            output_rows: op.output.skip(task.span.query_start * op.starts.output),
            rows,
            dim,
            value_dim,
            query: take(rows * query_width),
            query_width,
            output: take(rows * value_width),
            value_width,
            key: take(dim.div_ceil(O::DEPTH) * KEYS),
            value: take(KEYS.div_ceil(O::DEPTH) * value_width),
            products: take(S::OUTER_ROWS * KEYS),
            weights: take(S::OUTER_ROWS * KEYS),
            shift: take(rows),
            sums: take(rows * S::LANES),
            form: PhantomData,
            dropout: op.dropout.map(|dropout| (dropout, dropout.run_offset())),
        }
    }

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let Tiles { op, task, rows, .. } = *self;
        self.start::<S>();
        let begin = first_seen(op, &task.span, task.queries.start);
        let end = visible(&op.config, &task.span, task.queries.end - 1).end;
        // The tiles of the first tokens, and those of the window.
        let first = begin / KEYS * KEYS;
        let beside = op.config.sinks_before(first).next_multiple_of(KEYS).min(first);
        for tile in (0..beside).step_by(KEYS).chain((first..end).step_by(KEYS)) {
            let keys = tile..(tile + KEYS).min(end);
            if !self.any_bit(0..rows, &keys) {
                continue;
            }
            O::keys::<S>(&self.tokens(&op.key, keys.clone(), begin), self.dim, self.key);
            O::values::<S>(&self.tokens(&op.value, keys.clone(), begin), self.value_dim, self.value_width, self.value);
            for first in (0..rows).step_by(S::OUTER_ROWS) {
                self.strip::<S>(first..(first + S::OUTER_ROWS).min(rows), keys.clone());
            }
        }
        let value_scale = op.value.scale(task.kv_head);
        for row in 0..rows {
            let (query, head) = self.query_and_head(row);
            let sum = S::sum(S::load(self.sums.add(row * S::LANES)));
            let output = Row::head(&self.output_rows, query, head);
            let lse_row = task.span.query_start * op.starts.lse + query;
            let values = self.output.add(row * self.value_width);
            finish::<S>(
                (values, value_scale),
                *self.shift.add(row),
                sum,
                output,
                self.value_dim,
                lse_of(op.lse, lse_row, head),
                op.terms.sink(head),
            );
        }
    }

    /// A row's number in its sequence, and its head.
    #[inline(always)]
    fn query_and_head(&self, row: usize) -> (usize, usize) {
        let Task { heads, queries, .. } = self.task;
        (queries.start + row / heads.len(), heads.start + row % heads.len())
    }

    /// Queries into their buffer, and every row's softmax to its start.
    #[inline(always)]
    unsafe fn start<S: Simd>(&self) {
        let key_scale = self.op.key.scale(self.task.kv_head) * self.op.query_scale(self.task.kv_head);
        for row in 0..self.rows {
            let (query, head) = self.query_and_head(row);
            let to = self.query.add(row * self.query_width);
            O::query::<S>(Row::head(&self.query_rows, query, head), self.dim, to);
            // Scores are linear in the keys' scale. Keys that have one are no BF16, so these are f32.
            if key_scale != 1.0 {
                for at in (0..self.query_width).step_by(S::LANES) {
                    S::store(to.add(at), S::mul(S::load(to.add(at)), S::splat(key_scale)));
                }
            }
            for at in (0..self.value_width).step_by(S::LANES) {
                S::store(self.output.add(row * self.value_width + at), S::zero());
            }
            *self.shift.add(row) = f32::NEG_INFINITY;
            S::store(self.sums.add(row * S::LANES), S::zero());
        }
    }

    /// A tile's tokens. Those before `begin` no row of the block sees, and they may be gone: rows of 0 stand for them.
    #[inline(always)]
    fn tokens(&self, view: &KvView, keys: Range<usize>, begin: usize) -> Tokens {
        static ZEROS: [f32; MAX_HEAD_DIM] = [0.0; MAX_HEAD_DIM];
        let mut tokens = Tokens { at: [ZEROS.as_ptr().cast(); KEYS], count: keys.len(), dtype: view.dtype };
        let sinks = self.op.config.sinks_before(begin);
        let origin = view.origin(self.task.span.kv_start);
        for range in [keys.start..sinks.min(keys.end), begin.max(keys.start)..keys.end] {
            if range.is_empty() {
                continue;
            }
            let there = &mut tokens.at[range.start - keys.start..range.end - keys.start];
            // SAFETY: `prefill` saw the pages of all keys that a row of the sequence sees.
            unsafe { addresses(view, origin, range.start, self.task.kv_head, there) };
        }
        tokens
    }

    /// Whether bits of a mask show some of the rows some of the keys, which begin at a word's first.
    fn any_bit(&self, rows: Range<usize>, keys: &Range<usize>) -> bool {
        let Some(mask) = self.op.mask.filter(Mask::is_bits) else { return true };
        rows.into_iter().any(|row| {
            let (query, head) = self.query_and_head(row);
            let first = mask.offset(self.task.span.query_start, query, head);
            // SAFETY: a validated mask has a word for each 32 keys that a sequence may have.
            (keys.start / WORD_KEYS..keys.end.div_ceil(WORD_KEYS)).any(|word| unsafe { mask.word(first + word) } != 0)
        })
    }

    /// What is added to a row's scores with these keys: the mask's own elements, or what bits and the tree hide, written to `joined`.
    #[inline(always)]
    fn mask_of(&self, query: usize, head: usize, keys: &Range<usize>, joined: &mut [f32; KEYS]) -> Option<Row> {
        let Tiles { op, task, .. } = *self;
        let first = op.mask.map(|mask| mask.offset(task.span.query_start, query, head));
        let floats = op.mask.zip(first).filter(|(mask, _)| !mask.is_bits());
        let floats = floats.map(|(mask, first)| Row::raw(mask.tensor.data, mask.tensor.dtype).skip(first + keys.start));
        let bits = op.mask.zip(first).filter(|(mask, _)| mask.is_bits());
        let trunk = task.span.kv_length - task.span.query_count.min(task.span.kv_length);
        let tree = op.tree.filter(|_| keys.end > trunk);
        if bits.is_none() && tree.is_none() {
            return floats;
        }
        let ancestors = tree.map(|tree| tree.ancestors(task.span.query_start * op.starts.lse, query));
        for (key, joined) in keys.clone().zip(joined.iter_mut()) {
            // SAFETY: a validated mask has an element, or a word, for the key.
            let is_seen = unsafe {
                bits.is_none_or(|(mask, first)| mask.word(first + key / WORD_KEYS) >> (key % WORD_KEYS) & 1 == 1)
            } && ancestors.is_none_or(|seen| key < trunk || seen >> (key - trunk) & 1 == 1);
            *joined = match floats {
                _ if !is_seen => f32::NEG_INFINITY,
                // SAFETY: as above.
                Some(floats) => unsafe { floats.element(key - keys.start) },
                None => 0.0,
            };
        }
        Some(Row::raw(joined.as_mut_ptr().cast(), DType::F32))
    }

    /// A few rows meet a tile of keys.
    #[inline(always)]
    unsafe fn strip<S: Simd>(&self, strip: Range<usize>, keys: Range<usize>) {
        let Tiles { op, task, .. } = *self;
        let heads = task.heads.len();
        let seen = |row: usize| seen(op, &task.span, task.queries.start + row / heads);
        // Later rows see no earlier begin and no earlier end.
        let end = seen(strip.end - 1).end.min(keys.end);
        let begin = first_seen(op, &task.span, task.queries.start + strip.start / heads);
        let has_sinks = keys.start < op.config.sinks_before(seen(strip.end - 1).start);
        if end <= keys.start || (end <= begin && !has_sinks) || !self.any_bit(strip.clone(), &keys) {
            return;
        }
        let count = end - keys.start;
        let products = Outer {
            a: self.query.add(strip.start * self.query_width).cast_const(),
            a_stride: self.query_width,
            b: self.key.cast_const(),
            b_stride: KEYS,
            k: self.dim.div_ceil(O::DEPTH),
            c: self.products,
            c_stride: KEYS,
            accumulate: false,
        };
        O::product::<S>(products, strip.len(), count.div_ceil(S::LANES));
        for (i, row) in strip.clone().enumerate() {
            let seen = seen(row);
            let within = |key: usize| key.clamp(keys.start, end) - keys.start;
            let softmax = RunningSoftmax {
                shift: self.shift.add(row),
                sums: self.sums.add(row * S::LANES),
                output: self.output.add(row * self.value_width),
                width: self.value_width,
            };
            // Where the first tokens lie before the window, what is between them is hidden.
            let sinks = op.config.sinks_before(seen.start);
            let (visible, hidden) = match keys.start < sinks {
                true => (0..within(seen.end), Some((within(sinks) as f32, within(seen.start) as f32))),
                false => (within(seen.start)..within(seen.end), None),
            };
            let (query, head) = self.query_and_head(row);
            let mut joined = [0.0; KEYS];
            let mask = self.mask_of(query, head, &(keys.start..end), &mut joined);
            let SequenceSpan { query_count, kv_length, .. } = task.span;
            let position = (kv_length + query) as isize - (query_count + keys.start) as isize;
            let slope = op.terms.slope(head).map(|slope| (slope, position as f32));
            let products = self.products.add(i * KEYS);
            softmax.add::<S>(products, visible, count, self.scores, Added { mask, slope, hidden });
            if let Some((dropout, offset)) = &self.dropout {
                let row = (task.span.query_start * op.starts.lse + query) as u32;
                drop_weights(dropout, *offset, (row, head as u32), keys.start, products, count);
            }
        }
        let (weights, stride) = O::weights::<S>(strip.len(), count, self.products, self.weights);
        let values = Outer {
            a: weights,
            a_stride: stride,
            b: self.value.cast_const(),
            b_stride: self.value_width,
            k: count.div_ceil(O::DEPTH),
            c: self.output.add(strip.start * self.value_width),
            c_stride: self.value_width,
            accumulate: true,
        };
        O::product::<S>(values, strip.len(), self.value_width / S::LANES);
    }
}

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &AttentionPrefill) {
    for span in &op.spans().expect("lengths within their bounds") {
        let query = op.query.skip(span.query_start * op.starts.query);
        let output = op.output.skip(span.query_start * op.starts.output);
        let trunk = span.kv_length - span.query_count.min(span.kv_length);
        let bias = |row: usize, head: usize, token: usize| {
            let first = span.query_start * op.starts.lse;
            let in_tree = |tree: &Tree| token < trunk || tree.ancestors(first, row) >> (token - trunk) & 1 == 1;
            if !op.tree.as_ref().is_none_or(in_tree) {
                return f64::NEG_INFINITY;
            }
            let Some(mask) = &op.mask else { return 0.0 };
            let first = mask.offset(span.query_start, row, head);
            // SAFETY: a validated mask has an element, or a word, for it.
            unsafe {
                match mask.is_bits() {
                    true if mask.word(first + token / WORD_KEYS) >> (token % WORD_KEYS) & 1 == 1 => 0.0,
                    true => f64::NEG_INFINITY,
                    false => Row::raw(mask.tensor.data, mask.tensor.dtype).get(first + token),
                }
            }
        };
        let first = span.query_start * op.starts.lse;
        let extras: super::Extras<'_> =
            (first, &|head| op.query_scale(head), &bias, &op.terms, &|row| seen(op, span, row));
        super::reference(&op.config, (&query, &op.key, &op.value, &output), op.lse, span, extras);
    }
}
