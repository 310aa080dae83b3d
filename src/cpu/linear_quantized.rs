//! y = activation(x · Wᵀ + bias) over weights in FP8, Int8, Int4 and the blocks of files.
//!
//! The result is that of the dequantised weights: x and W become f32, whose products are summed in f32. With few rows W is
//! unpacked in registers ([`QuantizedTile`]) and the product runs at the speed of memory; with more rows a slice of W is
//! unpacked once into memory that stays in a core's caches, and the rows pass over it ([`DotTile`]). Both add the same
//! values in the same order, so neither the number of rows nor of threads changes a bit.

use super::dequantize::{unpack_blocks, with_encoding, Encoded, Slice, Unpack, CHUNK, SLICE};
use super::dot_tile::{DotTile, Products, COLUMNS};
#[cfg(target_arch = "x86_64")]
use super::int4_tile::{arrange, Int4Tile, BLOCK, INT4_ROWS, INT4_SLICE};
use super::linear::{
    epilogue, COLUMN_STEP, MAX_TASK_COLUMNS, MIN_TASK_ROWS, OVERLAPPED_ROWS, STREAM_AHEAD, TASK_WEIGHT_BYTES,
};
use super::quantized_tile::{QuantizedTile, QUANTIZED_ROWS};
use super::row::{vectors, Row};
use super::threads::{Scratch, Threads, SCRATCH_FLOATS};
use crate::operation::linear_product::LinearProduct;
use crate::simd::{dispatch, with_float, Kernel, Simd};
use crate::tensor::{DType, Element};
use crate::weight::{Encoding, Scales};
use std::marker::PhantomData;
use std::ops::Range;

/// Most rows of a task.
const TASK_ROWS: usize = 96;
/// Most rows of a task with Int4, whose slices of x are longer.
const INT4_TASK_ROWS: usize = 48;

/// How far ahead Int4 values are asked for when they are read at the speed of memory, in bytes: twice as far as floats.
#[cfg(target_arch = "x86_64")]
const INT4_AHEAD: usize = 2 * STREAM_AHEAD;

/// Columns of x that a task of few rows has ready at once.
const INPUT_COLUMNS: usize = 16 * SLICE;

/// Floats between rows of a slice in scratch memory, so that they do not compete for the same sets of a cache.
const PITCH: usize = SLICE + 16;

/// Most columns of a task that unpacks its slice of W into memory.
const UNPACKED_COLUMNS: usize = TASK_WEIGHT_BYTES / (SLICE * size_of::<f32>());

const _: () = assert!(
    TASK_ROWS * (UNPACKED_COLUMNS + PITCH) + UNPACKED_COLUMNS * PITCH <= SCRATCH_FLOATS
        && QUANTIZED_ROWS * (MAX_TASK_COLUMNS + INPUT_COLUMNS + 16) <= SCRATCH_FLOATS,
    "a task's sums, input and unpacked weights fit a thread's scratch memory"
);

#[cfg(target_arch = "x86_64")]
const _: () = assert!(
    INT4_TASK_ROWS * (MAX_TASK_COLUMNS + INT4_SLICE + 16) <= SCRATCH_FLOATS && INPUT_COLUMNS.is_multiple_of(INT4_SLICE),
    "a task's sums and input fit a thread's scratch memory, and slices begin where parts of the input do"
);

/// The widest tasks whose sums, input and unpacked weights fit a thread's scratch memory.
pub fn most_quantized_columns(op: &LinearProduct) -> usize {
    let blocks = matches!(op.weight.encoding, Encoding::Blocks(_));
    let registers_alone = op.weight.encoding == Encoding::Int4 || !blocks && op.input.rows <= QUANTIZED_ROWS;
    if registers_alone {
        MAX_TASK_COLUMNS
    } else {
        UNPACKED_COLUMNS
    }
}

