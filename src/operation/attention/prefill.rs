//! Attention of many query rows a sequence, over a KV cache or over tensors.

use super::device_lengths::DeviceLengths;
use super::dropout::Dropout;
use super::head_terms::HeadTerms;
use super::mask::Mask;
use super::tree::Tree;
use super::{check_lse, output_heads, AttentionConfig};
use crate::allocation::{collected, with_room};
use crate::error::{Error, Result, Status};
use crate::operation::access::Visit;
use crate::operation::{expect_extent, Cost};
use crate::tensor::{CacheLayer, DType, Heads, KvView, Placement, Tensor};

/// What lists of sequences hold.
const SEQUENCES: &str = "the sequences of a prefill";

/// The rows of one sequence: queries [query_start, +query_count) meet kv_length keys from the origin `kv_start` of the views.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SequenceSpan {
    pub query_start: usize,
    pub query_count: usize,
    /// Counts the views' sequence strides.
    pub kv_start: usize,
    pub kv_length: usize,
    /// Keys from the first on that every row sees, as far as the causal mask goes.
    pub prefix: usize,
}

/// From one start of a sequence to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Starts {
    /// In elements.
    pub query: usize,
    /// In elements.
    pub output: usize,
    /// In rows.
    pub lse: usize,
}

#[derive(Debug, Clone)]
pub struct AttentionPrefill {
    pub config: AttentionConfig,
    /// [T, query_heads, head_dim], or of a batch the rows of one sequence
    pub query: Heads,
    pub key: KvView,
    pub value: KvView,
    /// As `query`, with value_dim.
    pub output: Heads,
    /// f32 [rows of all sequences, query_heads], contiguous: ln Σ exp(score)
    pub lse: Option<Tensor>,
    /// Those that have rows; none where `lengths` tells of them.
    pub sequences: Vec<SequenceSpan>,
    pub lengths: Option<DeviceLengths>,
    pub starts: Starts,
    /// Sequences with a block of rows each; 1: the rows of all follow one another.
    pub blocks: usize,
    pub mask: Option<Mask>,
    /// f32 [1] or [kv_heads]: what query elements in FP8 count.
    pub query_scales: Option<Tensor>,
    pub terms: HeadTerms,
    pub tree: Option<Tree>,
    pub dropout: Option<Dropout>,
}

/// Where a prefill's keys are.
pub enum KeySource<'a> {
    Cache {
        layer: CacheLayer,
        sequences: &'a [i32],
        kv_lengths: &'a [i32],
    },
    /// [T_kv, kv_heads, head_dim], sequences one after the other from key_starts[b] to key_starts[b + 1]
    Tensors {
        key: Tensor,
        value: Tensor,
        key_starts: &'a [i32],
    },
}

