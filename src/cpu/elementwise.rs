//! Addition, multiplication, scaling, soft cap, conversion and activations.

use super::activation::activate;
use super::row::{vectors, Row};
use super::threads::Threads;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::simd::{dispatch, math, Kernel, Simd};
use std::ops::Range;

/// Elements of a task. Rows are cut too: logits are one row of a quarter million.
const TASK_ELEMENTS: usize = 16 * 1024;

pub fn elementwise(threads: &Threads, op: &Elementwise) {
    let (rows, columns) = (op.input.rows, op.input.columns);
    if columns == 0 {
        return;
    }
    let row_block = (TASK_ELEMENTS / columns).max(1);
    let column_block = columns.min(TASK_ELEMENTS);
    let column_blocks = columns.div_ceil(column_block);
    threads.run(rows.div_ceil(row_block) * column_blocks, |task, _| {
        let (row, column) = (task / column_blocks * row_block, task % column_blocks * column_block);
        let rows = row..(row + row_block).min(rows);
        let columns = column..(column + column_block).min(columns);
        // SAFETY: the descriptor is validated, and tasks write different elements.
        unsafe { dispatch(Block { op, rows, columns }) }
    });
}

struct Block<'a> {
    op: &'a Elementwise,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, rows, columns } = self;
        for row in rows {
            let input = Row::of(&op.input, row).skip(columns.start);
            let output = Row::of(&op.output, row).skip(columns.start);
            let second = op.second.map_or(input, |second| Row::of(&second, row).skip(columns.start));
            for (at, lanes) in vectors::<S>(columns.len()) {
                let x = input.load::<S>(at, lanes);
                let value = match op.kind {
                    ElementwiseKind::Add => S::add(x, second.load::<S>(at, lanes)),
                    ElementwiseKind::Multiply => S::mul(x, second.load::<S>(at, lanes)),
                    ElementwiseKind::Scale(factor) => S::mul(x, S::splat(factor)),
                    ElementwiseKind::SoftCap(cap) => math::soft_cap::<S>(x, cap),
                    ElementwiseKind::Convert => x,
                    ElementwiseKind::Activation(activation) => activate::<S>(activation, x),
                };
                output.store::<S>(at, value, lanes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{at_every_level, threads};
    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn a_soft_cap_keeps_what_is_tiny_beside_the_cap() {
        at_every_level(|level| {
            let mut values = [1e-45f32, -3e-42, 1.1e-38, 0.0, -0.0, 7e-20, -1.0, 65504.0, f32::NAN, f32::INFINITY];
            let mut capped = values;
            let shape = [1, values.len()];
            let (input, output) = (Tensor::of(&mut values, &shape), Tensor::of(&mut capped, &shape));
            let op = Elementwise::new(ElementwiseKind::SoftCap(3e38), input, None, output).unwrap();
            elementwise(threads(), &op);
            for (value, capped) in values.iter().zip(&capped).take(8) {
                assert_eq!(value.to_bits(), capped.to_bits(), "{level:?}: {value:e} became {capped:e}");
            }
            assert!(capped[8].is_nan() && capped[9] == 3e38, "{level:?}: {capped:?}");
        });
    }
}
