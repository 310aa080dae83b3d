//! The register tile of products with quantised weights of few rows: inner products of a few rows of x with four rows of
//! W, which are unpacked in registers.
//!
//! Every value is formed in f32 and multiplied as in [`super::dot_tile`], in the same order, so that tile gives the same
//! sums over weights unpacked into memory. Products in integers (VNNI) would take x apart into two or three 8-bit digits
//! with a scale for each group, and NaN and infinities along a way of their own.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::dequantize::{Encoded, Factors, Slice, CHUNK};
use super::dot_tile::{Products, COLUMNS, MAX_ROWS};
use crate::simd::{Kernel, Simd};
use std::marker::PhantomData;

/// Most rows of x in a tile of any level; above it the sums and the values being unpacked leave the registers.
pub const QUANTIZED_ROWS: usize = 4;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over the slices' elements.
pub struct QuantizedTile<'a, E> {
    /// Zeros follow the last element up to a whole number of chunks.
    pub x: *const f32,
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    /// The rows of W, of equal length.
    pub w: [Slice<'a>; COLUMNS],
    /// The tile asks for the cache lines of w that lie this many bytes further on.
    pub ahead: usize,
    pub encoded: PhantomData<E>,
}

impl<E: Encoded> QuantizedTile<'_, E> {
    /// Computes the first `rows` rows of the result, at most [`QUANTIZED_ROWS`].
    ///
    /// # Safety
    /// The CPU has `S`; every row is readable for the slices' length up to a whole number of chunks.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(self, rows: usize) -> Products {
        match rows {
            1 => S::call(Tile::<E, 1>(self)),
            2 => S::call(Tile::<E, 2>(self)),
            3 => S::call(Tile::<E, 3>(self)),
            _ => S::call(Tile::<E, 4>(self)),
        }
    }
}

const CACHE_LINE: usize = 64;

#[inline(always)]
fn at(data: &[*const u8; COLUMNS], offset: usize) -> [*const u8; COLUMNS] {
    data.map(|data| data.wrapping_add(offset))
}

struct Tile<'a, E, const ROWS: usize>(QuantizedTile<'a, E>);

impl<E: Encoded, const ROWS: usize> Kernel for Tile<'_, E, ROWS> {
    type Output = Products;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Products {
        let QuantizedTile { x, x_stride, w, ahead, .. } = self.0;
        let mut sums = [[S::zero(); COLUMNS]; ROWS];
        let mut factors = [Factors::UNSET; COLUMNS];
        let mut data = [std::ptr::null(); COLUMNS];
        for j in 0..COLUMNS {
            factors[j].set::<S, E>(&w[j]);
            data[j] = w[j].data::<E>();
        }
        let (whole, shift) = (w[0].whole_chunks::<E>(), w[0].group_shift());
        for chunk in 0..whole {
            if chunk * E::BYTES % CACHE_LINE == 0 {
                for j in 0..COLUMNS {
                    S::prefetch(data[j].wrapping_add(chunk * E::BYTES + ahead));
                }
            }
            let data = at(&data, chunk * E::BYTES);
            Self::chunk::<S>(&mut sums, x.add(chunk * CHUNK), x_stride, &factors, chunk >> shift, data);
        }
        if w[0].has_rest::<E>() {
            let bytes = [w[0].rest::<E>(), w[1].rest::<E>(), w[2].rest::<E>(), w[3].rest::<E>()];
            let data = bytes.each_ref().map(|bytes| bytes.as_ptr());
            Self::chunk::<S>(&mut sums, x.add(whole * CHUNK), x_stride, &factors, whole >> shift, data);
        }
        let mut result = [[0.0; COLUMNS]; MAX_ROWS];
        for i in 0..ROWS {
            result[i] = S::sum4(sums[i]);
        }
        result
    }
}

impl<E: Encoded, const ROWS: usize> Tile<'_, E, ROWS> {
    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        sums: &mut [[S::Vector; COLUMNS]; ROWS],
        x: *const f32,
        x_stride: usize,
        factors: &[Factors; COLUMNS],
        group: usize,
        data: [*const u8; COLUMNS],
    ) {
        let mut values = [factors[0].values::<S, E>(group); COLUMNS];
        for j in 1..COLUMNS {
            values[j] = factors[j].values::<S, E>(group);
        }
        for part in 0..CHUNK / S::LANES {
            let mut columns = [S::zero(); COLUMNS];
            for j in 0..COLUMNS {
                columns[j] = E::load::<S>(values[j], data[j], part);
            }
            for i in 0..ROWS {
                let row = S::load(x.add(i * x_stride + part * S::LANES));
                for j in 0..COLUMNS {
                    sums[i][j] = S::fma(row, columns[j], sums[i][j]);
                }
            }
        }
    }
}
