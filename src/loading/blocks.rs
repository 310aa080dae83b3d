//! Weights that are kept as a file has them: blocks of GGUF, bit for bit.

use super::rows::{Copier, PartRows};
use super::staging::{Staging, STAGING_BYTES};
use super::{allocate, Source, Weight, PARTS};
use crate::allocation::collected;
use crate::error::{Error, Result};
use crate::memory::MemoryManager;
use crate::stream::Stream;
use crate::weight::arrangement::RowMap;
use crate::weight::pack::Geometry;
use crate::weight::{Arrangement, BlockFormat, Encoding, Format, WeightView};
use std::sync::Arc;

impl Weight {
    /// Copies the parts, [rows, columns] of one format each, and waits until they have been read; a borrowed one stays where it
    /// is.
    pub fn from_blocks(
        memory: &Arc<MemoryManager>,
        format: BlockFormat,
        columns: usize,
        parts: &[PartRows],
        arrangement: Arrangement,
        source: Source,
        stream: &Stream,
    ) -> Result<Weight> {
        let shapes: Vec<_> = collected(parts.iter().map(|part| (part.rows, columns)), PARTS)?;
        let map = RowMap::new(arrangement, &shapes)?;
        let geometry = Geometry::new(Format::blocks(format), stream.executor().weight_layout(), map.rows, map.columns)?;
        if source != Source::Borrowed {
            let allocation = allocate(memory, &geometry, 0, stream)?;
            let (to, row_bytes) = (allocation.pointer().cast(), geometry.row_bytes());
            Copier { device: memory.device(), parts, map: &map, to, row_bytes, stream }.copy(source)?;
            stream.synchronize()?;
            return Ok(Weight::finished(geometry, &map, allocation, false, 0.0));
        }
        if parts.len() != 1 || map.is_gated() {
            return Err(Error::invalid("a borrowed weight is one matrix as it stands: it cannot be stacked or gated"));
        }
        let stride = parts[0].pitch / format.block_bytes() * format.elements();
        let view = WeightView::blocks(parts[0].data.cast_mut().cast(), format, map.rows, columns, stride);
        Ok(Weight { view, geometry, allocation: None, relative_error: 0.0, packed: None })
    }

    /// The format of the blocks that it holds, as they are or packed.
    pub fn block_format(&self) -> Option<BlockFormat> {
        match self.view.encoding {
            Encoding::Blocks(format) => Some(format),
            _ => self.packed,
        }
    }

    /// Copies the blocks of all rows to host memory, one row behind the other, and waits for them.
    pub fn read_blocks(&self, memory: &Arc<MemoryManager>, to: &mut [u8], stream: &Stream) -> Result<()> {
        let Some(format) = self.block_format() else {
            return Err(Error::invalid(format!("a weight of {} holds no blocks of a file", self.view.encoding)));
        };
        let row_bytes = format.bytes(self.view.columns);
        let needed = row_bytes * self.view.rows;
        if to.len() != needed {
            return Err(Error::invalid(format!("{} bytes for the blocks; {needed} are needed", to.len()))
                .with_limit(to.len() as u64, needed as u64));
        }
        let unpacked = match self.packed {
            Some(_) => Some(self.unpacked(memory, stream)?),
            None => None,
        };
        let (data, pitch) = match &unpacked {
            Some(blocks) => (blocks.pointer().cast::<u8>(), row_bytes),
            None => (self.view.data.cast::<u8>(), format.bytes(self.view.row_stride)),
        };
        let chunk = (STAGING_BYTES / row_bytes).clamp(1, self.view.rows);
        let mut staging = Staging::new(memory.device(), chunk * row_bytes)?;
        for (begin, to) in (0..self.view.rows).step_by(chunk).zip(to.chunks_mut(chunk * row_bytes)) {
            let from = data.wrapping_add(begin * pitch);
            // SAFETY: the weight has these rows, and the staging buffer room for them.
            unsafe {
                if pitch == row_bytes {
                    staging.download(from, to.len(), 0, stream)?;
                } else {
                    for row in 0..to.len() / row_bytes {
                        staging.download(from.wrapping_add(row * pitch), row_bytes, row * row_bytes, stream)?;
                    }
                }
            }
            stream.synchronize()?;
            to.copy_from_slice(&staging.bytes()[..to.len()]);
        }
        Ok(())
    }
}
