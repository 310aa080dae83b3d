//! Rows that are copied, not converted: of float tensors that keep their dtype, and of blocks as a file has them.

use super::staging::{Staging, STAGING_BYTES};
use super::Source;
use crate::device::{CopyKind, Device};
use crate::error::Result;
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::weight::arrangement::RowMap;

/// The rows of one part.
#[derive(Debug, Clone, Copy)]
pub struct PartRows {
    pub data: *const u8,
    pub rows: usize,
    pub row_bytes: usize,
    /// From one row to the next, in bytes.
    pub pitch: usize,
}

impl PartRows {
    /// A float matrix.
    pub fn of(part: &Tensor) -> PartRows {
        let size = part.dtype.size();
        PartRows {
            data: part.data.cast::<u8>(),
            rows: part.shape[0],
            row_bytes: part.shape[1] * size,
            pitch: part.strides[0] * size,
        }
    }
}

pub(super) struct Copier<'a> {
    pub device: &'a dyn Device,
    pub parts: &'a [PartRows],
    pub map: &'a RowMap,
    pub to: *mut u8,
    pub row_bytes: usize,
    pub stream: &'a Stream,
}

impl Copier<'_> {
    pub fn copy(&self, source: Source) -> Result<()> {
        match source {
            Source::Host if !self.parts_stand_as_they_are() => self.copy_staged(),
            Source::Host => self.copy_parts(CopyKind::HostToDevice),
            _ if self.parts_stand_as_they_are() => self.copy_parts(CopyKind::DeviceToDevice),
            _ => self.copy_rows(),
        }
    }

    /// Whether each part's rows already have the target's pitch and order.
    fn parts_stand_as_they_are(&self) -> bool {
        !self.map.is_gated()
            && self
                .parts
                .iter()
                .all(|part| part.row_bytes == self.row_bytes && (part.pitch == self.row_bytes || part.rows == 1))
    }

    fn copy_parts(&self, kind: CopyKind) -> Result<()> {
        let mut first = 0;
        for part in self.parts {
            let bytes = part.rows * self.row_bytes;
            // SAFETY: the part holds these rows, and the target the rows of all parts.
            unsafe {
                let to = self.to.add(first * self.row_bytes);
                self.device.copy(to.cast(), part.data.cast(), bytes, kind, self.stream.raw())?;
            }
            first += part.rows;
        }
        Ok(())
    }

    /// The source of a target row, and the bytes it holds.
    fn source(&self, row: usize) -> (*const u8, usize) {
        let (part, row) = self.map.source(row);
        let part = &self.parts[part];
        (part.data.wrapping_add(row * part.pitch), part.row_bytes)
    }

    fn copy_rows(&self) -> Result<()> {
        for row in 0..self.map.rows {
            let (from, bytes) = self.source(row);
            // SAFETY: `source` points at a row of a part, and the target has `rows` rows.
            unsafe {
                let to = self.to.add(row * self.row_bytes).cast();
                self.device.copy(to, from.cast(), bytes, CopyKind::DeviceToDevice, self.stream.raw())?;
            }
        }
        Ok(())
    }

    /// Arranges rows in page-locked memory, because one large copy is far cheaper than one a row.
    fn copy_staged(&self) -> Result<()> {
        let rows = self.map.rows;
        let chunk = (STAGING_BYTES / self.row_bytes).clamp(1, rows);
        let mut staging = Staging::new(self.device, chunk * self.row_bytes)?;
        for begin in (0..rows).step_by(chunk) {
            let count = chunk.min(rows - begin);
            for (row, to) in staging.bytes().chunks_exact_mut(self.row_bytes).take(count).enumerate() {
                let (from, bytes) = self.source(begin + row);
                // SAFETY: the source is a row of `bytes` in host memory, and a staged row has at least as many.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), bytes) };
            }
            // SAFETY: the target has rows begin .. begin + count.
            unsafe {
                let to = self.to.add(begin * self.row_bytes);
                staging.upload(0, count * self.row_bytes, to, self.stream)?;
            }
            // The buffer is refilled next.
            self.stream.synchronize()?;
        }
        Ok(())
    }
}
