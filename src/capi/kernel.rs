//! The registry: which kernels products and attention can take, which one an operation runs and why, and overriding that.

use super::backend::backend_and_stream;
use super::device::kind_code;
use super::environment::element;
use super::prelude::*;
use super::tuning::{case_of, nvb_linear_case};
use crate::executor::{Executor, Reason};
use crate::operation::{Operation, OperationKind};
use crate::registry::key::encoding_name;
use crate::registry::{kernels, kernels_of, KernelId};
use crate::stream::{Owner, Purpose, Sink};
use crate::tuning::explain::explain;
use crate::tuning::explain_operation::explain_operation;
use std::ffi::CString;

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
    /// What K (`nvb_linear_case.depth`), or attention's head_dim, must be a multiple of; 1: any.
    pub depth_multiple: u32,
    /// Bytes that rows of the input, or of queries, keys and values, start at multiples of; 1: any.
    pub alignment: u32,
    /// 1 if it is in force as the override.
    pub overridden: u32,
    /// Most rows of the input (M); 0: any.
    pub maximum_rows: u64,
    /// For `nvb_kernel_override` and `nvb_backend_options.linear_kernel`.
    pub name: [c_char; 64],
    /// Dtypes of the input or the queries, separated by spaces: "f16 bf16".
    pub inputs: [c_char; 32],
    /// What the weight may be kept in (`nvb_weight_info.encoding`), or the keys and values, likewise: "bf16 fp8_e4m3 int8".
    pub encodings: [c_char; 96],
    /// What it does, a sentence or two.
    pub summary: [c_char; 256],
}
versioned!(nvb_kernel_info);

/// The kernels of the backend's device, or of all devices for NULL, and whether each is in force as an override.
fn list(backend: *const nvb_backend) -> Result<Vec<(KernelId, bool)>> {
    if backend.is_null() {
        return Ok(kernels().map(|(id, _)| (id, false)).collect());
    }
    let object = BACKENDS.get(backend)?;
    let executor = object.backend.executor();
    Ok(kernels_of(executor.info().kind)
        .map(|(id, _)| (id, executor.choices().overridden(id.kernel().operation) == Some(id)))
        .collect())
}

