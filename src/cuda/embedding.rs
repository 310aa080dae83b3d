//! `embedding` on CUDA: the launcher of csrc/embedding.

use super::executor::CudaExecutor;
use super::launch::Launch;
use crate::error::{Error, Result};
use crate::ops::embedding::Embedding;
use crate::stream::RawHandle;
use std::ffi::c_void;

/// `nvb_embedding_params` of csrc/embedding/embedding.h.
#[repr(C)]
struct Params {
    tokens: *const c_void,
    table: *const c_void,
    output: *mut c_void,
    rows: i64,
    vocabulary: i64,
    columns: i64,
    table_stride: i64,
    output_stride: i64,
    table_dtype: u32,
    output_dtype: u32,
    scale: f32,
    reserved: u32,
}
const _: () = assert!(size_of::<Params>() == 80);

extern "C" {
    fn nvb_cuda_embedding(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Embedding, stream: RawHandle) -> Result<()> {
    let Some(table_dtype) = op.table.dtype() else {
        return Err(Error::unsupported(format!("CUDA has no embedding from {} tables", op.table.encoding)));
    };
    let _guard = executor.enter()?;
    let params = Params {
        tokens: op.tokens.data,
        table: op.table.data,
        output: op.output.data,
        rows: op.output.rows as i64,
        vocabulary: op.table.rows as i64,
        columns: op.output.columns as i64,
        table_stride: op.table.row_stride as i64,
        output_stride: op.output.row_stride as i64,
        table_dtype: table_dtype as u32,
        output_dtype: op.output.dtype as u32,
        scale: op.scale,
        reserved: 0,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_embedding(&params, &executor.launch_on(stream)) }, "embedding")
}
