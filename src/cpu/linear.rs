//! y = activation(x · Wᵀ + bias) + residual and its gated form, for any number of rows.
//!
//! A task computes a block of rows × columns of y. W is read as it lies in memory: a slice of it that fits the second
//! cache level stays there while the rows of x pass over it, a register tile at a time ([`DotTile`]). With few rows
//! the product runs at the speed of memory; with many, at that of the multipliers.
//!
//! k is cut into fixed blocks whose sums are added in order, so neither the number of rows nor of threads changes a bit.

use super::activation::{self, activate};
use super::dot_tile::{DotTile, COLUMNS};
use super::linear_quantized::{linear_quantized, most_quantized_columns};
use super::row::{vectors, Row};
use super::threads::{Scratch, Threads};
use crate::operation::linear_product::LinearProduct;
use crate::simd::{dispatch, Kernel, Simd, VectorElement};
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of a row of x between two additions to the running sums: a tile's rows of x and w then fit the first cache
/// level.
const K_BLOCK_BYTES: usize = 4096;

/// Most bytes of W that a task goes through, so that a slice of them stays in a core's second cache level.
pub(super) const TASK_WEIGHT_BYTES: usize = 256 * 1024;

/// How far ahead of the products W is asked for when it is read at the speed of memory, in bytes.
pub(super) const STREAM_AHEAD: usize = 1024;

/// Up to this many rows memory is the limit, or near it, and its work is worth hiding behind the products.
pub(super) const OVERLAPPED_ROWS: usize = 32;

/// Most rows of a task.
const TASK_ROWS: usize = 192;
/// Fewest rows of a task that is one of several over the same columns.
pub(super) const MIN_TASK_ROWS: usize = 24;

/// Columns of a task are a multiple of this: a cache line of f32 output.
pub(super) const COLUMN_STEP: usize = 16;
pub(super) const MAX_TASK_COLUMNS: usize = 512;

pub fn linear(threads: &Threads, op: &LinearProduct) {
    linear_in_columns(threads, op, 0);
}

/// With tasks of `task_columns` columns, a multiple of [`COLUMN_STEP`], where that is not more than [`most_task_columns`];
/// 0: of as many as the shape suggests. The result is the same to the bit.
pub fn linear_in_columns(threads: &Threads, op: &LinearProduct, task_columns: usize) {
    let (rows, columns) = (op.input.rows, op.weight.rows);
    if rows == 0 || columns == 0 {
        return;
    }
    let Some(dtype) = op.weight.dtype() else {
        return linear_quantized(threads, op, task_columns);
    };
    // Rows are cut where they are many, or where the columns alone give the threads too few tasks.
    let few_columns = (threads.count() * 2).div_ceil(columns.div_ceil(COLUMN_STEP)).min(rows / MIN_TASK_ROWS);
    let row_blocks = rows.div_ceil(TASK_ROWS).max(few_columns);
    let block_rows = rows.div_ceil(row_blocks);
    // Four tasks a thread even out threads that run at different speeds.
    let wanted = columns.div_ceil((threads.count() * 4).div_ceil(row_blocks));
    let suggested = wanted.min(affordable_columns(op, dtype)).next_multiple_of(COLUMN_STEP).min(MAX_TASK_COLUMNS);
    let block_columns = if task_columns == 0 { suggested } else { task_columns.min(MAX_TASK_COLUMNS) };
    let column_blocks = columns.div_ceil(block_columns);
    threads.run(row_blocks * column_blocks, |task, scratch| {
        let row = task % row_blocks * block_rows;
        let column = task / row_blocks * block_columns;
        let block = Block {
            op,
            dtype,
            rows: row..(row + block_rows).min(rows),
            columns: column..(column + block_columns).min(columns),
            scratch,
        };
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents, and tasks write
        // disjoint blocks of the output.
        unsafe { dispatch(block) }
    });
}

/// The widest tasks that the product can be cut into.
pub fn most_task_columns(op: &LinearProduct) -> usize {
    let most = if op.weight.dtype().is_some() { MAX_TASK_COLUMNS } else { most_quantized_columns(op) };
    most.min(op.weight.rows.next_multiple_of(COLUMN_STEP))
}

