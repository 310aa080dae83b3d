//! `attention` on CUDA: the launchers of csrc/attention, by the plans of `attention_plan`.

use super::attention_merge;
use super::attention_plan::{covered_rows, partial_bytes, DecodePlan, PrefillPlan};
use super::attention_prefix;
use super::executor::CudaExecutor;
use super::kernel_table::row;
use super::kv_placement::{sequence_stride, KvPlacement};
use super::launch::{vector_of, Launch};
use super::scratch::WorkspaceUse;
use super::workspace::Workspace;
use crate::device::RawHandle;
use crate::error::{Error, Result};
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, DeviceLengths, SequenceSpan};
use crate::operation::attention_merge::AttentionMerge;
use crate::operation::rope::Rotation;
use crate::operation::Operation;
use crate::registry::KernelId;
use crate::tensor::{DType, Heads, Tensor};
use std::ffi::c_void;

/// `NVB_ATTENTION_MAX_SEQUENCES` of csrc/attention/attention.h.
pub(super) const MAX_SEQUENCES: usize = 128;
/// Blocks of a launch along the axes of a grid that sequences and heads have.
const MOST_BLOCKS: usize = 65_535;

/// `nvb_attention_sequence` of csrc/attention/attention.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Sequence {
    query_start: i32,
    pub query_count: i32,
    kv_start: i32,
    kv_length: i32,
    pub first_block: i32,
    prefix: i32,
}

/// `nvb_attention_prefill_params` of csrc/attention/attention.h.
#[repr(C)]
pub(super) struct PrefillParams {
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    output: *mut c_void,
    lse: *mut c_void,
    query_scale: *const c_void,
    key_scale: *const c_void,
    value_scale: *const c_void,
    mask: *const c_void,
    sinks: *const c_void,
    slopes: *const c_void,
    tree_parents: *const c_void,
    mask_tiles: *mut c_void,
    partial: *mut c_void,
    counters: *mut c_void,
    pub query_starts: *const c_void,
    kv_starts: *const c_void,
    kv_lengths: *const c_void,
    kv_sequences: *const c_void,
    dropout_offsets: *const c_void,
    query_sequence_stride: i64,
    query_token_stride: i64,
    query_head_stride: i64,
    key_sequence_stride: i64,
    key_token_stride: i64,
    key_head_stride: i64,
    value_sequence_stride: i64,
    value_token_stride: i64,
    value_head_stride: i64,
    output_sequence_stride: i64,
    output_token_stride: i64,
    output_head_stride: i64,
    lse_sequence_stride: i64,
    mask_sequence_stride: i64,
    mask_row_stride: i64,
    mask_head_stride: i64,
    dropout_seed: u64,
    dropout_offset: u64,
    query_dtype: u32,
    kv_dtype: u32,
    value_dtype: u32,
    output_dtype: u32,
    mask_dtype: u32,
    query_scale_stride: i32,
    key_scale_stride: i32,
    value_scale_stride: i32,
    pub sequences: i32,
    pub query_heads: i32,
    kv_heads: i32,
    head_dim: i32,
    value_dim: i32,
    causal: i32,
    window: i32,
    scale: f32,
    soft_cap: f32,
    heads_per_group: i32,
    pub query_rows: i32,
    kv_rows: i32,
    pub max_query_count: i32,
    max_kv_length: i32,
    chunk: i32,
    sink_tokens: i32,
    dropout_threshold: u32,
    dropout_scale: f32,
    pub parts: i32,
    pub part_rows: i32,
    pub one_order: i32,
    reserved: u32,
    placement: KvPlacement,
    sequence: [Sequence; MAX_SEQUENCES],
}

/// `nvb_attention_decode_rope` of csrc/attention/attention.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DecodeRopeParams {
    key: *const c_void,
    value: *const c_void,
    query_norm: *const c_void,
    key_norm: *const c_void,
    key_token_stride: i64,
    key_head_stride: i64,
    value_token_stride: i64,
    value_head_stride: i64,
    key_dtype: u32,
    value_dtype: u32,
    query_norm_dtype: u32,
    key_norm_dtype: u32,
    rotary_dim: i32,
    base: f32,
    position_scale: f32,
    query_scale: f32,
    epsilon: f32,
    weight_offset: f32,
}

