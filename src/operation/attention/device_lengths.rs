//! Lengths of a prefill that lie in device memory, so that a captured call serves every step within its bounds.

use super::head_terms::HeadTerms;
use super::prefill::{check_one_dtype, check_query_dtype, tensor_view, AttentionPrefill, SequenceSpan, Starts};
use super::{check_lse, output_heads, AttentionConfig};
use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::operation::expect_extent;
use crate::tensor::{CacheLayer, DType, Placement, Tensor};

/// What is read when the work runs, and what it may not pass. What passes a bound is an error on the CPU; CUDA reads and
/// writes no memory for it.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLengths {
    /// i32 [B + 1]; absent: each sequence has `max_rows`, and its rows are a block of the batch.
    pub query_starts: Option<Tensor>,
    /// i32 [B + 1], of keys whose sequences follow one another; absent: `kv_lengths` has the lengths.
    pub key_starts: Option<Tensor>,
    /// i32 [B]
    pub kv_lengths: Option<Tensor>,
    /// i32 [B], of a cache; absent: 0, 1, 2, …
    pub sequences: Option<Tensor>,
    /// B
    pub count: usize,
    /// Query rows of a sequence, at most.
    pub max_rows: usize,
    pub max_kv_length: usize,
    /// What starts of keys are below: sequences of a cache or of a batch, or rows of keys.
    pub kv_rows: usize,
}

/// Where the keys are.
pub enum DeviceSource {
    Cache {
        layer: CacheLayer,
        /// i32 [B]
        sequences: Option<Tensor>,
        /// i32 [B]
        kv_lengths: Tensor,
    },
    /// [T_kv, kv_heads, head_dim]
    Tensors {
        key: Tensor,
        value: Tensor,
        /// i32 [B + 1]
        key_starts: Tensor,
    },
}

impl AttentionPrefill {
    /// As `new`, with lengths in device memory. `max_rows` 0: the rows of `query`; `max_kv_length` 0: the cache's capacity,
    /// or the rows of `key`.
    pub fn with_device_lengths(
        config: AttentionConfig,
        query: Tensor,
        query_starts: Tensor,
        source: DeviceSource,
        (output, lse): (Tensor, Option<Tensor>),
        (max_rows, max_kv_length): (usize, usize),
    ) -> Result<AttentionPrefill> {
        let config = config.with_value_dim();
        query.expect_rank("query", 3)?;
        let tokens = query.shape[0];
        expect_extent("the rows of `query`", tokens)?;
        let query = config.query_heads_of("query", query, tokens, config.head_dim)?;
        let output = output_heads(&config, output, tokens)?;
        check_lse(lse, tokens, config.query_heads)?;
        query_starts.expect_rank("device_query_starts", 1)?;
        let Some(count) = query_starts.shape[0].checked_sub(1) else {
            return Err(Error::invalid("device_query_starts is empty; one entry more than sequences is needed"));
        };
        let (key, value, kv_rows, longest) = match &source {
            DeviceSource::Cache { layer, sequences, .. } => {
                config.check_cache(layer)?;
                config.check_ring(layer)?;
                if sequences.is_none() && count > layer.sequences {
                    return Err(Error::invalid(format!(
                        "{count} sequences without `device_sequences`; the cache has {}",
                        layer.sequences
                    )));
                }
                (layer.key_view(), layer.value_view(), layer.sequences, layer.capacity)
            }
            DeviceSource::Tensors { key, value, .. } => {
                key.expect_rank("key", 3)?;
                let keys = key.shape[0];
                expect_extent("the rows of `key`", keys)?;
                let key = tensor_view(&config, "key", *key, keys, config.head_dim)?;
                let value = tensor_view(&config, "value", *value, keys, config.value_dim)?;
                check_one_dtype(&key, &value)?;
                (key, value, keys, keys)
            }
        };
        check_query_dtype(query.dtype, key.dtype)?;
        let max_rows = bound("max_query_rows", max_rows, tokens, "`query` has that many rows")?;
        let max_kv_length = bound("max_kv_length", max_kv_length, longest, "the keys of a sequence are no more")?;
        let (key_starts, kv_lengths, sequences) = match source {
            DeviceSource::Cache { layer, sequences, kv_lengths } => {
                layer.check_window(max_rows, max_kv_length, config.window)?;
                (None, Some(kv_lengths), sequences)
            }
            DeviceSource::Tensors { key_starts, .. } => (Some(key_starts), None, None),
        };
        let query_starts = Some(query_starts);
        let lengths =
            DeviceLengths { query_starts, key_starts, kv_lengths, sequences, count, max_rows, max_kv_length, kv_rows };
        let starts = Starts { query: query.token_stride, output: output.token_stride, lse: 1 };
        let op = AttentionPrefill {
            config,
            query,
            key,
            value,
            output,
            lse,
            sequences: Vec::new(),
            lengths: Some(lengths),
            starts,
            blocks: 1,
            mask: None,
            query_scales: None,
            terms: HeadTerms::default(),
            tree: None,
            dropout: None,
        };
        op.check_lengths()
    }

