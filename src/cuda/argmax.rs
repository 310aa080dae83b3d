//! `argmax` on CUDA: the launcher of csrc/argmax.

use super::prelude::*;
use crate::operation::argmax::Argmax;

/// `nvb_argmax_params` of csrc/argmax/argmax.h.
#[repr(C)]
struct Params {
    logits: *const c_void,
    tokens: *mut c_void,
    workspace: *mut c_void,
    rows: i64,
    columns: i64,
    logits_stride: i64,
    logits_dtype: u32,
    reserved: u32,
}

extern "C" {
    fn nvb_cuda_argmax(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_argmax_workspace(params: *const Params, launch: *const Launch) -> usize;
}

pub(super) fn run(executor: &CudaExecutor, op: &Argmax, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let launch = executor.launch_on(stream);
    let workspace = workspace(executor, op);
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace)?;
    let mut params = params(op);
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_argmax(&params, &launch) }, "argmax")
}

/// Without workspace.
fn params(op: &Argmax) -> Params {
    Params {
        logits: op.logits.data,
        tokens: op.tokens.data,
        workspace: std::ptr::null_mut(),
        rows: op.logits.rows as i64,
        columns: op.logits.columns as i64,
        logits_stride: op.logits.row_stride as i64,
        logits_dtype: op.logits.dtype as u32,
        reserved: 0,
    }
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &Argmax) -> Workspace {
    // SAFETY: the query reads the two structs only.
    let bytes = unsafe { nvb_cuda_argmax_workspace(&params(op), &executor.launch_on(RawHandle::NULL)) };
    Workspace::none().with(WorkspaceUse::Kernel, bytes)
}
