//! Int8: value = scale · q. Quantising uses −127 ..= 127, so that a weight and its negative are equally good; imported
//! quantised values may be −128.

/// Adding and subtracting 1.5 · 2^23 rounds |x| < 2^22 to the nearest integer, ties to even, without a call.
const ROUND: f32 = 12_582_912.0;

pub(super) fn round(value: f32) -> f32 {
    (value + ROUND) - ROUND
}

pub const MAX: f32 = 127.0;

/// The quantised value of value / scale. `inverse` is 1 / scale, or 0 for a scale that is 0.
pub fn encode(value: f32, inverse: f32) -> u8 {
    round((value * inverse).clamp(-MAX, MAX)) as i32 as u8
}

pub fn decode(q: u8) -> f32 {
    f32::from(q as i8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_and_rounding_is_to_even() {
        for q in -127..=127i32 {
            assert_eq!(decode(encode(q as f32 * 0.25, 4.0)), q as f32);
            let middle = (q as f32 + 0.5).clamp(-127.0, 127.0);
            assert_eq!(decode(encode(middle, 1.0)), middle.round_ties_even(), "{middle}");
        }
        assert_eq!(decode(0x80), -128.0);
        assert_eq!((decode(encode(1e9, 1.0)), decode(encode(-1e9, 1.0))), (127.0, -127.0));
        assert_eq!(encode(5.0, 0.0), 0);
    }
}
