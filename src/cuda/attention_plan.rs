//! The plans of attention on CUDA: which kernel of csrc/attention runs, and how it divides the work. Running, naming the
//! kernel and sizing the workspace read them.
//!
//! The override comes first, then what was tuned, then the kernels in the order of their table, of which the first that takes
//! the arguments runs: the last takes all. A plan is a plain value, made without memory and locks, and does not depend on what lies in device
//! memory, so that a captured call serves every step.

use super::attention::{decode_params, prefill_params, DecodeParams, DecodeRopeParams, PrefillParams, MAX_SEQUENCES};
use super::executor::CudaExecutor;
use super::kernel_table::{kernel, row};
use super::launch::Launch;
use super::scratch::{WorkspaceUse, ALIGNMENT};
use super::workspace::Workspace;
use crate::device::RawHandle;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, SequenceSpan};
use crate::operation::{Operation, OperationKind};
use crate::registry::attention_key::AttentionKey;
use crate::registry::{Family, KernelId};
use std::cmp::Reverse;
use std::ops::Range;

/// `NVB_ATTENTION_MAX_SPLITS` of csrc/attention/attention.h.
const MAX_SPLITS: usize = 256;
/// `NVB_ATTENTION_MERGED_SPLITS` of csrc/attention/attention.h.
const MERGED_SPLITS: usize = 16;
/// `NVB_ATTENTION_DECODE_COUNTERS` of csrc/attention/attention.h.
const DECODE_COUNTERS: usize = 17;

/// `nvb_attention_prefill_shape` of csrc/attention/attention.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PrefillShape {
    rows: i32,
    tile_rows: i32,
    tile_keys: i32,
    finds_mask_tiles: i32,
    partial_bytes: i32,
    counters: i32,
}

/// `nvb_attention_decode_shape` of csrc/attention/attention.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DecodeShape {
    heads_per_block: i32,
    keys: i32,
    min_tiles: i32,
    threads: i32,
    shared_bytes: i32,
    cluster: i32,
    passes: i32,
    stages: i32,
    resident: i32,
}

extern "C" {
    fn nvb_cuda_attention_prefill_kernel_supports(
        index: i32,
        params: *const PrefillParams,
        launch: *const Launch,
        shape: *mut PrefillShape,
    ) -> i32;
    fn nvb_cuda_attention_decode_kernel_supports(
        index: i32,
        params: *const DecodeParams,
        launch: *const Launch,
        shape: *mut DecodeShape,
    ) -> i32;
}

/// Kernels in a table, more than any has.
const ROWS: i32 = 8;

/// The rows to try: the override's, then what was tuned, then all in their order.
fn rows(
    executor: &CudaExecutor,
    operation: OperationKind,
    key: impl FnOnce() -> AttentionKey,
) -> impl Iterator<Item = i32> {
    let choices = executor.choices();
    let tuned = choices.tuned_attention(key).and_then(|entry| row(entry.choice.kernel));
    choices.overridden(operation).and_then(row).into_iter().chain(tuned).chain(0..ROWS)
}

