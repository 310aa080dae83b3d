//! The register tile for BF16 times BF16 on CPUs with AVX512-BF16: two products a lane and instruction, twice the rate
//! of widening both sides first.
//!
//! Products of BF16 are exact in f32; `vdpbf16ps` rounds each addition to nearest even and takes subnormal inputs as 0
//! (Intel SDM, volume 2). The shape and the order of the final additions are [`super::dot_tile`]'s.

#![allow(clippy::needless_range_loop)] // The indices are a tile's coordinates in several arrays at once.

use super::dot_tile::{DotTile, Products, COLUMNS, MAX_ROWS};
use crate::simd::avx512::Avx512;
use crate::simd::Simd;
use half::bf16;
use std::arch::x86_64::*;

pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// # Safety
/// The CPU has AVX-512 and AVX512-BF16; every row is readable for `k` elements.
pub unsafe fn compute(tile: DotTile<bf16, bf16>, rows: usize) -> Products {
    match rows {
        1 => rows_of::<1>(tile),
        2 => rows_of::<2>(tile),
        3 => rows_of::<3>(tile),
        4 => rows_of::<4>(tile),
        5 => rows_of::<5>(tile),
        _ => rows_of::<6>(tile),
    }
}

/// Elements in a vector.
const LANES: usize = 32;

/// Reads the bits as 16 pairs of BF16.
#[inline(always)]
unsafe fn pairs(bits: __m512i) -> __m512bh {
    std::mem::transmute::<__m512i, __m512bh>(bits)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn rows_of<const ROWS: usize>(tile: DotTile<bf16, bf16>) -> Products {
    let DotTile { x, x_stride, w, k, ahead } = tile;
    let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    let mut at = 0;
    while at < k {
        let lanes = LANES.min(k - at);
        let mask = (u64::MAX >> (64 - lanes)) as u32;
        let mut columns = [pairs(_mm512_setzero_si512()); COLUMNS];
        for j in 0..COLUMNS {
            let pointer = w[j].add(at).cast::<i16>();
            _mm_prefetch::<_MM_HINT_T0>(pointer.cast::<i8>().wrapping_add(ahead));
            columns[j] = pairs(_mm512_maskz_loadu_epi16(mask, pointer));
        }
        for i in 0..ROWS {
            let row = pairs(_mm512_maskz_loadu_epi16(mask, x.add(i * x_stride + at).cast()));
            for j in 0..COLUMNS {
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
            }
        }
        at += LANES;
    }
    let mut result = [[0.0; COLUMNS]; MAX_ROWS];
    for i in 0..ROWS {
        result[i] = Avx512::sum4(sums[i]);
    }
    result
}