    /// A batch whose sequences have as many keys each as `kv_lengths`, i32 [B] in device memory, says; `max_kv_length` 0: M.
    pub fn with_kv_lengths(mut self, kv_lengths: Tensor, max_kv_length: usize) -> Result<AttentionPrefill> {
        let count = self.blocks;
        let keys = self.sequences.first().map_or(0, |span| span.kv_length);
        let max_kv_length = bound("max_kv_length", max_kv_length, keys, "`key` has that many rows a sequence")?;
        self.lengths = Some(DeviceLengths {
            query_starts: None,
            key_starts: None,
            kv_lengths: Some(kv_lengths),
            sequences: None,
            count,
            max_rows: self.query.tokens,
            max_kv_length,
            kv_rows: count,
        });
        self.sequences = Vec::new();
        self.check_lengths()
    }

    fn check_lengths(self) -> Result<AttentionPrefill> {
        let Some(lengths) = &self.lengths else { return Ok(self) };
        let count = lengths.count;
        for (name, tensor, entries) in lengths.named() {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(name, DType::I32)?;
            tensor.expect_shape(name, &[count + entries])?;
            tensor.expect_readable(name)?;
            if !tensor.is_contiguous() {
                return Err(Error::invalid(format!("tensor `{name}` is strided; a contiguous one is needed")));
            }
            tensor.expect_apart(name, "output", &self.rows(&self.output, self.starts.output))?;
            if let Some(lse) = &self.lse {
                tensor.expect_apart(name, "lse", lse)?;
            }
        }
        Ok(self)
    }

    /// The sequences that have rows: those of the call, or as device memory says now, which is the host's for an executor
    /// that asks here. An error names the first sequence that passes a bound.
    pub fn spans(&self) -> Result<Vec<SequenceSpan>> {
        let Some(lengths) = &self.lengths else {
            return crate::allocation::collected(self.sequences.iter().copied(), "the sequences of a prefill");
        };
        let mut spans = with_room(lengths.count, "the sequences of a prefill")?;
        for b in 0..lengths.count {
            let span = lengths.span(b, self).map_err(|error| error.context(format_args!("sequence {b}")))?;
            if span.query_count > 0 {
                spans.push(span);
            }
        }
        Ok(spans)
    }

    /// Whether no sequence can have a row.
    pub fn is_empty(&self) -> bool {
        match &self.lengths {
            None => self.sequences.is_empty(),
            Some(lengths) => lengths.count == 0 || lengths.max_rows == 0,
        }
    }

    /// Keys of the longest sequence, at most.
    pub fn longest(&self) -> usize {
        match &self.lengths {
            None => self.sequences.iter().map(|span| span.kv_length).max().unwrap_or(0),
            Some(lengths) => lengths.max_kv_length,
        }
    }
}

