//! KV caches.

use super::backend::{expect_same_backend, nvb_backend, stream_of, BACKENDS};
use super::guard::guard;
use super::handle::Table;
use super::products::flag;
use super::status::nvb_status;
use super::stream::nvb_stream;
use super::structs::{expect_out, read, slice, versioned, write, write_out};
use super::tensor::{device_tensor, nvb_tensor, Reading};
use crate::allocation::gathered;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::kv_cache::{KvCache, KvCacheOptions, Queue};
use crate::memory::expect_awake;
use crate::stream::Stream;
use crate::tensor::{CacheLayer, DType};
use std::sync::Arc;

/// Keys and values of every layer, of up to `sequences` sequences of up to `capacity` tokens each.
///
/// Where a sequence's tokens lie:
/// - **Contiguous**, the default: [layers, keys and values, sequences, kv_heads, capacity, head_dim, of values value_dim].
/// - **Ring**, with `window`: the last `window` + `max_append` − 1 tokens of each sequence, position p at place p mod that
///   number. It is for layers whose attention has a window no longer than this one, and no call appends more than
///   `max_append` tokens of a sequence. A call that looks back further is refused.
/// - **Pages**, with `page_tokens`: a sequence has pages of so many tokens, whose numbers stand in a page table in device
///   memory; sequences share pages. `nvb_kv_cache_reserve` takes them before tokens are appended, `nvb_kv_cache_fork` shares
///   them, `nvb_kv_cache_truncate` and `nvb_kv_cache_release` give them back.
/// - **The engine's memory**, with `memory`: any of the three in tensors of the engine's. It then owns the pages, and gives each
///   call their table as `page_table`.
///
/// Work reads no lengths from the cache: calls name positions and lengths, so that one captured step serves all. A contiguous
/// sequence is rewound by naming a smaller position, and used anew from position 0 on.
///
/// Threads: work that writes different sequences or layers may run at once. Calls that change what sequences hold (reserve,
/// truncate, fork, copy, release) may come from any thread, for one sequence one at a time. On the device they take effect in
/// the order of their stream, so they and the work on the cache share a stream or are ordered by events: a page that one
/// sequence gave back is another one's next.
///
/// After an `nvb_memory_sleep` that discards contents the page table is gone like the keys: release every sequence before it is
/// used again.
pub struct nvb_kv_cache {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kv_cache_options {
    pub struct_size: usize,
    pub layers: u32,
    /// Sequences that the cache can hold at a time. Of an engine's pages 0: each call's table says how many there are.
    pub sequences: u32,
    pub kv_heads: u32,
    /// Elements of a key, 1 to 576.
    pub head_dim: u32,
    /// Elements of a value, 1 to 512; 0: `head_dim`.
    pub value_dim: u32,
    /// 1: a value is the first `value_dim` elements of its key and has no memory of its own, as in DeepSeek's latent attention
    /// (576 and 512). Appends then bring keys alone.
    pub values_in_keys: u32,
    /// Tokens that a sequence can have: no position reaches this number.
    pub capacity: u32,
    /// Of keys: `NVB_DTYPE_F32`, `_F16`, `_BF16`, `_FP8_E4M3`, `_FP8_E5M2`, `_KV_INT8`, `_KV_Q8_0` or `_KV_Q4_0`; 0: BF16 on CUDA,
    /// F32 on the CPU, or that of `memory`. What an append rounds to the last three has its scales in the cache.
    pub dtype: u32,
    /// Of values, any of these; 0: that of keys. With `values_in_keys` it is that of keys, and none of the last three.
    pub value_dtype: u32,
    /// Tokens of a page, 1 to 256; 0: no pages.
    pub page_tokens: u32,
    /// Pages of all sequences together; 0: enough for every sequence at its capacity. Only with `page_tokens`.
    pub pages: u32,
    /// Keys that a query sees, itself included, as `nvb_attention_options` has it: the cache is a ring. 0: it is none.
    pub window: u32,
    /// The most tokens of one sequence that a call appends to a ring; 0: 1. Only with `window`.
    pub max_append: u32,
    /// NULL, or the engine's memory: keys of layer 0, values of layer 0, keys of layer 1 and so on, each [pages, kv_heads,
    /// page_tokens, head_dim], without pages [sequences, kv_heads, capacity or the ring's tokens, head_dim], values with
    /// value_dim for head_dim, with any strides, the same for all keys and for all values. Of `NVB_DTYPE_KV_…` the last extent
    /// is a row's bytes, and address and strides are multiples of 16. With `values_in_keys` the values of a
    /// layer are a view of its keys. The engine keeps it while the cache is used; reads of positions past a sequence's end
    /// never happen, so its content may be anything.
    pub memory: *const nvb_tensor,
    /// 2 · `layers`, or 0.
    pub memory_count: usize,
    /// Optional, of keys in FP8: F32 [layers, kv_heads] in device memory, contiguous, which the engine keeps while the cache is
    /// used. A key is its head's scale times what is stored; appending divides by it, rounds to nearest even and saturates.
    /// Absent: 1. The engine computes them before the first token is appended, such as max |key| / 448 (E4M3; E5M2: 57344)
    /// over a calibration text, and the library never changes them: what was appended under one scale is read with the one that
    /// stands there then.
    pub key_scales: nvb_tensor,
    /// As `key_scales`, of the values; must be absent with `values_in_keys`, whose values have the keys' scales.
    pub value_scales: nvb_tensor,
}
versioned!(nvb_kv_cache_options { memory });

/// What a cache holds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kv_cache_usage {
    pub struct_size: usize,
    /// Device bytes of the cache, its page table included; 0 where the engine owns the memory.
    pub bytes: u64,
    /// Tokens that all sequences were given room for.
    pub tokens: u64,
    /// Bytes of one page in all layers; 0 without pages, as are the four below.
    pub page_bytes: u64,
    pub pages: u32,
    pub free_pages: u32,
    /// Pages that more than one sequence has.
    pub shared_pages: u32,
    /// Sequences that hold tokens.
    pub sequences: u32,
}
versioned!(nvb_kv_cache_usage);