/// For a descriptor whose weight is quantised and has rows, as the input has. `task_columns` as in
/// [`super::linear::linear_in_columns`].
pub fn linear_quantized(threads: &Threads, op: &LinearProduct, task_columns: usize) {
    let (rows, columns) = (op.input.rows, op.weight.rows);
    // Rows are cut where they are many, or where the columns alone give the threads too few tasks.
    let few_columns = (threads.count() * 2).div_ceil(columns.div_ceil(COLUMN_STEP)).min(rows / MIN_TASK_ROWS);
    let int4 = op.weight.encoding == Encoding::Int4;
    let row_blocks = rows.div_ceil(if int4 { INT4_TASK_ROWS } else { TASK_ROWS }).max(few_columns);
    let block_rows = rows.div_ceil(row_blocks);
    // Four tasks a thread even out threads that run at different speeds.
    let wanted = columns.div_ceil((threads.count() * 4).div_ceil(row_blocks));
    let most = most_quantized_columns(op);
    let suggested = wanted.min(most).next_multiple_of(COLUMN_STEP);
    let block_columns = if task_columns == 0 { suggested } else { task_columns.min(most) };
    let column_blocks = columns.div_ceil(block_columns);
    threads.run(row_blocks * column_blocks, |task, scratch| {
        let row = task % row_blocks * block_rows;
        let column = task / row_blocks * block_columns;
        let block = Block {
            op,
            rows: row..(row + block_rows).min(rows),
            columns: column..(column + block_columns).min(columns),
            scratch,
        };
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents, and tasks write
        // disjoint blocks of the output.
        unsafe { dispatch(block) }
    });
}

struct Block<'a> {
    op: &'a LinearProduct,
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, rows, columns, scratch } = self;
        let width = columns.len().next_multiple_of(COLUMNS);
        let (sums, scratch) = scratch.floats().split_at_mut(rows.len() * width);
        sums.fill(0.0);
        let product = Product { op, rows: rows.clone(), columns: columns.clone(), sums: sums.as_mut_ptr(), width };
        if let Encoding::Blocks(format) = op.weight.encoding {
            // For one row as for many: blocks of 256 elements are taken apart too slowly to do it in registers row by row.
            product.unpack::<S>(scratch, &|slice, to| unpack_blocks::<S>(format, slice, to));
            for (row, sums) in rows.zip(sums.chunks_exact_mut(width)) {
                epilogue::<S>(op, row, columns.clone(), sums);
            }
            return;
        }
        with_encoding!(&op.weight, E => {
            if S::LANES == 16 && E::BYTES < CHUNK {
                // For all numbers of rows, because its sums have an order of their own.
                #[cfg(target_arch = "x86_64")]
                product.int4::<S>(scratch);
            } else if rows.len() <= S::DOT_ROWS.min(QUANTIZED_ROWS) {
                product.stream::<S, E>(scratch);
            } else {
                let ahead = op.weight.row_stride * E::BYTES / CHUNK;
                product.unpack::<S>(scratch, &|slice, to| {
                    S::call(Unpack::<E> { slice, to, ahead, encoded: PhantomData });
                });
            }
            for (row, sums) in rows.zip(sums.chunks_exact_mut(width)) {
                if let Scales::Rows(scales) = op.weight.scales {
                    let scales = Row::raw(scales.cast_mut().cast(), DType::F32).skip(columns.start);
                    for (at, lanes) in vectors::<S>(columns.len()) {
                        let sum = Row::raw(sums.as_mut_ptr().cast(), DType::F32).skip(at);
                        let scale = S::mul(scales.load::<S>(at, lanes), S::splat(E::FACTOR));
                        sum.store::<S>(0, S::mul(sum.load::<S>(0, lanes), scale), lanes);
                    }
                }
                epilogue::<S>(op, row, columns.clone(), sums);
            }
        })
    }
}

/// x · Wᵀ of one task, before scales of rows, bias and activation.
struct Product<'a> {
    op: &'a LinearProduct,
    rows: Range<usize>,
    columns: Range<usize>,
    /// [rows, width], zero at first
    sums: *mut f32,
    width: usize,
}

/// Rows of x in f32, with zeros up to a whole number of chunks.
#[derive(Clone, Copy)]
struct Input {
    data: *const f32,
    stride: usize,
}

