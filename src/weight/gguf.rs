//! GGUF's blocks (ggml-common.h): each row is a sequence of blocks of 32 or 256 elements with their scales.
//!
//! - Q4_0: 32 elements in 18 bytes: f16 d; byte i = q[i] | q[i + 16] << 4. Value d · (q − 8).
//! - Q8_0: 32 elements in 34 bytes: f16 d; 32 signed bytes. Value d · q.
//! - Q4_K: 256 elements in 144 bytes: f16 d, f16 dmin; 12 bytes of 6-bit scales s and minima m of 8 groups of 32; per
//!   pair of groups 32 bytes with the first in the low nibbles. Value (d · s) · q − dmin · m in f32.
//! - Q6_K: 256 elements in 210 bytes: low nibbles, upper two bits, 16 signed 8-bit scales s of 16 elements each, f16 d.
//!   Value (d · s) · (q − 32) in f32.
//!
//! Q4_0 and Q8_0 are kept exactly. Q4_K's quantised values are kept, and its scales and minima rounded to f16. Q6_K has
//! no format of equal size and is quantised again.

use super::encoding::Encoding;
use super::format::{Format, Granularity};
use super::int4::unpack_halves;
use super::rows::{expect_bytes, f16_scale, QuantizedSource, RowSource, Shape};
use crate::error::{Error, Result};
use half::f16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockType {
    Q4_0,
    Q8_0,
    Q4K,
    Q6K,
}

impl BlockType {
    /// Elements and bytes of a block.
    pub fn size(self) -> (usize, usize) {
        match self {
            BlockType::Q4_0 => (32, 18),
            BlockType::Q8_0 => (32, 34),
            BlockType::Q4K => (256, 144),
            BlockType::Q6K => (256, 210),
        }
    }

    fn name(self) -> &'static str {
        match self {
            BlockType::Q4_0 => "Q4_0",
            BlockType::Q8_0 => "Q8_0",
            BlockType::Q4K => "Q4_K",
            BlockType::Q6K => "Q6_K",
        }
    }
}

pub struct GgufRows<'a> {
    kind: BlockType,
    rows: usize,
    columns: usize,
    data: &'a [u8],
}

impl<'a> GgufRows<'a> {
    pub fn new(kind: BlockType, rows: usize, columns: usize, data: &'a [u8]) -> Result<GgufRows<'a>> {
        let (elements, bytes) = kind.size();
        if !columns.is_multiple_of(elements) {
            return Err(Error::invalid(format!(
                "{} of [{rows}, {columns}]: rows are multiples of {elements} elements",
                kind.name()
            )));
        }
        let needed = (columns / elements * bytes).checked_mul(rows);
        expect_bytes(kind.name(), data.len(), needed, rows, columns)?;
        Ok(GgufRows { kind, rows, columns, data })
    }

    fn blocks(&self, row: usize) -> std::slice::ChunksExact<'a, u8> {
        let (elements, bytes) = self.kind.size();
        let row_bytes = self.columns / elements * bytes;
        self.data[row * row_bytes..][..row_bytes].chunks_exact(bytes)
    }

    fn scale(&self, bytes: &[u8], row: usize, block: usize) -> Result<f32> {
        let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        if scale.is_finite() {
            return Ok(scale);
        }
        Err(Error::invalid(format!("{} block {block} of row {row} has the scale {scale}", self.kind.name())))
    }
}

/// The 6-bit scale and minimum of group `j` of a Q4_K block.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// The quantised values of group `j` of a Q4_K block.
fn group_values(quants: &[u8], j: usize) -> impl Iterator<Item = u8> + '_ {
    quants[j / 2 * 32..][..32].iter().map(move |byte| byte >> (j % 2 * 4) & 15)
}

