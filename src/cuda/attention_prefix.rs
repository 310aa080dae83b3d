//! Decode over a shared prefix on CUDA: csrc/attention/attention_prefix.h around a prefill over the prefix and a decode over
//! what follows it.
//!
//! The query heads of a group, in all rows, are packed as the rows of the prefill, so that the prefix is read once for 128 of them,
//! and its keys are cut into parts that fill the device.

use super::attention::{decode_params, launch_decode, launch_prefill, no_decode, no_kernel, prefill_params};
use super::attention_plan::{DecodePlan, PrefillPlan};
use super::executor::CudaExecutor;
use super::launch::{mirror, Launch};
use super::scratch::{WorkspaceUse, ALIGNMENT};
use super::workspace::Workspace;
use crate::device::RawHandle;
use crate::error::Result;
use crate::operation::attention::{AttentionDecode, AttentionPrefill, Partial, SharedPrefix};
use crate::tensor::{DType, Heads, Placement, Tensor};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Query rows of a prefill's tile.
const TILE_ROWS: usize = 128;
/// More parts cost their merge more than they gain.
const MOST_PARTS: usize = 64;
/// Keys of a part, at least, and what they are a multiple of without pages.
const LEAST_TOKENS: usize = 128;
const STEP_TOKENS: usize = 16;

mirror! {
    /// `nvb_attention_prefix_params` of csrc/attention/attention_prefix.h.
    #[repr(C)]
    struct Params of(op: &AttentionDecode, prefix: &SharedPrefix, plan: &PrefixPlan, places: &Places) {
        query: *const c_void = op.query.data,
        positions: *const c_void = op.rows.positions.data,
        packed: *mut c_void = places.packed,
        own_positions: *mut c_void = places.positions,
        outputs: *const c_void = places.prefix.output.cast(),
        lses: *const c_void = places.prefix.lse.cast(),
        own_outputs: *const c_void = places.own.output.cast(),
        own_lses: *const c_void = places.own.lse.cast(),
        output: *mut c_void = op.output.data,
        lse: *mut c_void = op.lse.map_or(null_mut(), |lse| lse.data),
        query_token_stride: i64 = op.query.token_stride as i64,
        query_head_stride: i64 = op.query.head_stride as i64,
        output_token_stride: i64 = op.output.token_stride as i64,
        output_head_stride: i64 = op.output.head_stride as i64,
        query_dtype: u32 = op.query.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        rows: i32 = op.query.tokens as i32,
        query_heads: i32 = op.config.query_heads as i32,
        kv_heads: i32 = op.config.kv_heads as i32,
        head_dim: i32 = op.config.head_dim as i32,
        value_dim: i32 = op.config.value_dim as i32,
        prefix_tokens: i32 = prefix.tokens as i32,
        capacity: i32 = op.cache.capacity as i32,
        parts: i32 = plan.parts as i32,
    }
}

extern "C" {
    fn nvb_cuda_attention_prefix_pack(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_attention_prefix_merge(params: *const Params, launch: *const Launch) -> i32;
}

/// How the prefix is divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PrefixPlan {
    part_tokens: usize,
    pub parts: usize,
    /// Of the workspace, whose regions lie one behind the other in the order of [`Places`].
    bytes: [usize; 6],
}

/// The regions of the workspace.
struct Places {
    packed: *mut c_void,
    positions: *mut c_void,
    prefix: Partial,
    own: Partial,
}

impl PrefixPlan {
    pub fn of(executor: &CudaExecutor, op: &AttentionDecode, prefix: &SharedPrefix) -> PrefixPlan {
        let multiprocessors = executor.launch_attention_on(RawHandle::NULL).multiprocessors as usize;
        let (rows, heads) = (op.query.tokens, op.config.query_heads);
        let blocks = (rows * op.config.group()).div_ceil(TILE_ROWS).max(1) * op.config.kv_heads;
        let most = prefix.tokens.div_ceil(LEAST_TOKENS).min(MOST_PARTS);
        let parts = (multiprocessors / blocks).clamp(1, most);
        let step = match op.cache.placement {
            Placement::Paged(table) => table.page_tokens,
            _ => STEP_TOKENS,
        };
        let part_tokens = prefix.tokens.div_ceil(parts).next_multiple_of(step);
        let parts = prefix.tokens.div_ceil(part_tokens);
        let (items, float) = (rows * heads, size_of::<f32>());
        let bytes = [
            parts * items * op.config.head_dim * op.query.dtype.size(),
            rows * size_of::<i32>(),
            parts * items * op.config.value_dim * float,
            parts * items * float,
            items * op.config.value_dim * float,
            items * float,
        ];
        PrefixPlan { part_tokens, parts, bytes: bytes.map(|bytes| bytes.next_multiple_of(ALIGNMENT)) }
    }