impl DecodeRopeParams {
    /// Of a decode that rotates and appends its tokens. [`DecodeParams`] with its address live no longer than it.
    pub fn of(op: &AttentionDecode) -> Option<DecodeRopeParams> {
        let rope = op.rope?;
        let rotation = rope.rotation.unwrap_or(Rotation { base: 1.0, position_scale: 1.0, rotary_dim: 0 });
        let norm = |norm: Option<Tensor>| {
            norm.map_or((std::ptr::null(), DType::F32 as u32), |norm| (norm.data.cast_const(), norm.dtype as u32))
        };
        let ((query_norm, query_norm_dtype), (key_norm, key_norm_dtype)) = (norm(rope.query_norm), norm(rope.key_norm));
        Some(DecodeRopeParams {
            key: rope.key.data,
            value: rope.value.data,
            query_norm,
            key_norm,
            key_token_stride: rope.key.token_stride as i64,
            key_head_stride: rope.key.head_stride as i64,
            value_token_stride: rope.value.token_stride as i64,
            value_head_stride: rope.value.head_stride as i64,
            key_dtype: rope.key.dtype as u32,
            value_dtype: rope.value.dtype as u32,
            query_norm_dtype,
            key_norm_dtype,
            rotary_dim: rotation.rotary_dim as i32,
            base: rotation.base,
            position_scale: rotation.position_scale,
            query_scale: rope.query_scale,
            epsilon: rope.epsilon,
            weight_offset: rope.weight_offset,
        })
    }
}

/// `nvb_attention_decode_params` of csrc/attention/attention.h.
#[repr(C)]
pub(super) struct DecodeParams {
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    positions: *const c_void,
    slots: *const c_void,
    output: *mut c_void,
    lse: *mut c_void,
    key_scale: *const c_void,
    value_scale: *const c_void,
    sinks: *const c_void,
    slopes: *const c_void,
    workspace: *mut c_void,
    counters: *mut c_void,
    rope: *const DecodeRopeParams,
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
    value_dtype: u32,
    output_dtype: u32,
    sequences: i32,
    rows_per_sequence: i32,
    query_heads: i32,
    kv_heads: i32,
    head_dim: i32,
    value_dim: i32,
    slot_count: i32,
    capacity: i32,
    max_kv_length: i32,
    window: i32,
    scale: f32,
    soft_cap: f32,
    splits: i32,
    chunks: i32,
    heads_per_chunk: i32,
    slots_per_head: i32,
    chunk: i32,
    sink_tokens: i32,
    placement: KvPlacement,
}

extern "C" {
    fn nvb_cuda_attention_prefill_launch(
        index: i32,
        params: *const PrefillParams,
        blocks: i32,
        launch: *const Launch,
    ) -> i32;
    fn nvb_cuda_attention_decode_launch(index: i32, params: *const DecodeParams, launch: *const Launch) -> i32;
}

pub(super) fn prefill(executor: &CudaExecutor, op: &AttentionPrefill, stream: RawHandle) -> Result<()> {
    let mut params = prefill_params(op);
    let _guard = executor.enter()?;
    if op.is_empty() {
        return Ok(());
    }
    let plan = PrefillPlan::of(executor, op, &mut params).ok_or_else(|| no_kernel(&op.config))?;
    launch_prefill(executor, op, &plan, params, stream)
}

/// The attention by this kernel, a candidate; for measurements.
pub(super) fn with(executor: &CudaExecutor, op: &Operation, kernel: KernelId, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let other = || Error::unsupported(format!("{} cannot do this attention", kernel.kernel().name));
    let row = row(kernel).ok_or_else(other)?;
    match op {
        Operation::AttentionPrefill(op) => {
            let mut params = prefill_params(op);
            let plan = PrefillPlan::by([row], executor, op, &mut params).ok_or_else(other)?;
            launch_prefill(executor, op, &plan, params, stream)
        }
        Operation::AttentionDecode(op) => {
            let rope = DecodeRopeParams::of(op);
            let params = decode_params(op, &rope);
            let plan = DecodePlan::by([row], executor, op, &params).ok_or_else(other)?;
            launch_decode(executor, &plan, params, stream)
        }
        _ => Err(other()),
    }
}

