//! The register tile of every product with row-major weights: inner products of a few rows of x with four rows of w.
//!
//! Both operands run along memory, so nothing is packed or transposed: each output has one vector of partial sums along
//! k, and the lanes are added at the end. An output's sum is formed in the same order whatever the tile's height, so a
//! row's result does not depend on the rows beside it.

use super::simd::{Simd, VectorElement};

/// Rows of w in a tile.
pub const COLUMNS: usize = 4;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over k elements, for ROWS rows of x, `x_stride` elements apart.
///
/// With `PREFETCH`, asks for the lines of w that lie `ahead` bytes further on.
///
/// # Safety
/// The CPU has `S`; every row is readable for `k` elements.
#[inline(always)]
pub unsafe fn dot_tile<S: Simd, X: VectorElement, W: VectorElement, const ROWS: usize, const PREFETCH: bool>(
    x: *const X,
    x_stride: usize,
    w: [*const W; COLUMNS],
    k: usize,
    ahead: usize,
) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[S::zero(); COLUMNS]; ROWS];
    let mut at = 0;
    while at + S::LANES <= k {
        if PREFETCH {
            for row in w {
                S::prefetch(row.add(at).cast::<u8>().wrapping_add(ahead));
            }
        }
        let columns = [
            W::load::<S>(w[0].add(at)),
            W::load::<S>(w[1].add(at)),
            W::load::<S>(w[2].add(at)),
            W::load::<S>(w[3].add(at)),
        ];
        for i in 0..ROWS {
            let row = X::load::<S>(x.add(i * x_stride + at));
            for j in 0..COLUMNS {
                sums[i][j] = S::fma(row, columns[j], sums[i][j]);
            }
        }
        at += S::LANES;
    }
    if at < k {
        let rest = k - at;
        for j in 0..COLUMNS {
            let column = W::load_partial::<S>(w[j].add(at), rest);
            for i in 0..ROWS {
                let row = X::load_partial::<S>(x.add(i * x_stride + at), rest);
                sums[i][j] = S::fma(row, column, sums[i][j]);
            }
        }
    }
    let mut result = [[0.0; COLUMNS]; ROWS];
    for i in 0..ROWS {
        result[i] = S::sum4(sums[i]);
    }
    result
}
