//! y = activation(x · Wᵀ + bias) and its gated form, for any number of rows.
//!
//! A task computes a block of rows × columns of y. W is read as it lies in memory: a slice of it that fits the second
//! cache level stays there while the rows of x pass over it, a register tile at a time ([`dot_tile`]). With few rows
//! the product runs at the speed of memory; with many, at that of the multipliers.
//!
//! k is cut into fixed blocks whose sums are added in order, so neither the number of rows nor of threads changes a bit.

use super::activation::{self, activate};
use super::dot_tile::{dot_tile, COLUMNS};
use super::row::{vectors, Row};
use super::simd::{dispatch, Kernel, Simd, VectorElement};
use super::threads::{Scratch, Threads};
use crate::ops::linear::Linear;
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Elements of k between two additions to the running sums: a tile's rows of x and w then fit the first cache level.
const K_BLOCK: usize = 1024;

/// Most bytes of W that a task goes through, so that a slice of them stays in a core's second cache level.
const TASK_WEIGHT_BYTES: usize = 256 * 1024;

/// How far ahead of the products W is asked for when it is read at the speed of memory, in bytes.
const STREAM_AHEAD: usize = 1024;

/// Up to this many rows memory is the limit, or near it, and its work is worth hiding behind the products.
const OVERLAPPED_ROWS: usize = 32;

/// Most rows of a task.
const TASK_ROWS: usize = 192;

/// Columns of a task are a multiple of this: whole cache lines of output, also when gated pairs become one value.
const COLUMN_STEP: usize = 32;
const MAX_TASK_COLUMNS: usize = 512;

