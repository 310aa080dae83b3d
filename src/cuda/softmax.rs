//! `softmax` on CUDA: the launcher of csrc/softmax.

use super::prelude::*;
use crate::operation::softmax::Softmax;

/// `nvb_softmax_params` of csrc/softmax/softmax.h.
#[repr(C)]
struct Params {
    input: *const c_void,
    output: *mut c_void,
    rows: i64,
    columns: i64,
    input_stride: i64,
    output_stride: i64,
    input_dtype: u32,
    output_dtype: u32,
    scale: f32,
    reserved: u32,
}

extern "C" {
    fn nvb_cuda_softmax(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Softmax, stream: RawHandle) -> Result<()> {
    if op.input.rows == 0 || op.input.columns == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params {
        input: op.input.data,
        output: op.output.data,
        rows: op.input.rows as i64,
        columns: op.input.columns as i64,
        input_stride: op.input.row_stride as i64,
        output_stride: op.output.row_stride as i64,
        input_dtype: op.input.dtype as u32,
        output_dtype: op.output.dtype as u32,
        scale: op.scale,
        reserved: 0,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_softmax(&params, &executor.launch_on(stream)) }, "softmax")
}