/// The bytes of a workspace for the prefill. The context is current.
pub(super) fn prefill_workspace_bytes(executor: &CudaExecutor, op: &AttentionPrefill) -> usize {
    let plan = PrefillPlan::of(executor, op, &mut prefill_params(op));
    plan.map_or(Workspace::none(), |plan| plan.workspace(op)).total()
}

/// The context is current.
pub(super) fn launch_prefill(
    executor: &CudaExecutor,
    op: &AttentionPrefill,
    plan: &PrefillPlan,
    mut params: PrefillParams,
    stream: RawHandle,
) -> Result<()> {
    params.one_order = executor.batch_invariant.into();
    let scratch = executor.scratch(stream);
    // Where the workspace that the caller has set is too small, the keys stay in one part and no tile is left out.
    let workspace = plan.workspace(op);
    let mut scratch = match workspace.total() {
        0 => None,
        _ => scratch.lock(executor, stream, || workspace).ok(),
    };
    if let Some(scratch) = &mut scratch {
        let start = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
        if plan.mask_tile_bytes > 0 {
            params.mask_tiles = start.wrapping_byte_add(plan.partial_bytes(op));
        }
        if plan.counters > 0 {
            params.partial = start;
            params.counters = scratch.get(WorkspaceUse::Counters, workspace.of(WorkspaceUse::Counters))?;
        }
        if plan.parts > 1 && launch_parts(executor, op, plan, &mut params, start, stream)? {
            return Ok(());
        }
    }
    let launch = executor.launch_attention_on(stream);
    params.heads_per_group = plan.heads_per_group;
    if op.lengths.is_some() {
        let blocks = plan.most_blocks(&params)?;
        // SAFETY: the descriptor was validated, the plan is of it, and the context is current.
        let code = unsafe { nvb_cuda_attention_prefill_launch(plan.row, &params, blocks, &launch) };
        return executor.check_launch(code, "attention prefill");
    }
    for spans in op.sequences.chunks(MAX_SEQUENCES) {
        let blocks = plan.arrange(&mut params, spans)?;
        // SAFETY: the descriptor was validated, the plan is of it, and the context is current.
        let code = unsafe { nvb_cuda_attention_prefill_launch(plan.row, &params, blocks, &launch) };
        executor.check_launch(code, "attention prefill")?;
    }
    Ok(())
}

/// The prefill with its keys in parts, which lie at `outputs`, and their merge; false where rows of nobody lie between the sequences'.
fn launch_parts(
    executor: &CudaExecutor,
    op: &AttentionPrefill,
    plan: &PrefillPlan,
    params: &mut PrefillParams,
    outputs: *mut c_void,
    stream: RawHandle,
) -> Result<bool> {
    let Some(rows) = covered_rows(op) else { return Ok(false) };
    let AttentionConfig { query_heads: heads, value_dim, .. } = op.config;
    let lses = outputs.wrapping_byte_add(partial_bytes(op, plan.parts)[0]);
    let outputs = Tensor::new(outputs, DType::F32, &[plan.parts, rows.len(), heads, value_dim]);
    let lses = Tensor::new(lses, DType::F32, &[plan.parts, rows.len(), heads]);

    // Rows are numbered as those of the query are, so the first of a part lies before the workspace unless it is row 0.
    let of_row =
        |tensor: &Tensor, row: usize| tensor.data.wrapping_byte_sub(row * tensor.strides[1] * size_of::<f32>());
    let step = op.starts.query / op.query.token_stride;
    let mut partial = PrefillParams {
        output: of_row(&outputs, rows.start),
        lse: of_row(&lses, rows.start),
        output_dtype: DType::F32 as u32,
        output_sequence_stride: (step * heads * value_dim) as i64,
        output_token_stride: (heads * value_dim) as i64,
        output_head_stride: value_dim as i64,
        lse_sequence_stride: step as i64,
        parts: plan.parts as i32,
        part_rows: rows.len() as i32,
        heads_per_group: plan.heads_per_group,
        ..*params
    };
    plan.arrange(&mut partial, &op.sequences)?;
    // SAFETY: the descriptor was validated, the plan is of it, the workspace is as large as planned, and the context is current.
    let code =
        unsafe { nvb_cuda_attention_prefill_launch(plan.row, &partial, 0, &executor.launch_attention_on(stream)) };
    executor.check_launch(code, "attention prefill")?;

    let row_bytes = op.output.token_stride * op.output.dtype.size();
    let output =
        Heads { data: op.output.data.wrapping_byte_add(rows.start * row_bytes), tokens: rows.len(), ..op.output };
    let lse = op.lse.map(|lse| {
        let data = lse.data.wrapping_byte_add(rows.start * heads * size_of::<f32>());
        Tensor::new(data, DType::F32, &[rows.len(), heads])
    });
    attention_merge::run(executor, &AttentionMerge { outputs, lses, output, lse }, stream)?;
    Ok(true)
}