impl DeviceLengths {
    /// The tensors with their names, and how many entries they have more than there are sequences.
    pub fn named(&self) -> [(&'static str, Option<Tensor>, usize); 4] {
        [
            ("device_query_starts", self.query_starts, 1),
            ("device_key_starts", self.key_starts, 1),
            ("device_kv_lengths", self.kv_lengths, 0),
            ("device_sequences", self.sequences, 0),
        ]
    }

    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        [&mut self.query_starts, &mut self.key_starts, &mut self.kv_lengths, &mut self.sequences].into_iter().flatten()
    }

    /// As many sequences of the greatest lengths as `tokens` rows are enough for; of a batch, all.
    pub(super) fn bounds(&self, tokens: usize) -> impl Iterator<Item = SequenceSpan> {
        let full = if self.query_starts.is_some() { tokens.div_ceil(self.max_rows.max(1)) } else { self.count };
        let (query_count, kv_length) = (self.max_rows, self.max_kv_length);
        let sequences = if query_count == 0 { 0 } else { full.min(self.count) };
        (0..sequences).map(move |_| SequenceSpan { query_start: 0, query_count, kv_start: 0, kv_length, prefix: 0 })
    }

    /// One sequence, for tensors in host memory.
    fn span(&self, b: usize, op: &AttentionPrefill) -> Result<SequenceSpan> {
        // SAFETY: validated tensors of i32 with an entry for each sequence, and one more of starts.
        let number = |tensor: Tensor, at: usize| unsafe { tensor.data.cast::<i32>().add(at).read_unaligned() };
        let range = |name: &str, starts: Tensor, rows: usize| {
            let (start, end) = (number(starts, b), number(starts, b + 1));
            match start >= 0 && end >= start && end as usize <= rows {
                true => Ok((start as usize, (end - start) as usize)),
                false => {
                    Err(Error::invalid(format!("{name} runs from {start} to {end}; it has to lie in 0 to {rows}")))
                }
            }
        };
        let (query_start, query_count) = match self.query_starts {
            Some(starts) => range("device_query_starts", starts, op.query.tokens)?,
            None => (b, self.max_rows),
        };
        if query_count > self.max_rows {
            return Err(Error::invalid(format!("{query_count} query rows; max_query_rows is {}", self.max_rows))
                .with_limit(query_count as u64, self.max_rows as u64));
        }
        let (kv_start, kv_length) = match (self.key_starts, self.kv_lengths) {
            (Some(starts), _) => range("device_key_starts", starts, self.kv_rows)?,
            (None, lengths) => {
                let place = self.sequences.map_or(b as i32, |sequences| number(sequences, b));
                if place < 0 || place as usize >= self.kv_rows {
                    return Err(Error::invalid(format!("sequence {place} of the cache, which has {}", self.kv_rows))
                        .with_limit(place.max(0) as u64, self.kv_rows as u64));
                }
                let length = lengths.map_or(0, |lengths| number(lengths, b));
                if length < 0 {
                    return Err(Error::invalid(format!("device_kv_lengths holds {length}")));
                }
                (place as usize, length as usize)
            }
        };
        if kv_length > self.max_kv_length {
            return Err(Error::invalid(format!("{kv_length} keys; max_kv_length is {}", self.max_kv_length))
                .with_limit(kv_length as u64, self.max_kv_length as u64));
        }
        if op.config.causal && query_count > kv_length {
            return Err(Error::invalid(format!(
                "{query_count} query rows and only {kv_length} keys: append the keys first"
            )));
        }
        Ok(SequenceSpan { query_start, query_count, kv_start, kv_length, prefix: 0 })
    }

    /// The last origin of keys that a sequence may have, and the keys from there on.
    pub fn last(&self, placement: &Placement) -> (usize, usize) {
        match placement {
            Placement::Contiguous if self.key_starts.is_some() => (0, self.kv_rows),
            _ => (self.kv_rows.saturating_sub(1), self.max_kv_length),
        }
    }
}

/// A bound that the caller gave, 0 standing for `most`.
fn bound(name: &str, given: usize, most: usize, why: &str) -> Result<usize> {
    if given > most {
        return Err(Error::invalid(format!("{name} is {given}; at most {most} is needed, since {why}"))
            .with_limit(given as u64, most as u64));
    }
    Ok(if given == 0 { most } else { given })
}
