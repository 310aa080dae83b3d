//! Attention.

use super::backend::{nvb_backend, stream_of, BACKENDS};
use super::guard::guard;
use super::handle::Table;
use super::kv_cache::{layer_of, nvb_kv_cache};
use super::operations::or;
use super::status::nvb_status;
use super::stream::nvb_stream;
use super::structs::{expect_out, expect_reserved, read, read_into, slice, versioned};
use super::tensor::{nvb_tensor, Reading};
use crate::allocation::collected;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::operation::attention::{
    AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRopeArguments, DecodeRows, DeviceSource, Dropout,
    KeySource,
};
use crate::operation::rope::Rotation;
use crate::stream::Owner;
use crate::tensor::{CacheLayer, Tensor};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// softmax(cap(scale · Q·Kᵀ) + mask) · V with one set of heads, scale, cap and mask.
///
/// Threads: calls that take `const nvb_attention *` may run at once from many threads.
pub struct nvb_attention {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_options {
    pub struct_size: usize,
    /// A multiple of `kv_heads`; query head h reads key/value head h / (query_heads / kv_heads).
    pub query_heads: u32,
    pub kv_heads: u32,
    /// Elements of a query and of a key, 1 to 576.
    pub head_dim: u32,
    /// Elements of a value and of an output, 1 to 512; 0: `head_dim`. Values may be a view of the keys' first elements.
    pub value_dim: u32,
    /// Keys that a query sees, itself included: 0 ≤ q − k < window. 0: no window.
    pub window: u32,
    /// Multiplies the scores; 0: 1/√head_dim.
    pub scale: f32,
    /// Scores become soft_cap · tanh(score / soft_cap) before the mask (Gemma 2); 0: none.
    pub soft_cap: f32,
    /// 1: no causal mask; a window then keeps |q − k| < window. Prefill only: decode is causal by nature.
    pub bidirectional: u32,
    /// A chunked window (Llama 4): query q sees key k where ⌊k / chunk⌋ = ⌊q / chunk⌋, within mask and window as well. 0: none.
    pub chunk: u32,
    /// The first tokens of a sequence that a query sees beside its window, as far as they lie before it (StreamingLLM, Xiao et
    /// al., arXiv:2309.17453): up to 256. Only with `window`, without `chunk`, and not over a cache that is a ring. On CUDA the
    /// plain kernels take it. 0: none.
    pub sink_tokens: u32,
}
versioned!(nvb_attention_options);

/// Queries of several sequences, against a cache layer or against key and value tensors.
///
/// - **Ragged**, with `query_starts`: the rows of all sequences lie one after the other, in tensors of rank 3.
/// - **Dense**, with `query_starts` NULL and tensors of rank 4: a batch of B sequences of N query rows and M keys each, with any
///   strides, such as those of [B, heads, N, head_dim]. No host array is read; `sequence_count` is 0 or B.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_prefill_args {
    pub struct_size: usize,
    /// [T, query_heads, head_dim], or dense [B, N, query_heads, head_dim]; F32 or the keys' dtype, and any where the keys are FP8.
    pub query: nvb_tensor,
    /// As `query`, with value_dim for head_dim; F32, F16 or BF16.
    pub output: nvb_tensor,
    /// Optional, F32 [T, query_heads], or dense [B, N, query_heads], contiguous: ln Σ exp(score) over the visible keys; −inf for
    /// a row that sees none.
    pub lse: nvb_tensor,
    /// NULL: dense. Host memory, `sequence_count` + 1 entries: sequence b owns the query rows from query_starts[b] to
    /// query_starts[b + 1]. Read before the call returns, as are the other host arrays.
    pub query_starts: *const i32,
    pub sequence_count: usize,
    /// Keys and values: a cache, with `layer`, `sequences` and `kv_lengths`; or NULL, with `key`, `value`, `key_starts`.
    pub cache: *const nvb_kv_cache,
    /// Host memory: the cache's sequence of each; NULL: 0, 1, 2, …
    pub sequences: *const i32,
    /// Host memory: keys of each sequence, those of this call's tokens included. The last query row of a sequence stands
    /// at position kv_length − 1.
    pub kv_lengths: *const i32,
    /// [T_kv, kv_heads, head_dim], or dense [B, M, kv_heads, head_dim], when there is no cache; any dtype but I32.
    pub key: nvb_tensor,
    /// As `key`, with value_dim for head_dim and strides of its own; the keys' dtype.
    pub value: nvb_tensor,
    /// Host memory: as `query_starts`, for the rows of `key` and `value`.
    pub key_starts: *const i32,
    /// The cache's layer.
    pub layer: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional, I32 [sequences, entries] in device memory, as in `nvb_rope_args`. A visible key whose entry is no page of the
    /// pool is an error on the CPU, and counts as one of zeros on CUDA.
    pub page_table: nvb_tensor,
    /// Optional, F32, F16 or BF16: added to the scores, once they are scaled and capped; −inf hides a key, and a row whose keys
    /// are all hidden gives output 0 and lse −inf. Causal mask and window hold as well. Dense [B or 1, query_heads or 1, N or 1,
    /// at least M], ragged [1, query_heads or 1, T or 1, at least the longest sequence's keys]; leading axes of 1 may be left
    /// out, and strides may be 0. Read when the stream gets there.
    ///
    /// Or I32, a bit a key: of the same shape with words of 32 keys as the last axis, where bit k mod 32 of word ⌊k / 32⌋ is 1 if the
    /// row sees key k. Tiles that no row sees anything of are left out. Packed training sequences, several documents in one row, need
    /// no mask: they are ragged sequences, whose `query_starts` and `key_starts` are where the documents begin.
    pub mask: nvb_tensor,
    /// Optional, F32 [1] or [kv_heads] in device memory, for queries in FP8: (query · scale) is what a query element counts, of
    /// each head that reads the key/value head. Absent: 1. Whoever rounds to FP8 computes the scale before, usually
    /// max |x| / 448 (E4M3) or / 57344 (E5M2) of what it rounds, and writes it in stream order before this call.
    pub query_scale: nvb_tensor,
    /// As `query_scale`, of `key`; a cache in FP8 has its own.
    pub key_scale: nvb_tensor,
    /// As `query_scale`, of `value`.
    pub value_scale: nvb_tensor,
    /// Optional, I32 [B + 1] in device memory, contiguous: what `query_starts` is, read when the stream gets there, so that a
    /// captured call serves every step within the bounds below. `query_starts`, `key_starts`, `kv_lengths` and `sequences` are
    /// NULL then, `sequence_count` is 0 or B, and lengths are in `device_key_starts` or, over a cache, in `device_kv_lengths`. The
    /// last entry may lie below T: rows behind it are not written. What passes a bound, falls or names no sequence of the cache is
    /// an error on the CPU; on CUDA such a sequence has no rows, or no keys.
    pub device_query_starts: nvb_tensor,
    /// As `device_query_starts`, for the rows of `key` and `value`.
    pub device_key_starts: nvb_tensor,
    /// Optional, I32 [B] in device memory: what `kv_lengths` is. Also with a dense batch: of each sequence the first so many of its
    /// M keys count.
    pub device_kv_lengths: nvb_tensor,
    /// Optional, I32 [B] in device memory: what `sequences` is; absent: 0, 1, 2, …
    pub device_sequences: nvb_tensor,
    /// With lengths in device memory: no sequence has more query rows; it sizes the launch. 0: T.
    pub max_query_rows: u32,
    /// With lengths in device memory: no sequence has more keys. 0: the cache's capacity, or the rows of `key`.
    pub max_kv_length: u32,
    /// Optional, F32 [query_heads] in device memory: a learned logit of each head that takes weight and has no value (attention
    /// sinks), so that the weights are exp(score) / (exp(sink) + Σ exp(score)). It is not scaled or capped. The lse has it too: of
    /// parts that are merged, one alone gets the sinks. A row that sees no key gives output 0 and lse = sink.
    pub sinks: nvb_tensor,
    /// Optional, F32 [query_heads] in device memory: slope · |q − k| is taken from each capped score (ALiBi, Press et al. 2021).
    pub alibi_slopes: nvb_tensor,
    /// Optional, host memory, `sequence_count` or B entries: the first so many keys of a sequence are seen by all of its rows,
    /// whatever the causal mask says (PrefixLM: a prompt or an image that is read both ways). A window is then |q − k| < window. Excludes
    /// lengths in device memory, sink tokens and a bidirectional attention.
    pub prefix_lengths: *const i32,
    /// Optional, I32 [T], dense [B, N], in device memory, contiguous: the rows of a sequence are a tree of up to 64 draft tokens that
    /// are to be verified. Entry j of a sequence of n rows is the number of the row, 0 to j − 1, that its row j follows, or −1; other
    /// numbers count as −1. Row j, whose key is key L − n + j, sees the L − n keys before the tree, itself and the rows that it comes
    /// from. A row with d such rows stands at position L − n + d: there its query and key are to be rotated before the append, which
    /// `nvb_rope` without a cache does. Excludes a bidirectional attention, windows below 64, chunks, sink tokens, slopes and `prefix_lengths`
    /// (`NVB_ERROR_ATTENTION`).
    pub tree_parents: nvb_tensor,
    /// Optional, I32 [2] in device memory: the low and the high word of what is added to `dropout_offset`, read when the stream gets
    /// there, so that a captured call drops other weights in every replay. Only with `dropout`.
    pub dropout_device_offset: nvb_tensor,
    /// With `dropout`: which weights are dropped is a function of the seed, the offset and the weight's row, head and key alone, on
    /// every device bit for bit the same one, and no mask is stored. Of row r, counted as the rows of `lse` are, query head h and key
    /// k a weight is dropped where byte k mod 64 / 8 · 2 + k mod 2 of Philox4x32 with seven rounds (Salmon et al. 2011), with the seed as key and the
    /// counter [k / 64 · 4 + k mod 8 / 2, r, h | offset / 2^32 · 2^16, offset mod 2^32], is less than t: 256 · `dropout`, rounded, and from 1 to
    /// 255. Bytes count from the least significant one of the first of the four words; divisions are those of whole numbers.
    pub dropout_seed: u64,
    /// Less than 2^48; the sum of both offsets counts modulo that.
    pub dropout_offset: u64,
    /// The probability with which a weight becomes 0, less than 1, to the nearest 256th but 0; 0: none does. The kept ones, a share of
    /// 1 − t / 256, are divided by that share. The lse is as without. On CUDA keys and values of 16 bits have tensor cores for it
    /// from 9.0 on; else the plain kernel takes it.
    pub dropout: f32,
    /// Must be 0.
    pub reserved_dropout: u32,
}
versioned!(nvb_attention_prefill_args { query_starts, sequences, kv_lengths, key_starts, prefix_lengths });

