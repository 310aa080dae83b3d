//! Weights: matrices in the layout that products read.

use super::backend::{nvb_backend, stream_of, BACKENDS};
use super::guard::guard;
use super::handle::Table;
use super::status::nvb_status;
use super::stream::nvb_stream;
use super::structs::{expect_out, read, slice, versioned, write};
use super::tensor::{convert, nvb_tensor};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::weight::{Arrangement, Source, Weight, WeightView};
use std::sync::Arc;

/// A matrix [N, K] of a model, or several stacked or interleaved ones, in the device's layout.
///
/// Threads: calls that take `const nvb_weight *` may run at once from many threads.
pub struct nvb_weight {
    _private: [u8; 0],
}

/// `nvb_weight_desc.arrangement`: the parts stand one below the other, as Q, K and V of one product.
pub const NVB_WEIGHT_STACKED: u32 = 0;
/// `nvb_weight_desc.arrangement`: two parts, gate and up; products with it are gated (GeGLU, SwiGLU).
pub const NVB_WEIGHT_GATED: u32 = 1;
/// `nvb_weight_desc.source`: the parts are host memory, copied before the call returns.
pub const NVB_SOURCE_HOST: u32 = 0;
/// `nvb_weight_desc.source`: the parts are device memory, copied before the call returns.
pub const NVB_SOURCE_DEVICE: u32 = 1;
/// `nvb_weight_desc.source`: the one part is device memory (on the CPU: any memory, such as a mapped file) that is read
/// in place and outlives the weight.
pub const NVB_SOURCE_BORROWED: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_weight_desc {
    pub struct_size: usize,
    /// `part_count` tensors [Nᵢ, K] of one float dtype, not empty.
    pub parts: *const nvb_tensor,
    pub part_count: usize,
    /// `NVB_WEIGHT_…`
    pub arrangement: u32,
    /// `NVB_SOURCE_…`
    pub source: u32,
}
versioned!(nvb_weight_desc);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_weight_info {
    pub struct_size: usize,
    /// N, of all parts together.
    pub rows: u64,
    /// K
    pub columns: u64,
    /// Columns of a product with this weight: N, or N / 2 if gated.
    pub output_columns: u64,
    /// Device memory that the weight owns; 0 if borrowed.
    pub bytes: u64,
    /// `NVB_DTYPE_…`; 0 if quantised.
    pub dtype: u32,
    /// 1 if gated.
    pub gated: u32,
}
versioned!(nvb_weight_info);

pub struct WeightObject {
    pub weight: Weight,
    pub backend: Arc<Backend>,
}

static WEIGHTS: Table<WeightObject> = Table::new("weight", 5);

/// The weight behind a handle, kept alive by the first of the pair while a call uses the second.
pub(super) fn weight_of(backend: &Backend, weight: *const nvb_weight) -> Result<(Arc<WeightObject>, WeightView)> {
    let object = WEIGHTS.get(weight)?;
    super::backend::expect_same_backend(backend, object.backend.executor(), "weight")?;
    let view = object.weight.view();
    Ok((object, view))
}

/// Creates a weight and waits until its parts have been read. `stream` orders the copies; NULL: the default stream.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (which part and why), `NVB_ERROR_OUT_OF_MEMORY`.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_create(
    backend: *const nvb_backend,
    desc: *const nvb_weight_desc,
    stream: *mut nvb_stream,
    weight: *mut *mut nvb_weight,
) -> nvb_status {
    guard!(nvb_weight_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("weight", weight)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let desc = unsafe { read(desc)? };
        let arrangement = match desc.arrangement {
            NVB_WEIGHT_STACKED => Arrangement::Stacked,
            NVB_WEIGHT_GATED => Arrangement::Gated,
            other => return Err(Error::invalid(format!("arrangement is {other}; NVB_WEIGHT_… (0 or 1) is needed"))),
        };
        let source = match desc.source {
            NVB_SOURCE_HOST => Source::Host,
            NVB_SOURCE_DEVICE => Source::Device,
            NVB_SOURCE_BORROWED => Source::Borrowed,
            other => return Err(Error::invalid(format!("source is {other}; NVB_SOURCE_… (0 to 2) is needed"))),
        };
        let stream = stream_of(&backend, stream)?;
        // SAFETY: `part_count` tensors, by the header's contract.
        let parts = unsafe { slice("parts", desc.parts, desc.part_count)? };
        let mut tensors = Vec::with_capacity(parts.len());
        for (i, part) in parts.iter().enumerate() {
            let name = format!("parts[{i}]");
            let tensor = convert(&name, part)?;
            if source != Source::Host {
                backend.check_memory(&name, &tensor)?;
            }
            tensors.push(tensor);
        }
        let created = Weight::new(backend.memory(), &tensors, arrangement, source, None, &stream)?;
        let handle = WEIGHTS.insert(Arc::new(WeightObject { weight: created, backend }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { weight.write(handle) };
        Ok(())
    })
}

/// Destroys the handle; NULL is fine. Waits for the device before the memory is given back.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_destroy(weight: *mut nvb_weight) -> nvb_status {
    guard!(nvb_weight_destroy, { WEIGHTS.remove(weight) })
}

/// Fills `info`; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_get_info(weight: *const nvb_weight, info: *mut nvb_weight_info) -> nvb_status {
    guard!(nvb_weight_get_info, {
        let object = WEIGHTS.get(weight)?;
        let view = object.weight.view();
        let value = nvb_weight_info {
            struct_size: 0,
            rows: view.rows as u64,
            columns: view.columns as u64,
            output_columns: view.output_columns() as u64,
            bytes: object.weight.bytes() as u64,
            dtype: view.dtype().map_or(0, |dtype| dtype as u32),
            gated: view.gated.into(),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}
