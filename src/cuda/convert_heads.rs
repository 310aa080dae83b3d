//! `convert_heads` on CUDA: the launcher of csrc/convert_heads.

use super::launch::integers;
use super::prelude::*;
use crate::operation::convert_heads::{rotation_block, ConvertHeads, SIGN_WORDS};
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_convert_heads_params` of csrc/convert_heads/convert_heads.h.
    #[repr(C)]
    struct Params of(op: &ConvertHeads) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        scales: *mut f32 = vector_of(op.scales.map(|scales| scales.tensor)).cast(),
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        heads_per_scale: i64 = op.heads_per_scale() as i64,
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        write_scales: u32 = op.scales.is_some_and(|scales| scales.written).into(),
        block: u32 = rotation_block(op.input.shape[3]) as u32,
        factor: f32 = op.rotation.map_or(1.0, |rotation| rotation.factor),
        largest: f32 = op.largest(),
        rotate: u32 = op.rotation.is_some().into(),
        signs: [u32; SIGN_WORDS] = op.rotation.map_or([0; SIGN_WORDS], |rotation| rotation.signs),
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_convert_heads(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &ConvertHeads, stream: RawHandle) -> Result<()> {
    // Without tokens scales are written all the same.
    if op.input.shape[2] == 0 || op.scales.is_none() && op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_convert_heads(&params, &executor.launch_on(stream)) }, "convert_heads")
}
