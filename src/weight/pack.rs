//! The layouts that products read, and the way back.
//!
//! - 8-bit values and floats: rows, padded with zeros to a multiple of 16 bytes.
//! - Int4 in rows: 32 neighbouring elements in 16 bytes, byte i = q[i] | q[i + 16] << 4, padded with q = 8.
//! - Int4 in fragment tiles of 16 rows × 64 columns: 512 bytes, tiles of a block of 16 rows one after the other. Lane
//!   l = 4g + t of a warp owns 16 bytes of a tile, four words of which word j holds columns 16j + 4t .. + 3 of rows g and
//!   g + 8. Nibble p of a word is the first and nibble p + 4 the second element of pair p: pair 0 is row g, columns 0 and 1;
//!   pair 1 row g + 8, the same columns; pair 2 row g, columns 2 and 3; pair 3 row g + 8. Masking a word shifted by 4p with
//!   0x000f000f so gives one register of the first operand of mma.m16n8k16. Rows are padded to 16, columns to 64 with q = 8.
//!
//! Scales are f32 for rows and blocks, and f16 [N][groups] for groups; beside fragment tiles [N / 16][groups][g][2], those of
//! rows g and g + 8, 0 for padded rows. Zero points stand as the scales do.
//!
//! A stripe of 128 rows is a contiguous range of each of the three, so stripes are packed one by one.

use super::encoding::{Encoding, WeightLayout, BLOCK};
use super::format::{Format, Granularity};
use super::int4::{pack_halves, unpack_halves, ZERO};
use super::stripe::Stripe;
use crate::error::{Error, Result};
use half::f16;
use std::ops::Range;

const TILE_ROWS: usize = 16;
const TILE_COLUMNS: usize = 64;
const TILE_BYTES: usize = TILE_ROWS * TILE_COLUMNS / 2;
/// Elements of Int4 rows that are stored together.
const CHUNK: usize = 32;

/// Where each part of a weight starts in its memory.
const SECTION_ALIGNMENT: usize = 256;

/// Bytes and places of a weight in an executor's layout.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    pub format: Format,
    pub layout: WeightLayout,
    pub rows: usize,
    pub columns: usize,
}

/// The bytes of a stripe, or of all of a weight, in their three parts.
pub struct Parts<'a> {
    pub data: &'a mut [u8],
    pub scales: &'a mut [u8],
    pub zero_points: &'a mut [u8],
}

impl Geometry {
    /// Refuses what no address space holds.
    pub fn new(format: Format, layout: WeightLayout, rows: usize, columns: usize) -> Result<Geometry> {
        // Never less than what any encoding takes, scales, zero points and padding included.
        let most = (columns as u128 + 256) * (rows as u128 + 256) * 8;
        if most > isize::MAX as u128 {
            return Err(Error::invalid(format!("a weight of {rows} rows of {columns} overflows")));
        }
        Ok(Geometry { format, layout, rows, columns })
    }

    pub fn is_tiled(&self) -> bool {
        self.format.encoding == Encoding::Int4 && self.layout == WeightLayout::FragmentTiles
    }

    /// Elements from one row to the next: the padded columns.
    pub fn row_stride(&self) -> usize {
        match self.format.encoding {
            Encoding::Float(dtype) => (self.columns * dtype.size()).next_multiple_of(16) / dtype.size(),
            Encoding::Int4 if self.is_tiled() => self.columns.next_multiple_of(TILE_COLUMNS),
            Encoding::Int4 => self.columns.next_multiple_of(CHUNK),
            Encoding::Blocks(_) => self.columns,
            _ => self.columns.next_multiple_of(16),
        }
    }

    pub fn row_bytes(&self) -> usize {
        self.format.encoding.bytes(self.row_stride())
    }

    fn padded_rows(&self, rows: usize) -> usize {
        if self.is_tiled() {
            rows.next_multiple_of(TILE_ROWS)
        } else {
            rows
        }
    }

    pub fn data_bytes(&self, rows: usize) -> usize {
        self.padded_rows(rows) * self.row_bytes()
    }

    pub fn scale_bytes(&self, rows: usize) -> usize {
        let in_row = self.format.scales_in_row(self.columns);
        match self.format.granularity {
            Granularity::Blocks => rows.div_ceil(BLOCK) * in_row * size_of::<f32>(),
            _ if self.format.has_f16_scales() => self.padded_rows(rows) * in_row * size_of::<f16>(),
            _ => rows * in_row * size_of::<f32>(),
        }
    }

