//! Int4: value = scale · (q − 8), or scale · q + zero point; q in 0 ..= 15. Two quantised values a byte wherever they
//! are stored.

use super::int8::round;

/// The quantised value that stands for 0 without zero points, and fills what a layout pads.
pub const ZERO: u8 = 8;

/// The quantised value of value / scale + 8. `inverse` is 1 / scale, or 0.
pub fn encode(value: f32, inverse: f32) -> u8 {
    (round((value * inverse).clamp(-8.0, 7.0)) + 8.0) as i32 as u8
}

/// The quantised value of (value − zero point) / scale.
pub fn encode_from(value: f32, zero_point: f32, inverse: f32) -> u8 {
    round(((value - zero_point) * inverse).clamp(0.0, 15.0)) as i32 as u8
}

pub fn decode(q: u8) -> f32 {
    f32::from(q) - f32::from(ZERO)
}

/// 32 quantised values as GGUF's Q4_0 and the CPU's layout have them: byte i = q[i] | q[i + 16] << 4.
pub fn pack_halves(quantized: &[u8], bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = quantized[i] | quantized[i + 16] << 4;
    }
}

pub fn unpack_halves(bytes: &[u8], quantized: &mut [u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        quantized[i] = byte & 15;
        quantized[i + 16] = byte >> 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives() {
        for q in 0..16u8 {
            assert_eq!(encode(decode(q) * -0.5, -2.0), q);
            assert_eq!(encode_from(f32::from(q) * 0.5 - 3.0, -3.0, 2.0), q);
            let middle = f32::from(q) - 7.5;
            assert_eq!(decode(encode(middle, 1.0)), middle.round_ties_even().min(7.0), "{middle}");
        }
        assert_eq!((encode(1e9, 1.0), encode(-1e9, 1.0), encode(3.0, 0.0)), (15, 0, ZERO));
        assert_eq!((encode_from(1e9, 0.0, 1.0), encode_from(-1e9, 0.0, 1.0)), (15, 0));
    }

    #[test]
    fn halves_are_neighbours_sixteen_apart() {
        let quantized: Vec<u8> = (0..32).map(|i| i * 7 % 16).collect();
        let (mut bytes, mut back) = ([0; 16], [0; 32]);
        pack_halves(&quantized, &mut bytes);
        assert_eq!(bytes[3], quantized[3] | quantized[19] << 4);
        unpack_halves(&bytes, &mut back);
        assert_eq!(back[..], quantized[..]);
    }
}
