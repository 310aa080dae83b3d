//! Conversion of sources into a format: stripes of 128 rows are read, quantised (or kept, if they are), packed into
//! page-locked memory by several threads, and copied panel by panel.

use super::staging::{Staging, STAGING_BYTES};
use crate::allocation::{collected, filled, with_room};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::tensor::{DType, Element, Tensor};
use crate::thread::on_several;
use crate::weight::arrangement::RowMap;
use crate::weight::format::{Format, Granularity};
use crate::weight::int4;
use crate::weight::pack::{Geometry, Parts};
use crate::weight::quantize::{quantize, Range as Values};
use crate::weight::rows::{FloatRows, RowSource};
use crate::weight::stripe::{SquaredError, Stripe, STRIPE_ROWS};
use crate::weight::Encoding;
use half::{bf16, f16};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Where the parts are.
pub(super) enum Sources<'a> {
    Host(Vec<&'a dyn RowSource>),
    /// Float tensors, brought to the host panel by panel.
    Device(&'a [Tensor]),
}

pub(super) struct Conversion<'a> {
    pub device: &'a dyn Device,
    pub sources: Sources<'a>,
    pub map: &'a RowMap,
    pub geometry: Geometry,
    /// Whether the parts' quantised values are kept as they are.
    pub keep: bool,
    /// The weight's memory.
    pub to: *mut u8,
    pub stream: &'a Stream,
}

/// A panel's sources; rows are counted as in the whole part.
struct Panel<'a> {
    map: &'a RowMap,
    geometry: &'a Geometry,
    keep: bool,
    sources: &'a [&'a dyn RowSource],
    /// For scales per tensor: the range of each part.
    tensors: &'a [Values],
}

/// Calls `body` for each item from as many threads as there are cores, or as can be started; the error of the lowest index is returned.
pub(super) fn in_parallel<T: Send>(
    items: Vec<T>,
    body: impl Fn(usize, T) -> Result<SquaredError> + Sync,
) -> Result<SquaredError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let mut outcomes: Vec<Option<Result<SquaredError>>> = with_room(items.len(), "the outcomes of a conversion")?;
    outcomes.resize_with(items.len(), || None);
    let work = Mutex::new(items.into_iter().zip(&mut outcomes).enumerate());
    let run = || loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some((index, (item, outcome))) = next else { break };
        *outcome = Some(body(index, item));
    };
    on_several(threads, run);
    drop(work);
    let mut sum = SquaredError::default();
    for outcome in outcomes {
        sum.merge(outcome.expect("every item was worked on")?);
    }
    Ok(sum)
}

