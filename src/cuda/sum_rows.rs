//! `sum_rows` on CUDA: the launcher of csrc/sum_rows.

use super::launch::integers;
use super::prelude::*;
use crate::operation::sum_rows::SumRows;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_sum_rows_params` of csrc/sum_rows/sum_rows.h.
    #[repr(C)]
    struct Params of(op: &SumRows) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        scale: f32 = op.scale,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_sum_rows(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &SumRows, stream: RawHandle) -> Result<()> {
    if op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_sum_rows(&params, &executor.launch_on(stream)) }, "sum_rows")
}
