//! `pointwise` on CUDA: the launcher of csrc/pointwise.

use super::launch::integers;
use super::prelude::*;
use crate::operation::pointwise::Pointwise;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_pointwise_params` of csrc/pointwise/pointwise.h.
    #[repr(C)]
    struct Params of(op: &Pointwise) {
        input: *const c_void = op.input.data,
        second: *const c_void = vector_of(op.second),
        output: *mut c_void = op.output.data,
        shape: [i64; MAX_RANK] = integers(op.output.shape),
        input_shape: [i64; MAX_RANK] = integers(op.input.shape),
        second_shape: [i64; MAX_RANK] = integers(op.second.unwrap_or(op.output).shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        second_strides: [i64; MAX_RANK] = integers(op.second.unwrap_or(op.output).strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        function: u32 = op.function as u32,
        input_dtype: u32 = op.input.dtype as u32,
        second_dtype: u32 = vector_dtype_of(op.second),
        output_dtype: u32 = op.output.dtype as u32,
        alpha: f32 = op.alpha,
        beta: f32 = op.beta,
    }
}

extern "C" {
    fn nvb_cuda_pointwise(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Pointwise, stream: RawHandle) -> Result<()> {
    if op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_pointwise(&params, &executor.launch_on(stream)) }, "pointwise")
}
