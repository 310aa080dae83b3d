//! `matmul` on CUDA: cuBLASLt where it is present and has an algorithm, else the launcher of csrc/matmul.

use super::cublaslt::WORKSPACE_BYTES;
use super::prelude::*;
use crate::operation::matmul::{Matmul, MatrixBatch, BATCH_AXES};

mirror! {
    /// `nvb_matmul_params` of csrc/matmul/matmul.h.
    #[repr(C)]
    struct Params of(op: &Matmul) {
        a: *const c_void = op.a.data,
        b: *const c_void = op.b.data,
        output: *mut c_void = op.output.data,
        m: i64 = op.m as i64,
        n: i64 = op.n as i64,
        k: i64 = op.k as i64,
        batch: [i64; BATCH_AXES] = op.batch.map(|extent| extent as i64),
        a_batch_strides: [i64; BATCH_AXES] = strides(&op.a),
        b_batch_strides: [i64; BATCH_AXES] = strides(&op.b),
        output_batch_strides: [i64; BATCH_AXES] = strides(&op.output),
        a_stride: i64 = op.a.row_stride as i64,
        b_stride: i64 = op.b.row_stride as i64,
        output_stride: i64 = op.output.row_stride as i64,
        dtype: u32 = op.a.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        transpose_a: u32 = op.transpose_a.into(),
        transpose_b: u32 = op.transpose_b.into(),
        alpha: f32 = op.alpha,
        reserved: u32 = 0,
    }
    with strides = |matrix: &MatrixBatch| matrix.batch_strides.map(|stride| stride as i64);
}

extern "C" {
    fn nvb_cuda_matmul(params: *const Params, launch: *const Launch) -> i32;
}

/// The ends of a grid of our kernel: matrices, and rows in tiles of 64.
const MAX_MATRICES: usize = 65_535;
const MAX_ROWS: usize = 65_535 * 64;

/// Our kernel adds in the same order whatever the extents are; cuBLASLt promises nothing of the kind.
fn asks_vendor(executor: &CudaExecutor, op: &Matmul) -> bool {
    op.k > 0 && !executor.batch_invariant
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &Matmul) -> Workspace {
    let empty = op.batch[0] * op.batch[1] * op.m * op.n == 0;
    match !empty && asks_vendor(executor, op) && executor.cublaslt().is_some() {
        true => Workspace::none().with(WorkspaceUse::Kernel, WORKSPACE_BYTES),
        false => Workspace::none(),
    }
}

pub(super) fn run(executor: &CudaExecutor, op: &Matmul, stream: RawHandle) -> Result<()> {
    let [outer, inner] = op.batch;
    if outer * inner * op.m * op.n == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    if let Some(cublaslt) = executor.cublaslt().filter(|_| asks_vendor(executor, op)) {
        let scratch = executor.scratch(stream);
        if cublaslt.batched(op, &mut scratch.lock(executor, stream, || workspace(executor, op))?, stream)? {
            return Ok(());
        }
    }
    for (name, value, limit) in [("matrices", outer * inner, MAX_MATRICES), ("rows", op.m, MAX_ROWS)] {
        if value > limit {
            return Err(Error::unsupported(format!(
                "matmul of {value} {name} without cuBLASLt; at most {limit} are supported"
            ))
            .with_limit(value as u64, limit as u64));
        }
    }
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_matmul(&params, &executor.launch_on(stream)) }, "matmul")
}