/// Writes the number of kernels of the backend's device; of all that the library has, for a NULL backend.
#[no_mangle]
pub unsafe extern "C" fn nvb_kernel_count(backend: *const nvb_backend, count: *mut u32) -> nvb_status {
    guard!(nvb_kernel_count, {
        expect_out("count", count)?;
        let found = list(backend)?;
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
        let (id, overridden) = *element("kernel", &list(backend)?, index)?;
        let kernel = id.kernel();
        let words = |words: Vec<String>| words.join(" ");
        let value = nvb_kernel_info {
            struct_size: 0,
            operation: kernel.operation as u32,
            device_kind: kind_code(kernel.device),
            compute_capability: kernel.limits.capability as u32,
            depth_multiple: kernel.limits.depth_multiple as u32,
            alignment: kernel.limits.alignment as u32,
            overridden: overridden.into(),
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

/// `reason`, of a plan: the executor has no other kernel for the operation.
pub const NVB_REASON_ONLY: u32 = 0;
/// `reason`: the default for this shape and device.
pub const NVB_REASON_DEFAULT: u32 = 1;
/// `reason`: `nvb_kernel_override`.
pub const NVB_REASON_OVERRIDE: u32 = 2;
/// `reason`: `nvb_tune_linear`, or a tuning file.
pub const NVB_REASON_TUNED: u32 = 3;
/// `reason`: `batch_invariant` leaves no choice.
pub const NVB_REASON_BATCH_INVARIANT: u32 = 4;

pub(super) fn reason_code(reason: Reason) -> u32 {
    match reason {
        Reason::Only => NVB_REASON_ONLY,
        Reason::Default => NVB_REASON_DEFAULT,
        Reason::Override => NVB_REASON_OVERRIDE,
        Reason::Tuned => NVB_REASON_TUNED,
        Reason::BatchInvariant => NVB_REASON_BATCH_INVARIANT,
    }
}

/// How an operation would run. The texts end with the call that receives it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kernel_plan {
    pub struct_size: usize,
    /// `NVB_OPERATION_…`
    pub operation: u32,
    /// `NVB_REASON_…`
    pub reason: u32,
    /// The kernel's or strategy's name; where there is a choice, as `nvb_kernel_get` has it. Empty: nothing runs.
    pub kernel: *const c_char,
    /// All of it in words, several lines: also how the kernel divides the work, and what stands in others' way.
    pub text: *const c_char,
    /// Workspace with which the operation runs so.
    pub workspace_bytes: u64,
    /// What it must do at the least: floating-point operations, and bytes with each input read and each output written once.
    pub operations: f64,
    pub bytes: f64,
}
versioned!(nvb_kernel_plan);

/// Receives the plan of an operation, in the thread that called it.
pub type nvb_plan_callback = Option<unsafe extern "C" fn(plan: *const nvb_kernel_plan, user_data: *mut c_void)>;

struct Explainer {
    executor: Arc<dyn Executor>,
    callback: unsafe extern "C" fn(*const nvb_kernel_plan, *mut c_void),
    user_data: *mut c_void,
}

// SAFETY: the header asks for a callback that any thread which queues on the stream may call with this data.
unsafe impl Send for Explainer {}
// SAFETY: as above.
unsafe impl Sync for Explainer {}

impl Sink for Explainer {
    fn purpose(&self) -> Purpose {
        Purpose::Explanation
    }

    fn take(&self, op: Operation, _owner: Option<Owner>) -> Result<()> {
        let plan = self.executor.plan(&op)?;
        let no_nul = |text: String| CString::new(text).map_err(|_| Error::invalid("a text with a NUL"));
        let text = no_nul(explain_operation(&*self.executor, &op, &plan))?;
        let kernel = no_nul(plan.kernel.to_string())?;
        let cost = op.cost();
        let plan = nvb_kernel_plan {
            struct_size: size_of::<nvb_kernel_plan>(),
            operation: op.kind() as u32,
            reason: reason_code(plan.reason),
            kernel: kernel.as_ptr(),
            text: text.as_ptr(),
            workspace_bytes: plan.workspace as u64,
            operations: cost.operations,
            bytes: cost.bytes,
        };
        // SAFETY: the plan and its texts live until the call returns, and the data is the callback's.
        unsafe { (self.callback)(&plan, self.user_data) };
        Ok(())
    }
}

/// From now on operations on `stream` (NULL: the backend's default stream) do not run: each call checks its arguments as ever
/// and tells `callback` how it would run, before it returns. With a NULL `callback` they run again. Any operation can be asked
/// so, copies and fills too; allocations, events and waits go on as before, and what a KV cache holds cannot change on the
/// stream meanwhile. It holds for this handle: other handles of the same CUDA stream run their operations. The callback may be
/// called until then with `user_data`, from the threads that queue on the stream, and must not queue on it.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (the stream's operations are explained or recorded already).
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_explain(
    backend: *const nvb_backend,
    stream: *mut nvb_stream,
    callback: nvb_plan_callback,
    user_data: *mut c_void,
) -> nvb_status {
    guard!(nvb_stream_explain, {
        let (backend, stream) = backend_and_stream(backend, stream)?;
        match callback {
            Some(callback) => {
                stream.begin_sink(Arc::new(Explainer { executor: backend.executor().clone(), callback, user_data }))
            }
            None => stream.end_sink(|sink| sink.purpose() == Purpose::Explanation),
        }
    })
}

/// Writes which kernel the product would run and why (the override, a tuned entry, the default; what it falls back from),
/// which others could do it, and which cannot; `nvb_stream_explain` does so for every operation. `text` receives up to
/// `capacity` bytes with a closing NUL and may be NULL; `*needed` what all of it takes and may be NULL. Nothing is queued, and without a `weight` in `product` no memory is needed.
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

/// From now on the backend's calls of `operation` (`NVB_OPERATION_LINEAR`; on a GPU also `NVB_OPERATION_ATTENTION_PREFILL` and
/// `NVB_OPERATION_ATTENTION_DECODE`) take the kernel of this name where it can do them, and what they would have taken where it
/// cannot. NULL or "" ends that. Set around a set of calls it holds for what is
/// queued in between, of all threads; a recorded graph keeps what it was recorded with.
/// Errors: `NVB_ERROR_CONFIGURATION` (a name that this backend's device has no kernel of; the text lists those there are; on a
/// GPU any name of a product's with `batch_invariant`).
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
        object.backend.executor().choices().set_override(kind, &name)
    })
}
