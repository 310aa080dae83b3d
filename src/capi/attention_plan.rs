//! How an attention would run, whether it can, what memory it takes, and how long its kernels take.

use super::attention::*;
use super::kernel::reason_code;
use super::kv_cache::{layer_of, nvb_kv_cache_options, options_of};
use super::prelude::*;
use super::tensor::Reading;
use crate::allocation::{collected, filled};
use crate::executor::{Plan, SPLITS, STAGES, TILE_KEYS, TILE_ROWS};
use crate::kv_cache::KvCacheOptions;
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource};
use crate::operation::Operation;
use crate::tensor::{DType, Tensor};
use crate::tuning::attention::benchmark;

/// How an attention would run. What a kernel has no one number for is 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_plan {
    pub struct_size: usize,
    /// As `nvb_kernel_get` has it, for `nvb_kernel_override`; on the CPU the operation's name. Empty: nothing runs, since there are
    /// no rows.
    pub kernel: [c_char; 64],
    /// `NVB_REASON_…`
    pub reason: u32,
    /// Query rows of a block's tile. In a decode a row and a query head of a group are one each, so that 4 rows with 4 heads a
    /// key/value head are 16.
    pub tile_rows: u32,
    /// Keys of a tile.
    pub tile_keys: u32,
    /// Blocks that divide the keys of a sequence among them, at most, and merge their results.
    pub splits: u32,
    /// Tiles of keys that a block has under way at a time.
    pub stages: u32,
    /// 0.
    pub reserved: u32,
    /// Workspace with which the call runs so; `nvb_stream_set_workspace`.
    pub workspace_bytes: u64,
    /// What the call must do at the least, as in `nvb_kernel_plan`; a decode's positions are taken to be `max_kv_length` − 1.
    pub operations: f64,
    pub bytes: f64,
}
versioned!(nvb_attention_plan);

fn described(op: &Operation, plan: &Plan) -> nvb_attention_plan {
    let parameter = |name| plan.parameter(name) as u32;
    let cost = op.cost();
    nvb_attention_plan {
        struct_size: 0,
        kernel: fixed_text(plan.kernel),
        reason: reason_code(plan.reason),
        tile_rows: parameter(TILE_ROWS),
        tile_keys: parameter(TILE_KEYS),
        splits: parameter(SPLITS),
        stages: parameter(STAGES),
        reserved: 0,
        workspace_bytes: plan.workspace as u64,
        operations: cost.operations,
        bytes: cost.bytes,
    }
}

/// The descriptor of a prefill's or a decode's arguments, one of which is NULL, with what owns the cache.
///
/// # Safety
/// Structs with their sizes set, and the host arrays that they name.
pub(super) unsafe fn operation_of(
    reading: Reading<'_>,
    object: &AttentionObject,
    prefill: *const nvb_attention_prefill_args,
    decode: *const nvb_attention_decode_args,
) -> Result<(Operation, Option<crate::stream::Owner>)> {
    // SAFETY: the caller's contract.
    unsafe {
        match (prefill.is_null(), decode.is_null()) {
            (false, true) => {
                let (op, owner) = prefill_of(reading, object, &read(prefill)?)?;
                Ok((op.into(), owner))
            }
            (true, false) => {
                let args = read(decode)?;
                let (owner, layer) = layer_of(reading, &object.backend, (args.cache, args.layer), &args.page_table)?;
                Ok((decode_of(reading, object, &args, layer)?.into(), Some(owner)))
            }
            (true, true) => Err(Error::invalid("neither `prefill` nor `decode` is given; one of them is needed")),
            (false, false) => Err(Error::invalid("`prefill` and `decode` are given; one of them is needed")),
        }
    }
}

/// Fills in `plan` with how `nvb_attention_prefill` would run with `prefill`, or `nvb_attention_decode` with `decode`; the other
/// is NULL. Nothing is queued and no memory touched: `data` of a tensor counts by its alignment, and may be NULL for an aligned
/// one. It holds for these shapes and the kernels as they are chosen now; `nvb_stream_explain` has it in words.
/// Errors: those of the call itself.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_get_plan(
    attention: *const nvb_attention,
    prefill: *const nvb_attention_prefill_args,
    decode: *const nvb_attention_decode_args,
    plan: *mut nvb_attention_plan,
) -> nvb_status {
    guard!(nvb_attention_get_plan, {
        let object = ATTENTIONS.get(attention)?;
        expect_out("plan", plan)?;
        // SAFETY: structs with their sizes set and the arrays that they name, by the header's contract.
        unsafe {
            let (op, _owner) = operation_of(Reading::Shape, &object, prefill, decode)?;
            let found = object.backend.executor().plan(&op)?;
            write(plan, &described(&op, &found))
        }
    })
}

