//! C (+)= A · B with every matrix row-major: the product inside attention, where B's rows (a transposed tile of keys, or
//! values) are a few vectors wide. A register tile holds some rows of C; each step broadcasts one element of each row of
//! A against a row of B.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use crate::simd::{Kernel, Simd};

/// The operands of one product.
#[derive(Clone, Copy)]
pub struct Outer {
    /// [rows, k]
    pub a: *const f32,
    pub a_stride: usize,
    /// [k, vectors · LANES]
    pub b: *const f32,
    pub b_stride: usize,
    pub k: usize,
    /// [rows, vectors · LANES]
    pub c: *mut f32,
    pub c_stride: usize,
    /// Whether C is added to, or overwritten.
    pub accumulate: bool,
}

impl Outer {
    /// Computes all of C, which has at most `S::OUTER_ROWS` rows.
    ///
    /// # Safety
    /// The CPU has `S`; the operands are valid in the extents above.
    #[inline(always)]
    pub unsafe fn run<S: Simd>(self, rows: usize, vectors: usize) {
        let mut vector = 0;
        while vector < vectors {
            let part = Outer { b: self.b.add(vector * S::LANES), c: self.c.add(vector * S::LANES), ..self };
            if S::OUTER_VECTORS == 4 && vectors - vector >= 4 {
                part.rows::<S, 4>(rows);
                vector += 4;
            } else if vectors - vector >= 2 {
                part.rows::<S, 2>(rows);
                vector += 2;
            } else {
                part.rows::<S, 1>(rows);
                vector += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Simd, const VECTORS: usize>(self, rows: usize) {
        match rows {
            1 => S::call(Tile::<1, VECTORS>(self)),
            2 => S::call(Tile::<2, VECTORS>(self)),
            3 => S::call(Tile::<3, VECTORS>(self)),
            4 => S::call(Tile::<4, VECTORS>(self)),
            5 => S::call(Tile::<5, VECTORS>(self)),
            _ => S::call(Tile::<6, VECTORS>(self)),
        }
    }
}

struct Tile<const ROWS: usize, const VECTORS: usize>(Outer);

impl<const ROWS: usize, const VECTORS: usize> Kernel for Tile<ROWS, VECTORS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // The compiler empties the tiles of a level that has not the registers for them.
        if ROWS > S::OUTER_ROWS || VECTORS > S::OUTER_VECTORS {
            return;
        }
        let Outer { a, a_stride, b, b_stride, k, c, c_stride, accumulate } = self.0;
        let mut sums = [[S::zero(); VECTORS]; ROWS];
        for k in 0..k {
            let mut row = [S::zero(); VECTORS];
            for j in 0..VECTORS {
                row[j] = S::load(b.add(k * b_stride + j * S::LANES));
            }
            for i in 0..ROWS {
                let factor = S::splat(*a.add(i * a_stride + k));
                for j in 0..VECTORS {
                    sums[i][j] = S::fma(factor, row[j], sums[i][j]);
                }
            }
        }
        for i in 0..ROWS {
            for j in 0..VECTORS {
                let c = c.add(i * c_stride + j * S::LANES);
                let sum = if accumulate { S::add(S::load(c), sums[i][j]) } else { sums[i][j] };
                S::store(c, sum);
            }
        }
    }
}
