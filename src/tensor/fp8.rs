//! FP8 (OCP 8-bit floating point, revision 1.0): E4M3 without infinities (largest value 448, 0x7f and 0xff are NaN) and
//! E5M2 with them (57344). Every byte converts exactly to f32, f16 and bf16.

use super::{DType, Element};

pub const E4M3_MAX: f32 = 448.0;
pub const E5M2_MAX: f32 = 57344.0;

/// The fields moved into place, and the exponent's bias put right by an exact product.
fn widen(bits: u8, mantissa_bits: u32, bias: u32) -> f32 {
    let sign = u32::from(bits & 0x80) << 24;
    let fields = u32::from(bits & 0x7f) << (23 - mantissa_bits);
    f32::from_bits(sign | fields) * f32::from_bits((127 + 127 - bias) << 23)
}

pub fn e4m3_to_f32(bits: u8) -> f32 {
    if bits & 0x7f == 0x7f {
        f32::NAN
    } else {
        widen(bits, 3, 7)
    }
}

pub fn e5m2_to_f32(bits: u8) -> f32 {
    match bits & 0x7f {
        0x7c => f32::INFINITY.copysign(widen(bits, 2, 15)),
        0x7d..=0x7f => f32::NAN,
        _ => widen(bits, 2, 15),
    }
}

/// Rounds to nearest, ties to even; what exceeds 448 becomes ±448, and NaN stays NaN.
pub fn e4m3_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= E4M3_MAX {
        return sign | 0x7e;
    }
    if magnitude < 1.0 / 64.0 {
        // The bits count steps of 2^-9 here, and 8 steps are the smallest normal number.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    // 20 of the 23 bits of the mantissa go; a carry out of it raises the exponent, as it should.
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    sign | ((rounded >> 20) - ((127 - 7) << 3)) as u8
}

/// Rounds to nearest, ties to even; what exceeds 57344 becomes ±57344, infinities included, and NaN stays NaN.
pub fn e5m2_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= E5M2_MAX {
        return sign | 0x7b;
    }
    if magnitude < 1.0 / 16384.0 {
        // Steps of 2^-16 below 2^-14.
        return sign | (magnitude * 65536.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0xf_ffff + (bits >> 21 & 1);
    sign | ((rounded >> 21) - ((127 - 15) << 2)) as u8
}

/// An element of E4M3 in memory, as caches have keys and values.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// An element of E5M2 in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct E5m2(pub u8);

impl Element for E4m3 {
    const DTYPE: DType = DType::F8E4m3;
    fn to_f32(self) -> f32 {
        e4m3_to_f32(self.0)
    }
    /// Saturates too.
    fn from_f32(value: f32) -> E4m3 {
        E4m3(e4m3_from_f32(value))
    }
}

impl Element for E5m2 {
    const DTYPE: DType = DType::F8E5m2;
    fn to_f32(self) -> f32 {
        e5m2_to_f32(self.0)
    }
    /// Saturates too.
    fn from_f32(value: f32) -> E5m2 {
        E5m2(e5m2_from_f32(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Format = (fn(u8) -> f32, fn(f32) -> u8, f32);
    const FORMATS: [Format; 2] = [(e4m3_to_f32, e4m3_from_f32, E4M3_MAX), (e5m2_to_f32, e5m2_from_f32, E5M2_MAX)];

    #[test]
    fn every_code_survives_the_way_there_and_back() {
        for (decode, encode, most) in FORMATS {
            let (mut largest, mut nans) = (0f32, 0);
            for bits in 0..=255u8 {
                let value = decode(bits);
                if value.is_nan() {
                    assert!(decode(encode(value)).is_nan());
                    nans += 1;
                } else if value.is_infinite() {
                    assert_eq!(decode(encode(value)), most.copysign(value), "infinities saturate");
                } else {
                    assert_eq!(encode(value), bits, "{value}");
                    largest = largest.max(value);
                }
            }
            assert_eq!((largest, nans), (most, if most == E4M3_MAX { 2 } else { 6 }));
        }
    }

    #[test]
    fn published_values() {
        for (bits, value) in [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0)]
        {
            assert_eq!(e4m3_to_f32(bits), value);
        }
        assert_eq!((e4m3_to_f32(0x7e), e4m3_to_f32(0xc0)), (448.0, -2.0));
        for (bits, value) in [(0x01, 2f32.powi(-16)), (0x04, 2f32.powi(-14)), (0x3c, 1.0), (0x7b, 57344.0)] {
            assert_eq!(e5m2_to_f32(bits), value);
        }
        assert!(e5m2_to_f32(0x7c) == f32::INFINITY);
    }

    /// Between two neighbours the nearer one is taken, and of two equally near ones that with the even bits.
    #[test]
    fn rounding_is_to_nearest_even() {
        for (decode, encode, most) in FORMATS {
            for bits in 0..0x7fu8 {
                let (low, high) = (decode(bits), decode(bits + 1));
                if !high.is_finite() || high > most {
                    break;
                }
                let middle = (low + high) / 2.0;
                let even = if bits % 2 == 0 { bits } else { bits + 1 };
                assert_eq!((encode(middle), encode(-middle)), (even, even | 0x80), "{middle}");
                assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), bits);
                assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), bits + 1);
            }
            assert_eq!(decode(encode(most * 1.5)), most);
            assert_eq!(decode(encode(f32::NEG_INFINITY)), -most);
        }
    }
}
