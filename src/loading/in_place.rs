//! Weights whose memory is the caller's: blocks that are packed where they lie and put back there, and slices of rows.

use super::rows::PartRows;
use super::Weight;
use crate::device::CopyKind;
use crate::error::{Error, Result};
use crate::memory::{Allocation, MemoryManager};
use crate::operation::pack_blocks::{packed_format, PackBlocks, COLUMNS, ROWS};
use crate::stream::Stream;
use crate::weight::pack::Geometry;
use crate::weight::{BlockFormat, Scales, WeightView, BLOCK};
use std::sync::Arc;

/// What the memory of a packed weight is aligned to: copies of that many bytes read it.
const ALIGNMENT: usize = 16;

impl Weight {
    /// Packs the part's blocks, and waits until they have been. On failure they are as they were.
    pub fn pack_in_place(
        memory: &Arc<MemoryManager>,
        format: BlockFormat,
        columns: usize,
        part: &PartRows,
        stream: &Stream,
    ) -> Result<Weight> {
        let rows = part.rows;
        let Some(packed) = packed_format(format) else {
            return Err(Error::invalid(format!(
                "{format} has no other layout of the same size; Q4_0, Q4_1 and Q8_0 have one"
            ))
            .with_advice("borrow it as NVB_WEIGHT_FORMAT_BLOCKS"));
        };
        if !rows.is_multiple_of(ROWS) || !columns.is_multiple_of(COLUMNS) || part.pitch != part.row_bytes {
            return Err(Error::invalid(format!(
                "{format} [{rows}, {columns}] is packed in its place where rows are a multiple of {ROWS}, columns are one of \
                 {COLUMNS}, and rows follow one another without a gap"
            )));
        }
        let base = part.data.cast_mut();
        if !(base as usize).is_multiple_of(ALIGNMENT) {
            return Err(Error::invalid(format!("`data` is {base:p}; a multiple of {ALIGNMENT} is needed")));
        }
        let geometry = Geometry::new(packed, stream.executor().weight_layout(), rows, columns)?;
        let view = WeightView::packed_at(&geometry, base);
        let weight = Weight { view, geometry, allocation: None, relative_error: 0.0, packed: Some(format) };
        let bytes = rows * part.row_bytes;
        let blocks = memory.allocate_owned(bytes, stream.raw())?;
        let op = PackBlocks::new(format, blocks.pointer().cast(), view)?;
        let executor = stream.executor();
        // SAFETY: both have `bytes`, the part by the caller's word.
        unsafe { executor.copy(blocks.pointer(), base.cast(), bytes, CopyKind::DeviceToDevice, stream.raw())? };
        let done = executor.pack_blocks(&op, stream.raw());
        if !matches!(done, Ok(true)) {
            // SAFETY: as before.
            unsafe { executor.copy(base.cast(), blocks.pointer(), bytes, CopyKind::DeviceToDevice, stream.raw())? };
            stream.synchronize()?;
        }
        if !done? {
            return Err(Error::invalid(format!("a scale of {format} is not finite"))
                .with_advice("borrow it as NVB_WEIGHT_FORMAT_BLOCKS"));
        }
        stream.synchronize()?;
        Ok(weight)
    }

    /// A copy of the blocks that were packed. The stream has not passed it.
    pub(super) fn unpacked(&self, memory: &Arc<MemoryManager>, stream: &Stream) -> Result<Allocation> {
        let Some(format) = self.packed else {
            return Err(Error::invalid("the weight was not made in the place of its blocks (NVB_SOURCE_IN_PLACE)"));
        };
        let blocks = memory.allocate_owned(format.bytes(self.view.columns) * self.view.rows, stream.raw())?;
        let op = PackBlocks::new(format, blocks.pointer().cast(), self.view)?;
        stream.executor().unpack_blocks(&op, stream.raw())?;
        Ok(blocks)
    }

    /// Writes the blocks back to where they were, and waits for that. The weight is worthless afterwards.
    pub fn restore_blocks(&self, memory: &Arc<MemoryManager>, stream: &Stream) -> Result<()> {
        let blocks = self.unpacked(memory, stream)?;
        // SAFETY: the weight lies in what these blocks took.
        unsafe {
            let (to, from) = (self.view.data, blocks.pointer());
            stream.executor().copy(to, from, blocks.bytes(), CopyKind::DeviceToDevice, stream.raw())?;
        }
        stream.synchronize()
    }

