//! The register tile of `outer_tile` for pairs of BF16 on CPUs with AVX512-BF16: each element of A and B is a cell of four
//! bytes that holds two neighbours along k, and a step adds both products.
//!
//! What `vdpbf16ps` does to sums and subnormal numbers is in `bf16_tile`. A sum's order is the same in every tile.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::outer_tile::Outer;
use std::arch::x86_64::*;

/// Elements in a vector of sums.
const LANES: usize = 16;

/// Computes all of C, which has at most 6 rows. The cells of A and B are named as f32; `k` counts cells.
///
/// # Safety
/// The CPU has AVX-512 and AVX512-BF16; the operands are valid in their extents.
pub unsafe fn run(product: Outer, rows: usize, vectors: usize) {
    let mut vector = 0;
    while vector < vectors {
        let part = Outer { b: product.b.add(vector * LANES), c: product.c.add(vector * LANES), ..product };
        vector += match vectors - vector {
            1 => rows_of::<1>(part, rows),
            2 | 3 => rows_of::<2>(part, rows),
            _ => rows_of::<4>(part, rows),
        };
    }
}

#[inline(always)]
unsafe fn rows_of<const VECTORS: usize>(part: Outer, rows: usize) -> usize {
    match rows {
        1 => tile::<1, VECTORS>(part),
        2 => tile::<2, VECTORS>(part),
        3 => tile::<3, VECTORS>(part),
        4 => tile::<4, VECTORS>(part),
        5 => tile::<5, VECTORS>(part),
        _ => tile::<6, VECTORS>(part),
    }
    VECTORS
}

/// Reads the bits as 16 pairs of BF16.
#[inline(always)]
unsafe fn pairs(bits: __m512) -> __m512bh {
    std::mem::transmute::<__m512, __m512bh>(bits)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize>(tile: Outer) {
    let Outer { a, a_stride, b, b_stride, k, c, c_stride, accumulate } = tile;
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    for k in 0..k {
        let mut row = [_mm512_setzero_ps(); VECTORS];
        for j in 0..VECTORS {
            row[j] = _mm512_loadu_ps(b.add(k * b_stride + j * LANES));
        }
        for i in 0..ROWS {
            let factor = pairs(_mm512_castsi512_ps(_mm512_set1_epi32(a.add(i * a_stride + k).cast::<i32>().read())));
            for j in 0..VECTORS {
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], factor, pairs(row[j]));
            }
        }
    }
    for i in 0..ROWS {
        for j in 0..VECTORS {
            let c = c.add(i * c_stride + j * LANES);
            let sum = if accumulate { _mm512_add_ps(_mm512_loadu_ps(c), sums[i][j]) } else { sums[i][j] };
            _mm512_storeu_ps(c, sum);
        }
    }
}

/// Rounds `rows` rows of f32 to rows of cells, which hold half as many. `columns` is a multiple of 16.
///
/// # Safety
/// As for [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn round_rows(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    rows: usize,
    columns: usize,
) {
    for row in 0..rows {
        for at in (0..columns).step_by(LANES) {
            let rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from.add(row * from_stride + at)));
            let to = to.add(row * to_stride + at / 2).cast::<__m256i>();
            _mm256_storeu_si256(to, std::mem::transmute::<__m256bh, __m256i>(rounded));
        }
    }
}

/// `count` BF16 as cells, padded with 0 to whole vectors.
///
/// # Safety
/// As for [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn copy_row(from: *const u16, count: usize, to: *mut f32) {
    for at in (0..count).step_by(2 * LANES) {
        let mask = (u64::MAX >> (64 - (count - at).min(2 * LANES))) as u32;
        _mm512_storeu_si512(to.add(at / 2).cast(), _mm512_maskz_loadu_epi16(mask, from.add(at).cast()));
    }
}

/// Two rows of `columns` BF16 as one row of cells: the first row's elements are the lower halves. Without a second row the
/// upper halves are 0.
///
/// # Safety
/// As for [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn interleave_rows(first: *const u16, second: Option<*const u16>, to: *mut f32, columns: usize) {
    let mut numbers = [0i16; 64];
    for i in 0..16 {
        // Even elements come from the first row, odd ones from the second, which is numbered from 32 on.
        numbers[2 * i] = i as i16;
        numbers[2 * i + 1] = 32 + i as i16;
        numbers[32 + 2 * i] = 16 + i as i16;
        numbers[32 + 2 * i + 1] = 48 + i as i16;
    }
    let low = _mm512_loadu_si512(numbers.as_ptr().cast());
    let high = _mm512_loadu_si512(numbers.as_ptr().add(32).cast());
    for at in (0..columns).step_by(2 * LANES) {
        let count = (columns - at).min(2 * LANES);
        let mask = (u64::MAX >> (64 - count)) as u32;
        let a = _mm512_maskz_loadu_epi16(mask, first.add(at).cast());
        let b = match second {
            Some(second) => _mm512_maskz_loadu_epi16(mask, second.add(at).cast()),
            None => _mm512_setzero_si512(),
        };
        _mm512_storeu_ps(to.add(at), _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b)));
        // Rows of cells are whole vectors of 16.
        if count > LANES {
            _mm512_storeu_ps(to.add(at + LANES), _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b)));
        }
    }
}
