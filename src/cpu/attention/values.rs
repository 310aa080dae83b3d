//! Weighted values of some tokens: output += Σ weight · value over its tokens, for some query heads that share them. Values are
//! read where they lie, one address a token, and a register tile of heads × vectors holds the sums over all tokens.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use crate::simd::{Kernel, Simd, VectorElement};

#[derive(Clone, Copy)]
pub struct Values<T> {
    /// [heads, count]
    pub weights: *const f32,
    pub weights_stride: usize,
    /// Where the value of each token starts.
    pub at: *const *const T,
    pub count: usize,
    /// The cache lines that lie this many bytes further on are asked for; 0: none.
    pub ahead: usize,
    /// [heads, dim], padded to whole vectors
    pub output: *mut f32,
    pub output_stride: usize,
}

/// # Safety
/// The CPU has `S`; the operands are valid in the extents above.
#[inline(always)]
pub unsafe fn add<S: Simd, T: VectorElement>(values: Values<T>, heads: usize, dim: usize) {
    for first in (0..heads).step_by(S::OUTER_ROWS) {
        let rows = S::OUTER_ROWS.min(heads - first);
        let part = Values {
            weights: values.weights.add(first * values.weights_stride),
            output: values.output.add(first * values.output_stride),
            ..values
        };
        let (mut column, whole) = (0, dim / S::LANES * S::LANES);
        while column < whole {
            let vectors = match (whole - column) / S::LANES {
                1 => 1,
                2 | 3 => 2,
                left => S::OUTER_VECTORS.min(left),
            };
            rows_of::<S, T>(part, column, rows, vectors);
            column += vectors * S::LANES;
        }
        if column < dim {
            let rest = Rest { values: part, column, lanes: dim - column, rows };
            S::call(rest);
        }
    }
}

#[inline(always)]
unsafe fn rows_of<S: Simd, T: VectorElement>(values: Values<T>, column: usize, rows: usize, vectors: usize) {
    match rows {
        1 => vectors_of::<S, T, 1>(values, column, vectors),
        2 => vectors_of::<S, T, 2>(values, column, vectors),
        3 => vectors_of::<S, T, 3>(values, column, vectors),
        4 => vectors_of::<S, T, 4>(values, column, vectors),
        5 => vectors_of::<S, T, 5>(values, column, vectors),
        _ => vectors_of::<S, T, 6>(values, column, vectors),
    }
}

#[inline(always)]
unsafe fn vectors_of<S: Simd, T: VectorElement, const ROWS: usize>(values: Values<T>, column: usize, vectors: usize) {
    match vectors {
        1 => S::call(Tile::<T, ROWS, 1> { values, column }),
        2 => S::call(Tile::<T, ROWS, 2> { values, column }),
        _ => S::call(Tile::<T, ROWS, 4> { values, column }),
    }
}

struct Tile<T, const ROWS: usize, const VECTORS: usize> {
    values: Values<T>,
    column: usize,
}

impl<T: VectorElement, const ROWS: usize, const VECTORS: usize> Kernel for Tile<T, ROWS, VECTORS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // The compiler empties the tiles of a level that has not the registers for them.
        if ROWS > S::OUTER_ROWS || VECTORS > S::OUTER_VECTORS {
            return;
        }
        let Tile { values, column } = self;
        let mut sums = [[S::zero(); VECTORS]; ROWS];
        for token in 0..values.count {
            let value = (*values.at.add(token)).add(column);
            let mut row = [S::zero(); VECTORS];
            for j in 0..VECTORS {
                S::prefetch(value.add(j * S::LANES).cast::<u8>().wrapping_add(values.ahead));
                row[j] = T::load::<S>(value.add(j * S::LANES));
            }
            for i in 0..ROWS {
                let weight = S::splat(*values.weights.add(i * values.weights_stride + token));
                for j in 0..VECTORS {
                    sums[i][j] = S::fma(weight, row[j], sums[i][j]);
                }
            }
        }
        for i in 0..ROWS {
            for j in 0..VECTORS {
                let output = values.output.add(i * values.output_stride + column + j * S::LANES);
                S::store(output, S::add(S::load(output), sums[i][j]));
            }
        }
    }
}

/// The last elements of a head that is no whole number of vectors.
struct Rest<T> {
    values: Values<T>,
    column: usize,
    lanes: usize,
    rows: usize,
}

impl<T: VectorElement> Kernel for Rest<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rest { values, column, lanes, rows } = self;
        let mut sums = [S::zero(); 6];
        for token in 0..values.count {
            let row = T::load_partial::<S>((*values.at.add(token)).add(column), lanes);
            for (i, sum) in sums.iter_mut().enumerate().take(rows) {
                let weight = S::splat(*values.weights.add(i * values.weights_stride + token));
                *sum = S::fma(weight, row, *sum);
            }
        }
        for (i, sum) in sums.into_iter().enumerate().take(rows) {
            let output = values.output.add(i * values.output_stride + column);
            S::store(output, S::add(S::load(output), sum));
        }
    }
}