/// A few query rows, R, for each of B sequences: one, or a token and the draft tokens after it that are to be verified.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_attention_decode_args {
    pub struct_size: usize,
    /// [B · R, query_heads, head_dim], F32 or the dtype of the cache's keys, or any float over keys that are no floats: row r of sequence b is row b · R + r.
    pub query: nvb_tensor,
    /// [B · R, query_heads, value_dim], any float dtype.
    pub output: nvb_tensor,
    /// Optional, F32 [B · R, query_heads], as in prefill.
    pub lse: nvb_tensor,
    pub cache: *const nvb_kv_cache,
    /// I32 [B · R] in device memory: a row sees the keys 0 … its position of its sequence, within the window. The positions of
    /// a sequence's rows ascend, but −1 makes a row empty wherever it stands: output 0, lse −inf. So do other positions outside
    /// the cache on CUDA, which are an error on the CPU. Values that any row of a sequence sees must be finite.
    pub positions: nvb_tensor,
    /// Optional, I32 [B] in device memory: the cache's sequence of each; absent: 0, 1, 2, …
    pub sequences: nvb_tensor,
    pub layer: u32,
    /// No position reaches this number; it sizes the launch, so a captured call serves every step below it. 0: capacity.
    pub max_kv_length: u32,
    /// R, 1 to 16; 0: 1. The rows of a sequence read its keys together.
    pub rows_per_sequence: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional, I32 [sequences, entries], as in prefill.
    pub page_table: nvb_tensor,
    /// Optional, [B, kv_heads, head_dim]: the keys of the new tokens, one a sequence, as the product before left them. Then the call
    /// does first what `nvb_rope` with the fields below does: queries and keys are normed and rotated, keys and values appended at
    /// their positions. `query` is left as it is. R is 1, no two of the B sequences are the same, and `sequences` is needed where
    /// B > 1. A token at −1, or on CUDA outside the cache, is not appended.
    ///
    /// CUDA has a kernel for it from compute capability 9.0 on: query, key, value and cache of one 16-bit dtype, head_dim 64, 128 or
    /// 256, rotary_dim a multiple of 16, rows aligned to 16 bytes, and few visible keys: of one sequence 512 of head_dim 256, 1,024 of
    /// head_dim 128. Elsewhere the call is `NVB_ERROR_UNSUPPORTED`; `nvb_rope` and a call without `key` do the same.
    pub key: nvb_tensor,
    /// [B, kv_heads, value_dim], with `key` and only with it: stored as it is.
    pub value: nvb_tensor,
    /// Optional [head_dim], with `key`: RMS norm of each query head before the rotation.
    pub query_norm: nvb_tensor,
    /// Optional [head_dim], with `key`.
    pub key_norm: nvb_tensor,
    /// The rotation, as in `nvb_rope_args`: even, at most head_dim; 0: head_dim.
    pub rotary_dim: u32,
    /// 0: 10,000.
    pub base: f32,
    /// 0: 1.
    pub position_scale: f32,
    /// Multiplies the rotated queries; 0: 1.
    pub query_scale: f32,
    /// The norms' epsilon; 0: 1e-6.
    pub epsilon: f32,
    /// What the norms add to their weights: 0 or 1.
    pub weight_offset: f32,
    /// Optional, F32 [query_heads], as in prefill, and so are the slopes.
    pub sinks: nvb_tensor,
    pub alibi_slopes: nvb_tensor,
    /// The first tokens of all B sequences are the same, and their keys and values are read once for all of them: these tokens of
    /// `prefix_sequence`, whole pages of a paged cache. A sequence's own place for them is not read, so a table of an engine need not
    /// name the prefix's pages again; after `nvb_kv_cache_fork` they are the same pages anyway. 0: none.
    ///
    /// Positions count from the first token of the prefix, and each is −1 or at `prefix_tokens` − 1 and behind: one before that is an
    /// error on the CPU, and on CUDA an empty row. It excludes a window, a chunk, `alibi_slopes`, rings and `key`. Partial results
    /// are F32, in workspace. On CUDA it pays from some eight sequences on, and not over a cache in FP8.
    pub prefix_tokens: u32,
    /// The cache's sequence that holds the prefix, of the B or not.
    pub prefix_sequence: u32,
}
versioned!(nvb_attention_decode_args);

