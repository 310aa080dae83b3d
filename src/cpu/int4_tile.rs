//! The register tile for Int4 weights on CPUs with AVX-512, 128 neighbouring elements of a row at a time.
//!
//! A vector holds four chunks, so lane d has the eight nibbles of bytes 4d .. 4d + 3, all of one group. With x in the
//! order in which the nibbles come out ([`arrange`]), each of the eight becomes a vector of values by itself; a scale
//! is applied once to the sum of a lane's eight products.
//!
//! A nibble becomes a float by a look-up that ignores all but the lowest bits of its index, so it only has to be
//! shifted there. Shifts and look-ups share two of the four pipes, so one shift serves two nibbles: it moves both
//! halves of a lane, a look-up of floats takes the lower half's nibble, and one of BF16, which leaves out the lower
//! halves, the upper's. Scales are widened once for 16 groups. One row times a matrix that lies in caches reads 69 GB/s
//! with two threads of a Zen 5.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::dequantize::{Int4, Slice, CHUNK};
use super::dot_tile::{Products, COLUMNS, MAX_ROWS};
use crate::simd::avx512::Avx512;
use crate::simd::Simd;
use crate::weight::Scales;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Elements whose nibbles a vector holds.
pub const BLOCK: usize = 128;

/// Most elements of a tile's slices.
pub const INT4_SLICE: usize = 4096;

/// Nibbles in a lane.
const LANE_NIBBLES: usize = 8;
const LANES: usize = 16;

/// Most rows of x in a tile: its lanes' sums of products fill half of the registers.
pub const INT4_ROWS: usize = 4;

/// `result[i][j]` = Σ x[i][·] · w[j][·] over the slices' elements.
pub struct Int4Tile<'a> {
    /// Arranged, with zeros up to a whole number of blocks.
    pub x: *const f32,
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    /// The rows of W, of equal length.
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
        match (rows, self.w[0].weight.zero_points.is_null()) {
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

/// What the blocks of a tile have in common.
struct Look {
    /// The value of each nibble.
    floats: __m512,
    /// The value of each nibble in BF16, twice: the look-up's fifth bit is the next nibble's.
    bf16s: __m512i,
    /// A mask of 16-bit lanes. The compiler does not know it, because it would make an operation of its own of a
    /// constant.
    upper_halves: __mmask32,
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2")]
unsafe fn rows_of<const ROWS: usize, const ZERO_POINTS: bool>(tile: Int4Tile) -> Products {
    let Int4Tile { x, x_stride, w, ahead } = tile;
    let Slice { weight, k, len, .. } = w[0];
    let Scales::Groups { size, data: scales } = weight.scales else { unreachable!("Int4 has scales of groups") };
    let floats = _mm512_sub_ps(Avx512::lane_numbers(), _mm512_set1_ps(if ZERO_POINTS { 0.0 } else { 8.0 }));
    let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(floats)));
    let look = Look { floats, bf16s: _mm512_broadcast_i64x4(halves), upper_halves: black_box(0xaaaa_aaaa) };
    // Sizes are powers of two; a tile is short enough for divisions to show.
    let shift = size.trailing_zeros();
    let groups_of = |elements: usize| (elements + size - 1) >> shift;
    // The group of each lane, counted from the block's first: 4, 8 or 16 lanes hold a group.
    let lanes = _mm512_cvtps_epi32(Avx512::lane_numbers());
    let lane_groups = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128((shift - LANE_NIBBLES.trailing_zeros()) as i32));
    let (row_groups, slice_groups, block_groups) = (groups_of(weight.columns), groups_of(len), BLOCK >> shift);
    let (whole, data_bytes) = (len / BLOCK, len.div_ceil(CHUNK) * CHUNK / 2);
    let rest = u64::MAX >> (64 - (data_bytes - whole * BLOCK / 2)).min(63);
    let mut data = [std::ptr::null(); COLUMNS];
    for j in 0..COLUMNS {
        data[j] = w[j].data::<Int4<ZERO_POINTS>>();
    }
    let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    for group in (0..slice_groups).step_by(LANES) {
        let mask = (u32::MAX >> (32 - (slice_groups - group).min(LANES))) as u16;
        let mut scale = [_mm512_setzero_ps(); COLUMNS];
        let mut zero_point = [_mm512_setzero_ps(); COLUMNS];
        for j in 0..COLUMNS {
            let first = w[j].row * row_groups + (k >> shift) + group;
            scale[j] = factors(scales.wrapping_add(first), mask, row_groups);
            if ZERO_POINTS {
                zero_point[j] = factors(weight.zero_points.wrapping_add(first), mask, row_groups);
            }
        }
        let mut lane_groups = lane_groups;
        let first = (group << shift) / BLOCK;
        for block in first..(first + (LANES << shift) / BLOCK).min(len.div_ceil(BLOCK)) {
            let mut nibbles = [_mm512_setzero_si512(); COLUMNS];
            for j in 0..COLUMNS {
                let bytes = data[j].wrapping_add(block * BLOCK / 2);
                _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(ahead).cast());
                nibbles[j] = if block < whole {
                    _mm512_loadu_si512(bytes.cast())
                } else {
                    _mm512_maskz_loadu_epi8(rest, bytes.cast())
                };
            }
            let (mut lane_scale, mut lane_zero_point) = (scale, zero_point);
            for j in 0..COLUMNS {
                lane_scale[j] = _mm512_permutexvar_ps(lane_groups, scale[j]);
                lane_zero_point[j] = _mm512_permutexvar_ps(lane_groups, zero_point[j]);
            }
            let x = x.add(block * BLOCK);
            add_block::<ROWS, ZERO_POINTS>(&mut sums, &look, x, x_stride, nibbles, lane_scale, lane_zero_point);
            lane_groups = _mm512_add_epi32(lane_groups, _mm512_set1_epi32(block_groups as i32));
        }
    }
    let mut result = [[0.0; COLUMNS]; MAX_ROWS];
    for row in 0..ROWS {
        result[row] = Avx512::sum4(sums[row]);
    }
    result
}