/// The kernels that can do the attention, in the order of their table.
pub(super) fn candidates(executor: &CudaExecutor, op: &Operation) -> Vec<KernelId> {
    let supports = |&row: &i32| match op {
        Operation::AttentionPrefill(op) => PrefillPlan::by([row], executor, op, &mut prefill_params(op)).is_some(),
        // Its parts choose each for themselves.
        Operation::AttentionDecode(op) if op.prefix.is_some() => false,
        Operation::AttentionDecode(op) => {
            DecodePlan::by([row], executor, op, &decode_params(op, &DecodeRopeParams::of(op))).is_some()
        }
        _ => false,
    };
    let family = match op {
        Operation::AttentionPrefill(_) => Family::AttentionPrefill,
        _ => Family::AttentionDecode,
    };
    (0..ROWS).filter(supports).filter_map(|row| kernel(family, row)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PrefillPlan {
    /// Of the table of kernels.
    pub row: i32,
    /// Query rows of a block; 0: the kernel lays out its blocks itself.
    pub rows: usize,
    /// Query heads whose keys and values fit L2 together, so that blocks which run side by side find them there.
    pub heads_per_group: i32,
    /// Of the keys of each tile of rows, which are merged afterwards.
    pub parts: usize,
    /// Workspace of the tiles of keys that a mask of bits leaves out.
    pub mask_tile_bytes: usize,
    /// Workspace in which blocks of the kernel that share keys meet, and its counters.
    pub meeting_bytes: usize,
    pub counters: usize,
}

impl PrefillPlan {
    /// `None` without a query row, or a kernel. `params` has the table of some of the sequences afterwards.
    pub fn of(executor: &CudaExecutor, op: &AttentionPrefill, params: &mut PrefillParams) -> Option<PrefillPlan> {
        let rows = rows(executor, OperationKind::AttentionPrefill, || AttentionKey::of_prefill(op));
        PrefillPlan::by(rows, executor, op, params)
    }

    /// By the first of these rows that takes it.
    pub fn by(
        rows: impl IntoIterator<Item = i32>,
        executor: &CudaExecutor,
        op: &AttentionPrefill,
        params: &mut PrefillParams,
    ) -> Option<PrefillPlan> {
        if op.is_empty() {
            return None;
        }
        let launch = executor.launch_attention_on(RawHandle::NULL);
        let mut shape = PrefillShape::default();
        params.one_order = executor.batch_invariant.into();
        let mut supports = |row: i32| {
            if op.lengths.is_some() {
                // SAFETY: as below.
                return unsafe { nvb_cuda_attention_prefill_kernel_supports(row, params, &launch, &mut shape) != 0 };
            }
            op.sequences.chunks(MAX_SEQUENCES).all(|spans| {
                params.set_sequences(spans);
                // SAFETY: reads the structs alone, and writes the shape.
                unsafe { nvb_cuda_attention_prefill_kernel_supports(row, params, &launch, &mut shape) != 0 }
            })
        };
        let row = rows.into_iter().find(|&row| supports(row))?;
        let rows = shape.rows as usize;
        let parts = if executor.batch_invariant { 1 } else { parts(op, &shape, &launch) };
        let heads_per_group = heads_per_group(op, launch.l2_bytes as usize) as i32;
        let mask_tile_bytes = mask_tile_bytes(op, &shape);
        // Of more sequences than a launch takes, the shape is that of the last launch.
        let meets = op.sequences.len() <= MAX_SEQUENCES;
        let [meeting_bytes, counters] =
            [shape.partial_bytes, shape.counters].map(|count| if meets { count as usize } else { 0 });
        Some(PrefillPlan { row, rows, heads_per_group, parts, mask_tile_bytes, meeting_bytes, counters })
    }

    /// Without workspace: with the keys of each tile of rows in one piece.
    pub fn whole(self) -> PrefillPlan {
        PrefillPlan { parts: 1, mask_tile_bytes: 0, meeting_bytes: 0, counters: 0, ..self }
    }

    /// The parts' outputs and sums, and behind them what `mask_tile_bytes` is for, or what `meeting_bytes` is for.
    pub fn workspace(&self, op: &AttentionPrefill) -> Workspace {
        match self.partial_bytes(op) + self.mask_tile_bytes + self.meeting_bytes {
            0 => Workspace::none(),
            bytes => Workspace::none()
                .with(WorkspaceUse::Kernel, bytes)
                .with(WorkspaceUse::Counters, self.counters * size_of::<u32>()),
        }
    }

    /// Of the parts' outputs and sums.
    pub fn partial_bytes(&self, op: &AttentionPrefill) -> usize {
        if self.parts == 1 {
            return 0;
        }
        partial_bytes(op, self.parts).iter().sum()
    }

    /// Writes the table of the sequences, those with the most work first because blocks start in its order, and gives the
    /// number of blocks.
    pub fn arrange(&self, params: &mut PrefillParams, spans: &[SequenceSpan]) -> Result<i32> {
        params.set_sequences(spans);
        if self.rows == 0 {
            return Ok(0);
        }
        let heads = params.query_heads;
        let sequences = params.sequences_mut();
        sequences.sort_unstable_by_key(|sequence| Reverse(sequence.work()));
        let mut blocks = 0i32;
        for sequence in sequences {
            sequence.first_block = blocks;
            let tiles = (sequence.query_count as usize).div_ceil(self.rows);
            blocks = i32::try_from(tiles)
                .ok()
                .and_then(|tiles| tiles.checked_mul(heads)?.checked_add(blocks))
                .ok_or_else(too_many_blocks)?;
        }
        Ok(blocks)
    }

    /// Blocks that are enough whatever lengths device memory holds: those beyond them leave at once. The rows of ragged
    /// sequences fill their tiles but for one a sequence.
    pub fn most_blocks(&self, params: &PrefillParams) -> Result<i32> {
        if self.rows == 0 {
            return Ok(0);
        }
        let (sequences, rows) = (params.sequences as usize, self.rows);
        let mut tiles = sequences.checked_mul((params.max_query_count as usize).div_ceil(rows));
        if !params.query_starts.is_null() {
            let enough = (params.query_rows as usize + sequences * (rows - 1)) / rows;
            tiles = tiles.map(|tiles| tiles.min(enough));
        }
        let blocks = tiles.and_then(|tiles| tiles.checked_mul(params.query_heads as usize));
        blocks.and_then(|blocks| i32::try_from(blocks).ok()).ok_or_else(too_many_blocks)
    }
}

fn too_many_blocks() -> Error {
    Error::invalid("an attention prefill of more than 2^31 blocks; divide its sequences among calls")
}

/// Rows of query and output from the first sequence's first one to the last one's last, where they are all some sequence's.
pub(super) fn covered_rows(op: &AttentionPrefill) -> Option<Range<usize>> {
    let step = op.starts.query / op.query.token_stride.max(1);
    let first = |span: &SequenceSpan| span.query_start * step;
    let start = op.sequences.iter().map(first).min()?;
    let end = op.sequences.iter().map(|span| first(span) + span.query_count).max()?;
    let rows: usize = op.sequences.iter().map(|span| span.query_count).sum();
    (rows == end - start).then_some(start..end)
}

/// Bytes of the parts' outputs, and of their sums, each up to where the next may begin.
pub(super) fn partial_bytes(op: &AttentionPrefill, parts: usize) -> [usize; 2] {
    let items = parts * covered_rows(op).map_or(0, |rows| rows.len()) * op.config.query_heads;
    [items * op.config.value_dim, items].map(|floats| (floats * size_of::<f32>()).next_multiple_of(ALIGNMENT))
}

/// Two bits for each tile of keys and each tile of rows, which begins at any row of the query, and each head if the mask has heads: words
/// of 32, as csrc/attention/attention.h has them. 0 where the kernel finds none.
fn mask_tile_bytes(op: &AttentionPrefill, shape: &PrefillShape) -> usize {
    let Some(mask) = op.mask.as_ref().filter(|_| shape.finds_mask_tiles != 0) else { return 0 };
    let step = op.starts.query / op.query.token_stride.max(1);
    let rows = op.sequences.iter().map(|span| span.query_start * step + span.query_count).max().unwrap_or(0);
    let heads = if mask.head_stride == 0 { 1 } else { op.config.query_heads };
    let words = op.longest().div_ceil(shape.tile_keys as usize).div_ceil(32);
    (rows * heads * 2 * words * size_of::<u32>()).next_multiple_of(ALIGNMENT)
}

/// What an H200 takes: floating-point operations of a multiprocessor in a microsecond while it multiplies, a tile's beginning and
/// end in microseconds, and those of a merge, whose bytes come at the memory's speed.
const OPERATIONS: f64 = 4.5e6;
const TILE_ENDS: f64 = 4.0;
const MERGE: f64 = 5.0;
const MERGED_BYTES: f64 = 3e6;
/// Tiles of keys in a part, at least.
const FEWEST_TILES: usize = 4;
const MOST_PARTS: usize = 64;

/// Into how many parts the keys of each tile of rows are divided: as many as take the least time by a model of rounds of tiles.
/// Where tiles fill the device, that is one.
fn parts(op: &AttentionPrefill, shape: &PrefillShape, launch: &Launch) -> usize {
    let (multiprocessors, rows, keys) =
        (launch.multiprocessors as usize, shape.tile_rows as usize, shape.tile_keys as usize);
    if rows == 0 || op.lengths.is_some() || op.sequences.len() > MAX_SEQUENCES {
        return 1;
    }
    let AttentionConfig { query_heads, head_dim, value_dim, window, chunk, .. } = op.config;
    let tiles: usize = op.sequences.iter().map(|span| span.query_count.div_ceil(rows) * query_heads).sum();
    if 5 * tiles > 4 * multiprocessors {
        return 1;
    }
    let Some(covered) = covered_rows(op) else { return 1 };
    let visible = match window {
        0 => op.longest(),
        window => op.longest().min(if op.config.causal { window + rows } else { 2 * window + rows }),
    };
    let visible = if chunk == 0 { visible } else { visible.min(chunk + rows) };
    let key_tiles = visible.div_ceil(keys);
    let of_keys = (2 * rows * keys * (head_dim + value_dim)) as f64 / OPERATIONS;
    let time = |parts: usize| {
        let rounds = (tiles * parts).div_ceil(multiprocessors) as f64;
        let merge = match parts {
            1 => 0.0,
            _ => MERGE + (2 * parts * covered.len() * query_heads * value_dim * size_of::<f32>()) as f64 / MERGED_BYTES,
        };
        rounds * (key_tiles.div_ceil(parts) as f64 * of_keys + TILE_ENDS) + merge
    };
    let most = (key_tiles / FEWEST_TILES).clamp(1, MOST_PARTS);
    (1..=most).min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// The KV heads are dealt out evenly, because the short tiles that end a group leave part of the device idle.
fn heads_per_group(op: &AttentionPrefill, l2_bytes: usize) -> usize {
    let AttentionConfig { kv_heads, .. } = op.config;
    let longest = op.longest().max(1);
    let bytes = longest * (op.key.dtype.row_bytes(op.key.dim) + op.value.dtype.row_bytes(op.value.dim));
    let fitting = (l2_bytes / bytes).clamp(1, kv_heads);
    kv_heads.div_ceil(kv_heads.div_ceil(fitting)) * op.config.group()
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DecodePlan {
    /// Of the table of kernels.
    pub row: i32,
    /// Blocks that divide the keys of a sequence.
    pub splits: i32,
    /// Blocks that divide the query heads of all rows that meet a KV head, and the most of one.
    pub chunks: i32,
    pub heads_per_chunk: i32,
    /// Results in the workspace of each query head of a row.
    pub slots_per_head: i32,
    /// Keys of a tile, and tiles under way at a time.
    pub keys: usize,
    pub stages: usize,
    workspace_bytes: usize,
    counter_bytes: usize,
}

impl DecodePlan {
    /// `None` without a query row, or a kernel.
    pub fn of(executor: &CudaExecutor, op: &AttentionDecode) -> Option<DecodePlan> {
        DecodePlan::with_params(executor, op, &decode_params(op, &DecodeRopeParams::of(op)))
    }

    /// With the operation's parameters.
    pub fn with_params(executor: &CudaExecutor, op: &AttentionDecode, params: &DecodeParams) -> Option<DecodePlan> {
        let rows = rows(executor, OperationKind::AttentionDecode, || AttentionKey::of_decode(op));
        DecodePlan::by(rows, executor, op, params)
    }

    /// By the first of these rows that takes it.
    pub fn by(
        rows: impl IntoIterator<Item = i32>,
        executor: &CudaExecutor,
        op: &AttentionDecode,
        params: &DecodeParams,
    ) -> Option<DecodePlan> {
        if op.query.tokens == 0 {
            return None;
        }
        let launch = executor.launch_attention_on(RawHandle::NULL);
        rows.into_iter().find_map(|row| {
            let mut shape = DecodeShape::default();
            // SAFETY: reads the structs alone, and writes the shape.
            match unsafe { nvb_cuda_attention_decode_kernel_supports(row, params, &launch, &mut shape) } {
                0 => None,
                _ => DecodePlan::with(row, op, &shape, &launch),
            }
        })
    }

    /// `None` where the keys are too many for a kernel that merges in a cluster.
    fn with(row: i32, op: &AttentionDecode, shape: &DecodeShape, launch: &Launch) -> Option<DecodePlan> {
        let AttentionConfig { query_heads, kv_heads, value_dim, window, chunk, .. } = op.config;
        let rows = op.query.tokens;
        let items = op.rows.per_sequence * op.config.group();
        let chunks = items.div_ceil(shape.heads_per_block as usize);
        let longest = op.rows.max_kv_length;
        // What the rows of a sequence see together of a window, or of chunks.
        let within = |keys: usize| if keys > 0 { keys + op.rows.per_sequence - 1 } else { longest };
        let visible = within(window).min(within(chunk)).min(longest).max(1);
        let work = Work { blocks: op.sequence_count() * kv_heads * chunks, visible };
        let heads_per_chunk = items.div_ceil(chunks);
        // The tiles of all sequences are one list, and a block has at most two rows that others read too.
        let listed = shape.min_tiles == 0;
        let splits = match shape.cluster {
            _ if listed => work.tiles(shape).min((launch.multiprocessors * shape.resident) as usize),
            0 => work.splits(shape, launch),
            _ => work.cluster(shape, launch)?,
        };
        let merged = splits > 1 && shape.cluster == 0 && !listed;
        let slots_per_head = if merged { splits + splits.div_ceil(MERGED_SPLITS) } else { 0 };
        let partials = if listed { 2 * splits * heads_per_chunk } else { rows * query_heads * slots_per_head };
        // The maxima and sums come first, padded so that the outputs are aligned to 16 bytes.
        let sums = (partials * 2 * size_of::<f32>()).next_multiple_of(16);
        Some(DecodePlan {
            row,
            splits: splits as i32,
            chunks: chunks as i32,
            heads_per_chunk: heads_per_chunk as i32,
            slots_per_head: slots_per_head as i32,
            keys: shape.keys as usize,
            stages: shape.stages as usize,
            workspace_bytes: sums + partials * value_dim * size_of::<f32>(),
            counter_bytes: rows * query_heads * DECODE_COUNTERS * size_of::<u32>(),
        })
    }

    pub fn workspace(&self) -> Workspace {
        Workspace::none()
            .with(WorkspaceUse::Kernel, self.workspace_bytes)
            .with(WorkspaceUse::Counters, self.counter_bytes)
    }
}

/// What a decode has to divide.
struct Work {
    /// With one split.
    blocks: usize,
    /// The most keys that a row sees.
    visible: usize,
}

impl Work {
    /// Of all sequences.
    fn tiles(&self, shape: &DecodeShape) -> usize {
        self.blocks * self.visible.div_ceil(shape.keys as usize)
    }

    /// The fewest splits that keep the device nearly as busy as the best number would: a last wave of few blocks leaves it
    /// idle, and every split costs a write and a read of the output. Where all blocks fit at once, as many as there are.
    fn splits(&self, shape: &DecodeShape, launch: &Launch) -> usize {
        // 1 KiB of every block's shared memory is the system's, and what one block may have is what a multiprocessor has
        // less that.
        const SYSTEM_BYTES: i32 = 1024;
        let most = self.visible.div_ceil((shape.keys * shape.min_tiles) as usize).min(MAX_SPLITS);
        let by_memory = (launch.shared_bytes_per_block + SYSTEM_BYTES) / (shape.shared_bytes + SYSTEM_BYTES);
        let resident = by_memory.min(1024 / shape.threads).max(1);
        let slots = (launch.multiprocessors * resident) as usize;
        if self.blocks * most <= slots {
            return most;
        }
        let occupied = |splits: usize| {
            let blocks = self.blocks * splits;
            blocks as f64 / (blocks.div_ceil(slots) * slots) as f64
        };
        let best = (1..=most).map(occupied).fold(0.0, f64::max);
        let enough = if best >= 0.9 { 0.9 } else { 0.9 * best };
        (1..=most).find(|&splits| occupied(splits) >= enough).unwrap_or(1)
    }

    /// Blocks of a cluster, if their passes reach all keys. Clusters that follow one another take longer than blocks with a
    /// pass more: 32 sequences of 100 keys and 4 heads of 256 columns 9.2 µs on an H200, and 7.3 with a block alone.
    fn cluster(&self, shape: &DecodeShape, launch: &Launch) -> Option<usize> {
        let passes = self.visible.div_ceil(shape.keys as usize);
        let most = (launch.multiprocessors as usize / self.blocks).min(shape.cluster as usize);
        (passes <= shape.passes as usize * most).then(|| passes.min(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::attention::KeySource;
    use crate::tensor::{DType, Tensor};

    fn prefill(sequences: &[(i32, i32)], [heads, kv_heads, dim]: [usize; 3], causal: bool) -> AttentionPrefill {
        let starts = |of: fn(&(i32, i32)) -> i32| {
            let ends = sequences.iter().scan(0, |end, pair| {
                *end += of(pair);
                Some(*end)
            });
            std::iter::once(0).chain(ends).collect::<Vec<i32>>()
        };
        let (query_starts, key_starts) = (starts(|pair| pair.0), starts(|pair| pair.1));
        let tensor = |tokens: i32, heads: usize| {
            Tensor::new(256 as *mut std::ffi::c_void, DType::Bf16, &[tokens as usize, heads, dim])
        };
        let (rows, keys) = (query_starts[sequences.len()], key_starts[sequences.len()]);
        let config =
            AttentionConfig { query_heads: heads, kv_heads, head_dim: dim, causal, ..AttentionConfig::default() };
        let key = tensor(keys, kv_heads);
        let source = KeySource::Tensors { key, value: key, key_starts: &key_starts };
        let config = AttentionConfig::new(config).unwrap();
        AttentionPrefill::new(config, tensor(rows, heads), &query_starts, source, tensor(rows, heads), None).unwrap()
    }

    fn divided(sequences: &[(i32, i32)], heads: [usize; 3]) -> usize {
        let launch = Launch {
            stream: std::ptr::null_mut(),
            capability: 90,
            multiprocessors: 132,
            shared_bytes_per_block: 227 << 10,
            l2_bytes: 50 << 20,
        };
        let shape = PrefillShape { tile_rows: 128, tile_keys: 128, ..PrefillShape::default() };
        let op = prefill(sequences, heads, true);
        let most = parts(&op, &shape, &launch);
        assert_eq!(parts(&op, &PrefillShape { rows: 64, ..PrefillShape::default() }, &launch), 1, "another kernel");
        most
    }

    /// As csrc/attention/attention.h has them.
    #[test]
    fn tiles_of_a_mask_of_bits_have_two_bits() {
        let shape = PrefillShape { tile_rows: 128, tile_keys: 64, finds_mask_tiles: 1, ..PrefillShape::default() };
        let bytes = |rows: i32, heads: usize, shape: &PrefillShape| {
            let op = prefill(&[(3, 70), (rows, 4_097)], [4, 2, 64], false);
            let mask = Tensor::new(4096 as *mut std::ffi::c_void, DType::I32, &[heads, rows as usize + 3, 129]);
            mask_tile_bytes(&op.with_mask(Some(mask)).unwrap(), shape)
        };
        // 65 tiles of 64 keys are three words.
        assert_eq!(bytes(125, 1, &shape), 128 * 2 * 3 * 4);
        assert_eq!(bytes(125, 4, &shape), 4 * 128 * 2 * 3 * 4);
        assert_eq!(bytes(125, 1, &PrefillShape { finds_mask_tiles: 0, ..shape }), 0);
        assert_eq!(mask_tile_bytes(&prefill(&[(128, 128)], [4, 2, 64], false), &shape), 0);
    }

    #[test]
    fn keys_of_few_tiles_are_divided_and_no_others() {
        // 32 tiles fill 132 multiprocessors four times, eight tiles sixteen times.
        assert_eq!(divided(&[(512, 32_768)], [8, 4, 256]), 4);
        assert_eq!(divided(&[(128, 32_768)], [8, 4, 256]), 16);
        assert!(divided(&[(64, 32_768), (1, 9_000)], [4, 4, 128]) > 8);
        for whole in [&[(16_384, 16_384)][..], &[(512, 32_768); 8], &[(512, 512)], &[(64, 300)], &[(1, 1)]] {
            assert_eq!(divided(whole, [8, 4, 128]), 1, "{whole:?}");
        }
    }

    #[test]
    fn partial_results_cover_the_rows_of_all_sequences() {
        let op = prefill(&[(3, 10), (0, 4), (5, 9)], [2, 1, 64], false);
        assert_eq!(covered_rows(&op), Some(0..8));
        assert_eq!(partial_bytes(&op, 3), [3 * 8 * 2 * 64 * 4, 256]);
        let mut gap = prefill(&[(3, 10), (4, 4), (5, 9)], [2, 1, 64], false);
        gap.sequences.remove(1);
        assert_eq!(covered_rows(&gap), None);
    }
}
