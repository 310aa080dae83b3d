//! AWQ (AutoAWQ's GEMM layout): qweight i32 [K][N / 8], qzeros i32 [K / group][N / 8], scales [K / group][N]. Nibble i of
//! a word is output 8 · word + ORDER[i].

use super::grouped::{group_length, nibble, FloatBytes, Grouped, Nibbles};
use super::rows::expect_bytes;
use crate::error::{Error, Result};

/// The nibble that holds output j of a word: the inverse of 0, 2, 4, 6, 1, 3, 5, 7.
const NIBBLE_OF: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub struct Awq<'a> {
    weights: &'a [u8],
    zeros: Option<&'a [u8]>,
    words_in_row: usize,
}

impl Nibbles for Awq<'_> {
    fn quantized_at(&self, k: usize, n: usize) -> u8 {
        nibble(self.weights, k * self.words_in_row + n / 8, NIBBLE_OF[n % 8])
    }

    fn zero(&self, group: usize, n: usize) -> Option<u8> {
        self.zeros.map(|zeros| nibble(zeros, group * self.words_in_row + n / 8, NIBBLE_OF[n % 8]))
    }
}

/// `rows` is N and `columns` K; without `zeros` all are 8.
pub fn awq<'a>(
    rows: usize,
    columns: usize,
    group_size: usize,
    weights: &'a [u8],
    zeros: Option<&'a [u8]>,
    scales: FloatBytes<'a>,
) -> Result<Grouped<'a, Awq<'a>>> {
    if !rows.is_multiple_of(8) {
        return Err(Error::invalid(format!("AWQ of [{rows}, {columns}]: the rows must be a multiple of 8")));
    }
    let words = |count: usize| (rows / 8).checked_mul(count).and_then(|words| words.checked_mul(4));
    expect_bytes("AWQ's qweight", weights.len(), words(columns), rows, columns)?;
    let groups = columns.div_ceil(group_length(group_size, columns));
    if let Some(zeros) = zeros {
        expect_bytes("AWQ's qzeros", zeros.len(), words(groups), rows, columns)?;
    }
    Grouped::new(Awq { weights, zeros, words_in_row: rows / 8 }, rows, columns, group_size, scales, None)
}

#[cfg(test)]
mod tests {
    use super::super::encoding::Encoding;
    use super::super::format::Granularity;
    use super::super::rows::testing::{both, bytes};
    use super::super::rows::{QuantizedSource, RowSource};
    use super::*;
    use crate::tensor::DType;
    use half::f16;

    /// Packs as the format's definition says, from quantised values [k][n].
    fn pack(quantized: &[u8], n: usize) -> Vec<u8> {
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let words = quantized
            .chunks(8)
            .map(|eight| order.iter().enumerate().fold(0u32, |word, (i, &j)| word | u32::from(eight[j]) << (4 * i)));
        assert!(n.is_multiple_of(8));
        words.flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn values_are_those_of_the_definition() {
        let (n, k) = (16, 256);
        for (group, symmetric) in [(128, false), (64, true), (0, false), (32, false)] {
            let length = group_length(group, k);
            let groups = k / length;
            let quantized: Vec<u8> = bytes(n * k, 3).iter().map(|b| b & 15).collect();
            let zeros: Vec<u8> = bytes(n * groups, 4).iter().map(|b| if symmetric { 8 } else { b & 15 }).collect();
            let scales: Vec<f16> =
                bytes(n * groups, 5).iter().map(|&b| f16::from_f32(0.01 + f32::from(b) * 1e-4)).collect();
            let scale_bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            let (weights, zero_words) = (pack(&quantized, n), pack(&zeros, n));
            let floats = FloatBytes { bytes: &scale_bytes, dtype: DType::F16 };
            let source = awq(n, k, group, &weights, Some(&zero_words), floats).unwrap();
            let format = source.format();
            assert_eq!((format.encoding, format.zero_points), (Encoding::Int4, !symmetric));
            let wanted = if group == 0 { Granularity::Rows } else { Granularity::Groups(group) };
            assert_eq!((format.granularity, source.is_exact()), (wanted, symmetric));
            for row in 0..n {
                let (values, packed) = both(&source, row).unwrap();
                for at in 0..k {
                    let g = at / length;
                    let (scale, zero) = (scales[g * n + row].to_f32(), zeros[g * n + row]);
                    let value = scale * (f32::from(quantized[at * n + row]) - f32::from(zero));
                    assert_eq!(values[at], value);
                    let allowed = if symmetric { 0.0 } else { scale * 16.0 / 2048.0 };
                    assert!((packed[at] - value).abs() <= allowed, "{} is not {value}", packed[at]);
                }
            }
        }
    }

    #[test]
    fn what_is_short_or_not_finite_is_named() {
        let (weights, zeros, scales) = (vec![0; 8 * 64 / 2], vec![0; 8], vec![0x3c; 32]);
        let refused = |rows, columns, group, weights: &[u8], zeros: &[u8], scales: &[u8]| {
            let scales = FloatBytes { bytes: scales, dtype: DType::F16 };
            awq(rows, columns, group, weights, Some(zeros), scales).err().expect("refused").message
        };
        assert!(refused(8, 64, 32, &weights[1..], &zeros, &scales).contains("qweight"));
        assert!(refused(8, 64, 32, &weights, &zeros[1..], &scales).contains("qzeros"));
        assert!(refused(8, 64, 32, &weights, &zeros, &scales[1..]).contains("scales"));
        assert!(refused(9, 64, 32, &weights, &zeros, &scales).contains("multiple of 8"));
        assert!(refused(8, 64, 33, &weights, &zeros, &scales).contains("33"));
        let mut infinite = scales.clone();
        infinite[22..24].copy_from_slice(&f16::INFINITY.to_le_bytes());
        assert!(refused(8, 64, 32, &weights, &zeros, &infinite).contains("row 3, column 32"));

        // With zeros of 8 everywhere no zero point is stored; beside another zero, 8 times a large scale must be an f16
        // too.
        let mut large = scales.clone();
        large[22..24].copy_from_slice(&f16::MAX.to_le_bytes());
        let eights = vec![0x88; 8];
        let mixed = [&[0x87; 4], &eights[4..]].concat();
        let scales = FloatBytes { bytes: &large, dtype: DType::F16 };
        assert!(awq(8, 64, 32, &weights, Some(&eights), scales).is_ok());
        assert!(refused(8, 64, 32, &weights, &mixed, &large).contains("scale times zero of row 3, column 32"));
    }
}
