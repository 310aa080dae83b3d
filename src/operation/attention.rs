//! `attention`: softmax(cap(scale · Q·Kᵀ) + mask) · V with grouped query heads, over a KV cache or over tensors.
//!
//! One form reaches the executors whatever the caller's was: keys and values are a base address with strides, and each
//! sequence is a span of query rows that meets a span of keys. Query row i of a sequence with n rows and L keys stands
//! at position L − n + i, so a chunk of a prompt sees the cache before it (bottom-right alignment).
//!
//! Masks: causal keeps k ≤ q; a window W keeps 0 ≤ q − k < W, without causal |q − k| < W. The soft cap c turns a score
//! s into c·tanh(s/c) before the mask (Gemma 2). A row that sees no key gives 0 and lse = −inf.

/// What lists of sequences hold.
const SEQUENCES: &str = "the sequences of a prefill";

use crate::allocation::{collected, with_room};
use crate::error::{Error, Result, Status};
use crate::operation::access::{Effect, Visit};
use crate::operation::CostOf;
use crate::operation::{expect_extent, Cost};
use crate::tensor::{CacheLayer, DType, Heads, KvView, PageTable, Placement, Tensor, MAX_HEAD_DIM};

/// What stays the same from call to call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// 0: none
    pub soft_cap: f32,
    /// 0: none
    pub window: usize,
    pub causal: bool,
}

impl AttentionConfig {
    /// Fills in the default scale 1/√head_dim where `scale` is 0.
    pub fn new(mut config: AttentionConfig) -> Result<AttentionConfig> {
        let AttentionConfig { query_heads, kv_heads, head_dim, .. } = config;
        let fail = |message: String| Err(Error::new(Status::Attention, message));
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return fail(format!("head_dim is {head_dim}; 1 to {MAX_HEAD_DIM} is supported"));
        }
        if kv_heads == 0 || query_heads == 0 || query_heads % kv_heads != 0 {
            return fail(format!(
                "{query_heads} query heads cannot be shared out to {kv_heads} key/value heads evenly"
            ));
        }
        expect_extent("query_heads", query_heads)?;
        expect_extent("window", config.window)?;
        if config.scale == 0.0 {
            config.scale = 1.0 / (head_dim as f32).sqrt();
        }
        if !(config.scale.is_finite() && config.scale > 0.0) {
            return fail(format!("scale is {}; 0 (1/√head_dim) or a finite value above it is needed", config.scale));
        }
        if !(config.soft_cap.is_finite() && config.soft_cap >= 0.0) {
            return fail(format!("soft_cap is {}; 0 (none) or a finite value above it is needed", config.soft_cap));
        }
        Ok(config)
    }

    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// The keys [begin, end) that a query at `position` sees of `kv_length`.
    pub fn visible(&self, position: usize, kv_length: usize) -> (usize, usize) {
        let end = if self.causal { (position + 1).min(kv_length) } else { kv_length };
        match self.window {
            0 => (0, end),
            window => {
                let begin = (position + 1).saturating_sub(window);
                let end = if self.causal { end } else { end.min(position + window) };
                (begin.min(end), end)
            }
        }
    }

    /// Of `pairs` of a query row and a key, `rows` and `keys`, with queries and outputs of `dtypes`.
    fn cost(
        &self,
        pairs: f64,
        rows: usize,
        keys: usize,
        dtypes: [DType; 2],
        key_dtype: DType,
        lse: Option<Tensor>,
    ) -> Cost {
        let (dim, heads) = (self.head_dim as f64, self.query_heads as f64);
        let width = (dtypes[0].size() + dtypes[1].size()) as f64;
        let sums = if lse.is_some() { DType::F32.size() as f64 } else { 0.0 };
        Cost {
            operations: 4.0 * pairs * dim * heads,
            bytes: rows as f64 * heads * (dim * width + sums)
                + 2.0 * keys as f64 * self.kv_heads as f64 * dim * key_dtype.size() as f64,
        }
    }

    fn check_cache(&self, cache: &CacheLayer) -> Result<()> {
        if cache.heads == self.kv_heads && cache.head_dim == self.head_dim {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the cache holds {} heads of {}; the attention has {} of {}",
            cache.heads, cache.head_dim, self.kv_heads, self.head_dim
        )))
    }

    fn query_heads_of(&self, name: &str, tensor: Tensor, tokens: usize) -> Result<Heads> {
        let heads = Heads::new(name, tensor, tokens, self.head_dim)?;
        if heads.heads != self.query_heads {
            return Err(Error::invalid(format!("`{name}` has {} heads; {} are needed", heads.heads, self.query_heads)));
        }
        Ok(heads)
    }
}