pub struct AttentionObject {
    config: AttentionConfig,
    pub(super) backend: Arc<Backend>,
}

pub(super) static ATTENTIONS: Table<AttentionObject> = Table::new("attention", 7);

pub(super) fn config_of(options: &nvb_attention_options) -> Result<AttentionConfig> {
    AttentionConfig::new(AttentionConfig {
        query_heads: options.query_heads as usize,
        kv_heads: options.kv_heads as usize,
        head_dim: options.head_dim as usize,
        value_dim: options.value_dim as usize,
        scale: options.scale,
        soft_cap: options.soft_cap,
        window: options.window as usize,
        chunk: options.chunk as usize,
        sink_tokens: options.sink_tokens as usize,
        causal: match options.bidirectional {
            0 => true,
            1 => false,
            other => return Err(Error::invalid(format!("bidirectional is {other}; 0 or 1 is needed"))),
        },
    })
}

/// Creates an attention. Errors: `NVB_ERROR_ATTENTION` for options that contradict each other.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_create(
    backend: *const nvb_backend,
    options: *const nvb_attention_options,
    attention: *mut *mut nvb_attention,
) -> nvb_status {
    guard!(nvb_attention_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("attention", attention)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let options = unsafe { read(options)? };
        let config = config_of(&options)?;
        let handle = ATTENTIONS.insert(Arc::new(AttentionObject { config, backend }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { attention.write(handle) };
        Ok(())
    })
}

/// Destroys the handle; NULL is fine.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_destroy(attention: *mut nvb_attention) -> nvb_status {
    guard!(nvb_attention_destroy, { ATTENTIONS.remove(attention) })
}

