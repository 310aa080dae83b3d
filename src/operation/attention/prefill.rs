//! Attention of many query rows a sequence, over a KV cache or over tensors.

use super::{check_lse, output_heads, AttentionConfig};
use crate::allocation::{collected, with_room};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::operation::Cost;
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
}

#[derive(Debug, Clone)]
pub struct AttentionPrefill {
    pub config: AttentionConfig,
    /// [T, query_heads, head_dim]
    pub query: Heads,
    pub key: KvView,
    pub value: KvView,
    /// As `query`.
    pub output: Heads,
    /// f32 [T, query_heads], contiguous: ln Σ exp(score)
    pub lse: Option<Tensor>,
    pub sequences: Vec<SequenceSpan>,
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
                let view = |name: &str, tensor: Tensor, dim: usize| -> Result<KvView> {
                    let heads = Heads::new(name, tensor, keys, dim)?;
                    if heads.heads != config.kv_heads {
                        return Err(Error::invalid(format!(
                            "`{name}` has {} heads; {} are needed",
                            heads.heads, config.kv_heads
                        )));
                    }
                    Ok(KvView {
                        scales: std::ptr::null(),
                        data: tensor.data,
                        dtype: tensor.dtype,
                        sequence_stride: heads.token_stride,
                        token_stride: heads.token_stride,
                        head_stride: heads.head_stride,
                        placement: Placement::Contiguous,
                    })
                };
                let (key, value) = (view("key", key, config.head_dim)?, view("value", value, config.value_dim)?);
                if key.dtype != value.dtype {
                    return Err(Error::invalid("`key` and `value` must have one dtype"));
                }
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
        if query.dtype != key.dtype && query.dtype != DType::F32 && !key.dtype.is_fp8() {
            return Err(Error::invalid(format!(
                "`query` has dtype {}; f32 or the keys' {} is needed",
                query.dtype, key.dtype
            )));
        }
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
                });
            }
        }
        Ok(AttentionPrefill { config, query, key, value, output, lse, sequences })
    }

    /// Counts the (query, key) pairs that the mask keeps, and reads of each sequence the keys and values that any row sees.
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("query", Some(&self.query));
        let last = self.sequences.iter().map(|span| (span.kv_start, span.kv_length)).max().unwrap_or((0, 0));
        let dims = [self.config.head_dim, self.config.value_dim];
        for ((name, view), dim) in [("key", &self.key), ("value", &self.value)].into_iter().zip(dims) {
            let (blocks, tokens) = match &view.placement {
                Placement::Contiguous => (view.origin(last.0), last.1),
                Placement::Ring { tokens } => (view.origin(last.0), last.1.min(*tokens)),
                Placement::Paged(table) => ((table.pages - 1) * table.page_stride, table.page_tokens),
            };
            let tokens = tokens.saturating_sub(1) * view.token_stride;
            let elements = blocks + tokens + (self.config.kv_heads - 1) * view.head_stride + dim;
            visit.read_range(name, view.data, elements * view.dtype.size());
        }
        if let Placement::Paged(table) = &self.key.placement {
            visit.read("page_table", Some(&table.tensor()));
        }
        visit.write("output", Some(&self.output));
        visit.write("lse", self.lse.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let (mut pairs, mut rows, mut keys) = (0.0, 0, 0);
        for span in &self.sequences {
            let visible = |row: usize| {
                let position = (span.kv_length + row).saturating_sub(span.query_count);
                self.config.visible(position, span.kv_length)
            };
            for row in 0..span.query_count {
                let (begin, end) = visible(row);
                pairs += (end - begin) as f64;
            }
            // What rows see moves on with them and leaves no gap.
            let (first, last) = (visible(0), visible(span.query_count - 1));
            rows += span.query_count;
            keys += last.1.saturating_sub(first.0);
        }
        self.config.cost(pairs, rows, keys, [self.query.dtype, self.output.dtype], self.key.dtype, self.lse)
    }
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