/// The scales, or zero points, of up to 16 groups of a row; asks for those of the next row, `groups` further on.
#[inline(always)]
unsafe fn factors(factors: *const half::f16, mask: u16, groups: usize) -> __m512 {
    // The memory's own look-ahead follows the nibbles, not this trickle.
    _mm_prefetch::<_MM_HINT_T0>(factors.wrapping_add(groups).cast());
    _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, factors.cast()))
}

/// Adds the products of a block, whose lanes have these scales and zero points.
#[inline(always)]
unsafe fn add_block<const ROWS: usize, const ZERO_POINTS: bool>(
    sums: &mut [[__m512; COLUMNS]; ROWS],
    look: &Look,
    x: *const f32,
    x_stride: usize,
    mut nibbles: [__m512i; COLUMNS],
    scale: [__m512; COLUMNS],
    zero_point: [__m512; COLUMNS],
) {
    let mut products = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    for i in 0..LANE_NIBBLES / 2 {
        for j in 0..COLUMNS {
            let low = _mm512_permutexvar_ps(nibbles[j], look.floats);
            let high = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(look.upper_halves, nibbles[j], look.bf16s));
            nibbles[j] = _mm512_srli_epi16::<4>(nibbles[j]);
            for (place, mut value) in [(i, low), (LANE_NIBBLES / 2 + i, high)] {
                if ZERO_POINTS {
                    value = _mm512_fmadd_ps(value, scale[j], zero_point[j]);
                }
                for row in 0..ROWS {
                    let x = _mm512_loadu_ps(x.add(row * x_stride + place * LANES));
                    products[row][j] =
                        if place == 0 { _mm512_mul_ps(x, value) } else { _mm512_fmadd_ps(x, value, products[row][j]) };
                }
            }
        }
    }
    for row in 0..ROWS {
        for j in 0..COLUMNS {
            sums[row][j] = if ZERO_POINTS {
                _mm512_add_ps(sums[row][j], products[row][j])
            } else {
                _mm512_fmadd_ps(products[row][j], scale[j], sums[row][j])
            };
        }
    }
}

/// Brings a block of x, in memory order at `from`, into the order of the nibbles: lane 4g + a of vector 2b + h is
/// element 32g + 16h + 4a + b. `from` and `to` may be the same.
///
/// # Safety
/// The CPU has AVX-512; both are valid for a block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub unsafe fn arrange(from: *const f32, to: *mut f32) {
    let columns = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    let mut rows = [_mm512_setzero_ps(); LANE_NIBBLES];
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
