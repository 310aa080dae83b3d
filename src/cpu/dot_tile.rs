//! The register tile of every product with row-major weights: inner products of a few rows of x with four rows of w.
//!
//! Both operands run along memory, so nothing is packed or transposed: each output has one vector of partial sums along
//! k, and the lanes are added at the end. An output's sum is formed in the same order whatever the tile's height, so a
//! row's result does not depend on the rows beside it.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use crate::simd::{Kernel, Simd, VectorElement};
#[cfg(target_arch = "x86_64")]
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::any::TypeId;

/// Rows of w in a tile.
pub const COLUMNS: usize = 4;

/// Most rows of x in a tile of any level.
pub const MAX_ROWS: usize = 6;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over k elements.
#[derive(Clone, Copy)]
pub struct DotTile<X, W> {
    pub x: *const X,
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    pub w: [*const W; COLUMNS],
    pub k: usize,
    /// The tile asks for the cache lines of w that lie this many bytes further on; 0: none.
    pub ahead: usize,
}

pub type Products = [[f32; COLUMNS]; MAX_ROWS];

impl<X: VectorElement, W: VectorElement> DotTile<X, W> {
    /// Computes the first `rows` rows of the result, at most `S::DOT_ROWS`.
    ///
    /// # Safety
    /// The CPU has `S`; every row is readable for `k` elements.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(self, rows: usize) -> Products {
        #[cfg(target_arch = "x86_64")]
        if S::LANES == 16 && TypeId::of::<(X, W)>() == TypeId::of::<(bf16, bf16)>() && super::bf16_tile::is_supported()
        {
            let DotTile { x, x_stride, w, k, ahead } = self;
            let tile = DotTile { x: x.cast(), x_stride, w: w.map(|w| w.cast()), k, ahead };
            return super::bf16_tile::compute(tile, rows);
        }
        match rows {
            1 => S::call(Tile::<X, W, 1>(self)),
            2 => S::call(Tile::<X, W, 2>(self)),
            3 => S::call(Tile::<X, W, 3>(self)),
            4 => S::call(Tile::<X, W, 4>(self)),
            5 => S::call(Tile::<X, W, 5>(self)),
            _ => S::call(Tile::<X, W, 6>(self)),
        }
    }
}

struct Tile<X, W, const ROWS: usize>(DotTile<X, W>);

impl<X: VectorElement, W: VectorElement, const ROWS: usize> Kernel for Tile<X, W, ROWS> {
    type Output = Products;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Products {
        let mut result = [[0.0; COLUMNS]; MAX_ROWS];
        // The compiler empties the taller tiles of a level that has not the registers for them.
        if ROWS > S::DOT_ROWS {
            return result;
        }
        let DotTile { x, x_stride, w, k, ahead } = self.0;
        let mut sums = [[S::zero(); COLUMNS]; ROWS];
        let mut at = 0;
        while at + S::LANES <= k {
            let mut columns = [S::zero(); COLUMNS];
            for j in 0..COLUMNS {
                let pointer = w[j].add(at);
                // At distance 0 this is the line that is loaded next, which costs less than a branch.
                S::prefetch(pointer.cast::<u8>().wrapping_add(ahead));
                columns[j] = W::load::<S>(pointer);
            }
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
        for i in 0..ROWS {
            result[i] = S::sum4(sums[i]);
        }
        result
    }
}