impl Conversion<'_> {
    /// Fills the weight's memory, waits for the copies, and returns what was lost.
    pub fn run(&self) -> Result<SquaredError> {
        let (stripe_data, stripe_scales, stripe_zero_points) = (
            self.geometry.data_bytes(STRIPE_ROWS),
            self.geometry.scale_bytes(STRIPE_ROWS),
            self.geometry.zero_point_bytes(STRIPE_ROWS),
        );
        let stripe_bytes = stripe_data + stripe_scales + stripe_zero_points;
        let rows = self.map.rows;
        let panel_stripes = (STAGING_BYTES / stripe_bytes).clamp(1, rows.div_ceil(STRIPE_ROWS));
        let panel_rows = panel_stripes * STRIPE_ROWS;
        let tensors = if self.geometry.format.granularity == Granularity::Tensor && !self.keep {
            self.ranges(panel_rows)?
        } else {
            Vec::new()
        };
        let (data, scales, zero_points, _) = self.geometry.sections();
        let mut staging = Staging::new(self.device, panel_stripes * stripe_bytes)?;
        let mut error = SquaredError::default();
        self.for_panels(panel_rows, |range, sources| {
            let panel = Panel { map: self.map, geometry: &self.geometry, keep: self.keep, sources, tensors: &tensors };
            let bytes = staging.bytes();
            let (data_part, rest) = bytes.split_at_mut(panel_stripes * stripe_data);
            let (scale_part, zero_point_part) = rest.split_at_mut(panel_stripes * stripe_scales);
            let mut stripes = with_room(range.len().div_ceil(STRIPE_ROWS), "the stripes of a weight")?;
            let (mut data_part, mut scale_part, mut zero_point_part) = (data_part, scale_part, zero_point_part);
            for begin in range.clone().step_by(STRIPE_ROWS) {
                let count = STRIPE_ROWS.min(range.end - begin);
                let parts = Parts {
                    data: take(&mut data_part, self.geometry.data_bytes(count)),
                    scales: take(&mut scale_part, self.geometry.scale_bytes(count)),
                    zero_points: take(&mut zero_point_part, self.geometry.zero_point_bytes(count)),
                };
                stripes.push((begin..begin + count, parts));
            }
            error.merge(in_parallel(stripes, |_, (rows, parts)| panel.stripe(rows, parts))?);
            let first = range.start / STRIPE_ROWS;
            let uploads = [
                (0, self.geometry.data_bytes(range.len()), data.start + first * stripe_data),
                (
                    panel_stripes * stripe_data,
                    self.geometry.scale_bytes(range.len()),
                    scales.start + first * stripe_scales,
                ),
                (
                    panel_stripes * (stripe_data + stripe_scales),
                    self.geometry.zero_point_bytes(range.len()),
                    zero_points.start + first * stripe_zero_points,
                ),
            ];
            for (from, bytes, to) in uploads {
                // SAFETY: the weight's memory has the geometry's sections, of which this is the panel's part.
                unsafe { staging.upload(from, bytes, self.to.add(to), self.stream)? };
            }
            // The buffer is refilled next.
            self.stream.synchronize()
        })?;
        Ok(error)
    }

    /// Calls `body` with ranges of the weight's rows and sources that have them on the host.
    fn for_panels(
        &self,
        panel_rows: usize,
        mut body: impl FnMut(Range<usize>, &[&dyn RowSource]) -> Result<()>,
    ) -> Result<()> {
        let rows = self.map.rows;
        let panels = (0..rows).step_by(panel_rows).map(|begin| begin..(begin + panel_rows).min(rows));
        let parts = match &self.sources {
            Sources::Host(sources) => {
                for range in panels {
                    body(range, sources)?;
                }
                return Ok(());
            }
            Sources::Device(parts) => *parts,
        };
        let row_bytes = self.map.columns * parts[0].dtype.size();
        let mut staging = Staging::new(self.device, panel_rows.min(rows) * row_bytes)?;
        for range in panels {
            let mut at = 0;
            let mut tensors = with_room(parts.len(), "the parts of a weight")?;
            for (i, part) in parts.iter().enumerate() {
                let wanted = self.map.rows_of(i, &range);
                self.download(part, &wanted, &mut staging, at)?;
                let first = staging.bytes().as_mut_ptr().wrapping_add(at).wrapping_sub(wanted.start * row_bytes);
                tensors.push(Tensor { data: first.cast(), strides: [self.map.columns, 1, 1, 1], ..*part });
                at += wanted.len() * row_bytes;
            }
            self.stream.synchronize()?;
            // SAFETY: the staged rows are all that the panel reads, and they stay until it is done.
            let rows = tensors.iter().map(|&tensor| unsafe { FloatRows::new(tensor) });
            let rows: Vec<FloatRows> = collected(rows, "the parts of a weight")?;
            let sources = collected(rows.iter().map(|rows| rows as &dyn RowSource), "the parts of a weight")?;
            body(range, &sources)?;
        }
        Ok(())
    }

    /// Queues copies of rows of a part, without gaps, to offset `at`.
    fn download(&self, part: &Tensor, rows: &Range<usize>, staging: &mut Staging, at: usize) -> Result<()> {
        let size = part.dtype.size();
        let (row_bytes, pitch) = (part.shape[1] * size, part.strides[0] * size);
        let from = part.data.cast::<u8>().wrapping_add(rows.start * pitch);
        // SAFETY: the rows belong to the part, and the staging buffer holds the rows of a panel.
        unsafe {
            if row_bytes == pitch {
                return staging.download(from, rows.len() * row_bytes, at, self.stream);
            }
            for row in 0..rows.len() {
                staging.download(from.wrapping_add(row * pitch), row_bytes, at + row * row_bytes, self.stream)?;
            }
        }
        Ok(())
    }

    /// The range of each part, which takes a pass over all of them.
    fn ranges(&self, panel_rows: usize) -> Result<Vec<Values>> {
        let parts = match &self.sources {
            Sources::Host(sources) => sources.len(),
            Sources::Device(parts) => parts.len(),
        };
        let mut ranges = filled(Values::NOTHING, parts, "the ranges of a weight's parts")?;
        self.for_panels(panel_rows, |range, sources| {
            let mut values = zeros(self.map.columns)?;
            for row in range {
                let (part, row) = self.map.source(row);
                sources[part].values(row, &mut values)?;
                ranges[part] = ranges[part].join(Values::of(&values));
            }
            Ok(())
        })?;
        Ok(ranges)
    }
}