/// The signed quantised value of element `i` of a Q6_K block: halves of 128 elements, each of four quarters of 32.
fn q6_value(block: &[u8], i: usize) -> i8 {
    let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
    let low = block[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
    let high = block[128 + half * 32 + at] >> (quarter * 2) & 3;
    (low | high << 4) as i8 - 32
}

impl RowSource for GgufRows<'_> {
    fn shape(&self) -> Shape {
        let (encoding, zero_points) = match self.kind {
            BlockType::Q4_0 => (Encoding::Int4, false),
            BlockType::Q4K => (Encoding::Int4, true),
            BlockType::Q8_0 | BlockType::Q6K => (Encoding::Int8, false),
        };
        let format = Format { encoding, granularity: Granularity::Groups(32), zero_points, clipping: false };
        Shape { rows: self.rows, columns: self.columns, format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let elements = self.kind.size().0;
        for (i, (block, values)) in self.blocks(row).zip(values.chunks_exact_mut(elements)).enumerate() {
            match self.kind {
                BlockType::Q4_0 => {
                    let (d, mut quantized) = (self.scale(block, row, i)?, [0; 32]);
                    unpack_halves(&block[2..], &mut quantized);
                    for (value, q) in values.iter_mut().zip(quantized) {
                        *value = d * (f32::from(q) - 8.0);
                    }
                }
                BlockType::Q8_0 => {
                    let d = self.scale(block, row, i)?;
                    for (value, &q) in values.iter_mut().zip(&block[2..]) {
                        *value = d * f32::from(q as i8);
                    }
                }
                BlockType::Q4K => {
                    let (d, dmin) = (self.scale(block, row, i)?, self.scale(&block[2..], row, i)?);
                    for (j, values) in values.chunks_exact_mut(32).enumerate() {
                        let (scale, minimum) = scale_and_minimum(&block[4..16], j);
                        let (scale, minimum) = (d * scale, dmin * minimum);
                        for (value, q) in values.iter_mut().zip(group_values(&block[16..], j)) {
                            *value = scale * f32::from(q) - minimum;
                        }
                    }
                }
                BlockType::Q6K => {
                    let d = self.scale(&block[208..], row, i)?;
                    for (j, value) in values.iter_mut().enumerate() {
                        let scale = d * f32::from(block[192 + j / 16] as i8);
                        *value = scale * f32::from(q6_value(block, j));
                    }
                }
            }
        }
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        (self.kind != BlockType::Q6K).then_some(self as &dyn QuantizedSource)
    }
}

impl QuantizedSource for GgufRows<'_> {
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        zero_points: &mut [f32],
    ) -> Result<()> {
        let elements = self.kind.size().0;
        for (i, (block, quantized)) in self.blocks(row).zip(quantized.chunks_exact_mut(elements)).enumerate() {
            let d = self.scale(block, row, i)?;
            match self.kind {
                BlockType::Q4_0 => {
                    scales[i] = d;
                    unpack_halves(&block[2..], quantized);
                }
                BlockType::Q8_0 => {
                    scales[i] = d;
                    quantized.copy_from_slice(&block[2..]);
                }
                BlockType::Q4K => {
                    let dmin = self.scale(&block[2..], row, i)?;
                    for (j, quantized) in quantized.chunks_exact_mut(32).enumerate() {
                        let (scale, minimum) = scale_and_minimum(&block[4..16], j);
                        let column = i * 256 + j * 32;
                        scales[i * 8 + j] = f16_scale(d * scale, "scale", row, column)?;
                        zero_points[i * 8 + j] = f16_scale(-dmin * minimum, "minimum", row, column)?;
                        for (to, q) in quantized.iter_mut().zip(group_values(&block[16..], j)) {
                            *to = q;
                        }
                    }
                }
                BlockType::Q6K => unreachable!("Q6_K has no quantised values to keep"),
            }
        }
        Ok(())
    }

    fn is_exact(&self) -> bool {
        self.kind != BlockType::Q4K
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::testing::{both, bytes};
    use super::*;
    use proptest::prelude::*;

    const KINDS: [BlockType; 4] = [BlockType::Q4_0, BlockType::Q8_0, BlockType::Q4K, BlockType::Q6K];

    /// Random blocks with scales of ordinary size.
    fn blocks(kind: BlockType, count: usize, seed: u64) -> Vec<u8> {
        let size = kind.size().1;
        let mut data = bytes(count * size, seed);
        for (i, block) in data.chunks_exact_mut(size).enumerate() {
            let scale = f16::from_f32(0.01 + 0.001 * (i % 7) as f32).to_le_bytes();
            match kind {
                BlockType::Q6K => block[208..].copy_from_slice(&scale),
                _ => block[..2].copy_from_slice(&scale),
            }
            if kind == BlockType::Q4K {
                block[2..4].copy_from_slice(&f16::from_f32(0.003).to_le_bytes());
            }
        }
        data
    }

    #[test]
    fn codes_and_scales_are_the_values() {
        for kind in [BlockType::Q4_0, BlockType::Q8_0, BlockType::Q4K] {
            let (rows, columns) = (3, 512);
            let data = blocks(kind, rows * columns / kind.size().0, 5);
            let source = GgufRows::new(kind, rows, columns, &data).unwrap();
            for row in 0..rows {
                let (values, packed) = both(&source, row).unwrap();
                for (wanted, got) in values.iter().zip(&packed) {
                    let allowed = if source.is_exact() { 0.0 } else { 63.0 * 0.017 * 16.0 / 2048.0 };
                    assert!((wanted - got).abs() <= allowed, "{kind:?}: {wanted} became {got}");
                }
            }
        }
    }

    #[test]
    fn one_block_by_hand() {
        let mut block = vec![0; 144];
        block[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
        block[2..4].copy_from_slice(&f16::from_f32(0.25).to_le_bytes());
        // Group 5: scale 0b10_0011, minimum 0b01_0110, spread over three bytes.
        block[4 + 1] = 0b10 << 6;
        block[4 + 5] = 0b01 << 6;
        block[4 + 9] = 0b0110 << 4 | 0b0011;
        block[16 + 64 + 3] = 9 << 4;
        let source = GgufRows::new(BlockType::Q4K, 1, 256, &block).unwrap();
        let mut values = [0.0; 256];
        source.values(0, &mut values).unwrap();
        assert_eq!(values[5 * 32 + 3], 0.5 * 35.0 * 9.0 - 0.25 * 22.0);
        assert_eq!(values[5 * 32 + 4], -0.25 * 22.0);
    }

    #[test]
    fn sizes_are_checked() {
        for kind in KINDS {
            let (elements, size) = kind.size();
            let refused = |rows, columns, bytes: usize| {
                GgufRows::new(kind, rows, columns, &vec![0; bytes]).err().expect("refused").message
            };
            assert!(refused(2, elements, 2 * size - 1).contains(&format!("{}", 2 * size)));
            assert!(refused(1, elements + 1, 4 * size).contains("multiples"));
            assert!(refused(usize::MAX, elements * 4, size).contains("overflows"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the bytes are: values that are finite, or an error that names the block.
        #[test]
        fn no_bytes_do_harm(which in 0..4usize, seed in any::<u64>()) {
            let kind = KINDS[which];
            let data = bytes(2 * 512 / kind.size().0 * kind.size().1, seed);
            let source = GgufRows::new(kind, 2, 512, &data).unwrap();
            for row in 0..2 {
                let named = |error: Error| error.message.contains(&format!("row {row}"));
                let mut values = [f32::NAN; 512];
                match source.values(row, &mut values) {
                    Ok(()) => prop_assert!(values.iter().all(|value| value.is_finite())),
                    Err(error) => prop_assert!(named(error)),
                }
                if source.quantized().is_some() {
                    if let Err(error) = both(&source, row) {
                        prop_assert!(named(error));
                    }
                }
            }
        }
    }
}
