//! Weights: matrices [N, K] that live as long as a model, in the layout that the products read.
//!
//! Sources are kept as they are, or converted into a [`Format`], on the device where it has a kernel for that and on the
//! host elsewhere. A weight travels in panels of rows, so a model is never in memory twice.

mod blocks;
mod convert;
mod dequantize;
mod device_panels;
mod in_place;
mod rows;
mod staging;

use crate::allocation::{collected, with_room};
use crate::error::{Error, Result};
use crate::memory::{Allocation, MemoryManager};
use crate::operation::quantize::{Quantize, Quantized};
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::weight::arrangement::RowMap;
use crate::weight::pack::Geometry;
use crate::weight::rows::{FloatRows, RowSource};
use crate::weight::{Arrangement, BlockFormat, Format, WeightView};
use convert::{keeps_quantized, Conversion, Sources};
use device_panels::DevicePanels;
use rows::Copier;
pub use rows::PartRows;
use staging::Staging;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Host,
    Device,
    /// The weight reads the caller's memory, which outlives it: one part, device memory (host memory on the CPU).
    Borrowed,
    /// The same for blocks that become another format where they lie.
    InPlace,
}

pub struct Weight {
    view: WeightView,
    geometry: Geometry,
    /// `None` for a borrowed weight.
    allocation: Option<Allocation>,
    relative_error: f64,
    /// What its memory held before it was packed there.
    packed: Option<BlockFormat>,
}

impl Weight {
    /// Copies float parts into the device's layout, as they are or converted into `format`, and waits until they have been
    /// read.
    pub fn new(
        memory: &Arc<MemoryManager>,
        parts: &[Tensor],
        arrangement: Arrangement,
        source: Source,
        format: Option<Format>,
        stream: &Stream,
    ) -> Result<Weight> {
        let map = check(parts, arrangement)?;
        let own = Format::float(parts[0].dtype);
        let format = format.unwrap_or(own);
        if source == Source::Borrowed {
            return Weight::borrow(parts, &map, format, stream);
        }
        let geometry = Geometry::new(format, stream.executor().weight_layout(), map.rows, map.columns)?;
        if format == own {
            let allocation = allocate(memory, &geometry, 0, stream)?;
            let (to, row_bytes) = (allocation.pointer().cast(), geometry.row_bytes());
            let rows = collected(parts.iter().map(PartRows::of), PARTS)?;
            Copier { device: memory.device(), parts: &rows, map: &map, to, row_bytes, stream }.copy(source)?;
            stream.synchronize()?;
            return Ok(Weight::finished(geometry, &map, allocation, false, 0.0));
        }
        if source == Source::Device {
            return Weight::convert(memory, Sources::Device(parts), &map, geometry, stream);
        }
        if let Some(panels) = DevicePanels::new(memory, parts, &map, geometry, stream)? {
            let allocation = allocate(memory, &geometry, 0, stream)?;
            if let Some(error) = panels.quantize(allocation.pointer().cast())? {
                return Ok(Weight::finished(geometry, &map, allocation, false, error.relative()));
            }
        }
        // SAFETY: checked tensors in host memory, which the caller keeps during the call.
        let rows = parts.iter().map(|&part| unsafe { FloatRows::new(part) });
        let rows: Vec<FloatRows> = collected(rows, PARTS)?;
        let rows = collected(rows.iter().map(|rows| rows as &dyn RowSource), PARTS)?;
        Weight::convert(memory, Sources::Host(rows), &map, geometry, stream)
    }

    /// Reads the parts into `format`, or into the one that keeps all their quantised values, and waits until they have
    /// been read.
    pub fn import(
        memory: &Arc<MemoryManager>,
        parts: &[&dyn RowSource],
        arrangement: Arrangement,
        format: Option<Format>,
        stream: &Stream,
    ) -> Result<Weight> {
        let shapes: Vec<_> = collected(parts.iter().map(|part| (part.rows(), part.columns())), PARTS)?;
        let map = RowMap::new(arrangement, &shapes)?;
        let format = match format {
            Some(format) => format,
            None => common_format(parts, &map)?,
        };
        let geometry = Geometry::new(format, stream.executor().weight_layout(), map.rows, map.columns)?;
        Weight::convert(memory, Sources::Host(collected(parts.iter().copied(), PARTS)?), &map, geometry, stream)
    }

    fn borrow(parts: &[Tensor], map: &RowMap, format: Format, stream: &Stream) -> Result<Weight> {
        if parts.len() != 1 || map.is_gated() || format != Format::float(parts[0].dtype) {
            return Err(Error::invalid(
                "a borrowed weight is one tensor as it stands: it cannot be stacked, gated or converted",
            ));
        }
        let matrix = parts[0].as_matrix("parts[0]")?;
        let (rows, columns) = (matrix.rows, matrix.columns);
        let geometry = Geometry::new(format, stream.executor().weight_layout(), rows, columns)?;
        let view = WeightView::float(matrix.data, matrix.dtype, rows, columns, matrix.row_stride, false);
        Ok(Weight { view, geometry, allocation: None, relative_error: 0.0, packed: None })
    }

