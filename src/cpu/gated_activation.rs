//! output = activation(gate) · up.

use super::activation::{self, activate};
use super::row::{for_rows, vectors, Row};
use super::simd::{dispatch, Kernel, Simd};
use super::threads::Threads;
use crate::ops::gated_activation::GatedActivation;
use std::ops::Range;

pub fn gated_activation(threads: &Threads, op: &GatedActivation) {
    for_rows(threads, op.gate.rows, op.gate.columns, |rows, _| {
        // SAFETY: the descriptor is validated, and tasks write different rows.
        unsafe { dispatch(Rows { op, rows }) }
    });
}

struct Rows<'a> {
    op: &'a GatedActivation,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows } = self;
        for row in rows {
            let (gate, up, output) = (Row::of(&op.gate, row), Row::of(&op.up, row), Row::of(&op.output, row));
            for (at, lanes) in vectors::<S>(op.gate.columns) {
                let value = S::mul(activate::<S>(op.activation, gate.load::<S>(at, lanes)), up.load::<S>(at, lanes));
                output.store::<S>(at, value, lanes);
            }
        }
    }
}

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &GatedActivation) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        for row in 0..op.gate.rows {
            for i in 0..op.gate.columns {
                let (gate, up) = (Row::of(&op.gate, row).get(i), Row::of(&op.up, row).get(i));
                Row::of(&op.output, row).set(i, activation::reference(op.activation, gate) * up);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::*;
    use crate::ops::Activation;
    use crate::tensor::DType;

    #[test]
    fn every_activation_matches_the_reference() {
        at_every_level(|level| {
            for activation in [Activation::None, Activation::GeluTanh, Activation::GeluErf, Activation::Silu] {
                for (rows, columns) in [(0, 3), (1, 1), (17, 2049)] {
                    let (mut gate, mut up) =
                        (Buffer::random(DType::F16, rows * columns, 1), Buffer::random(DType::F16, rows * columns, 2));
                    let (mut output, mut expected) =
                        (Buffer::poisoned(DType::Bf16, rows * columns), Buffer::poisoned(DType::Bf16, rows * columns));
                    let shape = [rows, columns];
                    let mut op = |y: &mut Buffer| {
                        GatedActivation::new(gate.tensor(&shape), up.tensor(&shape), activation, y.tensor(&shape))
                            .unwrap()
                    };
                    gated_activation(threads(), &op(&mut output));
                    reference(&op(&mut expected));
                    assert_close(&output, &expected, &format!("{level:?} {activation:?} [{rows}, {columns}]"));
                }
            }
        });
    }
}
