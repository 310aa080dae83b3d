//! Weights: matrices [N, K] that live as long as a model, in the layout that the products read.
//!
//! Rows start on 16-byte boundaries. Several source tensors may be stacked (Q, K and V as one product), and a gate and
//! an up projection may be interleaved row by row, so that one product's neighbouring columns are the pair that a gated
//! activation needs.

pub mod awq;
pub mod codes;
mod encoding;
pub mod format;
pub mod fp8;
pub mod gguf;
pub mod gptq;
pub mod grouped;
pub mod int4;
pub mod int8;
pub mod pack;
pub mod quantize;
pub mod rows;
pub mod sfp;
pub mod stripe;
mod view;

pub use encoding::{Encoding, Scales, WeightLayout, BLOCK};
pub use format::{Format, Granularity};
pub use view::WeightView;

use crate::error::{Error, Result};
use crate::executor::{CopyKind, Executor};
use crate::memory::{Allocation, MemoryManager};
use crate::ops::expect_extent;
use crate::stream::Stream;
use crate::tensor::Tensor;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// The parts stand one below the other.
    Stacked,
    /// Two parts, gate and up, alternate row by row.
    Gated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Host,
    Device,
    /// The weight reads the caller's memory, which outlives it: one part, device memory (host memory on the CPU).
    Borrowed,
}

pub struct Weight {
    view: WeightView,
    /// `None` for a borrowed weight.
    allocation: Option<Allocation>,
}

impl Weight {
    /// Copies the parts into the device's layout and waits until they have arrived.
    pub fn new(
        memory: &Arc<MemoryManager>,
        parts: &[Tensor],
        arrangement: Arrangement,
        source: Source,
        stream: &Stream,
    ) -> Result<Weight> {
        let view = check(parts, arrangement)?;
        if source == Source::Borrowed {
            if parts.len() != 1 || arrangement == Arrangement::Gated {
                return Err(Error::invalid(
                    "a borrowed weight is one tensor as it stands: it cannot be stacked or gated",
                ));
            }
            let matrix = parts[0].as_matrix("parts[0]")?;
            return Ok(Weight {
                view: WeightView { data: matrix.data, row_stride: matrix.row_stride, ..view },
                allocation: None,
            });
        }
        let dtype = parts[0].dtype;
        let size = dtype.size();
        let row_bytes = view
            .columns
            .checked_mul(size)
            .and_then(|bytes| bytes.checked_next_multiple_of(16))
            .ok_or_else(|| Error::invalid(format!("a weight of {} columns overflows", view.columns)))?;
        let bytes = row_bytes
            .checked_mul(view.rows)
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or_else(|| Error::invalid(format!("a weight of {} rows of {} overflows", view.rows, view.columns)))?;
        let allocation = memory
            .allocate_owned(bytes, stream)
            .map_err(|error| error.context(format_args!("weight [{}, {}] of {}", view.rows, view.columns, dtype)))?;
        let copier = Copier {
            executor: memory.executor(),
            parts,
            arrangement,
            to: allocation.pointer().cast(),
            rows: view.rows,
            row_bytes,
            stream,
        };
        match source {
            Source::Host if !copier.parts_stand_as_they_are() => copier.copy_staged()?,
            Source::Host => copier.copy_parts(CopyKind::HostToDevice)?,
            _ if copier.parts_stand_as_they_are() => copier.copy_parts(CopyKind::DeviceToDevice)?,
            _ => copier.copy_rows()?,
        }
        stream.synchronize()?;
        let view = WeightView { data: allocation.pointer(), row_stride: row_bytes / size, ..view };
        Ok(Weight { view, allocation: Some(allocation) })
    }

    pub fn view(&self) -> WeightView {
        self.view
    }

    /// Device bytes that the weight owns; 0 when borrowed.
    pub fn bytes(&self) -> usize {
        self.allocation.as_ref().map_or(0, Allocation::bytes)
    }
}