impl Product<'_> {
    /// Each row of W is read once, from its start to its end.
    #[inline(always)]
    unsafe fn stream<S: Simd, E: Encoded>(&self, scratch: &mut [f32]) {
        let k = self.op.weight.columns;
        for part in (0..k).step_by(INPUT_COLUMNS) {
            let part = part..(part + INPUT_COLUMNS).min(k);
            let x = self.input::<S>(part.clone(), INPUT_COLUMNS + 16, scratch);
            for step in 0..self.steps() {
                for at in part.clone().step_by(SLICE) {
                    let tile = QuantizedTile::<E> {
                        x: x.data.add(at - part.start),
                        x_stride: x.stride,
                        w: self.slices(step, at, SLICE),
                        ahead: STREAM_AHEAD,
                        encoded: PhantomData,
                    };
                    self.add(0..self.rows.len(), step, tile.compute::<S>(self.rows.len()));
                }
            }
        }
    }

    /// With a few tiles of rows four rows of W are unpacked and stay in the first cache level while all rows of x pass
    /// by; with many, the task's slice of W is unpacked and passes by a tile's rows of x.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(&self, scratch: &mut [f32], unpack: &impl Fn(Slice, *mut f32)) {
        let (rows, k, steps) = (self.rows.len(), self.op.weight.columns, self.steps());
        let tiles = rows.div_ceil(S::DOT_ROWS);
        // Int4's tasks may be wider than what is unpacked at once.
        let unpacked_steps = if rows <= OVERLAPPED_ROWS { 1 } else { steps.min(UNPACKED_COLUMNS / COLUMNS) };
        let (panel, scratch) = scratch.split_at_mut(unpacked_steps * COLUMNS * PITCH);
        for at in (0..k).step_by(SLICE) {
            let length = SLICE.min(k - at);
            let x = self.input::<S>(at..at + length, PITCH, scratch);
            for first in (0..steps).step_by(unpacked_steps) {
                for (step, panel) in (first..steps).zip(panel.chunks_exact_mut(COLUMNS * PITCH)) {
                    for (slice, row) in self.slices(step, at, SLICE).into_iter().zip(panel.chunks_exact_mut(PITCH)) {
                        unpack(slice, row.as_mut_ptr());
                    }
                }
                for tile in 0..tiles {
                    // Tiles of nearly equal height: 7 rows are 4 + 3, not 6 + 1.
                    let tile = tile * rows / tiles..(tile + 1) * rows / tiles;
                    for (step, panel) in (first..steps).zip(panel.chunks_exact(COLUMNS * PITCH)) {
                        let row = |j: usize| panel.as_ptr().wrapping_add(j * PITCH);
                        let product = DotTile::<f32, f32> {
                            x: x.data.add(tile.start * x.stride),
                            x_stride: x.stride,
                            w: [row(0), row(1), row(2), row(3)],
                            k: length.next_multiple_of(CHUNK),
                            ahead: 0,
                        };
                        self.add(tile.clone(), step, product.compute::<S>(tile.len()));
                    }
                }
            }
        }
    }

    /// W is unpacked in registers whatever the number of rows. The order is chosen as in [`super::linear`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn int4<S: Simd>(&self, scratch: &mut [f32]) {
        let (rows, k, steps) = (self.rows.len(), self.op.weight.columns, self.steps());
        let tiles = rows.div_ceil(INT4_ROWS);
        let part = if tiles == 1 { INPUT_COLUMNS } else { INT4_SLICE };
        let by_tile = rows > OVERLAPPED_ROWS;
        let (outer, inner) = if by_tile { (tiles, steps) } else { (steps, tiles) };
        for start in (0..k).step_by(part) {
            let part = start..(start + part).min(k);
            let x = self.arranged_input::<S>(part.clone(), scratch);
            for a in 0..outer {
                for at in part.clone().step_by(INT4_SLICE) {
                    for b in 0..inner {
                        let (tile, step) = if by_tile { (a, b) } else { (b, a) };
                        let ahead = match tile {
                            0 if tiles == 1 => INT4_AHEAD,
                            0 => self.op.weight.row_stride / 2,
                            _ => 0,
                        };
                        let rows = tile * rows / tiles..(tile + 1) * rows / tiles;
                        let first = x.data.add(rows.start * x.stride + at - start);
                        let tile =
                            Int4Tile { x: first, x_stride: x.stride, w: self.slices(step, at, INT4_SLICE), ahead };
                        self.add(rows.clone(), step, tile.compute(rows.len()));
                    }
                }
            }
        }
    }

    /// The columns `part` of the task's rows of x in scratch memory, in the order of Int4 values, with zeros up to a
    /// whole number of blocks.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn arranged_input<S: Simd>(&self, part: Range<usize>, scratch: &mut [f32]) -> Input {
        let stride = part.len().next_multiple_of(BLOCK) + 16;
        let x = self.input::<S>(part.clone(), stride, scratch);
        for (row, to) in scratch.chunks_exact_mut(stride).take(self.rows.len()).enumerate() {
            let from = x.data.wrapping_add(row * x.stride);
            let whole = part.len() / BLOCK * BLOCK;
            for at in (0..whole).step_by(BLOCK) {
                arrange(from.add(at), to.as_mut_ptr().add(at));
            }
            if whole < part.len() {
                let mut rest = [0.0; BLOCK];
                std::ptr::copy_nonoverlapping(from.add(whole), rest.as_mut_ptr(), part.len() - whole);
                arrange(rest.as_ptr(), to.as_mut_ptr().add(whole));
            }
        }
        Input { data: scratch.as_ptr(), stride }
    }

    /// Tiles beside each other. A tile's four rows of W lie a quarter of the task's apart, so that each of four streams
    /// reads a long contiguous range.
    fn steps(&self) -> usize {
        self.columns.len().div_ceil(COLUMNS)
    }

    /// Up to `most` elements from `at` on, of the four rows of a step. A column past the last repeats it, and its product is dropped.
    fn slices(&self, step: usize, at: usize, most: usize) -> [Slice<'_>; COLUMNS] {
        let (last, length) = (self.columns.len() - 1, most.min(self.op.weight.columns - at));
        let slice = |j: usize| {
            let row = self.columns.start + (j * self.steps() + step).min(last);
            Slice { weight: &self.op.weight, row, k: at, len: length }
        };
        [slice(0), slice(1), slice(2), slice(3)]
    }

    /// The columns `part` of the task's rows of x: where they lie if they can be used so, else in scratch memory, `pitch`
    /// apart.
    #[inline(always)]
    unsafe fn input<S: Simd>(&self, part: Range<usize>, pitch: usize, scratch: &mut [f32]) -> Input {
        let (x, order) = (&self.op.input, self.op.weight.order);
        if x.dtype == DType::F32 && order.is_null() && part.len().is_multiple_of(CHUNK) {
            let data = x.data.cast::<f32>().add(self.rows.start * x.row_stride + part.start);
            return Input { data, stride: x.row_stride };
        }
        for (row, to) in self.rows.clone().zip(scratch.chunks_exact_mut(pitch)) {
            let from = Row::of(x, row);
            if order.is_null() {
                for (at, lanes) in vectors::<S>(part.len()) {
                    S::store(to.as_mut_ptr().add(at), from.load::<S>(part.start + at, lanes));
                }
            } else {
                with_float!(x.dtype, X => {
                    let from = x.data.cast::<X>().add(row * x.row_stride);
                    for (to, k) in to.iter_mut().zip(part.clone()) {
                        *to = from.add(order.add(k).read() as usize).read().to_f32();
                    }
                })
            }
            to[part.len()..part.len().next_multiple_of(CHUNK)].fill(0.0);
        }
        Input { data: scratch.as_ptr(), stride: pitch }
    }

    #[inline(always)]
    unsafe fn add(&self, rows: Range<usize>, step: usize, products: Products) {
        let steps = self.steps();
        for (row, products) in rows.zip(products) {
            for (j, product) in products.into_iter().enumerate() {
                let column = j * steps + step;
                if column < self.columns.len() {
                    *self.sums.add(row * self.width + column) += product;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
