//! `scatter_rows` on CUDA: the launcher of csrc/scatter_rows.

use super::launch::integers;
use super::prelude::*;
use crate::operation::scatter_rows::ScatterRows;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_scatter_rows_params` of csrc/scatter_rows/scatter_rows.h.
    #[repr(C)]
    struct Params of(op: &ScatterRows) {
        input: *const c_void = op.input.data,
        rows: *const i32 = op.rows.data.cast(),
        output: *mut c_void = op.output.data,
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        rows_shape: [i64; MAX_RANK] = integers(op.rows.shape),
        rows_strides: [i64; MAX_RANK] = integers(op.rows.strides),
        output_rows: i64 = op.output.shape[2] as i64,
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
    }
}

extern "C" {
    fn nvb_cuda_scatter_rows(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &ScatterRows, stream: RawHandle) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_scatter_rows(&params, &executor.launch_on(stream)) }, "scatter_rows")
}
