//! How a tile's operands lie in a task's working memory. Both products are `Outer`'s: rows of the left operand meet a right
//! operand whose columns lie along vectors.
//!
//! [`Wide`] computes in f32 whatever is stored. [`Pairs`] keeps BF16, two neighbours along k in a cell of four bytes, for
//! CPUs that multiply it; it rounds the weights to BF16, as the GPU's kernels do. Cells are named as f32 in both.

#![allow(clippy::needless_range_loop)] // The indices are a block's coordinates in several arrays at once.

use super::super::outer_tile::Outer;
use super::super::row::{vectors, Row};
use super::unpack_row;
use crate::simd::{with_kv, Simd, VectorElement};
use crate::tensor::{DType, MAX_HEAD_DIM};

/// Keys of a tile.
pub const KEYS: usize = 128;

/// Where a tile's keys or values start, one a token.
pub struct Tokens {
    pub at: [*const u8; KEYS],
    pub count: usize,
    pub dtype: DType,
}

#[allow(clippy::missing_safety_doc)] // The CPU has what the form needs; addresses are valid for what is said of them.
pub trait Operands {
    /// Neighbours along k that a cell holds.
    const DEPTH: usize;

    /// One query's `dim` elements as ⌈dim / DEPTH⌉ cells, padded with 0 to whole vectors.
    unsafe fn query<S: Simd>(from: Row, dim: usize, to: *mut f32);
    /// Keys as [⌈dim / DEPTH⌉, KEYS]; the columns past the last key are 0.
    unsafe fn keys<S: Simd>(tokens: &Tokens, dim: usize, to: *mut f32);
    /// Values as [⌈count / DEPTH⌉, width], padded with 0 to whole vectors.
    unsafe fn values<S: Simd>(tokens: &Tokens, dim: usize, width: usize, to: *mut f32);
    /// Weights, [rows, KEYS] in f32, as the left operand of the second product: its address and the cells of a row.
    unsafe fn weights<S: Simd>(rows: usize, keys: usize, from: *mut f32, to: *mut f32) -> (*const f32, usize);
    unsafe fn product<S: Simd>(product: Outer, rows: usize, vectors: usize);
}

pub struct Wide;

impl Operands for Wide {
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn query<S: Simd>(from: Row, dim: usize, to: *mut f32) {
        for (at, lanes) in vectors::<S>(dim) {
            S::store(to.add(at), from.load_kv::<S>(at, lanes));
        }
    }

    #[inline(always)]
    unsafe fn keys<S: Simd>(tokens: &Tokens, dim: usize, to: *mut f32) {
        if tokens.dtype.is_kv_row() {
            return transpose_unpacked::<S>(tokens, dim, to);
        }
        with_kv!(tokens.dtype, T => transpose::<S, T>(tokens, dim, to))
    }

    /// Values that are f32 are copied too: rows of many heads lie a power of two apart, and a tile of them would fall on a
    /// few sets of the first cache level.
    #[inline(always)]
    unsafe fn values<S: Simd>(tokens: &Tokens, dim: usize, width: usize, to: *mut f32) {
        if tokens.dtype.is_kv_row() {
            for (i, &from) in tokens.at[..tokens.count].iter().enumerate() {
                unpack_row::<S>(tokens.dtype, from, dim, to.add(i * width));
                // The padding takes part in the product.
                (dim..width).for_each(|at| to.add(i * width + at).write(0.0));
            }
            return;
        }
        with_kv!(tokens.dtype, T => {
            for (i, from) in tokens.at[..tokens.count].iter().enumerate() {
                for (at, lanes) in vectors::<S>(dim) {
                    S::store(to.add(i * width + at), T::load_lanes::<S>(from.cast::<T>().add(at), lanes));
                }
            }
        })
    }

    #[inline(always)]
    unsafe fn weights<S: Simd>(_: usize, _: usize, from: *mut f32, _: *mut f32) -> (*const f32, usize) {
        (from, KEYS)
    }

    #[inline(always)]
    unsafe fn product<S: Simd>(product: Outer, rows: usize, vectors: usize) {
        product.run::<S>(rows, vectors);
    }
}

