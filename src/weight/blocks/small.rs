//! Formats of 32 elements a block. Nibbles are paired: byte i holds q[i] in its low half and q[i + 16] in its high one.
//!
//! | | bytes | layout | value |
//! |---|---|---|---|
//! | Q4_0 | 18 | f16 d, 16 bytes | d · (q − 8) |
//! | Q4_1 | 20 | f16 d, f16 m, 16 bytes | d · q + m |
//! | Q5_0 | 22 | f16 d, fifth bits of q in 32 bits, 16 bytes | d · (q − 16) |
//! | Q5_1 | 24 | f16 d, f16 m, fifth bits, 16 bytes | d · q + m |
//! | Q8_0 | 34 | f16 d, 32 signed bytes | d · q |
//! | IQ4_NL | 18 | f16 d, 16 bytes | d · table[q] |
//! | MXFP4 | 17 | exponent e of 8 bits, 16 bytes | 2^(e − 127) · (E2M1 number q) (OCP Microscaling 1.0) |

use super::Block;
use half::f16;

pub struct Q4_0;
pub struct Q4_1;
pub struct Q5_0;
pub struct Q5_1;
pub struct Q8_0;
pub struct Iq4Nl;
pub struct Mxfp4;

/// The values that IQ4_NL's and IQ4_XS's 4 bits stand for.
pub(super) const NONLINEAR: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// Twice the numbers of E2M1: sign, two bits of exponent, one of mantissa.
const TWICE_E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

#[inline(always)]
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Calls `value` with each nibble of 16 bytes.
#[inline(always)]
fn nibbles(quants: &[u8], values: &mut [f32], value: impl Fn(u8) -> f32) {
    let quants: [u8; 16] = quants.try_into().expect("16 bytes");
    let values: &mut [f32; 32] = values.try_into().expect("32 values");
    for i in 0..16 {
        values[i] = value(quants[i] & 15);
        values[i + 16] = value(quants[i] >> 4);
    }
}

/// The same with a fifth bit of each.
#[inline(always)]
fn five_bits(high: &[u8], quants: &[u8], values: &mut [f32], value: impl Fn(f32) -> f32) {
    let high = u32::from_le_bytes(high.try_into().expect("4 bytes"));
    let quants: [u8; 16] = quants.try_into().expect("16 bytes");
    let values: &mut [f32; 32] = values.try_into().expect("32 values");
    for i in 0..16 {
        let bit = |at: usize| (high >> at & 1) << 4;
        values[i] = value((u32::from(quants[i] & 15) | bit(i)) as i32 as f32);
        values[i + 16] = value((u32::from(quants[i] >> 4) | bit(i + 16)) as i32 as f32);
    }
}

impl Block for Q4_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(block);
        nibbles(&block[2..18], values, |q| d * (f32::from(q) - 8.0));
    }
}

impl Block for Q4_1 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let (d, m) = (half(block), half(&block[2..]));
        nibbles(&block[4..20], values, |q| d * f32::from(q) + m);
    }
}

impl Block for Q5_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(block);
        five_bits(&block[2..6], &block[6..22], values, |q| d * (q - 16.0));
    }
}

impl Block for Q5_1 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let (d, m) = (half(block), half(&block[2..]));
        five_bits(&block[4..8], &block[8..24], values, |q| d * q + m);
    }
}

impl Block for Q8_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(block);
        let quants: [u8; 32] = block[2..34].try_into().expect("32 bytes");
        let values: &mut [f32; 32] = values.try_into().expect("32 values");
        for i in 0..32 {
            values[i] = d * f32::from(quants[i] as i8);
        }
    }
}

impl Block for Iq4Nl {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let d = half(block);
        nibbles(&block[2..18], values, |q| d * NONLINEAR[usize::from(q)]);
    }
}

impl Block for Mxfp4 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;

    #[inline(always)]
    fn decode(block: &[u8], values: &mut [f32]) {
        let half_scale = half_of_power(block[0]);
        nibbles(&block[1..17], values, |q| half_scale * TWICE_E2M1[usize::from(q)]);
    }
}

/// 2^(e − 128), which for the smallest two is below the normal numbers.
#[inline(always)]
fn half_of_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => (u32::from(exponent) - 1) << 23,
    })
}