pub fn linear(threads: &Threads, op: &Linear) {
    let (rows, columns) = (op.input.rows, op.weight.rows);
    if rows == 0 || columns == 0 {
        return;
    }
    let row_blocks = rows.div_ceil(TASK_ROWS);
    let block_rows = rows.div_ceil(row_blocks);
    // Four tasks a thread even out threads that run at different speeds.
    let wanted = columns.div_ceil((threads.count() * 4).div_ceil(row_blocks));
    let affordable = TASK_WEIGHT_BYTES / (op.weight.columns.min(K_BLOCK).max(1) * op.weight.dtype.size());
    let block_columns = wanted.min(affordable).next_multiple_of(COLUMN_STEP).min(MAX_TASK_COLUMNS);
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
    op: &'a Linear,
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        match (self.op.input.dtype, self.op.weight.dtype) {
            (DType::F32, DType::F32) => self.compute::<S, f32, f32>(),
            (DType::F32, DType::F16) => self.compute::<S, f32, f16>(),
            (DType::F32, DType::Bf16) => self.compute::<S, f32, bf16>(),
            (DType::F16, _) => self.compute::<S, f16, f16>(),
            (_, _) => self.compute::<S, bf16, bf16>(),
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    unsafe fn compute<S: Simd, X: VectorElement, W: VectorElement>(self) {
        let Block { op, rows, columns, scratch } = self;
        let width = columns.len().next_multiple_of(COLUMNS);
        let mut product = Product::<X, W> {
            x: op.input.data.cast::<X>().add(rows.start * op.input.row_stride),
            x_stride: op.input.row_stride,
            w: op.weight.data.cast::<W>().add(columns.start * op.weight.row_stride),
            w_stride: op.weight.row_stride,
            columns: columns.len(),
            quarter: columns.len().div_ceil(COLUMNS),
            k: op.weight.columns,
            sums: scratch.floats().as_mut_ptr(),
            sums_stride: width,
        };
        if rows.len() <= S::DOT_ROWS {
            product.stream::<S>(rows.len());
        } else if rows.len() <= OVERLAPPED_ROWS {
            product.overlapped::<S>(rows.len());
        } else {
            product.blocked::<S>(rows.len());
        }
        let sums = std::slice::from_raw_parts_mut(product.sums, rows.len() * width);
        for (i, sums) in sums.chunks_exact_mut(width).enumerate() {
            finish::<S>(op, rows.start + i, columns.clone(), sums);
        }
    }
}

/// x · Wᵀ of one task, before bias and activation, into `sums`.
struct Product<X, W> {
    x: *const X,
    x_stride: usize,
    w: *const W,
    w_stride: usize,
    columns: usize,
    /// A tile's four rows of W lie this far apart, so that each of four streams reads a long contiguous range: on
    /// 4096 columns of BF16 that reaches 98 % of the memory's read bandwidth, four neighbouring rows 80 %.
    quarter: usize,
    k: usize,
    sums: *mut f32,
    sums_stride: usize,
}

impl<X: VectorElement, W: VectorElement> Product<X, W> {
    /// One tile of rows: each row of W is read once, from its start to its end.
    #[inline(always)]
    unsafe fn stream<S: Simd>(&mut self, rows: usize) {
        for step in 0..self.quarter {
            for k in k_blocks(self.k) {
                self.tile::<S, true>(0, rows, step, k, STREAM_AHEAD);
            }
        }
    }

    /// A few tiles of rows: four rows of W stay in the first cache level while all rows of x pass by, and the next four
    /// are on their way meanwhile.
    #[inline(always)]
    unsafe fn overlapped<S: Simd>(&mut self, rows: usize) {
        let tiles = rows.div_ceil(S::DOT_ROWS);
        let next = self.w_stride * std::mem::size_of::<W>();
        for k in k_blocks(self.k) {
            for step in 0..self.quarter {
                for tile in 0..tiles {
                    let (begin, end) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                    if tile == 0 {
                        self.tile::<S, true>(begin, end - begin, step, k.clone(), next);
                    } else {
                        self.tile::<S, false>(begin, end - begin, step, k.clone(), 0);
                    }
                }
            }
        }
    }

    /// Many tiles of rows: for a slice of k, a tile's rows of x stay in the first cache level while the task's W
    /// passes by.
    #[inline(always)]
    unsafe fn blocked<S: Simd>(&mut self, rows: usize) {
        // Tiles of nearly equal height: 7 rows are 4 + 3, not 6 + 1.
        let tiles = rows.div_ceil(S::DOT_ROWS);
        for k in k_blocks(self.k) {
            for tile in 0..tiles {
                let (begin, end) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                for step in 0..self.quarter {
                    self.tile::<S, false>(begin, end - begin, step, k.clone(), 0);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const PREFETCH: bool>(
        &mut self,
        row: usize,
        rows: usize,
        step: usize,
        k: Range<usize>,
        ahead: usize,
    ) {
        match rows {
            1 => self.tile_of::<S, 1, PREFETCH>(row, step, k, ahead),
            2 => self.tile_of::<S, 2, PREFETCH>(row, step, k, ahead),
            3 => self.tile_of::<S, 3, PREFETCH>(row, step, k, ahead),
            4 => self.tile_of::<S, 4, PREFETCH>(row, step, k, ahead),
            5 => self.tile_of::<S, 5, PREFETCH>(row, step, k, ahead),
            _ => self.tile_of::<S, 6, PREFETCH>(row, step, k, ahead),
        }
    }

    #[inline(always)]
    unsafe fn tile_of<S: Simd, const ROWS: usize, const PREFETCH: bool>(
        &mut self,
        row: usize,
        step: usize,
        k: Range<usize>,
        ahead: usize,
    ) {
        // The compiler removes the taller tiles of a level that has not the registers for them.
        if ROWS > S::DOT_ROWS {
            return;
        }
        let x = self.x.add(row * self.x_stride + k.start);
        // A column past the last repeats it, and its product is dropped.
        let w = |j: usize| self.w.add((j * self.quarter + step).min(self.columns - 1) * self.w_stride + k.start);
        let w = [w(0), w(1), w(2), w(3)];
        let products = dot_tile::<S, X, W, ROWS, PREFETCH>(x, self.x_stride, w, k.len(), ahead);
        for (i, products) in products.into_iter().enumerate() {
            for (j, product) in products.into_iter().enumerate() {
                let column = j * self.quarter + step;
                if column < self.columns {
                    let sum = self.sums.add((row + i) * self.sums_stride + column);
                    *sum = if k.start == 0 { product } else { *sum + product };
                }
            }
        }
    }
}

/// The fixed blocks of k; one empty block when k is 0, so that the sums are set.
fn k_blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    (0..k.max(1)).step_by(K_BLOCK).map(move |begin| begin..(begin + K_BLOCK).min(k))
}

/// Bias, activation, gating and the store of one row of a task.
#[inline(always)]
unsafe fn finish<S: Simd>(op: &Linear, row: usize, columns: Range<usize>, sums: &mut [f32]) {
    if let Some(bias) = &op.bias {
        let bias = Row::vector(bias).skip(columns.start);
        for (at, lanes) in vectors::<S>(columns.len()) {
            let sum = sums.as_mut_ptr().add(at);
            f32::store_lanes::<S>(sum, S::add(f32::load_lanes::<S>(sum, lanes), bias.load::<S>(at, lanes)), lanes);
        }
    }
    let output = Row::of(&op.output, row);
    if !op.weight.gated {
        for (at, lanes) in vectors::<S>(columns.len()) {
            let value = activate::<S>(op.activation, f32::load_lanes::<S>(sums.as_ptr().add(at), lanes));
            output.store::<S>(columns.start + at, value, lanes);
        }
        return;
    }
    for (at, lanes) in vectors::<S>(columns.len() / 2) {
        let pairs = sums.as_ptr().add(2 * at);
        let first = f32::load_lanes::<S>(pairs, S::LANES.min(2 * lanes));
        let second = f32::load_lanes::<S>(pairs.add(S::LANES), (2 * lanes).saturating_sub(S::LANES));
        let (gate, up) = S::deinterleave(first, second);
        output.store::<S>(columns.start / 2 + at, S::mul(activate::<S>(op.activation, gate), up), lanes);
    }
}

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &Linear) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        let weight = |row: usize| Row::raw(op.weight.data, op.weight.dtype).skip(row * op.weight.row_stride);
        let product = |m: usize, n: usize| {
            let (x, w) = (Row::of(&op.input, m), weight(n));
            let sum: f64 = (0..op.weight.columns).map(|k| x.get(k) * w.get(k)).sum();
            sum + op.bias.map_or(0.0, |bias| Row::vector(&bias).get(n))
        };
        let act = |x: f64| activation::reference(op.activation, x);
        for m in 0..op.output.rows {
            for n in 0..op.output.columns {
                let value =
                    if op.weight.gated { act(product(m, 2 * n)) * product(m, 2 * n + 1) } else { act(product(m, n)) };
                Row::of(&op.output, m).set(n, value);
            }
        }
    }
}