pub(super) fn no_kernel(config: &AttentionConfig) -> Error {
    Error::unsupported(format!("no kernel on this device computes {config:?}"))
}

/// Without a table of sequences and `heads_per_group`.
pub(super) fn prefill_params(op: &AttentionPrefill) -> PrefillParams {
    let lengths = op.lengths.as_ref();
    let numbers = |of: fn(&DeviceLengths) -> Option<Tensor>| {
        lengths.and_then(of).map_or(std::ptr::null(), |tensor| tensor.data.cast_const())
    };
    let bound = |of: fn(&DeviceLengths) -> usize| lengths.map_or(0, |lengths| of(lengths) as i32);
    let AttentionConfig { query_heads, kv_heads, head_dim, value_dim, scale, soft_cap, window, causal, .. } = op.config;
    PrefillParams {
        query: op.query.data,
        key: op.key.data,
        value: op.value.data,
        output: op.output.data,
        lse: op.lse.map_or(std::ptr::null_mut(), |lse| lse.data),
        query_scale: op.query_scales.map_or(std::ptr::null(), |scales| scales.data.cast_const()),
        key_scale: op.key.scales.cast(),
        value_scale: op.value.scales.cast(),
        mask: op.mask.map_or(std::ptr::null(), |mask| mask.tensor.data.cast_const()),
        sinks: vector_of(op.terms.sinks),
        slopes: vector_of(op.terms.slopes),
        tree_parents: vector_of(op.tree.map(|tree| tree.parents())),
        mask_tiles: std::ptr::null_mut(),
        partial: std::ptr::null_mut(),
        counters: std::ptr::null_mut(),
        query_starts: numbers(|lengths| lengths.query_starts),
        kv_starts: numbers(|lengths| lengths.key_starts),
        kv_lengths: numbers(|lengths| lengths.kv_lengths),
        kv_sequences: numbers(|lengths| lengths.sequences),
        dropout_offsets: vector_of(op.dropout.and_then(|dropout| dropout.device_offset())),
        query_sequence_stride: op.starts.query as i64,
        query_token_stride: op.query.token_stride as i64,
        query_head_stride: op.query.head_stride as i64,
        key_sequence_stride: sequence_stride(&op.key),
        key_token_stride: op.key.token_stride as i64,
        key_head_stride: op.key.head_stride as i64,
        value_sequence_stride: sequence_stride(&op.value),
        value_token_stride: op.value.token_stride as i64,
        value_head_stride: op.value.head_stride as i64,
        output_sequence_stride: op.starts.output as i64,
        output_token_stride: op.output.token_stride as i64,
        output_head_stride: op.output.head_stride as i64,
        lse_sequence_stride: op.starts.lse as i64,
        mask_sequence_stride: op.mask.map_or(0, |mask| mask.start_stride as i64),
        mask_row_stride: op.mask.map_or(0, |mask| mask.row_stride as i64),
        mask_head_stride: op.mask.map_or(0, |mask| mask.head_stride as i64),
        dropout_seed: op.dropout.map_or(0, |dropout| dropout.seed),
        dropout_offset: op.dropout.map_or(0, |dropout| dropout.offset),
        query_dtype: op.query.dtype as u32,
        kv_dtype: op.key.dtype as u32,
        value_dtype: op.value.dtype as u32,
        output_dtype: op.output.dtype as u32,
        mask_dtype: op.mask.map_or(DType::F32, |mask| mask.tensor.dtype) as u32,
        query_scale_stride: op.query_scales.map_or(0, |scales| i32::from(scales.shape[0] > 1)),
        key_scale_stride: op.key.scale_stride as i32,
        value_scale_stride: op.value.scale_stride as i32,
        sequences: bound(|lengths| lengths.count),
        query_heads: query_heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        value_dim: value_dim as i32,
        causal: causal.into(),
        window: window as i32,
        scale,
        soft_cap,
        heads_per_group: 0,
        query_rows: lengths.map_or(0, |_| op.query.tokens as i32),
        kv_rows: bound(|lengths| lengths.kv_rows),
        max_query_count: bound(|lengths| lengths.max_rows),
        max_kv_length: bound(|lengths| lengths.max_kv_length),
        chunk: op.config.chunk as i32,
        sink_tokens: op.config.sink_tokens as i32,
        dropout_threshold: op.dropout.map_or(0, |dropout| dropout.threshold.into()),
        dropout_scale: op.dropout.map_or(1.0, |dropout| dropout.scale),
        parts: 1,
        part_rows: 0,
        one_order: 0,
        reserved: 0,
        placement: KvPlacement::of(&op.key, &op.value),
        sequence: [Sequence::default(); MAX_SEQUENCES],
    }
}

