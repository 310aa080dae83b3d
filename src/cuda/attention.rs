//! `attention` on CUDA: the launchers of csrc/attention.

use super::executor::CudaExecutor;
use super::launch::Launch;
use super::scratch::WorkspaceUse;
use super::workspace::Workspace;
use crate::device::RawHandle;
use crate::error::Result;
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill};
use std::ffi::c_void;

/// `NVB_ATTENTION_MAX_SEQUENCES` of csrc/attention/attention.h.
const MAX_SEQUENCES: usize = 128;
/// `NVB_ATTENTION_DECODE_COUNTERS` of csrc/attention/attention.h.
const DECODE_COUNTERS: usize = 17;

/// `nvb_attention_sequence` of csrc/attention/attention.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sequence {
    kv_offset: i64,
    query_start: i32,
    query_count: i32,
    kv_length: i32,
    first_block: i32,
}

/// `nvb_attention_prefill_params` of csrc/attention/attention.h.
#[repr(C)]
struct PrefillParams {
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    output: *mut c_void,
    lse: *mut c_void,
    query_token_stride: i64,
    query_head_stride: i64,
    key_head_stride: i64,
    key_token_stride: i64,
    value_head_stride: i64,
    value_token_stride: i64,
    output_token_stride: i64,
    output_head_stride: i64,
    query_dtype: u32,
    kv_dtype: u32,
    output_dtype: u32,
    sequences: i32,
    query_heads: i32,
    kv_heads: i32,
    head_dim: i32,
    causal: i32,
    window: i32,
    scale: f32,
    soft_cap: f32,
    reserved: u32,
    sequence: [Sequence; MAX_SEQUENCES],
}

/// `nvb_attention_decode_params` of csrc/attention/attention.h.
#[repr(C)]
struct DecodeParams {
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    positions: *const c_void,
    slots: *const c_void,
    output: *mut c_void,
    lse: *mut c_void,
    workspace: *mut c_void,
    counters: *mut c_void,
    query_token_stride: i64,
    query_head_stride: i64,
    key_sequence_stride: i64,
    key_head_stride: i64,
    key_token_stride: i64,
    value_sequence_stride: i64,
    value_head_stride: i64,
    value_token_stride: i64,
    output_token_stride: i64,
    output_head_stride: i64,
    query_dtype: u32,
    kv_dtype: u32,
    output_dtype: u32,
    sequences: i32,
    query_heads: i32,
    kv_heads: i32,
    head_dim: i32,
    slot_count: i32,
    capacity: i32,
    max_kv_length: i32,
    window: i32,
    splits: i32,
    scale: f32,
    soft_cap: f32,
}

extern "C" {
    fn nvb_cuda_attention_prefill(params: *const PrefillParams, launch: *const Launch) -> i32;
    fn nvb_cuda_attention_decode(params: *const DecodeParams, launch: *const Launch) -> i32;
    fn nvb_cuda_attention_decode_workspace(params: *const DecodeParams, launch: *const Launch) -> usize;
}

