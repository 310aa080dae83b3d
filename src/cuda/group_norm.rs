//! `group_norm` on CUDA: the launcher of csrc/group_norm.

use super::norm::vector_data;
use super::prelude::*;
use crate::operation::group_norm::{GroupNorm, ImageLayout};

/// `nvb_group_norm_params` of csrc/group_norm/group_norm.h.
#[repr(C)]
struct Params {
    input: *const c_void,
    output: *mut c_void,
    weight: *const c_void,
    bias: *const c_void,
    samples: i64,
    channels: i64,
    positions: i64,
    groups: i64,
    input_sample_stride: i64,
    input_row_stride: i64,
    output_sample_stride: i64,
    output_row_stride: i64,
    input_dtype: u32,
    output_dtype: u32,
    weight_dtype: u32,
    activation: u32,
    channels_last: u32,
    epsilon: f32,
}

extern "C" {
    fn nvb_cuda_group_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &GroupNorm, stream: RawHandle) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params {
        input: op.input.data,
        output: op.output.data,
        weight: vector_data(op.weight),
        bias: vector_data(op.bias),
        samples: op.input.tokens as i64,
        channels: op.channels() as i64,
        positions: op.positions() as i64,
        groups: op.groups as i64,
        input_sample_stride: op.input.token_stride as i64,
        input_row_stride: op.input.head_stride as i64,
        output_sample_stride: op.output.token_stride as i64,
        output_row_stride: op.output.head_stride as i64,
        input_dtype: op.input.dtype as u32,
        output_dtype: op.output.dtype as u32,
        weight_dtype: op.weight.or(op.bias).map_or(DType::F32, |vector| vector.dtype) as u32,
        activation: op.activation as u32,
        channels_last: (op.layout == ImageLayout::Nhwc).into(),
        epsilon: op.epsilon,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_group_norm(&params, &executor.launch_on(stream)) }, "group_norm")
}