    /// Some of its rows as a weight in the same memory, which must outlive it.
    pub fn slice(&self, first: usize, rows: usize) -> Result<Weight> {
        let WeightView { gated, encoding, .. } = self.view;
        if gated {
            return Err(Error::invalid("rows of a gated weight are no weight of their own: gate and up alternate"));
        }
        let unit = match self.view.scales {
            Scales::Blocks(_) => BLOCK,
            _ => ROWS,
        };
        let end = first.checked_add(rows).filter(|&end| end <= self.view.rows && rows != 0);
        let Some(end) = end else {
            return Err(Error::invalid(format!(
                "{rows} rows from row {first} on are asked for; the weight has {}",
                self.view.rows
            ))
            .with_limit(rows as u64, self.view.rows as u64));
        };
        if !first.is_multiple_of(unit) || (!rows.is_multiple_of(unit) && end != self.view.rows) {
            return Err(Error::invalid(format!(
                "rows {first} to {end} are asked for; of {encoding} slices begin and end at multiples of {unit}, or at the end"
            )));
        }
        let geometry = Geometry { rows, ..self.geometry };
        Ok(Weight {
            view: self.view.rows_from(&self.geometry, first, rows),
            geometry,
            allocation: None,
            relative_error: self.relative_error,
            packed: self.packed,
        })
    }

    /// Bytes from the data's first to the end of what belongs to it.
    pub(super) fn borrowed_span(&self) -> usize {
        let WeightView { data, rows, columns, row_stride, encoding, .. } = self.view;
        let mut end = encoding.bytes((rows - 1) * row_stride + columns);
        let scales = match self.view.scales {
            Scales::None => return end,
            Scales::Rows(scales) | Scales::Blocks(scales) => scales as usize,
            Scales::Groups { data, .. } => data as usize,
        };
        end = end.max(scales + self.geometry.scale_bytes(rows) - data as usize);
        match self.view.zero_points.is_null() {
            true => end,
            false => end.max(self.view.zero_points as usize + self.geometry.zero_point_bytes(rows) - data as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_weights_take_what_their_blocks_took() {
        for format in BlockFormat::ALL.iter().copied() {
            let Some(packed) = packed_format(format) else { continue };
            for layout in [crate::weight::WeightLayout::Rows, crate::weight::WeightLayout::FragmentTiles] {
                for (rows, columns) in [(16, 64), (16, 192), (48, 64), (4096, 2560)] {
                    let geometry = Geometry::new(packed, layout, rows, columns).unwrap();
                    let parts =
                        [geometry.data_bytes(rows), geometry.scale_bytes(rows), geometry.zero_point_bytes(rows)];
                    assert_eq!(parts.iter().sum::<usize>(), format.bytes(columns) * rows, "{format} {layout:?}");
                    let view = WeightView::packed_at(&geometry, 4096 as *mut u8);
                    let weight = Weight { view, geometry, allocation: None, relative_error: 0.0, packed: Some(format) };
                    assert_eq!(weight.span(), format.bytes(columns) * rows, "{format} {layout:?}");
                    assert_eq!(weight.slice(0, rows).unwrap().view(), view);
                }
            }
        }
    }

    #[test]
    fn slices_begin_where_their_rows_do() {
        let format = packed_format(BlockFormat::Q4_1).unwrap();
        let geometry = Geometry::new(format, crate::weight::WeightLayout::FragmentTiles, 64, 128).unwrap();
        let view = WeightView::packed_at(&geometry, 4096 as *mut u8);
        let weight = Weight { view, geometry, allocation: None, relative_error: 0.0, packed: None };
        let slice = weight.slice(16, 32).unwrap();
        let found = slice.view();
        assert_eq!((found.rows, found.columns, found.row_stride), (32, 128, 128));
        assert_eq!(found.data as usize, 4096 + 16 * 64);
        let Scales::Groups { data, size: 32 } = found.scales else { panic!("{:?}", found.scales) };
        assert_eq!(data as usize, 4096 + 64 * 64 + 16 * 4 * 2);
        assert_eq!(found.zero_points as usize, 4096 + 64 * 64 + 64 * 4 * 2 + 16 * 4 * 2);
        for (first, rows) in [(8, 16), (0, 8), (48, 32), (64, 1), (0, 0), (usize::MAX, 2)] {
            assert!(weight.slice(first, rows).is_err(), "{first} {rows}");
        }
    }
}
