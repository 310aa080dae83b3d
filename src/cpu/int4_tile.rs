//! The register tile for Int4 weights on CPUs with AVX-512, 128 neighbouring elements of a row at a time.
//!
//! A vector holds four chunks, so lane d has the eight codes of bytes 4d .. 4d + 3, all of one group. With x in the order
//! in which the codes come out ([`arrange`]), each of the eight becomes a vector of values by itself; a scale is applied
//! once to the sum of a lane's eight products. That spares loads, and the scales' way through memory: one row times
//! 14336 × 4096 reads 46 GB/s with two threads of a Zen 5, where [`super::quantized_tile`] reads 37.
//!
//! A code becomes a float by a look-up that ignores all but the lowest four bits, so it only has to be shifted there.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::dequantize::{Int4, Slice, CHUNK};
use super::dot_tile::{Products, COLUMNS, MAX_ROWS};
use super::simd::avx512::Avx512;
use super::simd::Simd;
use crate::weight::Scales;
use std::arch::x86_64::*;

/// Elements whose codes a vector holds.
pub const BLOCK: usize = 128;

/// Most elements of a tile's slices.
pub const INT4_SLICE: usize = 4096;

/// Codes in a lane.
const CODES: usize = 8;
const LANES: usize = 16;

/// Most rows of x in a tile: its lanes' sums of products fill half of the registers.
pub const INT4_ROWS: usize = 4;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over the slices' elements.
pub struct Int4Tile<'a> {
    /// Arranged, with zeros up to a whole number of blocks.
    pub x: *const f32,
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    /// Of equal length.
    pub w: [Slice<'a>; COLUMNS],
    /// The tile asks for the cache lines of w that lie this many bytes further on.
    pub ahead: usize,
}