pub(super) fn prefill(executor: &CudaExecutor, op: &AttentionPrefill, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let AttentionConfig { query_heads, kv_heads, head_dim, scale, soft_cap, window, causal } = op.config;
    let launch = executor.launch_attention_on(stream);
    for spans in op.sequences.chunks(MAX_SEQUENCES) {
        let mut sequence = [Sequence::default(); MAX_SEQUENCES];
        for (entry, span) in sequence.iter_mut().zip(spans) {
            *entry = Sequence {
                kv_offset: span.kv_offset as i64,
                query_start: span.query_start as i32,
                query_count: span.query_count as i32,
                kv_length: span.kv_length as i32,
                first_block: 0,
            };
        }
        let params = PrefillParams {
            query: op.query.data,
            key: op.key.data,
            value: op.value.data,
            output: op.output.data,
            lse: op.lse.map_or(std::ptr::null_mut(), |lse| lse.data),
            query_token_stride: op.query.token_stride as i64,
            query_head_stride: op.query.head_stride as i64,
            key_head_stride: op.key.head_stride as i64,
            key_token_stride: op.key.token_stride as i64,
            value_head_stride: op.value.head_stride as i64,
            value_token_stride: op.value.token_stride as i64,
            output_token_stride: op.output.token_stride as i64,
            output_head_stride: op.output.head_stride as i64,
            query_dtype: op.query.dtype as u32,
            kv_dtype: op.key.dtype as u32,
            output_dtype: op.output.dtype as u32,
            sequences: spans.len() as i32,
            query_heads: query_heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            causal: causal.into(),
            window: window as i32,
            scale,
            soft_cap,
            reserved: 0,
            sequence,
        };
        // SAFETY: the descriptor was validated, and the context is current.
        executor.check_launch(unsafe { nvb_cuda_attention_prefill(&params, &launch) }, "attention prefill")?;
    }
    Ok(())
}

/// What `decode` keeps in scratch. The context is current.
pub(super) fn decode_workspace(executor: &CudaExecutor, op: &AttentionDecode) -> Workspace {
    let rows = op.query.tokens;
    if rows == 0 {
        return Workspace::none();
    }
    let params = decode_params(op);
    // SAFETY: the query reads the two structs only.
    let bytes = unsafe { nvb_cuda_attention_decode_workspace(&params, &executor.launch_attention_on(RawHandle::NULL)) };
    let counters = rows * op.config.query_heads * DECODE_COUNTERS * size_of::<u32>();
    Workspace::none().with(WorkspaceUse::Kernel, bytes).with(WorkspaceUse::Counters, counters)
}

pub(super) fn decode(executor: &CudaExecutor, op: &AttentionDecode, stream: RawHandle) -> Result<()> {
    if op.query.tokens == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let launch = executor.launch_attention_on(stream);
    let workspace = decode_workspace(executor, op);
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace)?;
    let params = DecodeParams {
        counters: scratch.get(WorkspaceUse::Counters, workspace.of(WorkspaceUse::Counters))?,
        workspace: scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?,
        ..decode_params(op)
    };
    // SAFETY: the descriptor was validated, workspace and counters are as large as asked, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_attention_decode(&params, &launch) }, "attention decode")
}

/// Without workspace and counters.
fn decode_params(op: &AttentionDecode) -> DecodeParams {
    let AttentionConfig { query_heads, kv_heads, head_dim, scale, soft_cap, window, .. } = op.config;
    DecodeParams {
        query: op.query.data,
        key: op.cache.key,
        value: op.cache.value,
        positions: op.positions.data,
        slots: op.slots.map_or(std::ptr::null_mut(), |slots| slots.data),
        output: op.output.data,
        lse: op.lse.map_or(std::ptr::null_mut(), |lse| lse.data),
        workspace: std::ptr::null_mut(),
        counters: std::ptr::null_mut(),
        query_token_stride: op.query.token_stride as i64,
        query_head_stride: op.query.head_stride as i64,
        key_sequence_stride: op.cache.slot_stride as i64,
        key_head_stride: op.cache.head_stride as i64,
        key_token_stride: op.cache.head_dim as i64,
        value_sequence_stride: op.cache.slot_stride as i64,
        value_head_stride: op.cache.head_stride as i64,
        value_token_stride: op.cache.head_dim as i64,
        output_token_stride: op.output.token_stride as i64,
        output_head_stride: op.output.head_stride as i64,
        query_dtype: op.query.dtype as u32,
        kv_dtype: op.cache.dtype as u32,
        output_dtype: op.output.dtype as u32,
        sequences: op.query.tokens as i32,
        query_heads: query_heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        slot_count: op.cache.slots as i32,
        capacity: op.cache.capacity as i32,
        max_kv_length: op.max_kv_length as i32,
        window: window as i32,
        splits: 0,
        scale,
        soft_cap,
    }
}
