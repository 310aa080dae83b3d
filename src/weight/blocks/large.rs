//! Formats of 256 elements a block, which have scales of scales.
//!
//! | | bytes | layout | value |
//! |---|---|---|---|
//! | Q2_K | 84 | 16 bytes with scale s and minimum m of 16 elements each, 64 bytes of 2 bits, f16 d, f16 dmin | (d · s) · q − dmin · m |
//! | Q3_K | 110 | third bits in 32 bytes, 64 bytes of 2 bits, 16 scales of 6 bits in 12 bytes, f16 d | (d · (s − 32)) · (q − 4) |
//! | Q4_K | 144 | f16 d, f16 dmin, 8 scales and minima of 6 bits in 12 bytes, 128 bytes | (d · s) · q − dmin · m |
//! | Q5_K | 176 | as Q4_K, with fifth bits in 32 bytes before the last 128 | (d · s) · q − dmin · m |
//! | Q6_K | 210 | low nibbles, upper two bits, 16 signed scales of 16 elements each, f16 d | (d · s) · (q − 32) |
//! | IQ4_XS | 136 | f16 d, upper bits of 8 scales, their lower 4 bits in 4 bytes, 128 bytes | (d · (s − 32)) · table[q] |

use super::small::{half, NONLINEAR};
use super::Block;

pub struct Q2K;
pub struct Q3K;
pub struct Q4K;
pub struct Q5K;
pub struct Q6K;
pub struct Iq4Xs;

/// The 6-bit scale and minimum of group `j` of Q4_K and Q5_K.
#[inline(always)]
pub fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// The 16 scales of Q3_K, less 32.
#[inline(always)]
fn q3_scale(packed: &[u8], j: usize) -> f32 {
    let low = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
    let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    f32::from((low | high << 4) as i8 - 32)
}

impl Block for Q2K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let (d, dmin) = (half(&block[80..]), half(&block[82..]));
        for j in 0..16 {
            let (scale, minimum) = (d * f32::from(block[j] & 15), dmin * f32::from(block[j] >> 4));
            let (first, shift) = (16 + j / 8 * 32 + j % 2 * 16, j % 8 / 2 * 2);
            let quants: [u8; 16] = block[first..first + 16].try_into().expect("16 bytes");
            let values: &mut [f32; 16] = (&mut values[16 * j..16 * j + 16]).try_into().expect("16 values");
            for i in 0..16 {
                values[i] = scale * f32::from(quants[i] >> shift & 3) - minimum;
            }
        }
    }
}

impl Block for Q3K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(&block[108..]);
        for j in 0..16 {
            let scale = d * q3_scale(&block[96..108], j);
            let (first, shift, bit) = (32 + j / 8 * 32 + j % 2 * 16, j % 8 / 2 * 2, j / 2);
            let high: [u8; 16] = block[j % 2 * 16..j % 2 * 16 + 16].try_into().expect("16 bytes");
            let quants: [u8; 16] = block[first..first + 16].try_into().expect("16 bytes");
            let values: &mut [f32; 16] = (&mut values[16 * j..16 * j + 16]).try_into().expect("16 values");
            for i in 0..16 {
                let q = quants[i] >> shift & 3 | (high[i] >> bit & 1) << 2;
                values[i] = scale * (f32::from(q) - 4.0);
            }
        }
    }
}

impl Block for Q4K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let (d, dmin) = (half(block), half(&block[2..]));
        for j in 0..8 {
            let (scale, minimum) = scale_and_minimum(&block[4..16], j);
            let (scale, minimum) = (d * scale, dmin * minimum);
            let (first, shift) = (16 + j / 2 * 32, j % 2 * 4);
            let quants: [u8; 32] = block[first..first + 32].try_into().expect("32 bytes");
            let values: &mut [f32; 32] = (&mut values[32 * j..32 * j + 32]).try_into().expect("32 values");
            for i in 0..32 {
                values[i] = scale * f32::from(quants[i] >> shift & 15) - minimum;
            }
        }
    }
}

impl Block for Q5K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let (d, dmin) = (half(block), half(&block[2..]));
        let high: [u8; 32] = block[16..48].try_into().expect("32 bytes");
        for j in 0..8 {
            let (scale, minimum) = scale_and_minimum(&block[4..16], j);
            let (scale, minimum) = (d * scale, dmin * minimum);
            let (first, shift) = (48 + j / 2 * 32, j % 2 * 4);
            let quants: [u8; 32] = block[first..first + 32].try_into().expect("32 bytes");
            let values: &mut [f32; 32] = (&mut values[32 * j..32 * j + 32]).try_into().expect("32 values");
            for i in 0..32 {
                let q = quants[i] >> shift & 15 | (high[i] >> j & 1) << 4;
                values[i] = scale * f32::from(q) - minimum;
            }
        }
    }
}

impl Block for Q6K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;

    /// Halves of 128 elements, each of four quarters of 32.
    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(&block[208..]);
        for j in 0..16 {
            let scale = d * f32::from(block[192 + j] as i8);
            let (part, quarter, at) = (j / 8, j % 8 / 2, j % 2 * 16);
            let first = part * 64 + quarter % 2 * 32 + at;
            let low: [u8; 16] = block[first..first + 16].try_into().expect("16 bytes");
            let first = 128 + part * 32 + at;
            let high: [u8; 16] = block[first..first + 16].try_into().expect("16 bytes");
            let values: &mut [f32; 16] = (&mut values[16 * j..16 * j + 16]).try_into().expect("16 values");
            for i in 0..16 {
                let q = low[i] >> (quarter / 2 * 4) & 15 | (high[i] >> (quarter * 2) & 3) << 4;
                values[i] = scale * (f32::from(q) - 32.0);
            }
        }
    }
}

impl Block for Iq4Xs {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 136;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(block);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for j in 0..8 {
            let scale = block[4 + j / 2] >> (j % 2 * 4) & 15 | (((high >> (2 * j)) & 3) as u8) << 4;
            let scale = d * f32::from(scale as i8 - 32);
            let quants: [u8; 16] = block[8 + 16 * j..24 + 16 * j].try_into().expect("16 bytes");
            let values: &mut [f32; 32] = (&mut values[32 * j..32 * j + 32]).try_into().expect("32 values");
            for i in 0..16 {
                values[i] = scale * NONLINEAR[usize::from(quants[i] & 15)];
                values[i + 16] = scale * NONLINEAR[usize::from(quants[i] >> 4)];
            }
        }
    }
}
