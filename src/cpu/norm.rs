//! Rows that are normalised as a whole, each after a pass that leaves what is to be normalised in scratch memory.

use super::row::{for_rows, Row};
use super::threads::{Scratch, Threads};
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{Matrix, Tensor};
use std::ops::Range;

/// An operation of which each row is independent of the others.
pub trait RowNorm: Sync {
    fn input(&self) -> &Matrix;

    /// Computes one row; `sum` is scratch memory for as many f32 as there are columns.
    ///
    /// # Safety
    /// The CPU has `S`, and the descriptor is validated.
    unsafe fn row<S: Simd>(&self, row: usize, sum: Row);
}

/// Computes all rows, of at most `MAX_COLUMNS` of ops/norm.rs, which a thread's scratch memory holds.
pub fn norm(threads: &Threads, op: &impl RowNorm) {
    for_rows(threads, op.input().rows, op.input().columns, |rows, scratch| {
        // SAFETY: the descriptor is validated, and tasks read and write different rows.
        unsafe { dispatch(Rows { op, rows, scratch }) }
    });
}

struct Rows<'a, N> {
    op: &'a N,
    rows: Range<usize>,
    scratch: &'a mut Scratch,
}

impl<N: RowNorm> Kernel for Rows<'_, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows, scratch } = self;
        let columns = op.input().columns;
        let sum = Row::vector(&Tensor::of(&mut scratch.floats()[..columns], &[columns]));
        for row in rows {
            op.row::<S>(row, sum);
        }
    }
}
