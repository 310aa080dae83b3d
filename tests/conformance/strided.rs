//! Tensors whose axes lie in memory in any order, for the operations that take any strides.

use crate::run::Run;
use nvbackend::error::Result;
use nvbackend::tensor::{DType, Tensor};

/// The order of axes in memory, the slowest first, and elements between what neighbours on an axis need and what they have.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    pub order: [usize; 4],
    pub gap: usize,
}

pub const ROW_MAJOR: Placement = Placement { order: [0, 1, 2, 3], gap: 0 };
/// The innermost axis stays the innermost.
pub const SWAPPED: Placement = Placement { order: [0, 2, 1, 3], gap: 3 };
pub const TRANSPOSED: Placement = Placement { order: [0, 1, 3, 2], gap: 0 };
pub const REVERSED: Placement = Placement { order: [3, 2, 1, 0], gap: 2 };
pub const PLACEMENTS: [Placement; 4] = [ROW_MAJOR, SWAPPED, TRANSPOSED, REVERSED];

impl Placement {
    /// The strides of a shape, and the elements that they span.
    fn strides(&self, shape: [usize; 4]) -> ([usize; 4], usize) {
        let (mut strides, mut stride) = ([1; 4], 1);
        for (place, &axis) in self.order.iter().enumerate().rev() {
            strides[axis] = stride;
            stride = stride * shape[axis].max(1) + if place == 0 { 0 } else { self.gap };
        }
        (strides, stride)
    }

    pub fn tensor(&self, run: &mut Run, dtype: DType, shape: [usize; 4], values: &[f64]) -> Result<Tensor> {
        let (strides, span) = self.strides(shape);
        run.strided(dtype, &shape, &strides, 0, span, Some(values))
    }

    pub fn output(&self, run: &mut Run, dtype: DType, shape: [usize; 4]) -> Result<Tensor> {
        let (strides, span) = self.strides(shape);
        let tensor = run.strided(dtype, &shape, &strides, 0, span, None)?;
        run.allow_write(&tensor);
        Ok(tensor)
    }
}

/// The places of a shape in row-major order.
pub fn places(shape: [usize; 4]) -> Vec<[usize; 4]> {
    let mut all = Vec::new();
    for a in 0..shape[0] {
        for b in 0..shape[1] {
            for c in 0..shape[2] {
                all.extend((0..shape[3]).map(|d| [a, b, c, d]));
            }
        }
    }
    all
}

/// The number of the element that a place of a larger shape repeats.
pub fn repeated(shape: [usize; 4], place: [usize; 4]) -> usize {
    (0..4).fold(0, |number, axis| number * shape[axis] + place[axis] % shape[axis])
}
