//! The registry: which kernels products can take, which one runs and why, and overriding that.

use super::device::kind_code;
use super::environment::element;
use super::operations::NVB_OPERATION_LINEAR;
use super::prelude::*;
use super::tuning::{case_of, nvb_linear_case};
use crate::operation::OperationKind;
use crate::registry::key::encoding_name;
use crate::registry::{kernels, kernels_of, KernelId};
use crate::tuning::explain::explain;

/// A kernel or strategy: one way to compute an operation. Its limits are necessary, not sufficient; `nvb_kernel_explain`
/// knows about a product.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kernel_info {
    pub struct_size: usize,
    /// `NVB_OPERATION_…`
    pub operation: u32,
    /// `NVB_DEVICE_…`
    pub device_kind: u32,
    /// Oldest compute capability, 10 · major + minor; 0: any.
    pub compute_capability: u32,
    /// What K (`nvb_linear_case.depth`) must be a multiple of; 1: any.
    pub depth_multiple: u32,
    /// Bytes that rows of the input start at multiples of; 1: any.
    pub alignment: u32,
    /// 1 if it is in force as the override.
    pub overridden: u32,
    /// Most rows of the input (M); 0: any.
    pub maximum_rows: u64,
    /// For `nvb_kernel_override` and `nvb_backend_options.linear_kernel`.
    pub name: [c_char; 64],
    /// Dtypes of the input, separated by spaces: "f16 bf16".
    pub inputs: [c_char; 32],
    /// What the weight may be kept in (`nvb_weight_info.encoding`), likewise: "bf16 fp8_e4m3 int8".
    pub encodings: [c_char; 96],
    /// What it does, a sentence or two.
    pub summary: [c_char; 256],
}
versioned!(nvb_kernel_info);

/// The kernels of the backend's device, or of all devices for NULL, and the override.
fn list(backend: *const nvb_backend) -> Result<(Vec<KernelId>, Option<KernelId>)> {
    if backend.is_null() {
        return Ok((kernels().map(|(id, _)| id).collect(), None));
    }
    let object = BACKENDS.get(backend)?;
    let executor = object.backend.executor();
    let of_device = kernels_of(executor.info().kind).map(|(id, _)| id).collect();
    Ok((of_device, executor.choices().overridden()))
}

/// Writes the number of kernels of the backend's device; of all that the library has, for a NULL backend.
#[no_mangle]
pub unsafe extern "C" fn nvb_kernel_count(backend: *const nvb_backend, count: *mut u32) -> nvb_status {
    guard!(nvb_kernel_count, {
        expect_out("count", count)?;
        let (found, _) = list(backend)?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("count", count, found.len() as u32) }
    })
}

/// Describes kernel `index` of those that `nvb_kernel_count` counts; set `info->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_kernel_get(
    backend: *const nvb_backend,
    index: u32,
    info: *mut nvb_kernel_info,
) -> nvb_status {
    guard!(nvb_kernel_get, {
        let (found, overridden) = list(backend)?;
        let id = *element("kernel", &found, index)?;
        let kernel = id.kernel();
        let words = |words: Vec<String>| words.join(" ");
        let value = nvb_kernel_info {
            struct_size: 0,
            operation: NVB_OPERATION_LINEAR,
            device_kind: kind_code(kernel.device),
            compute_capability: kernel.limits.capability as u32,
            depth_multiple: kernel.limits.depth_multiple as u32,
            alignment: kernel.limits.alignment as u32,
            overridden: (overridden == Some(id)).into(),
            maximum_rows: kernel.limits.rows as u64,
            name: fixed_text(kernel.name),
            inputs: fixed_text(&words(kernel.inputs.iter().map(ToString::to_string).collect())),
            encodings: fixed_text(&words(
                kernel.encodings.iter().map(|&encoding| encoding_name(encoding).to_string()).collect(),
            )),
            summary: fixed_text(kernel.summary),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}

/// Writes which kernel the product would run and why (the override, a tuned entry, the default; what it falls back from),
/// which others could do it, and which cannot. `text` receives up to `capacity` bytes with a closing NUL and may be NULL;
/// `*needed` what all of it takes and may be NULL. Nothing is queued, and without a `weight` in `product` no memory is needed.
#[no_mangle]
pub unsafe extern "C" fn nvb_kernel_explain(
    backend: *const nvb_backend,
    product: *const nvb_linear_case,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_kernel_explain, {
        let object = BACKENDS.get(backend)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let (_weight, case) = unsafe { case_of(&object.backend, product)? };
        let explanation = explain(&**object.backend.executor(), &case.shape()?);
        // SAFETY: NULL, or valid for `capacity` bytes and for writing.
        unsafe { give_text(&explanation, text, capacity, needed) }
    })
}

/// From now on the backend's products of `operation` (`NVB_OPERATION_LINEAR`) take the kernel of this name where it can do
/// them, and what they would have taken where it cannot. NULL or "" ends that. Set around a set of calls it holds for what is
/// queued in between, of all threads; a recorded graph keeps what it was recorded with.
/// Errors: `NVB_ERROR_CONFIGURATION` (a name that this backend's device has no kernel of; the text lists those there are; on a
/// GPU any name with `batch_invariant`).
#[no_mangle]
pub unsafe extern "C" fn nvb_kernel_override(
    backend: *const nvb_backend,
    operation: u32,
    name: *const c_char,
) -> nvb_status {
    guard!(nvb_kernel_override, {
        let object = BACKENDS.get(backend)?;
        let kind = OperationKind::from_code(operation).ok_or_else(|| {
            let last = OperationKind::ALL.len() - 1;
            Error::invalid(format!("operation is {operation}; NVB_OPERATION_… (0 to {last}) is needed"))
        })?;
        // SAFETY: NULL or NUL-terminated, by the header's contract.
        let name = unsafe { text("name", name)? };
        object.backend.executor().choices().set_override(kind.name(), &name)
    })
}