impl PrefillParams {
    /// Writes the table of up to `MAX_SEQUENCES` sequences, as they come and without their blocks.
    pub fn set_sequences(&mut self, spans: &[SequenceSpan]) {
        for (entry, span) in self.sequence.iter_mut().zip(spans) {
            *entry = Sequence {
                query_start: span.query_start as i32,
                query_count: span.query_count as i32,
                kv_start: span.kv_start as i32,
                kv_length: span.kv_length as i32,
                first_block: 0,
                prefix: span.prefix as i32,
            };
        }
        self.sequences = spans.len() as i32;
    }

    pub fn sequences_mut(&mut self) -> &mut [Sequence] {
        &mut self.sequence[..self.sequences as usize]
    }
}

impl Sequence {
    /// Pairs of a row and a key, the mask left aside.
    pub fn work(&self) -> i64 {
        i64::from(self.query_count) * i64::from(self.kv_length)
    }
}

/// The bytes of a workspace for the decode. The context is current.
pub(super) fn decode_workspace_bytes(executor: &CudaExecutor, op: &AttentionDecode) -> usize {
    if let Some(prefix) = &op.prefix {
        return attention_prefix::workspace_bytes(executor, op, prefix);
    }
    DecodePlan::of(executor, op).map_or(Workspace::none(), |plan| plan.workspace()).total()
}

pub(super) fn decode(executor: &CudaExecutor, op: &AttentionDecode, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    if let Some(prefix) = &op.prefix {
        return attention_prefix::decode(executor, op, prefix, stream);
    }
    let rope = DecodeRopeParams::of(op);
    let params = decode_params(op, &rope);
    match DecodePlan::with_params(executor, op, &params) {
        Some(plan) => launch_decode(executor, &plan, params, stream),
        None if op.query.tokens == 0 => Ok(()),
        None => Err(no_decode(op)),
    }
}