pub struct KvCacheObject {
    pub cache: KvCache,
    pub backend: Arc<Backend>,
}

pub(super) static KV_CACHES: Table<KvCacheObject> = Table::new("KV cache", 6);

/// A call that reads or writes the cache needs it awake.
pub(super) fn layer_of(
    reading: Reading<'_>,
    backend: &Backend,
    (cache, layer): (*const nvb_kv_cache, u32),
    page_table: &nvb_tensor,
) -> Result<(Arc<KvCacheObject>, CacheLayer)> {
    let object = KV_CACHES.get(cache)?;
    expect_same_backend(backend, object.backend.executor(), "KV cache")?;
    let layer = object.cache.layer_with(layer as usize, reading.optional("page_table", page_table)?)?;
    if let Reading::Memory(_) = reading {
        expect_awake(layer.key).map_err(|error| error.context("the KV cache"))?;
    }
    Ok((object, layer))
}

/// `None`: the default.
fn dtype_of(name: &str, code: u32) -> Result<Option<DType>> {
    let refused = |code: u32| {
        Error::invalid(format!(
            "{name} is {code}; NVB_DTYPE_F32, _F16, _BF16, _FP8_E4M3, _FP8_E5M2, _KV_INT8, _KV_Q8_0 or _KV_Q4_0 is needed"
        ))
    };
    match code {
        0 => Ok(None),
        code => DType::from_code(code).map(Some).ok_or_else(|| refused(code)),
    }
}

pub(super) fn options_of(
    reading: Reading<'_>,
    backend: &Backend,
    given: &nvb_kv_cache_options,
) -> Result<KvCacheOptions> {
    Ok(KvCacheOptions {
        layers: given.layers as usize,
        sequences: given.sequences as usize,
        kv_heads: given.kv_heads as usize,
        head_dim: given.head_dim as usize,
        value_dim: given.value_dim as usize,
        values_in_keys: flag("values_in_keys", given.values_in_keys)?,
        capacity: given.capacity as usize,
        dtype: dtype_of("dtype", given.dtype)?.unwrap_or(backend.default_dtype()),
        value_dtype: dtype_of("value_dtype", given.value_dtype)?,
        page_tokens: given.page_tokens as usize,
        pages: given.pages as usize,
        window: given.window as usize,
        max_append: given.max_append as usize,
        key_scales: reading.optional("key_scales", &given.key_scales)?,
        value_scales: reading.optional("value_scales", &given.value_scales)?,
    })
}