/// Room for the values of a row, or of some.
pub(super) fn zeros(columns: usize) -> Result<Vec<f32>> {
    filled(0.0, columns, "values of a weight")
}

/// Cuts the first `count` bytes off.
fn take<'a>(bytes: &mut &'a mut [u8], count: usize) -> &'a mut [u8] {
    let (first, rest) = std::mem::take(bytes).split_at_mut(count);
    *bytes = rest;
    first
}

impl Panel<'_> {
    fn stripe(&self, rows: Range<usize>, mut to: Parts) -> Result<SquaredError> {
        let geometry = self.geometry;
        if let Encoding::Float(dtype) = geometry.format.encoding {
            return self.floats(dtype, rows, to.data);
        }
        let mut stripe = Stripe::new(geometry.format, rows.len(), geometry.columns)?;
        let error = if self.keep { self.keep(rows, &mut stripe)? } else { self.quantize(rows, &mut stripe)? };
        geometry.pack(&stripe, &mut to);
        Ok(error)
    }

    fn source(&self, row: usize) -> (&dyn RowSource, usize) {
        let (part, row) = self.map.source(row);
        (self.sources[part], row)
    }

    /// Prefixes an error with the part that it is about.
    fn named<T>(&self, row: usize, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.context(format_args!("parts[{}]", self.map.source(row).0)))
    }

    fn floats(&self, dtype: DType, rows: Range<usize>, data: &mut [u8]) -> Result<SquaredError> {
        let geometry = self.geometry;
        let (mut values, mut stored) = (zeros(geometry.columns)?, zeros(geometry.columns)?);
        let mut error = SquaredError::default();
        for (row, bytes) in rows.zip(data.chunks_exact_mut(geometry.row_bytes())) {
            let (source, at) = self.source(row);
            self.named(row, source.values(at, &mut values))?;
            bytes.fill(0);
            write_floats(dtype, &values, bytes);
            read_floats(dtype, bytes, &mut stored);
            if let Some(k) = (0..values.len()).find(|&k| values[k].is_finite() && !stored[k].is_finite()) {
                return self.named(
                    row,
                    Err(Error::invalid(format!("row {at}, column {k} is {}, which {dtype} cannot hold", values[k]))),
                );
            }
            // What is not a number has no error.
            if values.iter().all(|value| value.is_finite()) {
                error.add(&stored, &values);
            }
        }
        Ok(error)
    }

    fn quantize(&self, rows: Range<usize>, stripe: &mut Stripe) -> Result<SquaredError> {
        let columns = stripe.columns;
        let mut values = zeros(rows.len() * columns)?;
        for (row, values) in rows.clone().zip(values.chunks_exact_mut(columns)) {
            let (source, at) = self.source(row);
            self.named(row, source.values(at, values))?;
            if let Some(k) = values.iter().position(|value| !value.is_finite()) {
                return self.named(
                    row,
                    Err(Error::invalid(format!(
                        "row {at}, column {k} is {}; only finite values can be quantised",
                        values[k]
                    ))),
                );
            }
        }
        let tensor = |row: usize| self.tensors[self.map.source(rows.start + row).0];
        quantize(stripe, &values, &tensor)
            .map_err(|error| error.context(format_args!("rows from {} on", rows.start)))?;
        let (mut back, mut error) = (zeros(columns)?, SquaredError::default());
        for (row, values) in values.chunks_exact(columns).enumerate() {
            stripe.values(row, &mut back);
            error.add(&back, values);
        }
        Ok(error)
    }

    fn keep(&self, rows: Range<usize>, stripe: &mut Stripe) -> Result<SquaredError> {
        let columns = stripe.columns;
        let (mut values, mut wanted, mut back) = (zeros(columns)?, zeros(columns)?, zeros(columns)?);
        let mut error = SquaredError::default();
        let all_exact =
            self.sources.iter().all(|source| source.quantized().is_some_and(|quantized| quantized.is_exact()));
        for (i, row) in rows.enumerate() {
            let (source, at) = self.source(row);
            let kept = source.quantized().expect("checked before values are kept");
            let theirs = source.format();
            let count = theirs.scales_in_row(columns);
            let mut scales = zeros(count)?;
            let mut zero_points = zeros(if theirs.zero_points { count } else { 0 })?;
            let quantized = &mut stripe.quantized[i * columns..][..columns];
            self.named(row, kept.quantized_row(at, quantized, &mut scales, &mut zero_points))?;
            let first = stripe.scale_row(i);
            for j in 0..stripe.scales_in_row() {
                let from = j * stripe.format.stored_group() / theirs.stored_group().max(1);
                stripe.scales[first + j] = scales[from];
                if let Some(zero_point) = stripe.zero_points.get_mut(first + j) {
                    *zero_point = match zero_points.get(from) {
                        Some(&zero_point) => zero_point,
                        None => self.named(row, symmetric_zero_point(scales[from], at))?,
                    };
                }
            }
            if all_exact {
                continue;
            }
            self.named(row, source.values(at, &mut values))?;
            match kept.order() {
                None => wanted.copy_from_slice(&values),
                Some(order) => wanted.iter_mut().zip(order).for_each(|(to, &k)| *to = values[k as usize]),
            }
            stripe.values(i, &mut back);
            error.add(&back, &wanted);
        }
        Ok(error)
    }
}