    pub fn zero_point_bytes(&self, rows: usize) -> usize {
        if self.format.zero_points {
            self.scale_bytes(rows)
        } else {
            0
        }
    }

    /// Where data, scales and zero points lie, and what follows them may begin.
    pub fn sections(&self) -> (Range<usize>, Range<usize>, Range<usize>, usize) {
        let after = |end: usize, bytes: usize| {
            let start = end.next_multiple_of(SECTION_ALIGNMENT);
            start..start + bytes
        };
        let data = after(0, self.data_bytes(self.rows));
        let scales = after(data.end, self.scale_bytes(self.rows));
        let zero_points = after(scales.end, self.zero_point_bytes(self.rows));
        let end = zero_points.end.next_multiple_of(SECTION_ALIGNMENT);
        (data, scales, zero_points, end)
    }

    /// Writes every byte of `to`.
    pub fn pack(&self, stripe: &Stripe, to: &mut Parts) {
        let (columns, row_bytes) = (self.columns, self.row_bytes());
        let rows = stripe.quantized.chunks_exact(columns);
        match self.format.encoding {
            Encoding::Int4 if self.is_tiled() => self.pack_tiles(stripe, to.data),
            Encoding::Int4 => {
                for (quantized, bytes) in rows.zip(to.data.chunks_exact_mut(row_bytes)) {
                    for (quantized, bytes) in quantized.chunks(CHUNK).zip(bytes.chunks_exact_mut(CHUNK / 2)) {
                        let mut chunk = [ZERO; CHUNK];
                        chunk[..quantized.len()].copy_from_slice(quantized);
                        pack_halves(&chunk, bytes);
                    }
                }
            }
            _ => {
                for (quantized, bytes) in rows.zip(to.data.chunks_exact_mut(row_bytes)) {
                    bytes[..columns].copy_from_slice(quantized);
                    bytes[columns..].fill(0);
                }
            }
        }
        self.pack_scales(stripe, &stripe.scales, to.scales);
        self.pack_scales(stripe, &stripe.zero_points, to.zero_points);
    }

    fn pack_tiles(&self, stripe: &Stripe, data: &mut [u8]) {
        let (rows, columns) = (stripe.rows, self.columns);
        let four = |row: usize, column: usize| {
            let mut quantized = [ZERO; 4];
            if row < rows && column < columns {
                let count = 4.min(columns - column);
                quantized[..count].copy_from_slice(&stripe.quantized[row * columns + column..][..count]);
            }
            quantized.map(u32::from)
        };
        let tiles_in_block = self.row_stride() / TILE_COLUMNS;
        for (tile, bytes) in data.chunks_exact_mut(TILE_BYTES).enumerate() {
            let (row, column) = (tile / tiles_in_block * TILE_ROWS, tile % tiles_in_block * TILE_COLUMNS);
            for (at, word) in bytes.chunks_exact_mut(4).enumerate() {
                let (lane, j) = (at / 4, at % 4);
                let (g, t) = (lane / 4, lane % 4);
                let a = four(row + g, column + 16 * j + 4 * t);
                let b = four(row + g + 8, column + 16 * j + 4 * t);
                let pairs = [[a[0], a[1]], [b[0], b[1]], [a[2], a[3]], [b[2], b[3]]];
                let bits = pairs
                    .iter()
                    .enumerate()
                    .fold(0, |bits, (p, [low, high])| bits | low << (4 * p) | high << (4 * p + 16));
                word.copy_from_slice(&u32::to_le_bytes(bits));
            }
        }
    }

    fn unpack_tiles(&self, data: &[u8], stripe: &mut Stripe) {
        let columns = self.columns;
        for row in 0..stripe.rows {
            for column in 0..columns {
                let tile = row / TILE_ROWS * (self.row_stride() / TILE_COLUMNS) + column / TILE_COLUMNS;
                let (g, high_row) = (row % 8, row % TILE_ROWS / 8);
                let (j, t, i) = (column % TILE_COLUMNS / 16, column % 16 / 4, column % 4);
                let word = tile * TILE_BYTES + (4 * g + t) * 16 + 4 * j;
                let nibble = (i / 2) * 2 + high_row + i % 2 * 4;
                stripe.quantized[row * columns + column] = data[word + nibble / 2] >> (nibble % 2 * 4) & 15;
            }
        }
    }

