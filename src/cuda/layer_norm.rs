//! `layer_norm` on CUDA: the launcher of csrc/layer_norm.

use super::norm::{vector_data, NormRows};
use super::prelude::*;
use crate::operation::layer_norm::LayerNorm;

/// `nvb_layer_norm_params` of csrc/layer_norm/layer_norm.h.
#[repr(C)]
struct Params {
    base: NormRows,
    weight: *const c_void,
    bias: *const c_void,
    epsilon: f32,
    reserved: u32,
}

extern "C" {
    fn nvb_cuda_layer_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &LayerNorm, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let vectors = [op.weight, op.bias];
    let params = Params {
        base: NormRows::new(&op.input, op.residual, op.residual_output, op.output, vectors),
        weight: vector_data(op.weight),
        bias: vector_data(op.bias),
        epsilon: op.epsilon,
        reserved: 0,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_layer_norm(&params, &executor.launch_on(stream)) }, "layer_norm")
}
