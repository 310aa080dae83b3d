//! `sort_rows` on CUDA: the launcher of csrc/sort_rows.

use super::launch::integers;
use super::prelude::*;
use crate::operation::sort_rows::SortRows;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_sort_rows_params` of csrc/sort_rows/sort_rows.h.
    #[repr(C)]
    struct Params of(op: &SortRows) {
        input: *const c_void = op.input.data,
        output: *mut i32 = op.output.data.cast(),
        workspace: *mut c_void = std::ptr::null_mut(),
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        count: i64 = op.count() as i64,
        input_dtype: u32 = op.input.dtype as u32,
        descending: u32 = op.descending.into(),
    }
}

extern "C" {
    fn nvb_cuda_sort_rows(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_sort_rows_workspace(params: *const Params) -> usize;
}

pub(super) fn run(executor: &CudaExecutor, op: &SortRows, stream: RawHandle) -> Result<()> {
    if op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let launch = executor.launch_on(stream);
    let workspace = workspace(op);
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace)?;
    let mut params = Params::of(op);
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_sort_rows(&params, &launch) }, "sort_rows")
}

/// What `run` keeps in scratch: lists of keys of rows that are longer than shared memory.
pub(super) fn workspace(op: &SortRows) -> Workspace {
    if op.output.is_empty() {
        return Workspace::none();
    }
    // SAFETY: the query reads the struct only.
    let bytes = unsafe { nvb_cuda_sort_rows_workspace(&Params::of(op)) };
    Workspace::none().with(WorkspaceUse::Kernel, bytes)
}