/// Queues the attention of whole prompts or chunks of prompts; the keys of these tokens must be in the cache (or the
/// tensors) in stream order before. Query row i of n with L keys stands at position L − n + i. Does not synchronise;
/// may be captured with the host arrays as they are then. On CUDA the keys of few query rows are divided among the multiprocessors,
/// and tiles of keys that a mask of bits hides are left out, for which the first such call with more rows or parts may allocate
/// workspace (`nvb_attention_prefill_get_workspace_size`).
/// Formula: FlashAttention 2 (Dao 2023), with Gemma 2's soft cap before the mask; with scales of FP8
/// score = (q · k) · query_scale · key_scale · scale and output = Σ p · v · value_scale. Softmax and sums in f32.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (a tensor, a length beyond the cache, more queries than keys).
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_prefill(
    attention: *const nvb_attention,
    args: *const nvb_attention_prefill_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_attention_prefill, {
        let object = ATTENTIONS.get(attention)?;
        let backend = &object.backend;
        let stream = stream_of(backend, stream)?;
        // SAFETY: a struct with its size set and host arrays of these lengths, by the header's contract.
        let (op, owner) = unsafe { prefill_of(Reading::Memory(backend), &object, &read(args)?)? };
        backend.queue_with(op, owner, &stream)
    })
}