impl AttentionPrefill {
    pub fn new(
        config: AttentionConfig,
        query: Tensor,
        query_starts: &[i32],
        source: KeySource<'_>,
        output: Tensor,
        lse: Option<Tensor>,
    ) -> Result<AttentionPrefill> {
        let config = config.with_value_dim();
        query.expect_rank("query", 3)?;
        let tokens = query.shape[0];
        let query = config.query_heads_of("query", query, tokens, config.head_dim)?;
        let output = output_heads(&config, output, tokens)?;
        check_lse(lse, tokens, config.query_heads)?;
        check_starts("query_starts", query_starts, tokens)?;
        let count = query_starts.len() - 1;
        let (key, value, spans) = match source {
            KeySource::Cache { layer, sequences, kv_lengths } => {
                config.check_cache(&layer)?;
                config.check_ring(&layer)?;
                if sequences.len() != count || kv_lengths.len() != count {
                    return Err(Error::invalid(format!(
                        "{} entries in sequences and {} in kv_lengths for a sequence_count of {count}",
                        sequences.len(),
                        kv_lengths.len()
                    )));
                }
                let mut spans = with_room(count, SEQUENCES)?;
                for (b, (&sequence, &length)) in sequences.iter().zip(kv_lengths).enumerate() {
                    let sequence = layer.check_sequence(sequence)?;
                    if length < 0 || length as usize > layer.capacity {
                        return Err(Error::invalid(format!(
                            "kv_lengths[{b}] is {length}; the cache holds up to {} tokens a sequence",
                            layer.capacity
                        ))
                        .with_limit(length.max(0) as u64, layer.capacity as u64));
                    }
                    let rows = (query_starts[b + 1] - query_starts[b]) as usize;
                    layer
                        .check_window(rows, length as usize, config.window)
                        .map_err(|error| error.context(format_args!("sequences[{b}]")))?;
                    spans.push((sequence, length as usize));
                }
                (layer.key_view(), layer.value_view(), spans)
            }
            KeySource::Tensors { key, value, key_starts } => {
                key.expect_rank("key", 3)?;
                let keys = key.shape[0];
                let key = tensor_view(&config, "key", key, keys, config.head_dim)?;
                let value = tensor_view(&config, "value", value, keys, config.value_dim)?;
                check_one_dtype(&key, &value)?;
                check_starts("key_starts", key_starts, keys)?;
                if key_starts.len() != query_starts.len() {
                    return Err(Error::invalid(format!(
                        "key_starts has {} entries; query_starts has {}",
                        key_starts.len(),
                        query_starts.len()
                    )));
                }
                let spans = key_starts.windows(2).map(|pair| (pair[0] as usize, (pair[1] - pair[0]) as usize));
                (key, value, collected(spans, SEQUENCES)?)
            }
        };
        check_query_dtype(query.dtype, key.dtype)?;
        let mut sequences = with_room(count, SEQUENCES)?;
        for (b, &(kv_start, kv_length)) in spans.iter().enumerate() {
            let query_count = (query_starts[b + 1] - query_starts[b]) as usize;
            if config.causal && query_count > kv_length {
                return Err(Error::invalid(format!(
                    "sequence {b} has {query_count} query rows and only {kv_length} keys: append the keys first"
                )));
            }
            if query_count > 0 {
                sequences.push(SequenceSpan {
                    query_start: query_starts[b] as usize,
                    query_count,
                    kv_start,
                    kv_length,
                    prefix: 0,
                });
            }
        }
        let starts = Starts { query: query.token_stride, output: output.token_stride, lse: 1 };
        Ok(AttentionPrefill {
            config,
            query,
            key,
            value,
            output,
            lse,
            sequences,
            lengths: None,
            starts,
            blocks: 1,
            mask: None,
            query_scales: None,
            terms: HeadTerms::default(),
            tree: None,
            dropout: None,
        })
    }

    /// A batch of sequences of one length: query [B, N, query_heads, head_dim], key and value [B, M, kv_heads, head_dim or
    /// value_dim], output [B, N, query_heads, value_dim] and lse [B, N, query_heads].
    pub fn dense(
        config: AttentionConfig,
        query: Tensor,
        (key, value): (Tensor, Tensor),
        output: Tensor,
        lse: Option<Tensor>,
    ) -> Result<AttentionPrefill> {
        let config = config.with_value_dim();
        for (name, tensor) in [("query", &query), ("key", &key), ("value", &value), ("output", &output)] {
            tensor.expect_rank(name, 4)?;
            tensor.expect_readable(name)?;
            expect_extent(&format!("the batch of `{name}`"), tensor.shape[0])?;
        }
        let ([batch, rows, ..], keys) = (query.shape, key.shape[1]);
        expect_extent("the rows of a sequence", rows)?;
        expect_extent("the keys of a sequence", keys)?;
        for (name, tensor) in [("key", &key), ("value", &value), ("output", &output)] {
            if tensor.shape[0] != batch {
                return Err(Error::invalid(format!(
                    "`{name}` is a batch of {}; `query` is one of {batch}",
                    tensor.shape[0]
                )));
            }
        }
        output.expect_places_apart("output")?;
        let query_heads = config.query_heads_of("query", of_block(query), rows, config.head_dim)?;
        let output_heads = config.query_heads_of("output", of_block(output), rows, config.value_dim)?;
        output_heads.tensor().expect_float("output")?;
        let view = |name: &str, tensor: Tensor, dim: usize| -> Result<KvView> {
            let view = tensor_view(&config, name, of_block(tensor), keys, dim)?;
            Ok(KvView { sequence_stride: tensor.strides[0], ..view })
        };
        let (key, value) = (view("key", key, config.head_dim)?, view("value", value, config.value_dim)?);
        check_one_dtype(&key, &value)?;
        check_query_dtype(query.dtype, key.dtype)?;
        let lse = match lse {
            Some(lse) => {
                lse.expect_shape("lse", &[batch, rows, config.query_heads])?;
                let flat = Tensor { rank: 2, ..Tensor::new(lse.data, lse.dtype, &[batch * rows, config.query_heads]) };
                if !lse.is_contiguous() {
                    return Err(Error::invalid("tensor `lse` is strided; a contiguous one is needed"));
                }
                Some(flat)
            }
            None => None,
        };
        check_lse(lse, batch * rows, config.query_heads)?;
        if config.causal && rows > keys {
            return Err(Error::invalid(format!("{rows} query rows and only {keys} keys under a causal mask")));
        }
        let span = |b| SequenceSpan { query_start: b, query_count: rows, kv_start: b, kv_length: keys, prefix: 0 };
        let sequences = collected((0..if rows == 0 { 0 } else { batch }).map(span), SEQUENCES)?;
        Ok(AttentionPrefill {
            config,
            query: query_heads,
            key,
            value,
            output: output_heads,
            lse,
            sequences,
            lengths: None,
            starts: Starts { query: query.strides[0], output: output.strides[0], lse: rows },
            blocks: batch,
            mask: None,
            query_scales: None,
            terms: HeadTerms::default(),
            tree: None,
            dropout: None,
        })
    }

