//! `attention_merge` on CUDA: the launcher of csrc/attention_merge.

use super::prelude::*;
use crate::operation::attention_merge::AttentionMerge;

mirror! {
    /// `nvb_attention_merge_params` of csrc/attention_merge/attention_merge.h.
    #[repr(C)]
    struct Params of(op: &AttentionMerge) {
        outputs: *const c_void = op.outputs.data,
        lses: *const c_void = op.lses.data,
        output: *mut c_void = op.output.data,
        lse: *mut c_void = op.lse.map_or(std::ptr::null_mut(), |lse| lse.data),
        part_stride: i64 = op.outputs.strides[0] as i64,
        token_stride: i64 = op.outputs.strides[1] as i64,
        head_stride: i64 = op.outputs.strides[2] as i64,
        lse_part_stride: i64 = op.lses.strides[0] as i64,
        lse_token_stride: i64 = op.lses.strides[1] as i64,
        lse_head_stride: i64 = op.lses.strides[2] as i64,
        output_token_stride: i64 = op.output.token_stride as i64,
        output_head_stride: i64 = op.output.head_stride as i64,
        parts: i32 = op.parts() as i32,
        tokens: i32 = op.output.tokens as i32,
        heads: i32 = op.output.heads as i32,
        head_dim: i32 = op.output.head_dim as i32,
        input_dtype: u32 = op.outputs.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
    }
}

extern "C" {
    fn nvb_cuda_attention_merge(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &AttentionMerge, stream: RawHandle) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_attention_merge(&params, &executor.launch_on(stream)) }, "attention_merge")
}