    fn convert(
        memory: &Arc<MemoryManager>,
        sources: Sources,
        map: &RowMap,
        geometry: Geometry,
        stream: &Stream,
    ) -> Result<Weight> {
        let executor = stream.executor();
        let keep = match &sources {
            Sources::Host(parts) => keeps_quantized(&geometry.format, parts, map),
            Sources::Device(_) => false,
        };
        let order = match &sources {
            Sources::Host(parts) if keep => parts[0].quantized().and_then(|quantized| quantized.order()),
            _ => None,
        };
        let order = order.unwrap_or_default();
        let mut order_bytes: Vec<u8> = with_room(size_of_val(order), "the order of a weight's columns")?;
        order.iter().for_each(|k| order_bytes.extend(k.to_le_bytes()));
        let order = order_bytes;
        let allocation = allocate(memory, &geometry, order.len(), stream)?;
        let to = allocation.pointer().cast::<u8>();
        if let Sources::Device(parts) = &sources {
            // What no kernel can do, or what cannot be quantised, the host does, or refuses by name.
            if executor.can_quantize(&geometry.format, parts.len()) {
                let view = WeightView::at(&geometry, map.is_gated(), allocation.pointer().cast(), false);
                let op = Quantize::new(parts, map.arrangement, geometry.format, view)?;
                if let Quantized::Done(error) = executor.quantize(&op, stream.raw())? {
                    return Ok(Weight::finished(geometry, map, allocation, false, error.relative()));
                }
            }
        }
        let error = Conversion { device: memory.device(), sources, map, geometry, keep, to, stream }.run()?;
        if !order.is_empty() {
            let mut staging = Staging::new(memory.device(), order.len())?;
            staging.bytes().copy_from_slice(&order);
            // SAFETY: the allocation has these bytes after its sections.
            unsafe { staging.upload(0, order.len(), to.add(geometry.sections().3), stream)? };
            stream.synchronize()?;
        }
        Ok(Weight::finished(geometry, map, allocation, !order.is_empty(), error.relative()))
    }

    /// The weight, once all that was queued to make it has been waited for.
    fn finished(
        geometry: Geometry,
        map: &RowMap,
        allocation: Allocation,
        ordered: bool,
        relative_error: f64,
    ) -> Weight {
        let view = WeightView::at(&geometry, map.is_gated(), allocation.pointer().cast(), ordered);
        let view = WeightView { settled: true, ..view };
        Weight { view, geometry, allocation: Some(allocation), relative_error, packed: None }
    }

    pub fn view(&self) -> WeightView {
        self.view
    }

    pub fn format(&self) -> Format {
        self.geometry.format
    }

    /// Device bytes from the view's first on among which all that a product reads lies.
    pub fn span(&self) -> usize {
        match &self.allocation {
            Some(allocation) => allocation.bytes(),
            None => self.borrowed_span(),
        }
    }

    /// Device bytes that the weight owns; 0 when borrowed.
    pub fn bytes(&self) -> usize {
        self.allocation.as_ref().map_or(0, Allocation::bytes)
    }

    /// The bytes of scales and zero points among these.
    pub fn scale_bytes(&self) -> usize {
        let rows = self.geometry.rows;
        self.geometry.scale_bytes(rows) + self.geometry.zero_point_bytes(rows)
    }

    /// ‖weight − source‖ / ‖source‖ of the conversion; 0 where nothing was lost.
    pub fn relative_error(&self) -> f64 {
        self.relative_error
    }
}

fn allocate(memory: &Arc<MemoryManager>, geometry: &Geometry, more: usize, stream: &Stream) -> Result<Allocation> {
    let (data, _, _, end) = geometry.sections();
    // Floats and blocks have nothing behind their rows.
    let bytes = if !geometry.format.encoding.has_scales() { data.end } else { end + more };
    memory.allocate_owned(bytes, stream.raw()).map_err(|error| {
        let Geometry { rows, columns, format, .. } = geometry;
        error.context(format_args!("weight [{rows}, {columns}] of {format}"))
    })
}

/// What lists of parts hold.
const PARTS: &str = "the parts of a weight";

fn check(parts: &[Tensor], arrangement: Arrangement) -> Result<RowMap> {
    let mut shapes = with_room(parts.len(), PARTS)?;
    for (i, part) in parts.iter().enumerate() {
        let name = format!("parts[{i}]");
        part.expect_float(&name)?;
        part.expect_rank(&name, 2)?;
        part.expect_readable(&name)?;
        part.expect_dtype(&name, parts[0].dtype)?;
        shapes.push((part.shape[0], part.shape[1]));
    }
    RowMap::new(arrangement, &shapes)
}

/// The format that keeps the quantised values of all parts.
fn common_format(parts: &[&dyn RowSource], map: &RowMap) -> Result<Format> {
    let first = parts[0].format();
    let mut common = first;
    for (i, part) in parts.iter().enumerate() {
        let format = part.format();
        common = common.common(format).ok_or_else(|| {
            Error::invalid(format!("parts[{i}] is {format} and parts[0] {first}: no format keeps both"))
                .with_advice("name the format that they shall have")
        })?;
    }
    let quantized = parts.iter().all(|part| part.quantized().is_some());
    if quantized && !keeps_quantized(&common, parts, map) {
        return Err(Error::invalid(format!(
            "these parts cannot be one weight of {common} as they are: their blocks or the orders of their columns differ"
        ))
        .with_advice("create a weight of each, or name a format"));
    }
    Ok(common)
}
