//! `pack_blocks`: blocks of GGUF become the layout that products read, and that becomes the same blocks again.
//!
//! Of three formats all that a block holds has a place there, of the same size in all: Q4_0 is Int4 in groups of 32, Q4_1 the same
//! with zero points (its minima), Q8_0 is Int8 in groups of 32.

use crate::error::{Error, Result};
use crate::weight::{BlockFormat, Encoding, Format, Granularity, WeightView};

#[derive(Debug, Clone, Copy)]
pub struct PackBlocks {
    pub format: BlockFormat,
    /// Device memory, rows one behind the other.
    pub blocks: *mut u8,
    /// Of whole tiles: rows a multiple of [`ROWS`] and columns of [`COLUMNS`], so that nothing is padded.
    pub weight: WeightView,
}

pub const ROWS: usize = 16;
pub const COLUMNS: usize = 64;

/// What a block of these formats has for each 32 elements.
const GROUP: usize = 32;

/// The format that keeps every bit of such blocks.
pub fn packed_format(format: BlockFormat) -> Option<Format> {
    let (encoding, zero_points) = match format {
        BlockFormat::Q4_0 => (Encoding::Int4, false),
        BlockFormat::Q4_1 => (Encoding::Int4, true),
        BlockFormat::Q8_0 => (Encoding::Int8, false),
        _ => return None,
    };
    Some(Format { encoding, granularity: Granularity::Groups(GROUP), zero_points, clipping: false })
}

impl PackBlocks {
    pub fn new(format: BlockFormat, blocks: *mut u8, weight: WeightView) -> Result<PackBlocks> {
        let packed = packed_format(format).is_some_and(|packed| {
            packed.encoding == weight.encoding
                && packed.zero_points != weight.zero_points.is_null()
                && weight.scales.group_size() == GROUP
        });
        let WeightView { rows, columns, .. } = weight;
        if !packed
            || weight.gated
            || !weight.order.is_null()
            || !rows.is_multiple_of(ROWS)
            || !columns.is_multiple_of(COLUMNS)
        {
            return Err(Error::invalid(format!(
                "{format} and a weight [{rows}, {columns}] of {} do not hold the same bits; Q4_0, Q4_1 and Q8_0 do, with rows a \
                 multiple of {ROWS} and columns of {COLUMNS}",
                weight.encoding
            )));
        }
        Ok(PackBlocks { format, blocks, weight })
    }
}