/// Rows of `count` cells as columns of [count, KEYS].
#[inline(always)]
unsafe fn transpose<S: Simd, T: VectorElement>(tokens: &Tokens, count: usize, to: *mut f32) {
    for column in (0..KEYS).step_by(S::LANES) {
        let there = tokens.count.saturating_sub(column).min(S::LANES);
        transpose_rows::<S, T>(&tokens.at[column..column + S::LANES], there, count, to.add(column));
    }
}

/// As `transpose` of f32, with the rows of a vector's columns unpacked before they are transposed.
#[inline(always)]
unsafe fn transpose_unpacked<S: Simd>(tokens: &Tokens, dim: usize, to: *mut f32) {
    // A row at a time: 16 of them, which a transposition in registers wants, would take 36 KiB of a stack that may have 64.
    let mut row = [0f32; MAX_HEAD_DIM];
    for column in 0..KEYS {
        match tokens.at[..tokens.count].get(column) {
            Some(&from) => unpack_row::<S>(tokens.dtype, from, dim, row.as_mut_ptr()),
            None => row.fill(0.0),
        }
        for (d, &element) in row[..dim].iter().enumerate() {
            to.add(d * KEYS + column).write(element);
        }
    }
}

/// The first `there` rows of a vector's columns; the others become 0.
#[inline(always)]
unsafe fn transpose_rows<S: Simd, T: VectorElement>(rows: &[*const u8], there: usize, count: usize, to: *mut f32) {
    for (at, lanes) in vectors::<S>(count) {
        let mut block = [S::zero(); 16];
        if there == S::LANES && lanes == S::LANES {
            // Loops of known length keep the block in registers.
            for i in 0..S::LANES {
                block[i] = T::load::<S>(rows[i].cast::<T>().add(at));
            }
            S::transpose(&mut block);
            for i in 0..S::LANES {
                S::store(to.add((at + i) * KEYS), block[i]);
            }
            continue;
        }
        for i in 0..there {
            block[i] = T::load_lanes::<S>(rows[i].cast::<T>().add(at), lanes);
        }
        S::transpose(&mut block);
        for i in 0..lanes {
            S::store(to.add((at + i) * KEYS), block[i]);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use pairs::Pairs;

#[cfg(target_arch = "x86_64")]
mod pairs {
    use super::super::super::bf16_outer_tile;
    use super::*;

    /// For a level of 16 lanes on a CPU with AVX512-BF16.
    pub struct Pairs;

    impl Operands for Pairs {
        const DEPTH: usize = 2;

        #[inline(always)]
        unsafe fn query<S: Simd>(from: Row, dim: usize, to: *mut f32) {
            bf16_outer_tile::copy_row(from.address().cast(), dim, to);
        }

        /// Two neighbours of a key are a cell as they lie in memory.
        #[inline(always)]
        unsafe fn keys<S: Simd>(tokens: &Tokens, dim: usize, to: *mut f32) {
            transpose::<S, f32>(tokens, dim / 2, to);
            if dim % 2 == 1 {
                let last = to.add(dim / 2 * KEYS);
                last.write_bytes(0, KEYS);
                for (i, from) in tokens.at[..tokens.count].iter().enumerate() {
                    last.add(i).cast::<u16>().write(from.cast::<u16>().add(dim - 1).read());
                }
            }
        }

        #[inline(always)]
        unsafe fn values<S: Simd>(tokens: &Tokens, dim: usize, width: usize, to: *mut f32) {
            for i in (0..tokens.count).step_by(2) {
                let second = (i + 1 < tokens.count).then(|| tokens.at[i + 1].cast());
                bf16_outer_tile::interleave_rows(tokens.at[i].cast(), second, to.add(i / 2 * width), dim);
            }
        }

        #[inline(always)]
        unsafe fn weights<S: Simd>(rows: usize, keys: usize, from: *mut f32, to: *mut f32) -> (*const f32, usize) {
            bf16_outer_tile::round_rows(from, KEYS, to, KEYS / 2, rows, keys.next_multiple_of(16));
            (to, KEYS / 2)
        }

        #[inline(always)]
        unsafe fn product<S: Simd>(product: Outer, rows: usize, vectors: usize) {
            bf16_outer_tile::run(product, rows, vectors);
        }
    }
}