    /// Adds what the tensor holds to the scores: of a batch [B or 1, query_heads or 1, N or 1, at least M], else
    /// [1, query_heads or 1, T or 1, at least the keys of the longest sequence]; leading axes of 1 may be left out.
    pub fn with_mask(mut self, mask: Option<Tensor>) -> Result<AttentionPrefill> {
        let Some(mask) = mask else { return Ok(self) };
        let keys = self.longest();
        let extents = [self.blocks, self.config.query_heads, self.query.tokens, keys];
        self.mask = Some(Mask::new(mask, extents, self.is_dense())?);
        Ok(self)
    }

    /// Whether each sequence has a block of rows.
    pub(super) fn is_dense(&self) -> bool {
        self.blocks > 1 || self.starts.lse != 1
    }

    /// Keys of each of the call's sequences that all its rows see, from the first key on, whatever the causal mask says (PrefixLM).
    /// `query_starts` are those of the call; empty: of a batch.
    pub fn with_prefixes(mut self, prefixes: &[i32], query_starts: &[i32]) -> Result<AttentionPrefill> {
        if prefixes.is_empty() {
            return Ok(self);
        }
        if !self.config.causal {
            let text = "`prefix_lengths` is given, and the attention is bidirectional: every key is seen";
            return Err(Error::new(Status::Attention, text));
        }
        if self.config.sink_tokens > 0 {
            let text = "`prefix_lengths` is given, and the attention has sink tokens";
            return Err(Error::new(Status::Attention, text));
        }
        if self.lengths.is_some() {
            let text = "`prefix_lengths` is given, and lengths lie in device memory: it is read on the host";
            return Err(Error::unsupported(text));
        }
        let mut spans = self.sequences.iter_mut();
        for (b, &prefix) in prefixes.iter().enumerate() {
            let has_rows = query_starts.get(b..b + 2).is_none_or(|pair| pair[0] < pair[1]);
            let Some(span) = has_rows.then(|| spans.next()).flatten() else { continue };
            if prefix < 0 || prefix as usize > span.kv_length {
                let text = format!("prefix_lengths[{b}] is {prefix}; the sequence has {} keys", span.kv_length);
                return Err(Error::invalid(text).with_limit(prefix.max(0) as u64, span.kv_length as u64));
            }
            span.prefix = prefix as usize;
        }
        Ok(self)
    }

    /// f32 [query_heads] each.
    pub fn with_head_terms(mut self, sinks: Option<Tensor>, slopes: Option<Tensor>) -> Result<AttentionPrefill> {
        let outputs = [Some(self.rows(&self.output, self.starts.output)), self.lse];
        self.terms = HeadTerms::new([sinks, slopes], self.config.query_heads, outputs)?;
        Ok(self)
    }

    /// Drops weights; what the offset lies in is apart from what the call writes.
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Result<AttentionPrefill> {
        if let Some(offset) = dropout.as_ref().and_then(Dropout::device_offset) {
            offset.expect_apart("dropout_device_offset", "output", &self.rows(&self.output, self.starts.output))?;
            self.lse.iter().try_for_each(|lse| offset.expect_apart("dropout_device_offset", "lse", lse))?;
        }
        self.dropout = dropout;
        Ok(self)
    }

