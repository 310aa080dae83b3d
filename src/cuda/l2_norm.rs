//! `l2_norm` on CUDA: the launcher of csrc/l2_norm.

use super::launch::integers;
use super::prelude::*;
use crate::operation::l2_norm::L2Norm;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_l2_norm_params` of csrc/l2_norm/l2_norm.h.
    #[repr(C)]
    struct Params of(op: &L2Norm) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        epsilon: f32 = op.epsilon,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_l2_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &L2Norm, stream: RawHandle) -> Result<()> {
    if op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_l2_norm(&params, &executor.launch_on(stream)) }, "l2_norm")
}