/// Columns whose slices of W stay in a core's second cache level.
fn affordable_columns(op: &LinearProduct, dtype: DType) -> usize {
    TASK_WEIGHT_BYTES / (op.weight.columns.clamp(1, k_block(op.input.dtype)) * dtype.size())
}

fn k_block(input: DType) -> usize {
    K_BLOCK_BYTES / input.size()
}

struct Block<'a> {
    op: &'a LinearProduct,
    /// The weight's.
    dtype: DType,
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, dtype, rows, columns, scratch } = self;
        let width = columns.len().next_multiple_of(COLUMNS);
        let sums = &mut scratch.floats()[..rows.len() * width];
        let product = Product { op, rows: rows.clone(), columns: columns.clone(), sums: sums.as_mut_ptr(), width };
        match (op.input.dtype, dtype) {
            (DType::F32, DType::F32) => product.compute::<S, f32, f32>(),
            (DType::F32, DType::F16) => product.compute::<S, f32, f16>(),
            (DType::F32, DType::Bf16) => product.compute::<S, f32, bf16>(),
            (DType::F16, _) => product.compute::<S, f16, f16>(),
            (_, _) => product.compute::<S, bf16, bf16>(),
        }
        for (row, sums) in rows.zip(sums.chunks_exact_mut(width)) {
            epilogue::<S>(op, row, columns.clone(), sums);
        }
    }
}

/// x · Wᵀ of one task, before bias and activation.
struct Product<'a> {
    op: &'a LinearProduct,
    rows: Range<usize>,
    columns: Range<usize>,
    /// [rows, width]
    sums: *mut f32,
    width: usize,
}

/// In which order a task goes through its slices of k, tiles of rows and steps of columns, and so what stays in cache.
enum Order {
    /// One tile of rows: each row of W is read once, from its start to its end.
    Stream,
    /// A few tiles: four rows of W stay in the first cache level while all rows of x pass by, and the next four are on
    /// their way meanwhile.
    Overlap,
    /// Many tiles: a tile's rows of x stay in the first cache level while the task's W passes by.
    Block,
}