    /// f32 [1] or [kv_heads] each: what elements of queries, keys and values in FP8 count. A cache has those of its own.
    pub fn with_scales(
        mut self,
        query: Option<Tensor>,
        key: Option<Tensor>,
        value: Option<Tensor>,
    ) -> Result<AttentionPrefill> {
        let kv_heads = self.config.kv_heads;
        let check = |name: &str, dtype: DType, scales: &Tensor| -> Result<()> {
            scales.expect_dtype(name, DType::F32)?;
            scales.expect_rank(name, 1)?;
            scales.expect_readable(name)?;
            if !dtype.is_fp8() {
                return Err(Error::invalid(format!("`{name}` is given, and what it scales is {dtype}, not FP8")));
            }
            if scales.shape[0] != 1 && scales.shape[0] != kv_heads {
                return Err(Error::invalid(format!(
                    "`{name}` has {} scales; 1 or {kv_heads}, one a key/value head, are needed",
                    scales.shape[0]
                )));
            }
            Ok(())
        };
        if let Some(scales) = query {
            check("query_scale", self.query.dtype, &scales)?;
            self.query_scales = Some(scales);
        }
        for (name, view, scales) in [("key_scale", &mut self.key, key), ("value_scale", &mut self.value, value)] {
            let Some(scales) = scales else { continue };
            check(name, view.dtype, &scales)?;
            if !view.scales.is_null() {
                return Err(Error::invalid(format!("`{name}` is given, and the cache has scales of its own")));
            }
            (view.scales, view.scale_stride) = (scales.data.cast_const().cast(), usize::from(scales.shape[0] > 1));
        }
        Ok(self)
    }

    /// A head's scale of queries, which executors that compute on the host read.
    pub fn query_scale(&self, kv_head: usize) -> f32 {
        self.query_scales.map_or(1.0, |scales| {
            let at = if scales.shape[0] > 1 { kv_head } else { 0 };
            // SAFETY: validated scales, in host memory for an executor that reads them here.
            unsafe { *scales.data.cast::<f32>().add(at) }
        })
    }

    /// Queries or outputs with all blocks.
    pub(super) fn rows(&self, heads: &Heads, stride: usize) -> Tensor {
        let shape = [self.blocks, heads.tokens, heads.heads, heads.head_dim];
        Tensor::new(heads.data, heads.dtype, &shape).with_strides(&[stride, heads.token_stride, heads.head_stride, 1])
    }

    /// Counts the (query, key) pairs that the mask keeps, and reads of each sequence the keys and values that any row sees.
    pub fn accesses(&self, visit: &mut impl Visit) {
        let dense = self.starts.lse != 1 || self.blocks != 1;
        match dense {
            true => visit.read("query", Some(&self.rows(&self.query, self.starts.query))),
            false => visit.read("query", Some(&self.query)),
        }
        visit.read("query_scale", self.query_scales.as_ref());
        self.terms.accesses(visit);
        visit.read("tree_parents", self.tree.map(|tree| tree.parents()).as_ref());
        if let Some(dropout) = &self.dropout {
            dropout.accesses(visit);
        }
        visit.read("mask", self.mask.as_ref().map(|mask| &mask.tensor));
        let last = match &self.lengths {
            None => self.sequences.iter().map(|span| (span.kv_start, span.kv_length)).max().unwrap_or((0, 0)),
            Some(lengths) => lengths.last(&self.key.placement),
        };
        for (name, tensor, _) in self.lengths.iter().flat_map(DeviceLengths::named) {
            visit.read(name, tensor.as_ref());
        }
        let dims = [self.config.head_dim, self.config.value_dim];
        for ((name, view), dim) in [("key", &self.key), ("value", &self.value)].into_iter().zip(dims) {
            let (blocks, tokens) = match &view.placement {
                Placement::Contiguous => (view.origin(last.0), last.1),
                Placement::Ring { tokens } => (view.origin(last.0), last.1.min(*tokens)),
                Placement::Paged(table) => ((table.pages - 1) * table.page_stride, table.page_tokens),
            };
            let tokens = tokens.saturating_sub(1) * view.token_stride;
            let elements = blocks + tokens + (self.config.kv_heads - 1) * view.head_stride + view.dtype.row_units(dim);
            visit.read_range(name, view.data, elements * view.dtype.size());
            if !view.scales.is_null() {
                let count = 1 + (self.config.kv_heads - 1) * view.scale_stride;
                visit.read_range("scales", view.scales.cast(), count * size_of::<f32>());
            }
        }
        if let Placement::Paged(table) = &self.key.placement {
            visit.read("page_table", Some(&table.tensor()));
        }
        match dense {
            true => visit.write("output", Some(&self.rows(&self.output, self.starts.output))),
            false => visit.write("output", Some(&self.output)),
        }
        visit.write("lse", self.lse.as_ref());
    }

