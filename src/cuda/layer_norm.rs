//! `layer_norm` on CUDA: the launcher of csrc/layer_norm.

use super::norm::NormRows;
use super::prelude::*;
use crate::operation::layer_norm::LayerNorm;

mirror! {
    /// `nvb_layer_norm_params` of csrc/layer_norm/layer_norm.h.
    #[repr(C)]
    struct Params of(op: &LayerNorm) {
        base: NormRows = NormRows::of(&op.input, [op.residual, op.residual_output, op.output], vectors),
        weight: *const c_void = vector_of(op.weight),
        bias: *const c_void = vector_of(op.bias),
        epsilon: f32 = op.epsilon,
        reserved: u32 = 0,
    }
    with vectors = [op.weight, op.bias];
}

extern "C" {
    fn nvb_cuda_layer_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &LayerNorm, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_layer_norm(&params, &executor.launch_on(stream)) }, "layer_norm")
}