impl Product<'_> {
    #[inline(always)]
    unsafe fn compute<S: Simd, X: VectorElement, W: VectorElement>(&self) {
        let (rows, k) = (self.rows.len(), self.op.weight.columns);
        // Tiles of nearly equal height: 7 rows are 4 + 3, not 6 + 1.
        let tiles = rows.div_ceil(S::DOT_ROWS);
        // At least one slice, so that the sums are set when k is 0.
        let slices = k.div_ceil(k_block(self.op.input.dtype)).max(1);
        // A tile's four rows of W lie a quarter of the task's apart, so that each of four streams reads a long
        // contiguous range: with 4096 columns of BF16 that reaches 98 % of the memory's read bandwidth, four
        // neighbouring rows 80 %.
        let steps = self.columns.len().div_ceil(COLUMNS);
        let order = match rows {
            _ if tiles == 1 => Order::Stream,
            0..=OVERLAPPED_ROWS => Order::Overlap,
            _ => Order::Block,
        };
        let next_row = self.op.weight.row_stride * std::mem::size_of::<W>();
        let (outer, middle, inner) = match order {
            Order::Stream => (steps, slices, 1),
            Order::Overlap => (slices, steps, tiles),
            Order::Block => (slices, tiles, steps),
        };
        for a in 0..outer {
            for b in 0..middle {
                for c in 0..inner {
                    let (slice, tile, step, ahead) = match order {
                        Order::Stream => (b, 0, a, STREAM_AHEAD),
                        Order::Overlap => (a, c, b, if c == 0 { next_row } else { 0 }),
                        Order::Block => (a, b, c, 0),
                    };
                    let rows = tile * rows / tiles..(tile + 1) * rows / tiles;
                    self.tile::<S, X, W>(rows, step, steps, slice, ahead);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, X: VectorElement, W: VectorElement>(
        &self,
        rows: Range<usize>,
        step: usize,
        steps: usize,
        slice: usize,
        ahead: usize,
    ) {
        let (x, w) = (&self.op.input, &self.op.weight);
        let block = k_block(x.dtype);
        let k = slice * block;
        // A column past the last repeats it, and its product is dropped.
        let last = self.columns.len() - 1;
        let column = |j: usize| {
            let column = self.columns.start + (j * steps + step).min(last);
            w.data.cast::<W>().add(column * w.row_stride + k).cast_const()
        };
        let tile = DotTile {
            x: x.data.cast::<X>().add((self.rows.start + rows.start) * x.row_stride + k).cast_const(),
            x_stride: x.row_stride,
            w: [column(0), column(1), column(2), column(3)],
            k: w.columns.saturating_sub(k).min(block),
            ahead,
        };
        let products = tile.compute::<S>(rows.len());
        for (row, products) in rows.zip(products) {
            let sums = self.sums.add(row * self.width);
            for (j, product) in products.into_iter().enumerate() {
                let column = j * steps + step;
                if column <= last {
                    let sum = sums.add(column);
                    *sum = if slice == 0 { product } else { *sum + product };
                }
            }
        }
    }
}

/// Bias, activation, gating, residual and the store of one row of a task.
#[inline(always)]
pub(super) unsafe fn epilogue<S: Simd>(op: &LinearProduct, row: usize, columns: Range<usize>, sums: &mut [f32]) {
    if let Some(bias) = &op.bias {
        let bias = Row::vector(bias).skip(columns.start);
        for (at, lanes) in vectors::<S>(columns.len()) {
            let sum = sums.as_mut_ptr().add(at);
            f32::store_lanes::<S>(sum, S::add(f32::load_lanes::<S>(sum, lanes), bias.load::<S>(at, lanes)), lanes);
        }
    }
    let output = Row::of(&op.output, row);
    let residual = op.residual.map(|residual| Row::of(&residual, row));
    if !op.weight.gated {
        for (at, lanes) in vectors::<S>(columns.len()) {
            let value = activate::<S>(op.activation, f32::load_lanes::<S>(sums.as_ptr().add(at), lanes));
            store_with::<S>(residual, output, columns.start + at, value, lanes);
        }
        return;
    }
    for (at, lanes) in vectors::<S>(columns.len() / 2) {
        let pairs = sums.as_ptr().add(2 * at);
        let first = f32::load_lanes::<S>(pairs, S::LANES.min(2 * lanes));
        let second = f32::load_lanes::<S>(pairs.add(S::LANES), (2 * lanes).saturating_sub(S::LANES));
        let (gate, up) = S::deinterleave(first, second);
        let value = S::mul(activate::<S>(op.activation, gate), up);
        store_with::<S>(residual, output, columns.start / 2 + at, value, lanes);
    }
}

/// Stores a vector with the residual added, which may be where it is stored.
#[inline(always)]
unsafe fn store_with<S: Simd>(residual: Option<Row>, output: Row, column: usize, value: S::Vector, lanes: usize) {
    let value = match residual {
        Some(residual) => S::add(value, residual.load::<S>(column, lanes)),
        None => value,
    };
    output.store::<S>(column, value, lanes);
}

/// The formula in f64 over dequantised weights, for tensors in host memory.
pub fn reference(op: &LinearProduct) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        let product = |m: usize, n: usize| {
            let (x, w) = (Row::of(&op.input, m), &op.weight);
            let sum: f64 = (0..w.columns).map(|k| x.get(w.input_column(k)) * w.value(n, k)).sum();
            sum + op.bias.map_or(0.0, |bias| Row::vector(&bias).get(n))
        };
        let act = |x: f64| activation::reference(op.activation, x);
        for m in 0..op.output.rows {
            for n in 0..op.output.columns {
                let value =
                    if op.weight.gated { act(product(m, 2 * n)) * product(m, 2 * n + 1) } else { act(product(m, n)) };
                let residual = op.residual.map_or(0.0, |residual| Row::of(&residual, m).get(n));
                Row::of(&op.output, m).set(n, value + residual);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::*;
    use crate::operation::Activation;
    use crate::tensor::Tensor;
    use crate::weight::WeightView;

    struct Case {
        rows: usize,
        columns: usize,
        k: usize,
        input: DType,
        weight: DType,
        output: DType,
        activation: Activation,
        gated: bool,
    }

    fn check(case: &Case, what: &str) {
        let &Case { rows, columns, k, activation, gated, .. } = case;
        // Rows of W and of x are padded, so that a stride other than the width is used.
        let stride = k + 3;
        let mut x = Buffer::random(case.input, rows * stride, 1);
        let mut w = Buffer::random(case.weight, columns * stride, 2);
        let mut bias = Buffer::random(DType::Bf16, columns, 3);
        let width = if gated { columns / 2 } else { columns };
        let (mut y, mut expected) =
            (Buffer::poisoned(case.output, rows * width), Buffer::poisoned(DType::F32, rows * width));
        let mut op = |y: &mut Buffer| {
            let weight = WeightView::float(w.tensor(&[columns * stride]).data, case.weight, columns, k, stride, gated);
            let x = Tensor::new(x.tensor(&[rows * stride]).data, case.input, &[rows, k]).with_strides(&[stride, 1]);
            LinearProduct::new(x, weight, Some(bias.tensor(&[columns])), activation, y.tensor(&[rows, width])).unwrap()
        };
        linear(threads(), &op(&mut y));
        reference(&op(&mut expected));
        assert_close(&y, &expected, what);
    }

    #[test]
    fn every_shape_dtype_and_epilogue_matches_the_reference() {
        let shapes = [
            (1, 1, 1),
            (1, 5, 3),
            (2, 33, 16),
            (3, 64, 100),
            (7, 65, 129),
            (13, 38, 1025),
            (40, 70, 64),
            (200, 36, 40),
            (1, 8, 2100),
        ];
        at_every_level(|level| {
            for (i, (rows, columns, k)) in shapes.into_iter().enumerate() {
                for (input, weight) in [
                    (DType::F32, DType::F32),
                    (DType::F32, DType::F16),
                    (DType::F32, DType::Bf16),
                    (DType::F16, DType::F16),
                    (DType::Bf16, DType::Bf16),
                ] {
                    let activation =
                        [Activation::None, Activation::GeluTanh, Activation::Silu, Activation::GeluErf][i % 4];
                    let output = DType::FLOATS[i % 3];
                    for gated in [false, true] {
                        let columns = if gated { columns + columns % 2 } else { columns };
                        let case = Case { rows, columns, k, input, weight, output, activation, gated };
                        check(&case, &format!("{level:?} [{rows}, {k}] {input} x [{columns}, {k}] {weight} {activation:?} gated {gated}"));
                    }
                }
            }
        });
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads() {
        let (rows, columns, k) = (61, 100, 3000);
        let mut x = Buffer::random(DType::F32, rows * k, 1);
        let mut w = Buffer::random(DType::Bf16, columns * k, 2);
        let weight = WeightView::float(w.tensor(&[columns * k]).data, DType::Bf16, columns, k, k, false);
        let x = x.tensor(&[rows, k]);
        let run = |threads: &Threads, first: usize, count: usize| {
            let mut y = Buffer::poisoned(DType::F32, count * columns);
            let mut x = x;
            x.data = x.data.cast::<f32>().wrapping_add(first * k).cast();
            x.shape[0] = count;
            let y_tensor = y.tensor(&[count, columns]);
            linear(threads, &LinearProduct::new(x, weight, None, Activation::None, y_tensor).unwrap());
            y.values()
        };
        at_every_level(|level| {
            let all = run(threads(), 0, rows);
            assert!(all == run(&Threads::new(1).unwrap(), 0, rows), "{level:?}");
            for (first, count) in [(0, 1), (60, 1), (5, 4), (7, 20)] {
                let part = &all[first * columns..(first + count) * columns];
                assert!(part == run(threads(), first, count), "{level:?} rows {first} + {count}");
            }
        });
    }

    #[test]
    fn nan_goes_through_and_empty_problems_are_nothing() {
        let (mut x, mut y) = (Buffer::from(DType::F32, &[1.0, f32::NAN]), Buffer::poisoned(DType::F32, 2));
        let mut w = Buffer::from(DType::F32, &[1.0, 0.0, 0.0, 0.0]);
        let weight = WeightView::float(w.tensor(&[4]).data, DType::F32, 2, 2, 2, false);
        linear(
            threads(),
            &LinearProduct::new(x.tensor(&[1, 2]), weight, None, Activation::None, y.tensor(&[1, 2])).unwrap(),
        );
        assert!(y.values().iter().all(|y| y.is_nan()));
        let (mut none, mut no_output) = (Buffer::from(DType::F32, &[]), Buffer::from(DType::F32, &[]));
        let op = LinearProduct::new(none.tensor(&[0, 2]), weight, None, Activation::None, no_output.tensor(&[0, 2]))
            .unwrap();
        linear(threads(), &op);
    }
}