    /// With lengths in device memory an upper bound: each sequence is taken to be as long as it may be.
    pub fn cost(&self) -> Cost {
        let (mut pairs, mut rows, mut keys) = (0.0, 0, 0);
        let bounds = self.lengths.as_ref().map(|lengths| lengths.bounds(self.query.tokens));
        for span in bounds.into_iter().flatten().chain(self.sequences.iter().copied()) {
            let visible = |row: usize| {
                let position = (span.kv_length + row).saturating_sub(span.query_count);
                self.config.visible_with_prefix(position, span.kv_length, span.prefix)
            };
            for row in 0..span.query_count {
                let (begin, end) = visible(row);
                pairs += (end - begin + self.config.sinks_before(begin)) as f64;
            }
            // What rows see moves on with them and leaves no gap.
            let (first, last) = (visible(0), visible(span.query_count - 1));
            rows += span.query_count;
            keys += last.1.saturating_sub(first.0) + self.config.sinks_before(first.0);
        }
        let token_bytes = self.key.dtype.row_bytes(self.key.dim) + self.value.dtype.row_bytes(self.value.dim);
        self.config.cost(pairs, rows, keys, [self.query.dtype, self.output.dtype], token_bytes, self.lse)
    }
}

/// One sequence of a batch.
fn of_block(tensor: Tensor) -> Tensor {
    let Tensor { shape, strides, .. } = tensor;
    Tensor::new(tensor.data, tensor.dtype, &shape[1..]).with_strides(&strides[1..])
}

/// Keys or values [keys, kv_heads, dim] of sequences that follow one another.
pub(super) fn tensor_view(
    config: &AttentionConfig,
    name: &str,
    tensor: Tensor,
    keys: usize,
    dim: usize,
) -> Result<KvView> {
    if !tensor.dtype.is_fp8() {
        tensor.expect_float(name)?;
    }
    let heads = Heads::of_any_dtype(name, tensor, keys, dim)?;
    if heads.heads != config.kv_heads {
        return Err(Error::invalid(format!("`{name}` has {} heads; {} are needed", heads.heads, config.kv_heads)));
    }
    Ok(KvView {
        scales: std::ptr::null(),
        scale_stride: 0,
        data: tensor.data,
        dtype: tensor.dtype,
        dim,
        sequence_stride: heads.token_stride,
        token_stride: heads.token_stride,
        head_stride: heads.head_stride,
        placement: Placement::Contiguous,
    })
}

/// Of tensors; the formats of a cache were checked when it was made.
pub(super) fn check_one_dtype(key: &KvView, value: &KvView) -> Result<()> {
    if key.dtype != value.dtype {
        return Err(Error::invalid("`key` and `value` must have one dtype"));
    }
    Ok(())
}

/// Queries are of the keys' dtype or F32, or of any float over keys that are no floats of 16 or 32 bits.
pub(super) fn check_query_dtype(query: DType, key: DType) -> Result<()> {
    if query == key || query == DType::F32 || !key.is_float() {
        return Ok(());
    }
    Err(Error::invalid(format!("`query` has dtype {query}; f32 or the keys' {key} is needed")))
}

/// Starts at 0, never falls, and ends at the number of rows.
fn check_starts(name: &str, starts: &[i32], rows: usize) -> Result<()> {
    let (Some(&first), Some(&last)) = (starts.first(), starts.last()) else {
        return Err(Error::invalid(format!("{name} is empty; one entry more than sequences is needed")));
    };
    if first != 0 || last < 0 || last as usize != rows {
        return Err(Error::invalid(format!("{name} runs from {first} to {last}; 0 to {rows} is needed")));
    }
    if let Some(b) = starts.windows(2).position(|pair| pair[1] < pair[0]) {
        return Err(Error::invalid(format!("{name} falls from {} to {} at entry {}", starts[b], starts[b + 1], b + 1)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_checked() {
        assert!(check_starts("s", &[0, 2, 2, 5], 5).is_ok());
        assert!(check_starts("s", &[], 0).is_err());
        assert!(check_starts("s", &[0], 0).is_ok());
        assert!(check_starts("s", &[1, 5], 5).is_err());
        assert!(check_starts("s", &[0, 3, 2, 5], 5).is_err());
        assert!(check_starts("s", &[0, 4], 5).is_err());
    }
}
