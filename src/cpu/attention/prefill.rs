//! Attention of many query rows, in tiles (Dao et al. 2022): scores of a few query rows with a tile of keys, their
//! weights, and the weighted values, without ever holding a whole row of scores.
//!
//! A task owns a block of query rows of one sequence and one key/value head; the query heads that share it are rows of
//! the same block. It walks over the keys that the block sees, a tile at a time. The tile's keys are transposed so that
//! scores lie along vectors; its values are widened to f32. Tiles start at multiples of [`KEYS`], so a row's sums do not
//! depend on the block it is in.

use super::{finish, kv_row, lse_of, visible, RunningSoftmax};
use crate::allocation::push;
use crate::cpu::outer_tile::Outer;
use crate::cpu::row::{vectors, Row};
use crate::cpu::threads::{Scratch, Threads};
use crate::error::Result;
use crate::operation::attention::{AttentionPrefill, SequenceSpan};
use crate::simd::{dispatch, Kernel, Simd};
use std::ops::Range;

/// Keys of a tile.
const KEYS: usize = 64;

/// Query rows of a block: enough to pay for the transposition of the keys.
const MAX_ROWS: usize = 96;
/// Query rows of a block when there are few of them for the threads.
const MIN_ROWS: usize = 24;

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
    for span in &op.sequences {
        let seen = visible(&op.config, span, 0).start..visible(&op.config, span, span.query_count - 1).end;
        // SAFETY: on the CPU a table is in host memory; the span's sequence and keys are within it.
        unsafe { op.key.check_pages(span.kv_offset, seen)? };
    }
    let tasks = split(op, threads.count())?;
    threads.run(tasks.len(), |task, scratch| {
        // SAFETY: the descriptor is validated; tasks write different rows and heads of the output.
        unsafe { dispatch(Block { op, task: &tasks[task], scratch }) }
    });
    Ok(())
}

fn split(op: &AttentionPrefill, threads: usize) -> Result<Vec<Task>> {
    let group = op.config.group();
    let largest = if op.config.head_dim > 256 { MAX_ROWS / 2 } else { MAX_ROWS };
    let queries: usize = op.sequences.iter().map(|span| span.query_count).sum();
    let rows = (queries * op.config.query_heads).div_ceil(threads * 4).clamp(MIN_ROWS, largest);
    let (heads, queries) = (group.min(rows), (rows / group).max(1));
    let mut tasks = Vec::new();
    for span in &op.sequences {
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

struct Block<'a> {
    op: &'a AttentionPrefill,
    task: &'a Task,
    scratch: &'a mut Scratch,
}

/// The block's working memory; every row is padded to whole vectors.
struct Buffers {
    /// [rows, width], scaled
    query: *mut f32,
    /// [rows, width]
    output: *mut f32,
    /// [head_dim, KEYS]
    key: *mut f32,
    /// [KEYS, width]
    value: *mut f32,
    /// [OUTER_ROWS, KEYS]
    scores: *mut f32,
    max: *mut f32,
    /// [rows, LANES]
    sums: *mut f32,
    width: usize,
}

impl Buffers {
    fn new<S: Simd>(scratch: &mut Scratch, rows: usize, head_dim: usize) -> Buffers {
        let width = head_dim.next_multiple_of(S::LANES);
        let mut rest = scratch.floats();
        let mut take = |count: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(count.next_multiple_of(16));
            rest = tail;
            part.as_mut_ptr()
        };
        Buffers {
            query: take(rows * width),
            output: take(rows * width),
            key: take(head_dim * KEYS),
            value: take(KEYS * width),
            scores: take(S::OUTER_ROWS * KEYS),
            max: take(rows),
            sums: take(rows * S::LANES),
            width,
        }
    }
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, task, scratch } = self;
        let (heads, dim) = (task.heads.len(), op.config.head_dim);
        let rows = task.queries.len() * heads;
        let buffers = Buffers::new::<S>(scratch, rows, dim);
        load_queries::<S>(op, task, &buffers);
        let begin = visible(&op.config, &task.span, task.queries.start).start;
        let end = visible(&op.config, &task.span, task.queries.end - 1).end;
        for tile in (begin / KEYS * KEYS..end).step_by(KEYS) {
            let keys = tile..(tile + KEYS).min(end);
            transpose_keys::<S>(op, task, begin, keys.clone(), buffers.key);
            widen_values::<S>(op, task, begin, keys.clone(), &buffers);
            for first in (0..rows).step_by(S::OUTER_ROWS) {
                let strip = first..(first + S::OUTER_ROWS).min(rows);
                add_tile::<S>(op, task, &buffers, strip, keys.clone());
            }
        }
        for row in 0..rows {
            let (query, head) =
                (task.span.query_start + task.queries.start + row / heads, task.heads.start + row % heads);
            let sum = S::sum(S::load(buffers.sums.add(row * S::LANES)));
            let output = Row::head(&op.output, query, head);
            let values = buffers.output.add(row * buffers.width);
            finish::<S>(values, *buffers.max.add(row), sum, output, dim, lse_of(op.lse, query, head));
        }
    }
}

