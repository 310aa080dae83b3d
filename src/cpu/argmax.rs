//! The index of each row's largest value.

use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::argmax::Argmax;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::Matrix;

pub fn argmax(threads: &Threads, op: &Argmax) {
    for_rows(threads, op.logits.rows, op.logits.columns, |rows, _| {
        for row in rows {
            // SAFETY: the descriptor is validated; tasks write different tokens.
            unsafe {
                let (_, token) = largest(&op.logits, row);
                op.tokens.data.cast::<i32>().add(row).write(token as i32);
            }
        }
    });
}

/// The largest number of a row and its lowest index; (−∞, 0) for a row of NaN.
///
/// # Safety
/// The row is readable and not empty.
pub unsafe fn largest(logits: &Matrix, row: usize) -> (f32, usize) {
    dispatch(Largest { row: Row::of(logits, row), columns: logits.columns })
}

struct Largest {
    row: Row,
    columns: usize,
}

/// Elements whose maximum is taken together; only the winning block is searched for the index.
const BLOCK: usize = 1024;

impl Kernel for Largest {
    type Output = (f32, usize);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> (f32, usize) {
        let Largest { row, columns } = self;
        let lowest = S::splat(f32::NEG_INFINITY);
        let (mut best, mut block) = (f32::NEG_INFINITY, 0);
        for begin in (0..columns).step_by(BLOCK) {
            let mut max = lowest;
            for (at, lanes) in vectors::<S>(BLOCK.min(columns - begin)) {
                let value = S::first(lanes, row.load::<S>(begin + at, lanes), lowest);
                // A NaN is less than nothing and is passed over.
                max = S::select_less(max, value, value, max);
            }
            let max = S::max_lane(max);
            if max > best {
                (best, block) = (max, begin);
            }
        }
        // Where nothing is above −∞, the first −∞ wins over a NaN; it may be in any block.
        let end = if best == f32::NEG_INFINITY { columns } else { columns.min(block + BLOCK) };
        let index = (block..end).find(|&i| row.get(i) as f32 == best);
        (best, index.unwrap_or(0))
    }
}

/// The formula, for tensors in host memory.
pub fn reference(op: &Argmax) {
    for row in 0..op.logits.rows {
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
        unsafe {
            let values = (0..op.logits.columns).map(|i| (i, Row::of(&op.logits, row).get(i)));
            let best =
                values.filter(|(_, x)| !x.is_nan()).reduce(|best, next| if next.1 > best.1 { next } else { best });
            op.tokens.data.cast::<i32>().add(row).write(best.map_or(0, |(i, _)| i as i32));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{at_every_level, threads, Buffer};
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn ties_nan_and_infinities() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let rows: [(&[f32], i32); 7] = [
            (&[1.0], 0),
            (&[1.0, 3.0, 3.0, 2.0], 1),
            (&[nan, -5.0, nan], 1),
            (&[nan, nan], 0),
            (&[nan, -inf, -inf], 1),
            (&[-0.0, 0.0], 0),
            (&[1.0, inf, nan], 1),
        ];
        at_every_level(|level| {
            for (values, expected) in rows {
                let mut logits = Buffer::from(DType::F32, values);
                let mut token = Buffer::from(DType::I32, &[-1.0]);
                let op = Argmax::new(logits.tensor(&[1, values.len()]), token.tensor(&[1])).unwrap();
                argmax(threads(), &op);
                assert_eq!(token.values()[0] as i32, expected, "{level:?} {values:?}");
                reference(&op);
                assert_eq!(token.values()[0] as i32, expected, "reference {values:?}");
            }
        });
    }

    #[test]
    fn long_rows_match_the_reference() {
        at_every_level(|level| {
            for (dtype, columns) in [(DType::F32, 262_144), (DType::Bf16, 5000), (DType::F16, 1025)] {
                let mut logits = Buffer::random(dtype, 3 * columns, 9);
                let (mut tokens, mut expected) =
                    (Buffer::from(DType::I32, &[-1.0; 3]), Buffer::from(DType::I32, &[-1.0; 3]));
                argmax(threads(), &Argmax::new(logits.tensor(&[3, columns]), tokens.tensor(&[3])).unwrap());
                reference(&Argmax::new(logits.tensor(&[3, columns]), expected.tensor(&[3])).unwrap());
                assert_eq!(tokens.values(), expected.values(), "{level:?} {dtype} {columns}");
            }
        });
    }
}
