//! `argmax` on CUDA: the launcher of csrc/argmax.

use super::prelude::*;
use crate::operation::argmax::Argmax;

mirror! {
    /// `nvb_argmax_params` of csrc/argmax/argmax.h.
    #[repr(C)]
    struct Params of(op: &Argmax) {
        logits: *const c_void = op.logits.data,
        tokens: *mut c_void = op.tokens.data,
        workspace: *mut c_void = std::ptr::null_mut(),
        rows: i64 = op.logits.rows as i64,
        columns: i64 = op.logits.columns as i64,
        logits_stride: i64 = op.logits.row_stride as i64,
        logits_dtype: u32 = op.logits.dtype as u32,
        reserved: u32 = 0,
    }
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
    let mut params = Params::of(op);
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_argmax(&params, &launch) }, "argmax")
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &Argmax) -> Workspace {
    // SAFETY: the query reads the two structs only.
    let bytes = unsafe { nvb_cuda_argmax_workspace(&Params::of(op), &executor.launch_on(RawHandle::NULL)) };
    Workspace::none().with(WorkspaceUse::Kernel, bytes)
}
