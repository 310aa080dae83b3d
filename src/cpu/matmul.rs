//! C = α · op(A) · op(B) over a batch. Operands become f32 in scratch memory, op(B)ᵀ with its rows contiguous, so that
//! the product is the one of [`super::linear`]; sums are f32 with one rounding at the store.

use super::dot_tile::{DotTile, COLUMNS};
use super::row::Row;
use super::threads::{Scratch, Threads};
use crate::operation::matmul::{Matmul, MatrixBatch};
use crate::simd::{dispatch, Kernel, Simd};
use std::ops::Range;

/// Elements of op(A) and of op(B) that are f32 at once.
const DEPTH: usize = 256;
/// Rows and columns of C of a task.
const TASK_ROWS: usize = 48;
const TASK_COLUMNS: usize = 64;
/// Floats between rows of a panel, so that they do not compete for the same sets of a cache.
const PITCH: usize = DEPTH + 16;

pub fn matmul(threads: &Threads, op: &Matmul) {
    let (row_blocks, column_blocks) = (op.m.div_ceil(TASK_ROWS), op.n.div_ceil(TASK_COLUMNS));
    let blocks = row_blocks * column_blocks;
    threads.run(op.batch[0] * op.batch[1] * blocks, |task, scratch| {
        let (matrix, block) = (task / blocks, task % blocks);
        let (row, column) = (block / column_blocks * TASK_ROWS, block % column_blocks * TASK_COLUMNS);
        let block = Block {
            op,
            batch: [matrix / op.batch[1], matrix % op.batch[1]],
            rows: row..(row + TASK_ROWS).min(op.m),
            columns: column..(column + TASK_COLUMNS).min(op.n),
            scratch,
        };
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents, and tasks write
        // disjoint blocks of the output.
        unsafe { dispatch(block) }
    });
}

struct Block<'a> {
    op: &'a Matmul,
    batch: [usize; 2],
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: &'a mut Scratch,
}

/// Row `row` of the matrix as it lies in memory.
fn row_of(matrix: &MatrixBatch, batch: [usize; 2], row: usize) -> Row {
    let first = batch[0] * matrix.batch_strides[0] + batch[1] * matrix.batch_strides[1];
    Row::raw(matrix.data, matrix.dtype).skip(first + row * matrix.row_stride)
}

/// Elements (lines, depth) of a matrix whose lines are its rows, or its columns, as rows of f32, `PITCH` apart, with
/// zeros up to a whole chunk.
unsafe fn panel(
    matrix: &MatrixBatch,
    batch: [usize; 2],
    columns: bool,
    lines: Range<usize>,
    depth: Range<usize>,
    to: &mut [f32],
) {
    for (place, line) in lines.clone().enumerate() {
        let to = &mut to[place * PITCH..][..depth.len().next_multiple_of(16)];
        to[depth.len()..].fill(0.0);
        if !columns {
            let row = row_of(matrix, batch, line);
            for (to, at) in to.iter_mut().zip(depth.clone()) {
                *to = row.get(at) as f32;
            }
        }
    }
    if columns {
        for (k, at) in depth.enumerate() {
            let row = row_of(matrix, batch, at);
            for (place, line) in lines.clone().enumerate() {
                to[place * PITCH + k] = row.get(line) as f32;
            }
        }
    }
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, batch, rows, columns, scratch } = self;
        let width = columns.len().next_multiple_of(COLUMNS);
        let (sums, scratch) = scratch.floats().split_at_mut(TASK_ROWS * (TASK_COLUMNS + COLUMNS));
        let (a, b) = scratch.split_at_mut(TASK_ROWS * PITCH);
        let sums = &mut sums[..rows.len() * width];
        sums.fill(0.0);
        for first in (0..op.k).step_by(DEPTH) {
            let depth = first..(first + DEPTH).min(op.k);
            panel(&op.a, batch, op.transpose_a, rows.clone(), depth.clone(), a);
            panel(&op.b, batch, !op.transpose_b, columns.clone(), depth.clone(), b);
            for row in (0..rows.len()).step_by(S::DOT_ROWS) {
                let height = S::DOT_ROWS.min(rows.len() - row);
                for column in (0..columns.len()).step_by(COLUMNS) {
                    // A column past the last repeats it, and its product is dropped.
                    let line = |j: usize| b.as_ptr().wrapping_add((column + j).min(columns.len() - 1) * PITCH);
                    let tile = DotTile::<f32, f32> {
                        x: a.as_ptr().add(row * PITCH),
                        x_stride: PITCH,
                        w: [line(0), line(1), line(2), line(3)],
                        k: depth.len().next_multiple_of(16),
                        ahead: 0,
                    };
                    for (i, products) in tile.compute::<S>(height).into_iter().take(height).enumerate() {
                        for (j, product) in products.into_iter().enumerate() {
                            sums[(row + i) * width + column + j] += product;
                        }
                    }
                }
            }
        }
        for (row, sums) in rows.zip(sums.chunks_exact(width)) {
            let output = row_of(&op.output, batch, row);
            for (column, sum) in columns.clone().zip(sums) {
                output.set(column, f64::from(op.alpha * sum));
            }
        }
    }
}