/// The rows of one sequence: queries [query_start, +query_count) meet kv_length keys from the origin kv_offset of the view.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SequenceSpan {
    pub query_start: usize,
    pub query_count: usize,
    pub kv_offset: usize,
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

/// One query row a sequence; the lengths are read from device memory, so that a captured call serves every step.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDecode {
    pub config: AttentionConfig,
    /// [B, query_heads, head_dim]
    pub query: Heads,
    pub cache: CacheLayer,
    pub output: Heads,
    pub lse: Option<Tensor>,
    /// i32 [B]: row b sees keys 0 ..= positions[b]
    pub positions: Tensor,
    /// i32 [B]: the cache's sequence of each row; absent: the row number
    pub sequences: Option<Tensor>,
    /// No position reaches this; it sizes the split of the work.
    pub max_kv_length: usize,
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
        query.expect_rank("query", 3)?;
        let tokens = query.shape[0];
        let query = config.query_heads_of("query", query, tokens)?;
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
                    spans.push((layer.origin(sequence), length as usize));
                }
                (layer.key_view(), layer.value_view(), spans)
            }
            KeySource::Tensors { key, value, key_starts } => {
                key.expect_rank("key", 3)?;
                let keys = key.shape[0];
                let view = |name: &str, tensor: Tensor| -> Result<KvView> {
                    let heads = Heads::new(name, tensor, keys, config.head_dim)?;
                    if heads.heads != config.kv_heads {
                        return Err(Error::invalid(format!(
                            "`{name}` has {} heads; {} are needed",
                            heads.heads, config.kv_heads
                        )));
                    }
                    Ok(KvView {
                        data: tensor.data,
                        dtype: tensor.dtype,
                        token_stride: heads.token_stride,
                        head_stride: heads.head_stride,
                        placement: Placement::Contiguous,
                    })
                };
                let (key, value) = (view("key", key)?, view("value", value)?);
                if key.token_stride != value.token_stride || key.dtype != value.dtype {
                    return Err(Error::invalid("`key` and `value` must have one dtype and one token stride"));
                }
                check_starts("key_starts", key_starts, keys)?;
                if key_starts.len() != query_starts.len() {
                    return Err(Error::invalid(format!(
                        "key_starts has {} entries; query_starts has {}",
                        key_starts.len(),
                        query_starts.len()
                    )));
                }
                let spans = key_starts
                    .windows(2)
                    .map(|pair| (pair[0] as usize * key.token_stride, (pair[1] - pair[0]) as usize));
                (key, value, collected(spans, SEQUENCES)?)
            }
        };
        if query.dtype != key.dtype && query.dtype != DType::F32 {
            return Err(Error::invalid(format!(
                "`query` has dtype {}; f32 or the keys' {} is needed",
                query.dtype, key.dtype
            )));
        }
        let mut sequences = with_room(count, SEQUENCES)?;
        for (b, &(kv_offset, kv_length)) in spans.iter().enumerate() {
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
                    kv_offset,
                    kv_length,
                });
            }
        }
        Ok(AttentionPrefill { config, query, key, value, output, lse, sequences })
    }

    /// Counts the (query, key) pairs that the mask keeps, and reads of each sequence the keys and values that any row sees.
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("query", Some(&self.query));
        let last = self.sequences.iter().map(|span| (span.kv_offset, span.kv_length)).max().unwrap_or((0, 0));
        for (name, view) in [("key", &self.key), ("value", &self.value)] {
            let (blocks, tokens) = match &view.placement {
                Placement::Contiguous => (last.0, last.1),
                Placement::Ring { tokens } => (last.0, last.1.min(*tokens)),
                Placement::Paged(table) => ((table.pages - 1) * table.page_stride, table.page_tokens),
            };
            let tokens = tokens.saturating_sub(1) * view.token_stride;
            let elements = blocks + tokens + (self.config.kv_heads - 1) * view.head_stride + self.config.head_dim;
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

impl AttentionDecode {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        config: AttentionConfig,
        query: Tensor,
        cache: CacheLayer,
        output: Tensor,
        lse: Option<Tensor>,
        positions: Tensor,
        sequences: Option<Tensor>,
        max_kv_length: usize,
    ) -> Result<AttentionDecode> {
        if !config.causal {
            return Err(Error::new(
                Status::Attention,
                "a bidirectional attention has no decode: its last row sees all keys",
            ));
        }
        query.expect_rank("query", 3)?;
        let rows = query.shape[0];
        let query = config.query_heads_of("query", query, rows)?;
        let output = output_heads(&config, output, rows)?;
        check_lse(lse, rows, config.query_heads)?;
        config.check_cache(&cache)?;
        if query.dtype != cache.dtype && query.dtype != DType::F32 {
            return Err(Error::invalid(format!(
                "`query` has dtype {}; f32 or the cache's {} is needed",
                query.dtype, cache.dtype
            )));
        }
        for (name, tensor) in [("positions", Some(positions)), ("sequences", sequences)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(name, DType::I32)?;
            tensor.expect_shape(name, &[rows])?;
            tensor.expect_readable(name)?;
        }
        let table = cache.page_table().map(PageTable::tensor);
        for (name, tensor) in [("positions", Some(positions)), ("sequences", sequences), ("page_table", table)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_apart(name, "output", &output.tensor())?;
            if let Some(lse) = &lse {
                tensor.expect_apart(name, "lse", lse)?;
            }
        }
        if sequences.is_none() && rows > cache.sequences {
            return Err(Error::invalid(format!(
                "{rows} rows without `sequences`; the cache has {} sequences",
                cache.sequences
            )));
        }
        let max_kv_length = if max_kv_length == 0 { cache.capacity } else { max_kv_length };
        if max_kv_length > cache.capacity {
            return Err(Error::invalid(format!(
                "max_kv_length is {max_kv_length}; the cache holds up to {} tokens a sequence",
                cache.capacity
            ))
            .with_limit(max_kv_length as u64, cache.capacity as u64));
        }
        cache.check_window(rows.min(1), max_kv_length, config.window)?;
        Ok(AttentionDecode { config, query, cache, output, lse, positions, sequences, max_kv_length })
    }

    /// An upper bound: every row is taken to be max_kv_length long.
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("query", Some(&self.query));
        visit.cache(&self.cache, Effect::Read);
        visit.read("positions", Some(&self.positions));
        visit.read("sequences", self.sequences.as_ref());
        visit.write("output", Some(&self.output));
        visit.write("lse", self.lse.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let rows = self.query.tokens;
        let (begin, end) = self.config.visible(self.max_kv_length - 1, self.max_kv_length);
        self.cost_of_keys((end - begin) * rows)
    }

    /// The positions, and the cost with the keys and values that the mask keeps at these.
    pub fn cost_by_content(&self) -> (Tensor, CostOf) {
        let op = *self;
        let cost = move |positions: &[i32]| {
            let inside = positions.iter().filter_map(|&position| op.cache.check_position(position).ok());
            let keys = inside.map(|position| {
                let (begin, end) = op.config.visible(position, position + 1);
                end - begin
            });
            op.cost_of_keys(keys.sum())
        };
        (self.positions, Box::new(cost))
    }

    /// `keys` of all rows together.
    fn cost_of_keys(&self, keys: usize) -> Cost {
        let rows = self.query.tokens;
        let dtypes = [self.query.dtype, self.output.dtype];
        let Cost { operations, bytes } = self.config.cost(keys as f64, rows, keys, dtypes, self.cache.dtype, self.lse);
        let indices = 1 + usize::from(self.sequences.is_some());
        Cost { operations, bytes: bytes + (rows * indices * DType::I32.size()) as f64 }
    }
}

