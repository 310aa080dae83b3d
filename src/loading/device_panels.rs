//! Quantising on the device what lies in host memory: the sources' rows travel panel by panel, as they are, and become
//! quantised values there. A host of 16 cores takes longer to find the quantised values of a model than to copy it.

use super::staging::STAGING_BYTES;
use crate::allocation::{gathered, with_room};
use crate::device::CopyKind;
use crate::error::Result;
use crate::memory::MemoryManager;
use crate::operation::quantize::{Quantize, Quantized};
use crate::stream::Stream;
use crate::tensor::{Matrix, Tensor};
use crate::weight::arrangement::RowMap;
use crate::weight::format::Granularity;
use crate::weight::pack::Geometry;
use crate::weight::stripe::{SquaredError, STRIPE_ROWS};
use crate::weight::Scales;
use crate::weight::WeightView;
use std::ops::Range;
use std::sync::Arc;

/// Where each part begins in a panel: sources are read in vectors of 16 bytes.
const ALIGNMENT: usize = 256;

/// Float matrices in host memory on their way into a weight's memory.
pub(super) struct DevicePanels<'a> {
    memory: &'a Arc<MemoryManager>,
    parts: Vec<Matrix>,
    map: &'a RowMap,
    geometry: Geometry,
    stream: &'a Stream,
    /// The pitch of the widest part.
    pitch: usize,
}

impl<'a> DevicePanels<'a> {
    /// `None` where the host has to convert: the device has no kernel, a tensor's one scale would take a second pass, or
    /// rows lie far apart.
    pub fn new(
        memory: &'a Arc<MemoryManager>,
        parts: &[Tensor],
        map: &'a RowMap,
        geometry: Geometry,
        stream: &'a Stream,
    ) -> Result<Option<DevicePanels<'a>>> {
        let format = geometry.format;
        if !stream.executor().can_quantize(&format, parts.len()) || format.granularity == Granularity::Tensor {
            return Ok(None);
        }
        let parts: Vec<Matrix> = gathered(parts.iter().map(|part| part.as_matrix("parts")), "the parts of a weight")?;
        let row_bytes = geometry.columns * parts[0].dtype.size();
        let pitch = parts.iter().fold(row_bytes, |most, part| most.max(part.row_stride * part.dtype.size()));
        let panels = DevicePanels { memory, parts, map, geometry, stream, pitch };
        Ok((pitch <= 2 * row_bytes).then_some(panels))
    }

    /// Fills the weight's memory at `to`, and returns what was lost; `None` where the host has to convert after all: there
    /// is no memory for a panel, or values cannot be quantised, which the host refuses by name.
    pub fn quantize(&self, to: *mut u8) -> Result<Option<SquaredError>> {
        let (executor, rows) = (self.stream.executor(), self.map.rows);
        let stripes = (STAGING_BYTES / (STRIPE_ROWS * self.pitch)).clamp(1, rows.div_ceil(STRIPE_ROWS));
        let panel_rows = stripes * STRIPE_ROWS;
        let bytes = panel_rows.min(rows) * self.pitch + self.parts.len() * ALIGNMENT;
        if self.memory.check_available(bytes as u64).is_err() {
            return Ok(None);
        }
        let panel = self.memory.allocate_owned(bytes, self.stream.raw())?;
        let mut lost = SquaredError::default();
        for first in (0..rows).step_by(panel_rows) {
            let range = first..(first + panel_rows).min(rows);
            let parts = self.upload(&range, panel.pointer().cast())?;
            let view = self.view_of(to, &range);
            let op = Quantize::new(&parts, self.map.arrangement, self.geometry.format, view)?;
            // It waits for the stream, so that the panel may be filled again.
            match executor.quantize(&op, self.stream.raw())? {
                Quantized::Done(error) => lost.merge(error),
                Quantized::Refused => return Ok(None),
            }
        }
        Ok(Some(lost))
    }

    /// Queues copies of the rows that `range` of the weight comes from, and returns them as they will stand.
    fn upload(&self, range: &Range<usize>, panel: *mut u8) -> Result<Vec<Tensor>> {
        let mut tensors = with_room(self.parts.len(), "the parts of a weight")?;
        let mut at = 0;
        for (i, part) in self.parts.iter().enumerate() {
            let rows = self.map.rows_of(i, range);
            if rows.is_empty() {
                continue;
            }
            let pitch = part.row_stride * part.dtype.size();
            let bytes = (rows.len() - 1) * pitch + part.columns * part.dtype.size();
            let from = part.data.cast::<u8>().wrapping_add(rows.start * pitch);
            let to = panel.wrapping_add(at).cast();
            // SAFETY: the rows belong to the part, which the caller keeps, and the panel holds as many at this pitch.
            unsafe {
                let kind = CopyKind::HostToDevice;
                self.memory.device().copy(to, from.cast(), bytes, kind, self.stream.raw())?;
            }
            let mut tensor = Tensor::new(to, part.dtype, &[rows.len(), part.columns]);
            tensor.strides[0] = part.row_stride;
            tensors.push(tensor);
            at = (at + bytes).next_multiple_of(ALIGNMENT);
        }
        Ok(tensors)
    }

    /// The weight's rows `range`, which begins with a stripe.
    fn view_of(&self, to: *mut u8, range: &Range<usize>) -> WeightView {
        let geometry = &self.geometry;
        let whole = WeightView::at(geometry, self.map.is_gated(), to, false);
        let first = range.start;
        let scale_bytes = geometry.scale_bytes(first);
        WeightView {
            data: whole.data.wrapping_byte_add(geometry.data_bytes(first)),
            rows: range.len(),
            scales: match whole.scales {
                Scales::None => Scales::None,
                Scales::Rows(data) => Scales::Rows(data.wrapping_byte_add(scale_bytes)),
                Scales::Blocks(data) => Scales::Blocks(data.wrapping_byte_add(scale_bytes)),
                Scales::Groups { size, data } => Scales::Groups { size, data: data.wrapping_byte_add(scale_bytes) },
            },
            zero_points: if whole.zero_points.is_null() {
                whole.zero_points
            } else {
                whole.zero_points.wrapping_byte_add(geometry.zero_point_bytes(first))
            },
            ..whole
        }
    }
}
