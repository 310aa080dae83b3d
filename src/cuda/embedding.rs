//! `embedding` on CUDA: the launchers of csrc/embedding.

use super::prelude::*;
use super::quantized::QuantizedMatrix;
use crate::operation::embedding::Embedding;

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

/// `nvb_embedding_quantized_params` of csrc/embedding/embedding.h.
#[repr(C)]
struct QuantizedParams {
    table: QuantizedMatrix,
    tokens: *const c_void,
    output: *mut c_void,
    rows: i64,
    output_stride: i64,
    output_dtype: u32,
    scale: f32,
}

extern "C" {
    fn nvb_cuda_embedding_quantized(params: *const QuantizedParams, launch: *const Launch) -> i32;
    fn nvb_cuda_embedding(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Embedding, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    if let Some(table) = QuantizedMatrix::of(&op.table) {
        return run_quantized(executor, op, table, stream);
    }
    let table_dtype = op.table.dtype().expect("a table that is not quantised");
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

fn run_quantized(executor: &CudaExecutor, op: &Embedding, table: QuantizedMatrix, stream: RawHandle) -> Result<()> {
    let params = QuantizedParams {
        table,
        tokens: op.tokens.data,
        output: op.output.data,
        rows: op.output.rows as i64,
        output_stride: op.output.row_stride as i64,
        output_dtype: op.output.dtype as u32,
        scale: op.scale,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_embedding_quantized(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "quantised embedding")
}
