//! `rms_norm` on CUDA: the launcher of csrc/rms_norm.

use super::norm::NormRows;
use super::prelude::*;
use super::quantized::QuantizedOutput;
use crate::operation::rms_norm::RmsNorm;

mirror! {
    /// `nvb_rms_norm_params` of csrc/rms_norm/rms_norm.h.
    #[repr(C)]
    struct Params of(op: &RmsNorm) {
        base: NormRows = NormRows::of(&op.input, [op.residual, op.residual_output, op.output], vectors),
        post_weight: *const c_void = vector_of(op.post_weight),
        weight: *const c_void = vector_of(op.weight),
        epsilon: f32 = op.epsilon,
        weight_offset: f32 = op.weight_offset,
        quantized_output: QuantizedOutput = QuantizedOutput::of(op.quantized_output),
    }
    with vectors = [op.post_weight, op.weight];
}

extern "C" {
    fn nvb_cuda_rms_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &RmsNorm, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_rms_norm(&params, &executor.launch_on(stream)) }, "rms_norm")
}
