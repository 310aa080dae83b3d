//! Addition, multiplication, scaling, soft cap, conversion and activations.

use super::activation::{self, activate};
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

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &Elementwise) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        for row in 0..op.input.rows {
            for i in 0..op.input.columns {
                let x = Row::of(&op.input, row).get(i);
                let second = op.second.map_or(0.0, |second| Row::of(&second, row).get(i));
                let value = match op.kind {
                    ElementwiseKind::Add => x + second,
                    ElementwiseKind::Multiply => x * second,
                    ElementwiseKind::Scale(factor) => x * f64::from(factor),
                    ElementwiseKind::SoftCap(cap) => f64::from(cap) * (x / f64::from(cap)).tanh(),
                    ElementwiseKind::Convert => x,
                    ElementwiseKind::Activation(activation) => activation::reference(activation, x),
                };
                Row::of(&op.output, row).set(i, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::*;
    use crate::operation::Activation;
    use crate::tensor::{DType, Tensor};

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

    #[test]
    fn every_kind_matches_the_reference() {
        let kinds = [
            ElementwiseKind::Add,
            ElementwiseKind::Multiply,
            ElementwiseKind::Scale(-1.5),
            ElementwiseKind::SoftCap(0.7),
            ElementwiseKind::Convert,
            ElementwiseKind::Activation(Activation::GeluTanh),
            ElementwiseKind::Activation(Activation::GeluErf),
            ElementwiseKind::Activation(Activation::Silu),
        ];
        at_every_level(|level| {
            for (rows, columns) in [(0, 4), (1, 1), (3, 37), (2, 40_000)] {
                for (i, kind) in kinds.into_iter().enumerate() {
                    let (from, to) = (DType::FLOATS[i % 3], DType::FLOATS[(i + rows) % 3]);
                    let mut input = Buffer::random(from, rows * columns, 1);
                    let mut row = Buffer::random(DType::Bf16, columns, 2);
                    let second = (i < 2).then(|| row.tensor(&[1, columns]));
                    let (mut output, mut expected) =
                        (Buffer::poisoned(to, rows * columns), Buffer::poisoned(to, rows * columns));
                    let mut op = |y: &mut Buffer| {
                        Elementwise::new(kind, input.tensor(&[rows, columns]), second, y.tensor(&[rows, columns]))
                            .unwrap()
                    };
                    elementwise(threads(), &op(&mut output));
                    reference(&op(&mut expected));
                    assert_close(&output, &expected, &format!("{level:?} {kind:?} [{rows}, {columns}] {from} to {to}"));
                }
            }
        });
    }
}