/// The descriptor, and who owns the cache: another thread may destroy its handle, and it lives until the work is queued, which
/// holds its memory.
///
/// # Safety
/// The host arrays have the lengths that the header says.
pub(super) unsafe fn prefill_of(
    reading: Reading<'_>,
    object: &AttentionObject,
    args: &nvb_attention_prefill_args,
) -> Result<(AttentionPrefill, Option<Owner>)> {
    expect_reserved(args.reserved)?;
    let count = args.sequence_count;
    if count > i32::MAX as usize {
        return Err(Error::invalid(format!("sequence_count is {count}; at most {} is supported", i32::MAX)));
    }
    // SAFETY: the caller's contract.
    let (op, owner) = unsafe { unmasked_prefill_of(reading, object, args, count)? };
    let scales = |name: &str, tensor: &nvb_tensor| reading.optional(name, tensor);
    let op = op.with_scales(
        scales("query_scale", &args.query_scale)?,
        scales("key_scale", &args.key_scale)?,
        scales("value_scale", &args.value_scale)?,
    )?;
    let op = op.with_head_terms(scales("sinks", &args.sinks)?, scales("alibi_slopes", &args.alibi_slopes)?)?;
    // SAFETY: the caller's contract.
    let op = unsafe { with_prefixes(op, args, count)? };
    let op = op.with_tree(reading.optional("tree_parents", &args.tree_parents)?)?;
    expect_reserved(args.reserved_dropout)?;
    let offset = reading.optional("dropout_device_offset", &args.dropout_device_offset)?;
    let heads = object.config.query_heads;
    let dropout = Dropout::new(args.dropout, args.dropout_seed, args.dropout_offset, offset, heads)?;
    let op = op.with_dropout(dropout)?;
    Ok((op.with_mask(reading.optional("mask", &args.mask)?)?, owner))
}

/// # Safety
/// As of `prefill_of`.
unsafe fn with_prefixes(
    op: AttentionPrefill,
    args: &nvb_attention_prefill_args,
    count: usize,
) -> Result<AttentionPrefill> {
    if args.prefix_lengths.is_null() {
        return Ok(op);
    }
    let starts = if args.query_starts.is_null() { 0 } else { count + 1 };
    let count = if args.query_starts.is_null() { op.blocks } else { count };
    // SAFETY: the caller's contract; starts were read before.
    unsafe {
        let prefixes = slice("prefix_lengths", args.prefix_lengths, count)?;
        let starts = if starts == 0 { &[] } else { slice("query_starts", args.query_starts, starts)? };
        op.with_prefixes(prefixes, starts)
    }
}

