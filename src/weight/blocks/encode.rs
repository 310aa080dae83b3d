//! Floats into blocks of 32, with the scales and roundings of ggml's reference (ggml-quants.c), so that what is written into a
//! cache has the bytes that ggml-cpu would write.

use super::small::NONLINEAR;
use super::BlockFormat;
use half::f16;

/// Whether [`BlockFormat::encode`] has the format.
pub const fn can_encode(format: BlockFormat) -> bool {
    matches!(
        format,
        BlockFormat::Q4_0
            | BlockFormat::Q4_1
            | BlockFormat::Q5_0
            | BlockFormat::Q5_1
            | BlockFormat::Q8_0
            | BlockFormat::Iq4Nl
    )
}

impl BlockFormat {
    /// Encodes whole blocks, of a format that [`can_encode`] names.
    pub fn encode(self, values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.chunks_exact(32).zip(blocks.chunks_exact_mut(self.block_bytes())) {
            let values: &[f32; 32] = values.try_into().expect("32 values");
            match self {
                BlockFormat::Q4_0 => q4_0(values, block),
                BlockFormat::Q4_1 => q4_1(values, block),
                BlockFormat::Q5_0 => q5_0(values, block),
                BlockFormat::Q5_1 => q5_1(values, block),
                BlockFormat::Q8_0 => q8_0(values, block),
                BlockFormat::Iq4Nl => iq4_nl(values, block),
                _ => unreachable!("a format that is not encoded"),
            }
        }
    }
}

/// The value with the largest magnitude, the first of several.
fn extreme(values: &[f32; 32]) -> f32 {
    let mut largest = (0.0f32, 0.0f32);
    for &value in values {
        if largest.0 < value.abs() {
            largest = (value.abs(), value);
        }
    }
    largest.1
}

fn smallest_and_largest(values: &[f32; 32]) -> (f32, f32) {
    values.iter().fold((f32::MAX, f32::MIN), |(low, high), &value| {
        (if value < low { value } else { low }, if value > high { value } else { high })
    })
}

fn inverse(d: f32) -> f32 {
    if d != 0.0 {
        1.0 / d
    } else {
        0.0
    }
}

fn put_half(value: f32, to: &mut [u8]) {
    to[..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Truncates, and saturates where C's conversion is undefined: of values that are not finite.
fn truncated(value: f32, most: u8) -> u8 {
    (value as i8 as u8).min(most)
}

fn put_nibbles(quants: [u8; 32], to: &mut [u8]) {
    for i in 0..16 {
        to[i] = quants[i] & 15 | (quants[i + 16] & 15) << 4;
    }
}

fn put_fifth_bits(quants: [u8; 32], to: &mut [u8]) {
    let bits = quants.iter().enumerate().fold(0u32, |bits, (i, &q)| bits | u32::from(q >> 4 & 1) << i);
    to[..4].copy_from_slice(&bits.to_le_bytes());
}

fn q4_0(values: &[f32; 32], block: &mut [u8]) {
    let d = extreme(values) / -8.0;
    let id = inverse(d);
    put_half(d, block);
    put_nibbles(values.map(|value| truncated(value * id + 8.5, 15)), &mut block[2..]);
}

fn q4_1(values: &[f32; 32], block: &mut [u8]) {
    let (low, high) = smallest_and_largest(values);
    let d = (high - low) / 15.0;
    let id = inverse(d);
    put_half(d, block);
    put_half(low, &mut block[2..]);
    put_nibbles(values.map(|value| truncated((value - low) * id + 0.5, 15)), &mut block[4..]);
}

fn q5_0(values: &[f32; 32], block: &mut [u8]) {
    let d = extreme(values) / -16.0;
    let id = inverse(d);
    let quants = values.map(|value| truncated(value * id + 16.5, 31));
    put_half(d, block);
    put_fifth_bits(quants, &mut block[2..]);
    put_nibbles(quants, &mut block[6..]);
}

fn q5_1(values: &[f32; 32], block: &mut [u8]) {
    let (low, high) = smallest_and_largest(values);
    let d = (high - low) / 31.0;
    let id = inverse(d);
    let quants = values.map(|value| ((value - low) * id + 0.5) as u8 & 31);
    put_half(d, block);
    put_half(low, &mut block[2..]);
    put_fifth_bits(quants, &mut block[4..]);
    put_nibbles(quants, &mut block[8..]);
}

/// As ggml has it for x86: values times 127 / largest, ties to even. Its reference multiplies by the inverse of the scale and
/// rounds ties away from 0, which is another byte for many values of BF16.
fn q8_0(values: &[f32; 32], block: &mut [u8]) {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let factor = if largest == 0.0 { 0.0 } else { 127.0 / largest };
    put_half(largest / 127.0, block);
    for (value, q) in values.iter().zip(&mut block[2..]) {
        *q = (value * factor).round_ties_even() as i8 as u8;
    }
}

/// Least squares of the values, weighted by their squares, to the table's nearest ones.
fn iq4_nl(values: &[f32; 32], block: &mut [u8]) {
    const LEAST: f32 = 1e-15;
    let extreme = extreme(values);
    if extreme.abs() < LEAST {
        return block[..18].fill(0);
    }
    let d = extreme / NONLINEAR[0];
    let id = 1.0 / d;
    let (mut product, mut square) = (0.0, 0.0);
    let quants = values.map(|value| {
        let index = nearest(id * value);
        let (q, weight) = (NONLINEAR[usize::from(index)], value * value);
        product += weight * q * value;
        square += weight * q * q;
        index
    });
    put_half(if square > 0.0 { product / square } else { 0.0 }, block);
    put_nibbles(quants, &mut block[2..]);
}

/// The place in the table of the nearest value, the larger of two that are as near.
fn nearest(value: f32) -> u8 {
    let above = NONLINEAR.iter().position(|&entry| value < entry).unwrap_or(NONLINEAR.len());
    match above {
        0 => 0,
        16 => 15,
        at if value - NONLINEAR[at - 1] < NONLINEAR[at] - value => (at - 1) as u8,
        at => at as u8,
    }
}
