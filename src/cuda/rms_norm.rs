//! `rms_norm` on CUDA: the launcher of csrc/rms_norm.

use super::norm::{vector_data, NormRows};
use super::prelude::*;
use super::quantized::QuantizedOutput;
use crate::operation::rms_norm::RmsNorm;

/// `nvb_rms_norm_params` of csrc/rms_norm/rms_norm.h.
#[repr(C)]
struct Params {
    base: NormRows,
    post_weight: *const c_void,
    weight: *const c_void,
    epsilon: f32,
    weight_offset: f32,
    quantized_output: QuantizedOutput,
}

extern "C" {
    fn nvb_cuda_rms_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &RmsNorm, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let vectors = [op.post_weight, op.weight];
    let params = Params {
        base: NormRows::new(&op.input, op.residual, op.residual_output, op.output, vectors),
        post_weight: vector_data(op.post_weight),
        weight: vector_data(op.weight),
        epsilon: op.epsilon,
        weight_offset: op.weight_offset,
        quantized_output: QuantizedOutput::of(op.quantized_output),
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_rms_norm(&params, &executor.launch_on(stream)) }, "rms_norm")
}