/// The shapes of an attention's calls over a cache, for questions that need no memory. Rows lie one after the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_shape {
    pub struct_size: usize,
    /// Sequences of a call, up to those of the cache.
    pub sequences: u32,
    /// Query rows of each, of a decode 1 to 16; 0: 1.
    pub rows_per_sequence: u32,
    /// Keys of each, those of its rows included; 0: the cache's capacity.
    pub kv_length: u32,
    /// 0: a decode. 1: a prefill.
    pub prefill: u32,
    /// `NVB_DTYPE_…` of queries and of outputs; 0: that of the cache's keys, BF16 where those are no floats of 16 or 32 bits.
    pub query_dtype: u32,
    pub output_dtype: u32,
}
versioned!(nvb_attention_shape);

/// Bytes of device memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_memory {
    pub struct_size: usize,
    /// Of the calls: what a stream's workspace must have, or the stream takes at the first call.
    pub workspace_bytes: u64,
    /// Of the cache, its page table included: what `nvb_kv_cache_get_bytes` says of one that is created so.
    pub cache_bytes: u64,
}
versioned!(nvb_attention_memory);

/// Addresses that nobody reads, apart from each other and aligned like allocations.
fn nowhere(place: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(place << 44)
}

/// The operation that such a call would be.
fn operation_like(config: AttentionConfig, cache: &KvCacheOptions, shape: &nvb_attention_shape) -> Result<Operation> {
    let dtype = |name: &str, code: u32| match code {
        0 if cache.dtype.is_float() => Ok(cache.dtype),
        0 => Ok(DType::Bf16),
        _ => DType::from_code(code)
            .filter(|dtype| dtype.is_float())
            .ok_or_else(|| Error::invalid(format!("{name} is {code}; NVB_DTYPE_F32, _F16 or _BF16 is needed"))),
    };
    let layer = cache.layer_at(nowhere(1), nowhere(2).cast_const().cast(), 0)?;
    let (sequences, rows) = (shape.sequences as usize, shape.rows_per_sequence.max(1) as usize);
    if sequences > cache.sequences {
        return Err(Error::invalid(format!("sequences is {sequences}; the cache has {}", cache.sequences))
            .with_limit(sequences as u64, cache.sequences as u64));
    }
    let count = sequences.checked_mul(rows).filter(|&count| count <= i32::MAX as usize).ok_or_else(|| {
        Error::invalid(format!("{sequences} sequences of {rows} rows; {} rows are the most", i32::MAX))
    })?;
    let length = if shape.kv_length == 0 { cache.capacity } else { shape.kv_length as usize };
    let heads = |place: usize, dtype: DType, width: usize| {
        Tensor::new(nowhere(place), dtype, &[count, config.query_heads, width])
    };
    let query = heads(3, dtype("query_dtype", shape.query_dtype)?, config.head_dim);
    let output = heads(4, dtype("output_dtype", shape.output_dtype)?, config.value_dim);
    if shape.prefill > 1 {
        return Err(Error::invalid(format!("prefill is {}; 0 or 1 is needed", shape.prefill)));
    }
    if shape.prefill == 1 {
        let starts = collected((0..sequences + 1).map(|b| (b * rows) as i32), "sequences")?;
        let places = collected(0..sequences as i32, "sequences")?;
        let kv_lengths = filled(length.min(i32::MAX as usize) as i32, sequences, "sequences")?;
        let source = KeySource::Cache { layer, sequences: &places, kv_lengths: &kv_lengths };
        return Ok(AttentionPrefill::new(config, query, &starts, source, output, None)?.into());
    }
    let positions = Tensor::new(nowhere(5), DType::I32, &[count]);
    let rows = DecodeRows { per_sequence: rows, positions, sequences: None, max_kv_length: length };
    Ok(AttentionDecode::new(config, query, layer, output, None, rows)?.into())
}

/// The backend, the operation and the cache's options that the structs describe.
///
/// # Safety
/// Structs with their sizes set.
unsafe fn planned(
    backend: *const nvb_backend,
    options: *const nvb_attention_options,
    cache: *const nvb_kv_cache_options,
    shape: *const nvb_attention_shape,
) -> Result<(Plan, KvCacheOptions)> {
    let backend = BACKENDS.get(backend)?.backend.clone();
    // SAFETY: the caller's contract.
    let (options, cache, shape) = unsafe { (read(options)?, read(cache)?, read(shape)?) };
    let (config, cache) = (config_of(&options)?, options_of(Reading::Shape, &backend, &cache)?);
    let op = operation_like(config, &cache, &shape)?;
    let plan = backend.executor().plan(&op)?;
    if plan.kernel.is_empty() && shape.sequences > 0 {
        return Err(Error::unsupported(format!("no kernel of this device does the {}", op.kind().name())));
    }
    Ok((plan, cache))
}

/// `NVB_OK` if a backend's device has a kernel for an attention of these options, over a cache of these options (`memory` is
/// ignored), in calls of these shapes; otherwise the reason is the error, as creating and calling would say it. No memory is
/// needed, allocated or touched, and nothing need have been created but the backend.
/// Errors: `NVB_ERROR_UNSUPPORTED` (what the device has no kernel for), `NVB_ERROR_ATTENTION` (options that contradict each
/// other), `NVB_ERROR_INVALID_ARGUMENT` (the rest).
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_is_supported(
    backend: *const nvb_backend,
    options: *const nvb_attention_options,
    cache: *const nvb_kv_cache_options,
    shape: *const nvb_attention_shape,
) -> nvb_status {
    guard!(nvb_attention_is_supported, {
        // SAFETY: structs with their sizes set, by the header's contract.
        unsafe { planned(backend, options, cache, shape).map(|_| ()) }
    })
}