/// Creates a cache, contents undefined: layers · kv_heads rows of a key and of a value for each token that there is room for, and an
/// I32 page table where there are pages; nothing but the handle over the engine's `memory`. `NVB_DTYPE_…` says what a row takes: a
/// token of 128 elements and as many values takes 512 bytes in BF16, 256 in FP8, 288 in INT8 and Q8_0 and 160 in Q4_0, for
/// each layer and head.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (which field), `NVB_ERROR_OUT_OF_MEMORY`.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_create(
    backend: *const nvb_backend,
    options: *const nvb_kv_cache_options,
    cache: *mut *mut nvb_kv_cache,
) -> nvb_status {
    guard!(nvb_kv_cache_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("cache", cache)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let given = unsafe { read(options)? };
        let dtypes = [dtype_of("dtype", given.dtype)?, dtype_of("value_dtype", given.value_dtype)?];
        let options = options_of(Reading::Memory(&backend), &backend, &given)?;
        let created = if given.memory_count == 0 {
            let stream = stream_of(&backend, std::ptr::null_mut())?;
            stream.expect_unrecorded("the making of a cache")?;
            let created = KvCache::new(backend.memory(), options, &stream)?;
            // Other streams may use the memory at once.
            stream.synchronize()?;
            created
        } else {
            // SAFETY: as many tensors, by the header's contract.
            let tensors = unsafe { slice("memory", given.memory, given.memory_count)? };
            if tensors.len() != 2 * options.layers {
                return Err(Error::invalid(format!(
                    "memory_count is {}; {} are needed, keys and values of each layer",
                    tensors.len(),
                    2 * options.layers
                )));
            }
            let tensors = gathered(tensors.iter().map(|tensor| device_tensor(&backend, "memory", tensor)), "layers")?;
            for (at, dtype) in dtypes.into_iter().enumerate() {
                let other = |other: &DType| tensors.iter().skip(at).step_by(2).any(|tensor| tensor.dtype != *other);
                if let Some(dtype) = dtype.filter(other) {
                    let name = ["dtype", "value_dtype"][at];
                    return Err(Error::invalid(format!("{name} is {dtype}, and `memory` has another")));
                }
            }
            KvCache::over(options, &tensors)?
        };
        let handle = KV_CACHES.insert(Arc::new(KvCacheObject { cache: created, backend }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { cache.write(handle) };
        Ok(())
    })
}

/// Destroys the handle; NULL is fine. Waits for the device before the memory is given back.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_destroy(cache: *mut nvb_kv_cache) -> nvb_status {
    guard!(nvb_kv_cache_destroy, { KV_CACHES.remove(cache) })
}

/// Writes the device bytes that the cache holds.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_get_bytes(cache: *const nvb_kv_cache, bytes: *mut u64) -> nvb_status {
    guard!(nvb_kv_cache_get_bytes, {
        let object = KV_CACHES.get(cache)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("bytes", bytes, object.cache.bytes() as u64) }
    })
}

/// Gives `sequence` room for `tokens` tokens, those that it holds included; it then holds as many. Less than it holds changes
/// nothing. Before an append a cache with pages needs it, and a ring for a later truncation or copy; of contiguous
/// sequences it only notes the number.
/// Pages are taken from the free ones, and where the next token falls into a page that another sequence has too, that page is
/// copied first. Queues a copy of the new entries of the page table on `stream`, and that of a page; nothing where no page is
/// needed. Does not synchronise, but once in some thousand pages it waits for copies of long ago. Allocates nothing. What
/// changes pages cannot be captured; a captured step reads the newest table.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY` if too few pages are free, with the sequence and both numbers; nothing has changed then.
/// `NVB_ERROR_INVALID_ARGUMENT` (a number past its limit, a capture, memory that sleeps, a stream that is explained or
/// recorded), of the four calls below too; `NVB_ERROR_UNSUPPORTED` for the engine's memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_reserve(
    cache: *mut nvb_kv_cache,
    sequence: u32,
    tokens: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_reserve, {
        change(cache, stream, |cache, stream, queue| cache.reserve(sequence as usize, tokens as usize, stream, queue))
    })
}

