use super::encode::can_encode;
use super::*;
use crate::weight::rows::testing::bytes;
use half::f16;

/// The value of element `i` of a block, from the formats' definitions and one element at a time.
fn by_definition(format: BlockFormat, block: &[u8], i: usize) -> f64 {
    let half = |at: usize| f64::from(f16::from_le_bytes([block[at], block[at + 1]]).to_f32());
    let nibble = |first: usize| f64::from(block[first + i % 16] >> (i / 16 * 4) & 15);
    let fifth = |first: usize| f64::from(block[first + i / 8] >> (i % 8) & 1) * 16.0;
    let table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    let k_scale = |group: usize| {
        let packed = &block[4..16];
        match group {
            0..=3 => (f64::from(packed[group] & 63), f64::from(packed[group + 4] & 63)),
            _ => (
                f64::from(packed[group + 4] & 15) + 16.0 * f64::from(packed[group - 4] >> 6),
                f64::from(packed[group + 4] >> 4) + 16.0 * f64::from(packed[group] >> 6),
            ),
        }
    };
    match format {
        BlockFormat::Q4_0 => half(0) * (nibble(2) - 8.0),
        BlockFormat::Q4_1 => half(0) * nibble(4) + half(2),
        BlockFormat::Q5_0 => half(0) * (nibble(6) + fifth(2) - 16.0),
        BlockFormat::Q5_1 => half(0) * (nibble(8) + fifth(4)) + half(2),
        BlockFormat::Q8_0 => half(0) * f64::from(block[2 + i] as i8),
        BlockFormat::Iq4Nl => half(0) * f64::from(table[nibble(2) as usize]),
        BlockFormat::Mxfp4 => {
            let q = nibble(1) as u32;
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][q as usize % 8];
            let sign = if q < 8 { 1.0 } else { -1.0 };
            sign * magnitude * 2f64.powi(i32::from(block[0]) - 127)
        }
        BlockFormat::Q2K => {
            let scales = block[i / 16];
            let q = f64::from(block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3);
            half(80) * f64::from(scales & 15) * q - half(82) * f64::from(scales >> 4)
        }
        BlockFormat::Q3K => {
            let group = i / 16;
            let low = block[96 + group % 8] >> (group / 8 * 4) & 15;
            let high = block[104 + group % 4] >> (group / 4 * 2) & 3;
            let q = f64::from(block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3);
            let third = f64::from(block[i % 32] >> (i / 32) & 1) * 4.0;
            half(108) * (f64::from(low | high << 4) - 32.0) * (q + third - 4.0)
        }
        BlockFormat::Q4K | BlockFormat::Q5K => {
            let five = format == BlockFormat::Q5K;
            let (scale, minimum) = k_scale(i / 32);
            let quants = if five { 48 } else { 16 };
            let q = f64::from(block[quants + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15);
            let high = if five { f64::from(block[16 + i % 32] >> (i / 32) & 1) * 16.0 } else { 0.0 };
            half(0) * scale * (q + high) - half(2) * minimum
        }
        BlockFormat::Q6K => {
            let (part, quarter, at) = (i / 128, i % 128 / 32, i % 32);
            let low = block[part * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
            let high = block[128 + part * 32 + at] >> (quarter * 2) & 3;
            half(208) * f64::from(block[192 + i / 16] as i8) * (f64::from(low | high << 4) - 32.0)
        }
        BlockFormat::Iq4Xs => {
            let group = i / 32;
            let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
            let high = u16::from_le_bytes([block[2], block[3]]) >> (2 * group) & 3;
            let q = block[8 + group * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
            half(0) * (f64::from(u16::from(low) | high << 4) - 32.0) * f64::from(table[q as usize])
        }
    }
}

#[test]
fn blocks_are_decoded_as_their_formats_define_them() {
    for &format in BlockFormat::ALL {
        for seed in 0..64 {
            let block = bytes(format.block_bytes(), 91 + seed);
            let mut values = vec![f32::NAN; format.elements()];
            format.decode(&block, &mut values);
            for (i, &value) in values.iter().enumerate() {
                let expected = by_definition(format, &block, i);
                if !expected.is_finite() || !value.is_finite() {
                    assert_eq!(expected.is_finite(), value.is_finite(), "{format}, element {i}: {value}");
                    continue;
                }
                // Two roundings of products and one of a sum, of terms that may cancel.
                let allowed = 3.0 * f64::from(f32::EPSILON) * (expected.abs() + 63.0 * 65504.0);
                let allowed =
                    if format == BlockFormat::Mxfp4 { 0.0 } else { allowed.min(expected.abs().max(1e3) * 1e-3) };
                assert!((f64::from(value) - expected).abs() <= allowed, "{format}, element {i}: {value}, {expected}");
            }
        }
    }
}

#[test]
fn sizes_are_those_of_the_format() {
    let sizes: Vec<usize> = BlockFormat::ALL.iter().map(|format| format.block_bytes()).collect();
    assert_eq!(sizes, [18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17]);
    assert!(BlockFormat::ALL
        .iter()
        .all(|format| format.block_bytes() <= MOST_BYTES && format.elements() <= MOST_ELEMENTS));
    for &format in BlockFormat::ALL {
        assert_eq!(BlockFormat::from_file_type(format.file_type()), Some(format));
    }
    assert_eq!(BlockFormat::from_file_type(0), None);
}

#[test]
fn what_is_encoded_is_within_half_a_step_of_what_was_given() {
    for &format in BlockFormat::ALL.iter().filter(|&&format| can_encode(format)) {
        for seed in 0..32 {
            let values: Vec<f32> = bytes(32, 7 + seed).iter().map(|&byte| (f32::from(byte) - 100.0) / 64.0).collect();
            let mut block = vec![0; format.block_bytes()];
            format.encode(&values, &mut block);
            let mut back = vec![f32::NAN; 32];
            format.decode(&block, &mut back);
            let range = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let step = match format {
                BlockFormat::Q8_0 => range / 127.0,
                BlockFormat::Q5_0 => range / 16.0,
                BlockFormat::Q5_1 => 2.0 * range / 31.0,
                BlockFormat::Q4_0 => range / 8.0,
                BlockFormat::Q4_1 => 2.0 * range / 15.0,
                // The widest gap of the table, and least squares move its ends.
                _ => range * 48.0 / 113.0,
            };
            for (value, back) in values.iter().zip(&back) {
                // The one at the end of a range that has no middle is a whole step away.
                assert!((value - back).abs() <= step * 1.01, "{format}: {value} became {back}");
            }
        }
        let mut block = vec![1; format.block_bytes()];
        format.encode(&[0.0; 32], &mut block);
        let mut back = [f32::NAN; 32];
        format.decode(&block, &mut back);
        assert_eq!(back, [0.0; 32], "{format}");
    }
}

#[test]
fn values_that_are_not_finite_do_no_harm() {
    for &format in BlockFormat::ALL.iter().filter(|&&format| can_encode(format)) {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut values = [0.5; 32];
            values[9] = special;
            let mut block = vec![0; format.block_bytes()];
            format.encode(&values, &mut block);
        }
    }
}
