//! `group_norm` on CUDA: the launcher of csrc/group_norm.

use super::prelude::*;
use crate::operation::group_norm::{GroupNorm, ImageLayout};

mirror! {
    /// `nvb_group_norm_params` of csrc/group_norm/group_norm.h.
    #[repr(C)]
    struct Params of(op: &GroupNorm) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        weight: *const c_void = vector_of(op.weight),
        bias: *const c_void = vector_of(op.bias),
        samples: i64 = op.input.tokens as i64,
        channels: i64 = op.channels() as i64,
        positions: i64 = op.positions() as i64,
        groups: i64 = op.groups as i64,
        input_sample_stride: i64 = op.input.token_stride as i64,
        input_row_stride: i64 = op.input.head_stride as i64,
        output_sample_stride: i64 = op.output.token_stride as i64,
        output_row_stride: i64 = op.output.head_stride as i64,
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        weight_dtype: u32 = vector_dtype_of(op.weight.or(op.bias)),
        activation: u32 = op.activation as u32,
        channels_last: u32 = (op.layout == ImageLayout::Nhwc).into(),
        epsilon: f32 = op.epsilon,
    }
}

extern "C" {
    fn nvb_cuda_group_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &GroupNorm, stream: RawHandle) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_group_norm(&params, &executor.launch_on(stream)) }, "group_norm")
}
