//! The register tile of products with quantised weights of few rows: inner products of a few rows of x with four rows of
//! W, which are unpacked in registers.
//!
//! Every value is formed in f32 and multiplied as in [`super::dot_tile`], in the same order, so that tile gives the same
//! sums over weights unpacked into memory. Products in integers (VNNI) would need activations of two 8-bit digits to be
//! as exact, and with a scale for every 32 elements take as many instructions as a table look-up and an FMA.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::dequantize::{Encoded, Slice, CHUNK};
use super::dot_tile::{Products, COLUMNS, MAX_ROWS};
use super::simd::{Kernel, Simd};
use std::marker::PhantomData;

/// Most rows of x in a tile of any level; above it the sums and the values being unpacked leave the registers.
pub const QUANTIZED_ROWS: usize = 4;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over the slices' elements.
pub struct QuantizedTile<'a, E> {
    /// Zeros follow the last element up to a whole number of chunks.
    pub x: *const f32,
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    /// Of equal length.
    pub w: &'a [Slice; COLUMNS],
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

struct Tile<'a, E, const ROWS: usize>(QuantizedTile<'a, E>);

impl<E: Encoded, const ROWS: usize> Kernel for Tile<'_, E, ROWS> {
    type Output = Products;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Products {
        let QuantizedTile { x, x_stride, w, ahead, .. } = self.0;
        let mut sums = [[S::zero(); COLUMNS]; ROWS];
        let whole = w[0].whole_chunks::<E>();
        for chunk in 0..whole {
            let mut data = [std::ptr::null(); COLUMNS];
            let mut values = [w[0].values::<S, E>(chunk); COLUMNS];
            for j in 0..COLUMNS {
                data[j] = w[j].data::<E>(chunk);
                values[j] = w[j].values::<S, E>(chunk);
                S::prefetch(data[j].wrapping_add(ahead));
            }
            Self::chunk::<S>(&mut sums, x.add(chunk * CHUNK), x_stride, values, data);
        }
        if w[0].has_rest::<E>() {
            let mut values = [w[0].values::<S, E>(whole); COLUMNS];
            let mut bytes = [[0; CHUNK]; COLUMNS];
            for j in 0..COLUMNS {
                values[j] = w[j].values::<S, E>(whole);
                bytes[j] = w[j].rest();
            }
            let data = [bytes[0].as_ptr(), bytes[1].as_ptr(), bytes[2].as_ptr(), bytes[3].as_ptr()];
            Self::chunk::<S>(&mut sums, x.add(whole * CHUNK), x_stride, values, data);
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
        values: [E::Values<S>; COLUMNS],
        data: [*const u8; COLUMNS],
    ) {
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