/// Forgets the tokens of `sequence` from `tokens` on, and gives back the pages that no token is left in. Stream, capture and
/// allocation are as with `nvb_kv_cache_reserve`.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`: more tokens than the sequence holds, or a ring has lost keys that a token there sees;
/// `NVB_ERROR_UNSUPPORTED` for the engine's memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_truncate(
    cache: *mut nvb_kv_cache,
    sequence: u32,
    tokens: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_truncate, {
        change(cache, stream, |cache, stream, queue| cache.truncate(sequence as usize, tokens as usize, stream, queue))
    })
}

/// Forgets all tokens of `sequence`, as `nvb_kv_cache_truncate` to 0.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_release(
    cache: *mut nvb_kv_cache,
    sequence: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_release, {
        change(cache, stream, |cache, stream, queue| cache.truncate(sequence as usize, 0, stream, queue))
    })
}

/// Lets `to`, which holds nothing, begin with the first `tokens` tokens of `from`. Whole pages are shared; of the last one, if
/// it is not whole, a copy is queued on `stream`. Either sequence may then be appended to, truncated or released. Stream,
/// capture and allocation are as with `nvb_kv_cache_reserve`.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY` if no page is free for that copy; `NVB_ERROR_INVALID_ARGUMENT` (one sequence given twice,
/// `to` holds tokens, more tokens than `from` holds); `NVB_ERROR_UNSUPPORTED` for caches without pages and the engine's.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_fork(
    cache: *mut nvb_kv_cache,
    from: u32,
    to: u32,
    tokens: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_fork, {
        change(cache, stream, |cache, stream, queue| {
            cache.fork(from as usize, to as usize, tokens as usize, stream, queue)
        })
    })
}

/// Copies the first `tokens` tokens of `from` in all layers to `to`, which holds nothing; with pages it takes as many new ones.
/// Stream and allocation are as with `nvb_kv_cache_reserve`; without pages it may be captured.
/// Errors: those of `nvb_kv_cache_fork`, but that caches without pages are fine.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_copy(
    cache: *mut nvb_kv_cache,
    from: u32,
    to: u32,
    tokens: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_copy, {
        change(cache, stream, |cache, stream, queue| {
            cache.copy(from as usize, to as usize, tokens as usize, stream, queue)
        })
    })
}

/// Writes the tokens that `sequence` holds, as the last call above left it.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`; `NVB_ERROR_UNSUPPORTED` for the engine's memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_get_length(
    cache: *const nvb_kv_cache,
    sequence: u32,
    tokens: *mut u32,
) -> nvb_status {
    guard!(nvb_kv_cache_get_length, {
        let held = KV_CACHES.get(cache)?.cache.tokens(sequence as usize)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("tokens", tokens, held as u32) }
    })
}

/// Fills in `usage`.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_get_usage(
    cache: *const nvb_kv_cache,
    usage: *mut nvb_kv_cache_usage,
) -> nvb_status {
    guard!(nvb_kv_cache_get_usage, {
        let object = KV_CACHES.get(cache)?;
        let held = object.cache.usage();
        let value = nvb_kv_cache_usage {
            struct_size: 0,
            bytes: object.cache.bytes() as u64,
            tokens: held.tokens as u64,
            page_bytes: held.page_bytes as u64,
            pages: held.pages as u32,
            free_pages: held.free_pages as u32,
            shared_pages: held.shared_pages as u32,
            sequences: held.sequences as u32,
        };
        // SAFETY: a struct with its size set, by the header's contract.
        unsafe { write(usage, &value) }
    })
}

/// Calls `work` with what queues its copies on the stream.
fn change(
    cache: *const nvb_kv_cache,
    stream: *mut nvb_stream,
    work: impl FnOnce(&KvCache, &Stream, Queue<'_>) -> Result<()>,
) -> Result<()> {
    let object = KV_CACHES.get(cache)?;
    let stream = stream_of(&object.backend, stream)?;
    object.cache.expect_awake()?;
    // Its books would change, and the page table on the device not.
    stream.expect_no_sink("what a cache holds can change")?;
    work(&object.cache, &stream, &mut |copy| object.backend.queue(copy, &stream))
}