/// Fills in `memory` with what such a cache and such calls take: the very bytes, from shapes alone. With `max_kv_length` at
/// `kv_length` a call takes this workspace; an engine plans with the largest of its shapes, which need not be the largest
/// `kv_length`, since more sequences are divided less.
/// Errors: those of `nvb_attention_is_supported`.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_estimate_memory(
    backend: *const nvb_backend,
    options: *const nvb_attention_options,
    cache: *const nvb_kv_cache_options,
    shape: *const nvb_attention_shape,
    memory: *mut nvb_attention_memory,
) -> nvb_status {
    guard!(nvb_attention_estimate_memory, {
        expect_out("memory", memory)?;
        // SAFETY: structs with their sizes set, by the header's contract.
        unsafe {
            let (plan, cache) = planned(backend, options, cache, shape)?;
            let bytes = nvb_attention_memory {
                struct_size: 0,
                workspace_bytes: plan.workspace as u64,
                cache_bytes: cache.device_bytes()? as u64,
            };
            write(memory, &bytes)
        }
    })
}

/// What one kernel took.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_measurement {
    pub struct_size: usize,
    /// As in `nvb_attention_plan`.
    pub kernel: [c_char; 64],
    /// The median of a launch, in seconds.
    pub seconds: f64,
    /// 1: what the call runs now.
    pub chosen: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(nvb_attention_measurement);

/// The most rounds of a benchmark, and the most rows of its table that a caller has room for.
const MOST_ROUNDS: u32 = 10_000;
const MOST_MEASUREMENTS: usize = 1024;

/// Measures every kernel that can do `nvb_attention_prefill` with `prefill`, or `nvb_attention_decode` with `decode`, the other
/// being NULL, on these tensors and this cache: `rounds` rounds (0: 7), the kernels in turns. Writes up to `measurement_count` rows to
/// the array `measurements`, whose first has its `struct_size` set for all, in the order in which kernels are preferred, and to
/// `*count` how many there are; `measurements` may be NULL where `measurement_count` is 0. A chosen row that is not the fastest is worth
/// `nvb_kernel_override`.
///
/// The calls write the output and the lse as ever, and read caches as they lie: a caller who wants to know about memory that
/// is not in the device's caches gives tensors larger than those. Waits for the stream, and allocates on a GPU 128 MiB for the
/// time of the call, and workspace. On the CPU there is one kernel. Errors: those of the call; a stream under capture, explained
/// or recorded (`NVB_ERROR_INVALID_ARGUMENT`).
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_benchmark(
    attention: *const nvb_attention,
    prefill: *const nvb_attention_prefill_args,
    decode: *const nvb_attention_decode_args,
    rounds: u32,
    measurements: *mut nvb_attention_measurement,
    measurement_count: usize,
    count: *mut usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_attention_benchmark, {
        let object = ATTENTIONS.get(attention)?;
        let backend = &object.backend;
        let stream = stream_of(backend, stream)?;
        expect_out("count", count)?;
        if rounds > MOST_ROUNDS {
            return Err(Error::invalid(format!("rounds is {rounds}; at most {MOST_ROUNDS} is supported"))
                .with_limit(rounds.into(), MOST_ROUNDS.into()));
        }
        if measurement_count > MOST_MEASUREMENTS {
            return Err(Error::invalid(format!(
                "measurement_count is {measurement_count}; at most {MOST_MEASUREMENTS} is supported"
            ))
            .with_limit(measurement_count as u64, MOST_MEASUREMENTS as u64));
        }
        if measurement_count > 0 {
            expect_out("measurements", measurements)?;
        }
        stream.expect_no_sink("kernels are measured")?;
        stream.expect_awake()?;
        // SAFETY: structs with their sizes set and the arrays that they name, by the header's contract.
        let (op, _owner) = unsafe { operation_of(Reading::Memory(backend), &object, prefill, decode)? };
        op.expect_apart()?;
        let rounds = if rounds == 0 { 7 } else { rounds as usize };
        let found = benchmark(backend.executor(), backend.memory(), &op, &stream, rounds)?;
        if measurement_count > 0 {
            // SAFETY: the first struct of the array has its size set, by the header's contract.
            let size = unsafe { read(measurements)?.struct_size };
            for (at, measured) in found.iter().enumerate().take(measurement_count) {
                let value = nvb_attention_measurement {
                    struct_size: size,
                    kernel: fixed_text(measured.kernel),
                    seconds: measured.seconds,
                    chosen: measured.is_chosen.into(),
                    reserved: 0,
                };
                // SAFETY: the array has `measurement_count` structs of this size, by the header's contract.
                unsafe {
                    let place = measurements.byte_add(at * size);
                    place.cast::<usize>().write_unaligned(size);
                    write(place, &value)?;
                }
            }
        }
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("count", count, found.len()) }
    })
}