impl Int4Tile<'_> {
    /// Computes the first `rows` rows of the result, at most [`INT4_ROWS`].
    ///
    /// # Safety
    /// The CPU has AVX-512; the weight is one of Int4 in host memory, row-major, with the slices in it; every row of x is
    /// readable for a whole number of blocks.
    pub unsafe fn compute(self, rows: usize) -> Products {
        match (rows, self.w[0].weight.offsets.is_null()) {
            (1, true) => rows_of::<1, false>(self),
            (2, true) => rows_of::<2, false>(self),
            (3, true) => rows_of::<3, false>(self),
            (_, true) => rows_of::<4, false>(self),
            (1, false) => rows_of::<1, true>(self),
            (2, false) => rows_of::<2, true>(self),
            (3, false) => rows_of::<3, true>(self),
            (_, false) => rows_of::<4, true>(self),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2")]
unsafe fn rows_of<const ROWS: usize, const OFFSETS: bool>(tile: Int4Tile) -> Products {
    let Int4Tile { x, x_stride, w, ahead } = tile;
    let Slice { weight, k, len, .. } = w[0];
    let Scales::Groups { size, data: scales } = weight.scales else { unreachable!("Int4 has scales of groups") };
    let zero = if OFFSETS { 0.0 } else { 8.0 };
    let table = _mm512_sub_ps(Avx512::lane_numbers(), _mm512_set1_ps(zero));
    // The group of each lane, counted from the block's first: 4, 8 or 16 lanes hold a group.
    let lanes = _mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let lane_groups = _mm256_srl_epi16(lanes, _mm_cvtsi32_si128((size / CODES).ilog2() as i32));
    let (groups, block_groups) = (weight.columns.div_ceil(size), BLOCK / size);
    let mut data = [std::ptr::null(); COLUMNS];
    let mut first = [0; COLUMNS];
    for j in 0..COLUMNS {
        data[j] = w[j].data::<Int4<OFFSETS>>();
        first[j] = w[j].row * groups + k / size;
        for line in (0..len / size).step_by(LANES) {
            // Of the row that follows this one: the memory's own look-ahead follows the codes, not this trickle.
            _mm_prefetch::<_MM_HINT_T0>(scales.wrapping_add(first[j] + groups + line).cast());
            if OFFSETS {
                _mm_prefetch::<_MM_HINT_T0>(weight.offsets.wrapping_add(first[j] + groups + line).cast());
            }
        }
    }
    let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    let code_bytes = len.div_ceil(CHUNK) * CHUNK / 2;
    let last_groups = len.div_ceil(size);
    for block in 0..len.div_ceil(BLOCK) {
        let byte = block * BLOCK / 2;
        let byte_mask = u64::MAX >> 64_usize.saturating_sub(code_bytes - byte);
        let group = block * block_groups;
        let group_mask = (1u32 << block_groups.min(last_groups - group)).wrapping_sub(1) as u8;
        let mut codes = [_mm512_setzero_si512(); COLUMNS];
        for j in 0..COLUMNS {
            _mm_prefetch::<_MM_HINT_T0>(data[j].wrapping_add(byte + ahead).cast());
            codes[j] = _mm512_maskz_loadu_epi8(byte_mask, data[j].wrapping_add(byte).cast());
        }
        let factor = |values: *const half::f16, j: usize| values.wrapping_add(first[j] + group).cast::<i16>();
        let mut scale = [_mm512_setzero_ps(); COLUMNS];
        let mut offset = [_mm512_setzero_ps(); COLUMNS];
        for j in 0..COLUMNS {
            scale[j] = lane_factors(factor(scales, j), group_mask, lane_groups);
            if OFFSETS {
                offset[j] = lane_factors(factor(weight.offsets, j), group_mask, lane_groups);
            }
        }
        let mut products = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
        for i in 0..CODES {
            for j in 0..COLUMNS {
                let mut value = _mm512_permutexvar_ps(codes[j], table);
                codes[j] = _mm512_srli_epi32::<4>(codes[j]);
                if OFFSETS {
                    value = _mm512_fmadd_ps(value, scale[j], offset[j]);
                }
                for row in 0..ROWS {
                    let x = _mm512_loadu_ps(x.add(row * x_stride + block * BLOCK + i * LANES));
                    products[row][j] =
                        if i == 0 { _mm512_mul_ps(x, value) } else { _mm512_fmadd_ps(x, value, products[row][j]) };
                }
            }
        }
        for row in 0..ROWS {
            for j in 0..COLUMNS {
                sums[row][j] = if OFFSETS {
                    _mm512_add_ps(sums[row][j], products[row][j])
                } else {
                    _mm512_fmadd_ps(products[row][j], scale[j], sums[row][j])
                };
            }
        }
    }
    let mut result = [[0.0; COLUMNS]; MAX_ROWS];
    for row in 0..ROWS {
        result[row] = Avx512::sum4(sums[row]);
    }
    result
}

/// The scales, or offsets, of a block's groups, each in the lanes of its group.
#[inline(always)]
unsafe fn lane_factors(factors: *const i16, mask: u8, lane_groups: __m256i) -> __m512 {
    let groups = _mm256_castsi128_si256(_mm_maskz_loadu_epi16(mask, factors));
    _mm512_cvtph_ps(_mm256_permutexvar_epi16(lane_groups, groups))
}

/// Brings a block of x, in memory order at `from`, into the order of the codes: lane 4g + a of vector 2b + h is element
/// 32g + 16h + 4a + b. `from` and `to` may be the same.
///
/// # Safety
/// The CPU has AVX-512; both are valid for a block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub unsafe fn arrange(from: *const f32, to: *mut f32) {
    let columns = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    let mut rows = [_mm512_setzero_ps(); CODES];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = _mm512_permutexvar_ps(columns, _mm512_loadu_ps(from.add(i * LANES)));
    }
    for h in 0..2 {
        // Quarter b of row g goes to quarter g of vector b.
        let (a, b, c, d) = (rows[h], rows[2 + h], rows[4 + h], rows[6 + h]);
        let (low_ab, high_ab) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let (low_cd, high_cd) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        let vectors = [
            _mm512_shuffle_f32x4::<0x88>(low_ab, low_cd),
            _mm512_shuffle_f32x4::<0xdd>(low_ab, low_cd),
            _mm512_shuffle_f32x4::<0x88>(high_ab, high_cd),
            _mm512_shuffle_f32x4::<0xdd>(high_ab, high_cd),
        ];
        for (b, vector) in vectors.into_iter().enumerate() {
            _mm512_storeu_ps(to.add((2 * b + h) * LANES), vector);
        }
    }
}