fn output_heads(config: &AttentionConfig, output: Tensor, tokens: usize) -> Result<Heads> {
    let heads = config.query_heads_of("output", output, tokens)?;
    output.expect_writable("output")?;
    Ok(heads)
}

fn check_lse(lse: Option<Tensor>, rows: usize, heads: usize) -> Result<()> {
    let Some(lse) = lse else { return Ok(()) };
    lse.expect_dtype("lse", DType::F32)?;
    lse.expect_shape("lse", &[rows, heads])?;
    lse.expect_writable("lse")?;
    if lse.is_contiguous() {
        return Ok(());
    }
    Err(Error::invalid("tensor `lse` is strided; a contiguous one is needed"))
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

    fn config(causal: bool, window: usize) -> AttentionConfig {
        AttentionConfig { query_heads: 2, kv_heads: 1, head_dim: 4, scale: 0.0, soft_cap: 0.0, window, causal }
    }

    #[test]
    fn visible_ranges_follow_the_mask() {
        assert_eq!(config(true, 0).visible(3, 10), (0, 4));
        assert_eq!(config(true, 2).visible(3, 10), (2, 4));
        assert_eq!(config(true, 1).visible(0, 10), (0, 1));
        assert_eq!(config(false, 0).visible(3, 10), (0, 10));
        assert_eq!(config(false, 2).visible(3, 10), (2, 5));
        assert_eq!(config(false, 2).visible(9, 4), (4, 4));
    }

    #[test]
    fn the_default_scale_is_one_over_root_d() {
        assert_eq!(AttentionConfig::new(config(true, 0)).unwrap().scale, 0.5);
        let uneven = AttentionConfig { query_heads: 3, kv_heads: 2, ..config(true, 0) };
        assert_eq!(AttentionConfig::new(uneven).unwrap_err().status, Status::Attention);
    }

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
