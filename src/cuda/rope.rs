//! `rope` on CUDA: the launcher of csrc/rope, which also does the plain append.

use super::kv_placement::{sequence_stride, KvPlacement};
use super::prelude::*;
use crate::error::{Error, Status};
use crate::operation::rope::{Append, Rope, Rotation};
use crate::tensor::{CacheLayer, Heads, Tensor};

mirror! {
    /// `nvb_rope_params` of csrc/rope/rope.h.
    #[repr(C)]
    struct Params of(op: &Rope) {
        query: *const c_void,
        key: *const c_void,
        value: *const c_void,
        query_output: *mut c_void,
        key_output: *mut c_void,
        query_norm: *const c_void,
        key_norm: *const c_void,
        key_cache: *mut c_void = cache.map_or(std::ptr::null_mut(), |cache| cache.key),
        value_cache: *mut c_void = cache.filter(|_| op.value.is_some()).map_or(std::ptr::null_mut(), |cache| cache.value),
        key_scale: *const c_void = cache.map_or(std::ptr::null(), |cache| cache.key_scales.cast()),
        value_scale: *const c_void = cache.map_or(std::ptr::null(), |cache| cache.value_scales.cast()),
        positions: *const c_void = op.positions.data,
        slots: *const c_void = vector_of(op.append.and_then(|append| append.sequences)),
        query_token_stride: i64,
        query_head_stride: i64,
        key_token_stride: i64,
        key_head_stride: i64,
        value_token_stride: i64,
        value_head_stride: i64,
        query_output_token_stride: i64,
        query_output_head_stride: i64,
        key_output_token_stride: i64,
        key_output_head_stride: i64,
        cache_slot_stride: i64 = cache.map_or(0, |cache| sequence_stride(&cache.key_view())),
        cache_head_stride: i64 = cache.map_or(0, |cache| cache.head_stride as i64),
        cache_token_stride: i64 = cache.map_or(0, |cache| cache.token_stride as i64),
        query_dtype: u32,
        key_dtype: u32,
        value_dtype: u32,
        query_output_dtype: u32,
        key_output_dtype: u32,
        query_norm_dtype: u32,
        key_norm_dtype: u32,
        cache_dtype: u32 = cache.map_or(DType::F32, |cache| cache.dtype) as u32,
        tokens: i32 = op.tokens as i32,
        query_heads: i32 = heads(op.query),
        kv_heads: i32 = heads(op.key.or(op.value)),
        head_dim: i32 = op.head_dim as i32,
        rotary_dim: i32 = rotation.rotary_dim as i32,
        slot_count: i32 = cache.map_or(0, |cache| cache.sequences as i32),
        capacity: i32 = cache.map_or(0, |cache| cache.capacity as i32),
        base: f32 = rotation.base,
        position_scale: f32 = rotation.position_scale,
        query_scale: f32 = op.query_scale,
        epsilon: f32 = op.epsilon,
        weight_offset: f32 = op.weight_offset,
        placement: KvPlacement = placement_of(op),
    }
    with (query, query_token_stride, query_head_stride, query_dtype) = rows(op.query);
    with (key, key_token_stride, key_head_stride, key_dtype) = rows(op.key);
    with (value, value_token_stride, value_head_stride, value_dtype) = rows(op.value);
    with (query_output, query_output_token_stride, query_output_head_stride, query_output_dtype) =
        rows(op.query_output);
    with (key_output, key_output_token_stride, key_output_head_stride, key_output_dtype) = rows(op.key_output);
    with (query_norm, query_norm_dtype) = norm(op.query_norm);
    with (key_norm, key_norm_dtype) = norm(op.key_norm);
    with cache = op.append.map(|append| append.cache);
    with rotation = op.rotation.unwrap_or(Rotation { base: 1.0, position_scale: 1.0, rotary_dim: 0 });
    with heads = |heads: Option<Heads>| heads.map_or(0, |heads| heads.heads) as i32;
}

extern "C" {
    fn nvb_cuda_rope(params: *const Params, launch: *const Launch) -> i32;
}

/// Address, token stride, head stride and dtype; what is absent still names a dtype that has a kernel.
fn rows(heads: Option<Heads>) -> (*mut c_void, i64, i64, u32) {
    match heads {
        Some(Heads { data, dtype, token_stride, head_stride, .. }) => {
            (data, token_stride as i64, head_stride as i64, dtype as u32)
        }
        None => (std::ptr::null_mut(), 0, 0, DType::F32 as u32),
    }
}

fn norm(weight: Option<Tensor>) -> (*const c_void, u32) {
    weight.map_or((std::ptr::null(), DType::F32 as u32), |weight| (weight.data.cast_const(), weight.dtype as u32))
}

fn placement_of(op: &Rope) -> KvPlacement {
    let of = |append: Append| KvPlacement::of_keys(&append.cache.key_view());
    op.append.map_or(KvPlacement::CONTIGUOUS, of)
}

/// The most columns of a head that the kernel takes.
const MAX_COLUMNS: usize = 512;

/// Columns `first .. first + count` of an append that only copies.
fn columns(op: &Rope, first: usize, count: usize) -> Rope {
    let skipped = |data: *mut c_void, size: usize| data.cast::<u8>().wrapping_add(first * size).cast::<c_void>();
    let key = op.key.map(|key| Heads { data: skipped(key.data, key.dtype.size()), head_dim: count, ..key });
    let append = op.append.map(|append| {
        let cache = append.cache;
        Append { cache: CacheLayer { key: skipped(cache.key, cache.dtype.size()), head_dim: count, ..cache }, ..append }
    });
    Rope { head_dim: count, key, append, ..*op }
}

pub(super) fn run(executor: &CudaExecutor, op: &Rope, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let launch_once = |op: &Rope| {
        let params = Params::of(op);
        // SAFETY: the descriptor was validated, and the context is current.
        executor.check_launch(unsafe { nvb_cuda_rope(&params, &executor.launch_on(stream)) }, "rope")
    };
    let launch = |op: &Rope| {
        if op.head_dim <= MAX_COLUMNS {
            return launch_once(op);
        }
        // A row has one scale, or one that a block of columns would not end with.
        let rows = op.append.is_some_and(|append| append.cache.dtype.is_kv_row());
        let copies = op.rotation.is_none() && op.key_norm.is_none() && op.query.is_none() && op.key_output.is_none();
        if !copies || op.value.is_some() {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "a head of {} columns is appended by a launch of its own alone, without rotation and norms; {MAX_COLUMNS} \
                     columns can be rotated",
                    op.head_dim
                ),
            ));
        }
        if rows {
            return launch_once(op);
        }
        (0..op.head_dim)
            .step_by(MAX_COLUMNS)
            .try_for_each(|first| launch_once(&columns(op, first, MAX_COLUMNS.min(op.head_dim - first))))
    };
    match op.append {
        // The kernel has one dim and one set of strides for both; else values are keys of a second launch, that only appends.
        Some(append) if op.value.is_some() && !append.cache.is_uniform() => {
            launch(&Rope { value: None, ..*op })?;
            launch(&Rope {
                head_dim: append.cache.value_dim,
                query: None,
                query_output: None,
                query_norm: None,
                key: op.value,
                key_output: None,
                key_norm: None,
                value: None,
                rotation: None,
                append: Some(Append { cache: append.cache.values_as_keys(), ..append }),
                ..*op
            })
        }
        _ => launch(op),
    }
}
