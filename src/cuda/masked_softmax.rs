//! `masked_softmax` on CUDA: the launcher of csrc/masked_softmax.

use super::launch::integers;
use super::prelude::*;
use crate::operation::masked_softmax::MaskedSoftmax;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_masked_softmax_params` of csrc/masked_softmax/masked_softmax.h.
    #[repr(C)]
    struct Params of(op: &MaskedSoftmax) {
        input: *const c_void = op.input.data,
        mask: *const c_void = vector_of(op.mask),
        sinks: *const f32 = vector_of(op.sinks).cast(),
        output: *mut c_void = op.output.data,
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        mask_shape: [i64; MAX_RANK] = integers(op.mask.unwrap_or(op.input).shape),
        mask_strides: [i64; MAX_RANK] = integers(op.mask.unwrap_or(op.input).strides),
        input_dtype: u32 = op.input.dtype as u32,
        mask_dtype: u32 = vector_dtype_of(op.mask),
        output_dtype: u32 = op.output.dtype as u32,
        scale: f32 = op.scale,
        alibi_bias: f32 = op.alibi_bias,
        alibi_heads: u32 = 1 << op.input.shape[1].max(1).ilog2(),
    }
}

extern "C" {
    fn nvb_cuda_masked_softmax(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &MaskedSoftmax, stream: RawHandle) -> Result<()> {
    if op.input.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_masked_softmax(&params, &executor.launch_on(stream)) }, "masked_softmax")
}
