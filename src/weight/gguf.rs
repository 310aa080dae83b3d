//! Rows of GGUF's blocks (`blocks`) on their way into the formats that have scales beside their values.
//!
//! Q4_0 and Q8_0 are kept exactly. Q4_K's quantised values are kept, and its scales and minima rounded to f16. The others have
//! no format of equal size and are quantised again.

use super::blocks::{scale_and_minimum, BlockFormat};
use super::encoding::Encoding;
use super::format::{Format, Granularity};
use super::int4::unpack_halves;
use super::rows::{expect_bytes, f16_scale, QuantizedSource, RowSource, Shape};
use crate::error::{Error, Result};
use half::f16;

pub struct GgufRows<'a> {
    kind: BlockFormat,
    rows: usize,
    columns: usize,
    data: &'a [u8],
}

impl<'a> GgufRows<'a> {
    pub fn new(kind: BlockFormat, rows: usize, columns: usize, data: &'a [u8]) -> Result<GgufRows<'a>> {
        let (elements, bytes) = (kind.elements(), kind.block_bytes());
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
        let bytes = self.kind.block_bytes();
        let row_bytes = self.kind.bytes(self.columns);
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

/// The quantised values of group `j` of a Q4_K block.
fn group_values(quants: &[u8], j: usize) -> impl Iterator<Item = u8> + '_ {
    quants[j / 2 * 32..][..32].iter().map(move |byte| byte >> (j % 2 * 4) & 15)
}

impl RowSource for GgufRows<'_> {
    fn shape(&self) -> Shape {
        let (encoding, zero_points) = match self.kind {
            BlockFormat::Q4_0 => (Encoding::Int4, false),
            BlockFormat::Q4K => (Encoding::Int4, true),
            _ => (Encoding::Int8, false),
        };
        let format = Format { encoding, granularity: Granularity::Groups(32), zero_points, clipping: false };
        Shape { rows: self.rows, columns: self.columns, format }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let elements = self.kind.elements();
        for (i, (block, values)) in self.blocks(row).zip(values.chunks_exact_mut(elements)).enumerate() {
            self.kind.decode(block, values);
            if values.iter().any(|value| !value.is_finite()) {
                return Err(Error::invalid(format!(
                    "{} block {i} of row {row} has values that are not finite",
                    self.kind.name()
                )));
            }
        }
        Ok(())
    }

    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        let kept = matches!(self.kind, BlockFormat::Q4_0 | BlockFormat::Q8_0 | BlockFormat::Q4K);
        kept.then_some(self as &dyn QuantizedSource)
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
        let elements = self.kind.elements();
        for (i, (block, quantized)) in self.blocks(row).zip(quantized.chunks_exact_mut(elements)).enumerate() {
            let d = self.scale(block, row, i)?;
            match self.kind {
                BlockFormat::Q4_0 => {
                    scales[i] = d;
                    unpack_halves(&block[2..], quantized);
                }
                BlockFormat::Q8_0 => {
                    scales[i] = d;
                    quantized.copy_from_slice(&block[2..]);
                }
                BlockFormat::Q4K => {
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
                _ => unreachable!("a format without quantised values to keep"),
            }
        }
        Ok(())
    }

    fn is_exact(&self) -> bool {
        self.kind != BlockFormat::Q4K
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::testing::{both, bytes};
    use super::*;
    use proptest::prelude::*;

    const KINDS: &[BlockFormat] = BlockFormat::ALL;

    /// Random blocks with scales of ordinary size.
    fn blocks(kind: BlockFormat, count: usize, seed: u64) -> Vec<u8> {
        let size = kind.block_bytes();
        let mut data = bytes(count * size, seed);
        for (i, block) in data.chunks_exact_mut(size).enumerate() {
            let scale = f16::from_f32(0.01 + 0.001 * (i % 7) as f32).to_le_bytes();
            match kind {
                BlockFormat::Q6K => block[208..].copy_from_slice(&scale),
                _ => block[..2].copy_from_slice(&scale),
            }
            if kind == BlockFormat::Q4K {
                block[2..4].copy_from_slice(&f16::from_f32(0.003).to_le_bytes());
            }
        }
        data
    }

    #[test]
    fn codes_and_scales_are_the_values() {
        for kind in [BlockFormat::Q4_0, BlockFormat::Q8_0, BlockFormat::Q4K] {
            let (rows, columns) = (3, 512);
            let data = blocks(kind, rows * columns / kind.elements(), 5);
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
        let source = GgufRows::new(BlockFormat::Q4K, 1, 256, &block).unwrap();
        let mut values = [0.0; 256];
        source.values(0, &mut values).unwrap();
        assert_eq!(values[5 * 32 + 3], 0.5 * 35.0 * 9.0 - 0.25 * 22.0);
        assert_eq!(values[5 * 32 + 4], -0.25 * 22.0);
    }

    #[test]
    fn sizes_are_checked() {
        for &kind in KINDS {
            let (elements, size) = (kind.elements(), kind.block_bytes());
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
        fn no_bytes_do_harm(which in 0..KINDS.len(), seed in any::<u64>()) {
            let kind = KINDS[which];
            let data = bytes(2 * 512 / kind.elements() * kind.block_bytes(), seed);
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