    /// The place of a row's scale for a group, beside fragment tiles.
    fn tiled_scale(row: usize, group: usize, groups: usize) -> usize {
        (row / TILE_ROWS * groups + group) * TILE_ROWS + row % 8 * 2 + row % TILE_ROWS / 8
    }

    fn pack_scales(&self, stripe: &Stripe, scales: &[f32], to: &mut [u8]) {
        if !self.format.has_f16_scales() {
            for (bytes, scale) in to.chunks_exact_mut(4).zip(scales) {
                bytes.copy_from_slice(&scale.to_le_bytes());
            }
            return;
        }
        let groups = stripe.scales_in_row();
        if self.is_tiled() {
            to.fill(0);
        }
        for (i, &scale) in scales.iter().enumerate() {
            let at = if self.is_tiled() { Self::tiled_scale(i / groups, i % groups, groups) } else { i };
            to[2 * at..][..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        }
    }

    fn unpack_scales(&self, from: &[u8], groups: usize, scales: &mut [f32]) {
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = if self.format.has_f16_scales() {
                let at = if self.is_tiled() { Self::tiled_scale(i / groups, i % groups, groups) } else { i };
                f16::from_le_bytes([from[2 * at], from[2 * at + 1]]).to_f32()
            } else {
                f32::from_le_bytes(from[4 * i..][..4].try_into().expect("four bytes"))
            };
        }
    }