/// What no kernel takes.
pub(super) fn no_decode(op: &AttentionDecode) -> Error {
    if op.rope.is_some() {
        return Error::unsupported(format!(
            "no decode kernel here rotates and appends for {} rows of {:?} with a cache in {}, and {} keys at most; one is there from \
             compute capability 9.0 on for 16-bit floats of one dtype, head_dim 64, 128 or 256, rotary_dim a multiple of 16 and \
             as many visible keys as a cluster of blocks reads in one pass",
            op.query.tokens, op.config, op.cache.dtype, op.rows.max_kv_length
        ))
        .with_advice("call nvb_rope and then nvb_attention_decode without a key");
    }
    let [sequences, rows, heads] = [op.sequence_count(), op.rows.per_sequence, op.config.query_heads];
    Error::unsupported(format!(
        "no decode kernel takes {sequences} sequences of {rows} rows with {heads} heads; {MOST_BLOCKS} sequences, and as many rows \
         times heads, are the most"
    ))
    .with_limit(sequences.max(rows * heads) as u64, MOST_BLOCKS as u64)
}

/// The context is current.
pub(super) fn launch_decode(
    executor: &CudaExecutor,
    plan: &DecodePlan,
    mut params: DecodeParams,
    stream: RawHandle,
) -> Result<()> {
    let launch = executor.launch_attention_on(stream);
    let workspace = plan.workspace();
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace)?;
    params.counters = scratch.get(WorkspaceUse::Counters, workspace.of(WorkspaceUse::Counters))?;
    params.workspace = scratch.get(WorkspaceUse::Kernel, workspace.of(WorkspaceUse::Kernel))?;
    params.splits = plan.splits;
    params.chunks = plan.chunks;
    params.heads_per_chunk = plan.heads_per_chunk;
    params.slots_per_head = plan.slots_per_head;
    // SAFETY: the descriptor was validated, workspace and counters are as large as planned, and the context is current.
    let code = unsafe { nvb_cuda_attention_decode_launch(plan.row, &params, &launch) };
    executor.check_launch(code, "attention decode")
}

/// Without workspace, counters and what a plan decides. `rope` is of `op`, and outlives what is returned.
pub(super) fn decode_params(op: &AttentionDecode, rope: &Option<DecodeRopeParams>) -> DecodeParams {
    let AttentionConfig { query_heads, kv_heads, head_dim, value_dim, scale, soft_cap, window, .. } = op.config;
    let (key, value) = (op.cache.key_view(), op.cache.value_view());
    DecodeParams {
        query: op.query.data,
        key: op.cache.key,
        value: op.cache.value,
        positions: op.rows.positions.data,
        slots: op.rows.sequences.map_or(std::ptr::null_mut(), |sequences| sequences.data),
        output: op.output.data,
        lse: op.lse.map_or(std::ptr::null_mut(), |lse| lse.data),
        key_scale: op.cache.key_scales.cast(),
        value_scale: op.cache.value_scales.cast(),
        sinks: vector_of(op.terms.sinks),
        slopes: vector_of(op.terms.slopes),
        workspace: std::ptr::null_mut(),
        counters: std::ptr::null_mut(),
        rope: rope.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
        query_token_stride: op.query.token_stride as i64,
        query_head_stride: op.query.head_stride as i64,
        key_sequence_stride: sequence_stride(&key),
        key_head_stride: key.head_stride as i64,
        key_token_stride: key.token_stride as i64,
        value_sequence_stride: sequence_stride(&value),
        value_head_stride: value.head_stride as i64,
        value_token_stride: value.token_stride as i64,
        output_token_stride: op.output.token_stride as i64,
        output_head_stride: op.output.head_stride as i64,
        query_dtype: op.query.dtype as u32,
        kv_dtype: op.cache.dtype as u32,
        value_dtype: op.cache.value_dtype as u32,
        output_dtype: op.output.dtype as u32,
        sequences: op.sequence_count() as i32,
        rows_per_sequence: op.rows.per_sequence as i32,
        query_heads: query_heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        value_dim: value_dim as i32,
        slot_count: op.cache.sequences as i32,
        capacity: op.cache.capacity as i32,
        max_kv_length: op.rows.max_kv_length as i32,
        window: window as i32,
        scale,
        soft_cap,
        splits: 0,
        chunks: 0,
        heads_per_chunk: 0,
        slots_per_head: 0,
        chunk: op.config.chunk as i32,
        sink_tokens: op.config.sink_tokens as i32,
        placement: KvPlacement::of(&key, &value),
    }
}