/// Scaled queries into their buffer, and the running softmax of every row to its start.
#[inline(always)]
unsafe fn load_queries<S: Simd>(op: &AttentionPrefill, task: &Task, buffers: &Buffers) {
    let heads = task.heads.len();
    let scale = S::splat(op.config.scale);
    for row in 0..task.queries.len() * heads {
        let (query, head) = (task.span.query_start + task.queries.start + row / heads, task.heads.start + row % heads);
        let from = Row::head(&op.query, query, head);
        for (at, lanes) in vectors::<S>(op.config.head_dim) {
            let place = row * buffers.width + at;
            S::store(buffers.query.add(place), S::mul(from.load::<S>(at, lanes), scale));
            S::store(buffers.output.add(place), S::zero());
        }
        *buffers.max.add(row) = f32::NEG_INFINITY;
        S::store(buffers.sums.add(row * S::LANES), S::zero());
    }
}

/// Keys as [head_dim, KEYS]; the columns before `begin`, whose tokens may have no page any more, and past the last key are 0.
#[inline(always)]
unsafe fn transpose_keys<S: Simd>(op: &AttentionPrefill, task: &Task, begin: usize, keys: Range<usize>, to: *mut f32) {
    for column in (0..KEYS).step_by(S::LANES) {
        for (at, lanes) in vectors::<S>(op.config.head_dim) {
            let mut block = [S::zero(); 16];
            for (i, row) in block.iter_mut().enumerate().take(S::LANES) {
                if column + i < keys.len() && keys.start + column + i >= begin {
                    *row = kv_row(&op.key, task.span.kv_offset, keys.start + column + i, task.kv_head)
                        .load::<S>(at, lanes);
                }
            }
            S::transpose(&mut block);
            for (i, row) in block.iter().enumerate().take(lanes) {
                S::store(to.add((at + i) * KEYS + column), *row);
            }
        }
    }
}

/// Values as [KEYS, width]. Values that are f32 are copied too: rows of many heads lie a power of two apart, and a tile
/// of them would fall on a few sets of the first cache level.
#[inline(always)]
unsafe fn widen_values<S: Simd>(
    op: &AttentionPrefill,
    task: &Task,
    begin: usize,
    keys: Range<usize>,
    buffers: &Buffers,
) {
    for (i, key) in keys.enumerate() {
        if key < begin {
            for at in (0..buffers.width).step_by(S::LANES) {
                S::store(buffers.value.add(i * buffers.width + at), S::zero());
            }
            continue;
        }
        let from = kv_row(&op.value, task.span.kv_offset, key, task.kv_head);
        for (at, lanes) in vectors::<S>(op.config.head_dim) {
            S::store(buffers.value.add(i * buffers.width + at), from.load::<S>(at, lanes));
        }
    }
}

/// A few rows meet a tile of keys.
#[inline(always)]
unsafe fn add_tile<S: Simd>(
    op: &AttentionPrefill,
    task: &Task,
    buffers: &Buffers,
    strip: Range<usize>,
    keys: Range<usize>,
) {
    let heads = task.heads.len();
    let seen = |row: usize| visible(&op.config, &task.span, task.queries.start + row / heads);
    // Later rows see no earlier begin and no earlier end.
    let end = seen(strip.end - 1).end.min(keys.end);
    if end <= keys.start.max(seen(strip.start).start) {
        return;
    }
    let (count, width) = (end - keys.start, buffers.width);
    // Scores.
    let scores = Outer {
        a: buffers.query.add(strip.start * width),
        a_stride: width,
        b: buffers.key.cast_const(),
        b_stride: KEYS,
        k: op.config.head_dim,
        c: buffers.scores,
        c_stride: KEYS,
        accumulate: false,
    };
    scores.run::<S>(strip.len(), count.div_ceil(S::LANES));
    // Weights.
    for (i, row) in strip.clone().enumerate() {
        let seen = seen(row);
        let within = |key: usize| key.clamp(keys.start, end) - keys.start;
        let mut softmax = RunningSoftmax {
            max: buffers.max.add(row),
            sums: buffers.sums.add(row * S::LANES),
            output: buffers.output.add(row * width),
            width,
        };
        softmax.add::<S>(buffers.scores.add(i * KEYS), within(seen.start)..within(seen.end), count, op.config.soft_cap);
    }
    // Weighted values.
    let values = Outer {
        a: buffers.scores.cast_const(),
        a_stride: KEYS,
        b: buffers.value.cast_const(),
        b_stride: width,
        k: count,
        c: buffers.output.add(strip.start * width),
        c_stride: width,
        accumulate: true,
    };
    values.run::<S>(strip.len(), width / S::LANES);
}

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &AttentionPrefill) {
    for span in &op.sequences {
        super::reference(&op.config, (&op.query, &op.key, &op.value, &op.output), op.lse, span);
    }
}
