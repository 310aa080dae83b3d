//! `sample` on CUDA: the launcher of csrc/sample.

use super::prelude::*;
use crate::operation::sample::Sample;
use crate::tensor::Tensor;

/// `nvb_sample_params` of csrc/sample/sample.h.
#[repr(C)]
struct Params {
    logits: *const c_void,
    sequences: *const c_void,
    positions: *const c_void,
    tokens: *mut c_void,
    probabilities: *mut c_void,
    workspace: *mut c_void,
    rows: i64,
    columns: i64,
    logits_stride: i64,
    seed: u64,
    logits_dtype: u32,
    top_k: i32,
    temperature: f32,
    top_p: f32,
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
    let mut params = params(op);
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_sample(&params, &launch) }, "sample")
}

/// Without workspace.
fn params(op: &Sample) -> Params {
    let data = |tensor: Option<Tensor>| tensor.map_or(std::ptr::null_mut(), |tensor| tensor.data);
    Params {
        logits: op.logits.data,
        sequences: data(op.sequences),
        positions: data(op.positions),
        tokens: op.tokens.data,
        probabilities: data(op.probabilities),
        workspace: std::ptr::null_mut(),
        rows: op.logits.rows as i64,
        columns: op.logits.columns as i64,
        logits_stride: op.logits.row_stride as i64,
        seed: op.options.seed,
        logits_dtype: op.logits.dtype as u32,
        top_k: op.options.top_k.min(i32::MAX as u32) as i32,
        temperature: op.options.temperature,
        top_p: op.options.top_p,
    }
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &Sample) -> Workspace {
    // SAFETY: the query reads the two structs only.
    let bytes = unsafe { nvb_cuda_sample_workspace(&params(op), &executor.launch_on(RawHandle::NULL)) };
    Workspace::none().with(WorkspaceUse::Kernel, bytes)
}