/// As `prefill_of`, without mask and scales.
unsafe fn unmasked_prefill_of(
    reading: Reading<'_>,
    object: &AttentionObject,
    args: &nvb_attention_prefill_args,
    count: usize,
) -> Result<(AttentionPrefill, Option<Owner>)> {
    let query = reading.tensor("query", &args.query)?;
    let output = reading.tensor("output", &args.output)?;
    let lse = reading.optional("lse", &args.lse)?;
    if args.query_starts.is_null() && query.rank == 4 {
        if !args.cache.is_null() {
            return Err(Error::invalid("`query` has rank 4, and a cache is given, whose lengths need `query_starts`"));
        }
        if count != 0 && count != query.shape[0] {
            return Err(Error::invalid(format!("sequence_count is {count}; `query` is a batch of {}", query.shape[0])));
        }
        let keys = (reading.tensor("key", &args.key)?, reading.tensor("value", &args.value)?);
        let op = AttentionPrefill::dense(object.config, query, keys, output, lse)?;
        let op = match reading.optional("device_kv_lengths", &args.device_kv_lengths)? {
            Some(lengths) => op.with_kv_lengths(lengths, args.max_kv_length as usize)?,
            None => op,
        };
        return Ok((op, None));
    }
    if let Some(query_starts) = reading.optional("device_query_starts", &args.device_query_starts)? {
        return device_lengths_of(reading, object, args, (query, query_starts, output, lse));
    }
    for (name, tensor) in [
        ("device_key_starts", &args.device_key_starts),
        ("device_kv_lengths", &args.device_kv_lengths),
        ("device_sequences", &args.device_sequences),
    ] {
        if reading.optional(name, tensor)?.is_some() {
            return Err(Error::invalid(format!("`{name}` is given without `device_query_starts`")));
        }
    }
    // SAFETY: the caller's contract.
    let query_starts = unsafe { slice("query_starts", args.query_starts, count + 1)? };
    if args.cache.is_null() {
        // SAFETY: the caller's contract.
        let key_starts = unsafe { slice("key_starts", args.key_starts, count + 1)? };
        let source = KeySource::Tensors {
            key: reading.tensor("key", &args.key)?,
            value: reading.tensor("value", &args.value)?,
            key_starts,
        };
        return Ok((AttentionPrefill::new(object.config, query, query_starts, source, output, lse)?, None));
    }
    let (cache, layer) = layer_of(reading, &object.backend, (args.cache, args.layer), &args.page_table)?;
    // SAFETY: the caller's contract.
    let kv_lengths = unsafe { slice("kv_lengths", args.kv_lengths, count)? };
    let in_order: Vec<i32>;
    let sequences = if args.sequences.is_null() {
        in_order = collected(0..count as i32, "the sequences of a prefill")?;
        &in_order
    } else {
        // SAFETY: the caller's contract.
        unsafe { slice("sequences", args.sequences, count)? }
    };
    let source = KeySource::Cache { layer, sequences, kv_lengths };
    Ok((AttentionPrefill::new(object.config, query, query_starts, source, output, lse)?, Some(cache)))
}

