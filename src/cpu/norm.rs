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

#[cfg(test)]
pub mod testing {
    use super::super::testing::{assert_close, at_every_level, Buffer};
    use crate::tensor::{DType, Tensor};

    /// The tensors of a norm, which it may be given or not; the vectors are its weights.
    pub struct Operands {
        pub input: Tensor,
        pub residual: Tensor,
        pub vectors: [Tensor; 2],
        pub residual_output: Tensor,
        pub output: Tensor,
    }

    /// Compares what `run` leaves in the outputs with what `reference` does, at every level, for rows of several lengths
    /// and for all 16 forms of an operation.
    pub fn check_forms(run: impl Fn([bool; 4], Operands), reference: impl Fn([bool; 4], Operands)) {
        at_every_level(|level| {
            for (rows, columns) in [(0, 8), (1, 1), (3, 7), (5, 640), (130, 129), (2, 65_536)] {
                for form in 0..16 {
                    let mut input = Buffer::random(DType::Bf16, rows * columns, 1);
                    let mut residual = Buffer::random(DType::F32, rows * columns, 2);
                    let mut vectors = [Buffer::random(DType::F16, columns, 3), Buffer::random(DType::F16, columns, 4)];
                    let mut outputs = |function: &dyn Fn([bool; 4], Operands)| {
                        let shape = [rows, columns];
                        let mut sum = Buffer::poisoned(DType::F32, rows * columns);
                        let mut output = Buffer::poisoned(DType::Bf16, rows * columns);
                        let operands = Operands {
                            input: input.tensor(&shape),
                            residual: residual.tensor(&shape),
                            vectors: vectors.each_mut().map(|vector| vector.tensor(&[columns])),
                            residual_output: sum.tensor(&shape),
                            output: output.tensor(&shape),
                        };
                        function([1, 2, 4, 8].map(|bit| form & bit != 0), operands);
                        (sum, output)
                    };
                    let (sum, output) = outputs(&run);
                    let (expected_sum, expected) = outputs(&reference);
                    assert_close(&sum, &expected_sum, &format!("{level:?} sum [{rows}, {columns}] form {form}"));
                    assert_close(&output, &expected, &format!("{level:?} output [{rows}, {columns}] form {form}"));
                }
            }
        });
    }
}
