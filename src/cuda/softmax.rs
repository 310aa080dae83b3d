//! `softmax` on CUDA: the launcher of csrc/softmax.

use super::prelude::*;
use crate::operation::softmax::Softmax;

mirror! {
    /// `nvb_softmax_params` of csrc/softmax/softmax.h.
    #[repr(C)]
    struct Params of(op: &Softmax) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        rows: i64 = op.input.rows as i64,
        columns: i64 = op.input.columns as i64,
        input_stride: i64 = op.input.row_stride as i64,
        output_stride: i64 = op.output.row_stride as i64,
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        scale: f32 = op.scale,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_softmax(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Softmax, stream: RawHandle) -> Result<()> {
    if op.input.rows == 0 || op.input.columns == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_softmax(&params, &executor.launch_on(stream)) }, "softmax")
}
