//! `embedding` on CUDA: the launchers of csrc/embedding.

use super::prelude::*;
use super::quantized::QuantizedMatrix;
use crate::operation::embedding::Embedding;

mirror! {
    /// `nvb_embedding_params` of csrc/embedding/embedding.h.
    #[repr(C)]
    struct Params of(op: &Embedding, table_dtype: DType) {
        tokens: *const c_void = op.tokens.data,
        table: *const c_void = op.table.data,
        output: *mut c_void = op.output.data,
        rows: i64 = op.output.rows as i64,
        vocabulary: i64 = op.vocabulary() as i64,
        batch_tokens: i64 = op.tokens_of_a_batch() as i64,
        token_stride: i64 = op.token_stride() as i64,
        columns: i64 = op.output.columns as i64,
        table_stride: i64 = op.table.row_stride as i64,
        output_stride: i64 = op.output.row_stride as i64,
        table_dtype: u32 = table_dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        scale: f32 = op.scale,
        reserved: u32 = 0,
    }
}

mirror! {
    /// `nvb_embedding_quantized_params` of csrc/embedding/embedding.h.
    #[repr(C)]
    struct QuantizedParams of(op: &Embedding, table: QuantizedMatrix) {
        table: QuantizedMatrix,
        tokens: *const c_void = op.tokens.data,
        output: *mut c_void = op.output.data,
        rows: i64 = op.output.rows as i64,
        output_stride: i64 = op.output.row_stride as i64,
        output_dtype: u32 = op.output.dtype as u32,
        scale: f32 = op.scale,
    }
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
    let params = Params::of(op, table_dtype);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_embedding(&params, &executor.launch_on(stream)) }, "embedding")
}

fn run_quantized(executor: &CudaExecutor, op: &Embedding, table: QuantizedMatrix, stream: RawHandle) -> Result<()> {
    let params = QuantizedParams::of(op, table);
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_embedding_quantized(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "quantised embedding")
}