fn check(parts: &[Tensor], arrangement: Arrangement) -> Result<WeightView> {
    let Some(first) = parts.first() else {
        return Err(Error::invalid("a weight needs at least one part"));
    };
    let mut rows = 0;
    for (i, part) in parts.iter().enumerate() {
        let name = format!("parts[{i}]");
        part.expect_float(&name)?;
        part.expect_rank(&name, 2)?;
        part.expect_readable(&name)?;
        part.expect_dtype(&name, first.dtype)?;
        if part.is_empty() {
            return Err(Error::invalid(format!("`{name}` has shape {:?}: a weight cannot be empty", part.shape())));
        }
        if part.shape[1] != first.shape[1] {
            return Err(Error::invalid(format!(
                "`{name}` has {} columns; parts[0] has {}",
                part.shape[1], first.shape[1]
            )));
        }
        rows += part.shape[0];
    }
    if arrangement == Arrangement::Gated && (parts.len() != 2 || parts[0].shape[0] != parts[1].shape[0]) {
        return Err(Error::invalid("a gated weight takes two parts, gate and up, of one shape"));
    }
    expect_extent("the number of rows", rows)?;
    expect_extent("the number of columns", first.shape[1])?;
    let (columns, gated) = (first.shape[1], arrangement == Arrangement::Gated);
    Ok(WeightView::float(std::ptr::null_mut(), first.dtype, rows, columns, columns, gated))
}

/// Bytes of the page-locked buffer through which rows travel that need re-arranging.
const STAGING_BYTES: usize = 32 << 20;

struct Copier<'a> {
    executor: &'a Arc<dyn Executor>,
    parts: &'a [Tensor],
    arrangement: Arrangement,
    to: *mut u8,
    rows: usize,
    row_bytes: usize,
    stream: &'a Stream,
}

impl Copier<'_> {
    /// Whether each part's rows already have the target's pitch and order.
    fn parts_stand_as_they_are(&self) -> bool {
        self.arrangement == Arrangement::Stacked
            && self.parts.iter().all(|part| {
                let size = part.dtype.size();
                part.shape[1] * size == self.row_bytes
                    && (part.strides[0] * size == self.row_bytes || part.shape[0] == 1)
            })
    }

    fn copy_parts(&self, kind: CopyKind) -> Result<()> {
        let mut first = 0;
        for part in self.parts {
            let bytes = part.shape[0] * self.row_bytes;
            // SAFETY: the part holds these rows, and the target the rows of all parts.
            unsafe {
                let to = self.to.add(first * self.row_bytes);
                self.executor.copy(to.cast(), part.data, bytes, kind, self.stream.raw())?;
            }
            first += part.shape[0];
        }
        Ok(())
    }

    /// The source of a target row, and the bytes it holds.
    fn source(&self, row: usize) -> (*const u8, usize) {
        let (part, row) = match self.arrangement {
            Arrangement::Gated => (&self.parts[row % 2], row / 2),
            Arrangement::Stacked => {
                let mut first = 0;
                let part = self
                    .parts
                    .iter()
                    .find(|part| {
                        first += part.shape[0];
                        row < first
                    })
                    .expect("row < the sum of the parts' rows");
                (part, row - (first - part.shape[0]))
            }
        };
        let size = part.dtype.size();
        (part.data.cast::<u8>().wrapping_add(row * part.strides[0] * size), part.shape[1] * size)
    }

    fn copy_rows(&self) -> Result<()> {
        for row in 0..self.rows {
            let (from, bytes) = self.source(row);
            // SAFETY: `source` points at a row of a part, and the target has `rows` rows.
            unsafe {
                let to = self.to.add(row * self.row_bytes).cast();
                self.executor.copy(to, from.cast(), bytes, CopyKind::DeviceToDevice, self.stream.raw())?;
            }
        }
        Ok(())
    }

    /// Arranges rows in page-locked memory, because one large copy is far cheaper than one a row.
    fn copy_staged(&self) -> Result<()> {
        let chunk = (STAGING_BYTES / self.row_bytes).clamp(1, self.rows);
        let staging = self.executor.host_allocate(chunk * self.row_bytes)?.cast::<u8>();
        let result = (0..self.rows).step_by(chunk).try_for_each(|begin| {
            let count = chunk.min(self.rows - begin);
            for row in 0..count {
                let (from, bytes) = self.source(begin + row);
                // SAFETY: the staging buffer holds `chunk` rows of `row_bytes`, of which the source fills `bytes`.
                unsafe {
                    let to = staging.add(row * self.row_bytes);
                    std::ptr::copy_nonoverlapping(from, to, bytes);
                    std::ptr::write_bytes(to.add(bytes), 0, self.row_bytes - bytes);
                }
            }
            // SAFETY: the target has rows begin .. begin + count.
            unsafe {
                let to = self.to.add(begin * self.row_bytes).cast();
                let bytes = count * self.row_bytes;
                self.executor.copy(to, staging.cast(), bytes, CopyKind::HostToDevice, self.stream.raw())?;
            }
            // The buffer is refilled next.
            self.stream.synchronize()
        });
        // SAFETY: allocated above with this size; every copy out of it was waited for, or failed.
        unsafe { self.executor.host_free(staging.cast(), chunk * self.row_bytes) };
        result
    }
}
