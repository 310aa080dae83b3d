//! `sample` on CUDA: the launcher of csrc/sample.

use super::prelude::*;
use crate::operation::sample::Sample;

mirror! {
    /// `nvb_sample_params` of csrc/sample/sample.h.
    #[repr(C)]
    struct Params of(op: &Sample) {
        logits: *const c_void = op.logits.data,
        sequences: *const c_void = vector_of(op.sequences),
        positions: *const c_void = vector_of(op.positions),
        tokens: *mut c_void = op.tokens.data,
        probabilities: *mut c_void = vector_of(op.probabilities),
        workspace: *mut c_void = std::ptr::null_mut(),
        rows: i64 = op.logits.rows as i64,
        columns: i64 = op.logits.columns as i64,
        logits_stride: i64 = op.logits.row_stride as i64,
        seed: u64 = op.options.seed,
        logits_dtype: u32 = op.logits.dtype as u32,
        top_k: i32 = op.options.top_k.min(i32::MAX as u32) as i32,
        temperature: f32 = op.options.temperature,
        top_p: f32 = op.options.top_p,
    }
}

/// What the kernels' integer sums of weights hold.
const MAX_COLUMNS: usize = (1 << 20) - 1;

extern "C" {
    fn nvb_cuda_sample(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_sample_workspace(params: *const Params, launch: *const Launch) -> usize;
}

pub(super) fn run(executor: &CudaExecutor, op: &Sample, stream: RawHandle) -> Result<()> {
    if op.logits.columns > MAX_COLUMNS {
        return Err(Error::unsupported(format!(
            "sampling from {} logits; at most {MAX_COLUMNS} on CUDA",
            op.logits.columns
        ))
        .with_limit(op.logits.columns as u64, MAX_COLUMNS as u64));
    }
    let _guard = executor.enter()?;
    let launch = executor.launch_on(stream);
    let workspace = workspace(executor, op);
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace)?;
    let mut params = Params::of(op);
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_sample(&params, &launch) }, "sample")
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &Sample) -> Workspace {
    // SAFETY: the query reads the two structs only.
    let bytes = unsafe { nvb_cuda_sample_workspace(&Params::of(op), &executor.launch_on(RawHandle::NULL)) };
    Workspace::none().with(WorkspaceUse::Kernel, bytes)
}