    /// Apart from that of the decode behind the prefix.
    fn workspace(&self) -> Workspace {
        Workspace::none().with(WorkspaceUse::Input, self.bytes.iter().sum())
    }

    fn places(&self, first: *mut c_void) -> Places {
        let at = |region: usize| first.wrapping_byte_add(self.bytes[..region].iter().sum());
        let partial = |region: usize| Partial { output: at(region).cast(), lse: at(region + 1).cast() };
        Places { packed: at(0), positions: at(1), prefix: partial(2), own: partial(4) }
    }

    fn prefill(&self, op: &AttentionDecode, prefix: &SharedPrefix, places: &Places) -> Result<AttentionPrefill> {
        let (heads, head_dim) = (op.config.kv_heads, op.config.head_dim);
        let query = Heads {
            data: places.packed,
            dtype: op.query.dtype,
            tokens: op.query.tokens * op.config.group(),
            heads,
            head_dim,
            token_stride: heads * head_dim,
            head_stride: head_dim,
        };
        // Every part has a copy of the queries.
        let next = query.tokens * query.token_stride;
        prefix.prefill(op, (query, next), self.part_tokens, places.prefix)
    }

    fn own(&self, op: &AttentionDecode, prefix: &SharedPrefix, places: &Places) -> AttentionDecode {
        let positions = Tensor::new(places.positions, DType::I32, &[op.query.tokens]);
        prefix.own(op, positions, places.own)
    }
}

/// The decode behind the prefix, whose kernel stands for the call in plans. Nothing of it is at its place yet.
pub(super) fn own_of(executor: &CudaExecutor, op: &AttentionDecode, prefix: &SharedPrefix) -> AttentionDecode {
    let plan = PrefixPlan::of(executor, op, prefix);
    plan.own(op, prefix, &plan.places(null_mut()))
}

/// All bytes of a workspace for the call. The context is current.
pub(super) fn workspace_bytes(executor: &CudaExecutor, op: &AttentionDecode, prefix: &SharedPrefix) -> usize {
    let plan = PrefixPlan::of(executor, op, prefix);
    let own = DecodePlan::of(executor, &plan.own(op, prefix, &plan.places(null_mut())));
    own.map_or(0, |own| own.workspace().total_with(&[plan.workspace()]))
}

/// Queues the call. The context is current.
pub(super) fn decode(
    executor: &CudaExecutor,
    op: &AttentionDecode,
    prefix: &SharedPrefix,
    stream: RawHandle,
) -> Result<()> {
    if op.query.tokens == 0 {
        return Ok(());
    }
    let plan = PrefixPlan::of(executor, op, prefix);
    let scratch = executor.scratch(stream);
    let workspace = plan.workspace();
    // Held until all is queued, and apart from what the decode takes.
    let mut held = scratch.lock_inputs(executor, stream, || workspace)?;
    let places = plan.places(held.get(WorkspaceUse::Input, workspace.of(WorkspaceUse::Input))?);
    let launch = executor.launch_attention_on(stream);
    let params = Params::of(op, prefix, &plan, &places);
    let own = plan.own(op, prefix, &places);
    let own_plan = DecodePlan::of(executor, &own).ok_or_else(|| no_decode(op))?;
    let over_prefix = plan.prefill(op, prefix, &places)?;
    let mut prefill = prefill_params(&over_prefix);
    let prefill_plan =
        PrefillPlan::of(executor, &over_prefix, &mut prefill).ok_or_else(|| no_kernel(&over_prefix.config))?.whole();

    // SAFETY: the descriptor was validated, the workspace is as large as planned, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_attention_prefix_pack(&params, &launch) }, "attention prefix")?;
    launch_decode(executor, &own_plan, decode_params(&own, &None), stream)?;
    launch_prefill(executor, &over_prefix, &prefill_plan, prefill, stream)?;
    // SAFETY: as above.
    executor.check_launch(unsafe { nvb_cuda_attention_prefix_merge(&params, &launch) }, "attention prefix")
}
