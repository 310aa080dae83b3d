//! The attention over all keys from the results over parts of them.

use super::backend::arguments;
use super::prelude::*;
use super::tensor::{device_tensor, nvb_tensor, optional_device_tensor};
use crate::operation::attention_merge::AttentionMerge;

/// lse = ln Σₚ exp(lses[p]); output = Σₚ exp(lses[p] − lse) · outputs[p].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_merge_args {
    pub struct_size: usize,
    /// [P, T, query_heads, head_dim] of any float dtype, P from 1 on: the outputs over parts of the keys. Parts, tokens and heads
    /// may lie apart.
    pub outputs: nvb_tensor,
    /// F32 [P, T, query_heads], natural logarithms, as `nvb_attention_prefill` and `nvb_attention_decode` write them. A part that
    /// saw no key has −inf and counts nothing, whatever its output holds.
    pub lses: nvb_tensor,
    /// [T, query_heads, head_dim], any float dtype; 0 where every part has −inf. Must not overlap `outputs` or `lses`.
    pub output: nvb_tensor,
    /// Optional, F32 [T, query_heads], contiguous: the joint lse, −inf where every part has it.
    pub lse: nvb_tensor,
}
versioned!(nvb_attention_merge_args);

/// Queues the merge of attention's results over disjoint parts of the keys: a shared prefix and what follows it, a cache on
/// several devices, the chunks of a long prompt. In f32, in the order of the parts, rounded once. Does not synchronise or
/// allocate; may be captured.
/// Formula: the reduction of "flash-decoding" (Dao et al. 2023), which is that of FlashAttention 2's tiles.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (no part, a head_dim past 512, shapes, dtypes and strides that do not fit, an overlap).
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_merge(
    backend: *const nvb_backend,
    args: *const nvb_attention_merge_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_attention_merge, {
        arguments!(backend, args, stream);
        let op = AttentionMerge::new(
            device_tensor(&backend, "outputs", &args.outputs)?,
            device_tensor(&backend, "lses", &args.lses)?,
            device_tensor(&backend, "output", &args.output)?,
            optional_device_tensor(&backend, "lse", &args.lse)?,
        )?;
        backend.queue(op, &stream)
    })
}