/// A prefill whose lengths lie in device memory, of its query, starts, output and lse.
fn device_lengths_of(
    reading: Reading<'_>,
    object: &AttentionObject,
    args: &nvb_attention_prefill_args,
    (query, query_starts, output, lse): (Tensor, Tensor, Tensor, Option<Tensor>),
) -> Result<(AttentionPrefill, Option<Owner>)> {
    let host = [
        ("query_starts", args.query_starts),
        ("key_starts", args.key_starts),
        ("kv_lengths", args.kv_lengths),
        ("sequences", args.sequences),
    ];
    if let Some((name, _)) = host.iter().find(|(_, array)| !array.is_null()) {
        return Err(Error::invalid(format!(
            "`device_query_starts` and the host's `{name}` are given; one of them is needed"
        )));
    }
    let sequences = query_starts.shape[0].saturating_sub(1);
    if args.sequence_count != 0 && args.sequence_count != sequences {
        return Err(Error::invalid(format!(
            "sequence_count is {}; `device_query_starts` has entries for {sequences}",
            args.sequence_count
        )));
    }
    let (source, owner): (_, Option<Owner>) = if args.cache.is_null() {
        let key_starts = reading.tensor("device_key_starts", &args.device_key_starts)?;
        let (key, value) = (reading.tensor("key", &args.key)?, reading.tensor("value", &args.value)?);
        (DeviceSource::Tensors { key, value, key_starts }, None)
    } else {
        let (owner, layer) = layer_of(reading, &object.backend, (args.cache, args.layer), &args.page_table)?;
        let kv_lengths = reading.tensor("device_kv_lengths", &args.device_kv_lengths)?;
        let sequences = reading.optional("device_sequences", &args.device_sequences)?;
        (DeviceSource::Cache { layer, sequences, kv_lengths }, Some(owner))
    };
    let bounds = (args.max_query_rows as usize, args.max_kv_length as usize);
    let op = AttentionPrefill::with_device_lengths(object.config, query, query_starts, source, (output, lse), bounds)?;
    Ok((op, owner))
}

pub(super) fn decode_of(
    reading: Reading<'_>,
    object: &AttentionObject,
    args: &nvb_attention_decode_args,
    layer: CacheLayer,
) -> Result<AttentionDecode> {
    expect_reserved(args.reserved)?;
    let op = AttentionDecode::new(
        object.config,
        reading.tensor("query", &args.query)?,
        layer,
        reading.tensor("output", &args.output)?,
        reading.optional("lse", &args.lse)?,
        DecodeRows {
            per_sequence: args.rows_per_sequence.max(1) as usize,
            positions: reading.tensor("positions", &args.positions)?,
            sequences: reading.optional("sequences", &args.sequences)?,
            max_kv_length: args.max_kv_length as usize,
        },
    )?
    .with_head_terms(reading.optional("sinks", &args.sinks)?, reading.optional("alibi_slopes", &args.alibi_slopes)?)?
    .with_prefix(args.prefix_tokens as usize, args.prefix_sequence as usize)?;
    let Some(key) = reading.optional("key", &args.key)? else {
        for (name, tensor) in [("value", &args.value), ("query_norm", &args.query_norm), ("key_norm", &args.key_norm)] {
            if reading.optional(name, tensor)?.is_some() {
                return Err(Error::invalid(format!("`{name}` is given without `key`")));
            }
        }
        return Ok(op);
    };
    let head_dim = object.config.head_dim;
    op.with_rope(DecodeRopeArguments {
        key,
        value: reading.tensor("value", &args.value)?,
        query_norm: reading.optional("query_norm", &args.query_norm)?,
        key_norm: reading.optional("key_norm", &args.key_norm)?,
        query_scale: or(args.query_scale, 1.0),
        epsilon: or(args.epsilon, 1e-6),
        weight_offset: args.weight_offset,
        rotation: Some(Rotation {
            base: or(args.base, 10_000.0),
            position_scale: or(args.position_scale, 1.0),
            rotary_dim: if args.rotary_dim == 0 { head_dim & !1 } else { args.rotary_dim as usize },
        }),
    })
}

/// Queues the attention of one or a few new tokens for each of B sequences; their keys must be in the cache in stream order before,
/// or are appended by the call (`key`).
/// Positions and sequences are read from device memory when the stream reaches the call, so a captured call serves every
/// step. Does not synchronise; the first call with a larger `max_kv_length` or B may allocate workspace.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`; `NVB_ERROR_ATTENTION` for a bidirectional attention.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_decode(
    attention: *const nvb_attention,
    args: *const nvb_attention_decode_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_attention_decode, {
        let object = ATTENTIONS.get(attention)?;
        let backend = &object.backend;
        let stream = stream_of(backend, stream)?;
        let mut read = MaybeUninit::uninit();
        // SAFETY: a struct with its size set, by the header's contract.
        let args = unsafe { read_into(args, &mut read)? };
        let (owner, layer) = layer_of(Reading::Memory(backend), backend, (args.cache, args.layer), &args.page_table)?;
        backend.queue_with(decode_of(Reading::Memory(backend), &object, args, layer)?, Some(owner), &stream)
    })
}