    /// The stripe of `rows` rows whose parts these are.
    pub fn unpack(&self, rows: usize, from: &Parts) -> Result<Stripe> {
        let mut stripe = Stripe::new(self.format, rows, self.columns)?;
        let (columns, row_bytes) = (self.columns, self.row_bytes());
        if self.is_tiled() {
            self.unpack_tiles(from.data, &mut stripe);
        } else {
            for (quantized, bytes) in stripe.quantized.chunks_exact_mut(columns).zip(from.data.chunks_exact(row_bytes))
            {
                if self.format.encoding == Encoding::Int4 {
                    for (quantized, bytes) in quantized.chunks_mut(CHUNK).zip(bytes.chunks_exact(CHUNK / 2)) {
                        let mut chunk = [0; CHUNK];
                        unpack_halves(bytes, &mut chunk);
                        quantized.copy_from_slice(&chunk[..quantized.len()]);
                    }
                } else {
                    quantized.copy_from_slice(&bytes[..columns]);
                }
            }
        }
        let groups = stripe.scales_in_row();
        self.unpack_scales(from.scales, groups, &mut stripe.scales);
        self.unpack_scales(from.zero_points, groups, &mut stripe.zero_points);
        Ok(stripe)
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::GROUP_SIZES;
    use super::super::rows::testing::bytes;
    use super::*;
    use proptest::prelude::*;

    fn formats() -> Vec<Format> {
        let mut formats = Vec::new();
        for encoding in Encoding::QUANTIZED {
            let all = [Granularity::Tensor, Granularity::Rows, Granularity::Blocks];
            for granularity in all.into_iter().chain(GROUP_SIZES.map(Granularity::Groups)) {
                formats.extend(Format::new(encoding, granularity, false, false));
                formats.extend(Format::new(encoding, granularity, true, false));
            }
        }
        formats
    }

    fn stripe(format: Format, rows: usize, columns: usize, seed: u64) -> Stripe {
        let mut stripe = Stripe::new(format, rows, columns).unwrap();
        let mask = if format.encoding == Encoding::Int4 { 15 } else { 255 };
        for (q, byte) in stripe.quantized.iter_mut().zip(bytes(rows * columns, seed)) {
            *q = byte & mask;
        }
        for (i, scale) in stripe.scales.iter_mut().chain(&mut stripe.zero_points).enumerate() {
            *scale = (i % 1000) as f32 * 0.125 - 3.0;
        }
        stripe
    }

    fn packed(geometry: &Geometry, stripe: &Stripe) -> [Vec<u8>; 3] {
        let rows = stripe.rows;
        let mut parts = [geometry.data_bytes(rows), geometry.scale_bytes(rows), geometry.zero_point_bytes(rows)]
            .map(|bytes| vec![0xaa; bytes]);
        let [data, scales, zero_points] = &mut parts;
        geometry.pack(stripe, &mut Parts { data, scales, zero_points });
        parts
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn unpacking_gives_back_what_was_packed(rows in 1..129usize, columns in 1..400usize, seed in any::<u64>()) {
            for format in formats() {
                for layout in [WeightLayout::Rows, WeightLayout::FragmentTiles] {
                    let geometry = Geometry::new(format, layout, rows, columns).unwrap();
                    let stripe = stripe(format, rows, columns, seed);
                    let [mut data, mut scales, mut zero_points] = packed(&geometry, &stripe);
                    let parts = Parts { data: &mut data, scales: &mut scales, zero_points: &mut zero_points };
                    prop_assert!(geometry.unpack(rows, &parts).unwrap() == stripe, "{format} {layout:?} [{rows}, {columns}]");
                    let (data, scales, zero_points, end) = geometry.sections();
                    prop_assert!(data.end <= scales.start && scales.end <= zero_points.start && zero_points.end <= end);
                    prop_assert!(scales.start % 256 == 0 && zero_points.start % 256 == 0);
                }
            }
        }
    }

    /// Each element of a tile once, in the words of the layout's definition.
    #[test]
    fn tiles_are_fragments() {
        let format = Format::new(Encoding::Int4, Granularity::Groups(32), true, false).unwrap();
        let (rows, columns) = (40, 200);
        let geometry = Geometry::new(format, WeightLayout::FragmentTiles, rows, columns).unwrap();
        let stripe = stripe(format, rows, columns, 3);
        let [data, scales, zero_points] = packed(&geometry, &stripe);
        assert_eq!((data.len(), scales.len()), (3 * 4 * 512, 3 * 7 * 32));
        let quantized_at = |row: usize, column: usize| {
            if row < rows && column < columns {
                stripe.quantized[row * columns + column]
            } else {
                8
            }
        };
        for tile in 0..12 {
            for (l, j) in (0..32).flat_map(|l| (0..4).map(move |j| (l, j))) {
                let (g, t) = (l / 4, l % 4);
                let at = tile * 512 + l * 16 + j * 4;
                let word = u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
                let (row, column) = (tile / 4 * 16 + g, tile % 4 * 64 + 16 * j + 4 * t);
                let pairs = [(row, column), (row + 8, column), (row, column + 2), (row + 8, column + 2)];
                for (p, (row, column)) in pairs.into_iter().enumerate() {
                    let pair = word >> (4 * p) & 0x000f_000f;
                    let wanted = u32::from(quantized_at(row, column)) | u32::from(quantized_at(row, column + 1)) << 16;
                    assert_eq!(pair, wanted, "tile {tile}, lane {l}, word {j}, pair {p}");
                }
            }
        }
        for (row, group) in (0..48).flat_map(|row| (0..7).map(move |group| (row, group))) {
            let at = ((row / 16 * 7 + group) * 8 + row % 8) * 2 + row % 16 / 8;
            for (bytes, wanted) in [(&scales, &stripe.scales), (&zero_points, &stripe.zero_points)] {
                let stored = f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32();
                assert_eq!(stored, if row < rows { wanted[row * 7 + group] } else { 0.0 });
            }
        }
    }

    #[test]
    fn rows_are_padded() {
        let int8 = Format::new(Encoding::Int8, Granularity::Rows, false, false).unwrap();
        let geometry = Geometry::new(int8, WeightLayout::FragmentTiles, 3, 17).unwrap();
        assert_eq!((geometry.row_bytes(), geometry.scale_bytes(3)), (32, 12));
        let [data, ..] = packed(&geometry, &stripe(int8, 3, 17, 1));
        assert!(data.chunks(32).all(|row| row[17..].iter().all(|&byte| byte == 0)));
        let int4 = Format::new(Encoding::Int4, Granularity::Groups(64), false, false).unwrap();
        let geometry = Geometry::new(int4, WeightLayout::Rows, 2, 33).unwrap();
        assert_eq!((geometry.row_bytes(), geometry.row_stride()), (32, 64));
        let [data, ..] = packed(&geometry, &stripe(int4, 2, 33, 1));
        assert!(data[17..32].iter().all(|&byte| byte == 0x88));
        assert!(Geometry::new(int4, WeightLayout::Rows, 1 << 31, 1 << 31).is_err());
    }
}