/// The zero point with which q and a zero of 8 are what q − 8 is without; exact, as 8 is a power of two.
fn symmetric_zero_point(scale: f32, row: usize) -> Result<f32> {
    let zero_point = -f32::from(int4::ZERO) * scale;
    if f16::from_f32(zero_point).is_finite() {
        return Ok(zero_point);
    }
    Err(Error::invalid(format!("a scale of row {row} is {scale}; its zero point {zero_point} is more than f16 holds")))
}

pub(super) fn write_floats(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    fn write<const N: usize>(values: &[f32], bytes: &mut [u8], encode: impl Fn(f32) -> [u8; N]) {
        for (bytes, &value) in bytes.chunks_exact_mut(N).zip(values) {
            bytes.copy_from_slice(&encode(value));
        }
    }
    match dtype {
        DType::F32 => write(values, bytes, f32::to_le_bytes),
        DType::F16 => write(values, bytes, |value| f16::from_f32(value).to_le_bytes()),
        _ => write(values, bytes, |value| bf16::from_f32(value).to_le_bytes()),
    }
}

pub(super) fn read_floats(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    fn read<const N: usize>(bytes: &[u8], values: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
        for (bytes, value) in bytes.chunks_exact(N).zip(values) {
            *value = decode(bytes.try_into().expect("N bytes"));
        }
    }
    match dtype {
        DType::F32 => read(bytes, values, f32::from_le_bytes),
        DType::F16 => read(bytes, values, |bytes| Element::to_f32(f16::from_le_bytes(bytes))),
        _ => read(bytes, values, |bytes| Element::to_f32(bf16::from_le_bytes(bytes))),
    }
}

/// Whether the format can take the sources' quantised values as they stand.
pub(super) fn keeps_quantized(format: &Format, sources: &[&dyn RowSource], map: &RowMap) -> bool {
    fn order<'a>(source: &&'a dyn RowSource) -> Option<&'a [i32]> {
        source.quantized().and_then(|quantized| quantized.order())
    }
    let first = order(&sources[0]);
    (format.granularity != Granularity::Blocks || map.keeps_blocks())
        && sources
            .iter()
            .all(|source| source.quantized().is_some() && format.holds(&source.format()) && order(source) == first)
}
