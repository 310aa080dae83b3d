//! Attention of one or a few query rows a sequence, over a KV cache.

use super::head_terms::HeadTerms;
use super::prefill::check_query_dtype;
use super::prefix::SharedPrefix;
use super::{check_lse, output_heads, AttentionConfig};
use crate::error::{Error, Result, Status};
use crate::operation::access::{Effect, Visit};
use crate::operation::rope::{Append, Rope, RopeArguments, Rotation};
use crate::operation::{Cost, CostOf};
use crate::tensor::{CacheLayer, DType, Heads, PageTable, Tensor};

/// The most rows of a sequence.
pub const MAX_ROWS_PER_SEQUENCE: usize = 16;

/// The position of a row that its sequence does not need.
pub const EMPTY_ROW: i32 = -1;

/// Which keys the rows of a decode see. Row r of sequence b is row b · R + r of query and output.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRows {
    /// R, 1 to [`MAX_ROWS_PER_SEQUENCE`].
    pub per_sequence: usize,
    /// i32 [B · R]: a row sees the keys 0 ..= its position within the window; none at [`EMPTY_ROW`]
    pub positions: Tensor,
    /// i32 [B]: the cache's sequence of each; absent: 0, 1, 2, …
    pub sequences: Option<Tensor>,
    /// No position reaches this; it sizes the split of the work. 0: the cache's capacity.
    pub max_kv_length: usize,
}

/// A few query rows a sequence; the lengths are read from device memory, so that a captured call serves every step.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDecode {
    pub config: AttentionConfig,
    /// [B · R, query_heads, head_dim]
    pub query: Heads,
    pub cache: CacheLayer,
    pub output: Heads,
    pub lse: Option<Tensor>,
    pub rows: DecodeRows,
    pub terms: HeadTerms,
    /// The first keys of all sequences, where they are one's.
    pub prefix: Option<SharedPrefix>,
    /// What is done to the new tokens first; `None`: queries are rotated, and keys and values in the cache.
    pub rope: Option<DecodeRope>,
}

/// Norm, rotation and append of the one new token of each sequence, as `rope` does them: the queries are normed, rotated, scaled
/// and rounded to their dtype, key and value join the cache at the token's position.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRope {
    /// [B, kv_heads, head_dim]
    pub key: Heads,
    /// [B, kv_heads, value_dim]
    pub value: Heads,
    pub query_norm: Option<Tensor>,
    pub key_norm: Option<Tensor>,
    pub query_scale: f32,
    pub epsilon: f32,
    pub weight_offset: f32,
    pub rotation: Option<Rotation>,
}

/// The tensors and numbers of a [`DecodeRope`] before validation.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRopeArguments {
    pub key: Tensor,
    pub value: Tensor,
    pub query_norm: Option<Tensor>,
    pub key_norm: Option<Tensor>,
    pub query_scale: f32,
    pub epsilon: f32,
    pub weight_offset: f32,
    pub rotation: Option<Rotation>,
}

impl AttentionDecode {
    pub fn new(
        config: AttentionConfig,
        query: Tensor,
        cache: CacheLayer,
        output: Tensor,
        lse: Option<Tensor>,
        rows: DecodeRows,
    ) -> Result<AttentionDecode> {
        let config = config.with_value_dim();
        if !config.causal {
            return Err(Error::new(
                Status::Attention,
                "a bidirectional attention has no decode: its last row sees all keys",
            ));
        }
        query.expect_rank("query", 3)?;
        let DecodeRows { per_sequence, positions, sequences, max_kv_length } = rows;
        let count = query.shape[0];
        if !(1..=MAX_ROWS_PER_SEQUENCE).contains(&per_sequence) {
            return Err(Error::invalid(format!(
                "rows_per_sequence is {per_sequence}; 1 to {MAX_ROWS_PER_SEQUENCE} is supported"
            ))
            .with_limit(per_sequence as u64, MAX_ROWS_PER_SEQUENCE as u64)
            .with_advice("more rows of a sequence are a prefill"));
        }
        if !count.is_multiple_of(per_sequence) {
            return Err(Error::invalid(format!(
                "`query` has {count} rows; a multiple of rows_per_sequence, {per_sequence}, is needed"
            )));
        }
        let query = config.query_heads_of("query", query, count, config.head_dim)?;
        let output = output_heads(&config, output, count)?;
        check_lse(lse, count, config.query_heads)?;
        config.check_cache(&cache)?;
        check_query_dtype(query.dtype, cache.dtype)?;
        for (name, tensor, entries) in
            [("positions", Some(positions), count), ("sequences", sequences, count / per_sequence)]
        {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(name, DType::I32)?;
            tensor.expect_shape(name, &[entries])?;
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
        if sequences.is_none() && count / per_sequence > cache.sequences {
            return Err(Error::invalid(format!(
                "{} sequences without `sequences`; the cache has {}",
                count / per_sequence,
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
        cache.check_window(count.min(per_sequence), max_kv_length, config.window)?;
        config.check_ring(&cache)?;
        Ok(AttentionDecode {
            config,
            query,
            cache,
            output,
            lse,
            rows: DecodeRows { max_kv_length, ..rows },
            rope: None,
            terms: HeadTerms::default(),
            prefix: None,
        })
    }

    /// Rotates and appends the new tokens first.
    pub fn with_rope(self, arguments: DecodeRopeArguments) -> Result<AttentionDecode> {
        let DecodeRows { per_sequence, sequences, .. } = self.rows;
        if per_sequence != 1 {
            return Err(Error::invalid(format!(
                "rows_per_sequence is {per_sequence}; a decode that rotates and appends its tokens takes 1"
            ))
            .with_limit(per_sequence as u64, 1)
            .with_advice("call rope before it"));
        }
        if self.query.tokens > 1 && sequences.is_none() {
            return Err(Error::invalid(format!(
                "`sequences` is needed where {} tokens are rotated and appended",
                self.query.tokens
            )));
        }
        if self.cache.has_values_in_keys() {
            return Err(Error::invalid("the cache has values in its keys; call rope before the attention"));
        }
        if self.prefix.is_some() {
            return Err(Error::invalid(
                "a decode over a shared prefix rotates and appends no tokens; call rope before it",
            ));
        }
        let DecodeRopeArguments { key, value, query_norm, key_norm, query_scale, epsilon, weight_offset, rotation } =
            arguments;
        // What rope would refuse is refused in its words.
        let rope = Rope::new(RopeArguments {
            query: Some(self.query.tensor()),
            query_output: Some(self.query.tensor()),
            query_norm,
            query_scale,
            key: Some(key),
            key_output: None,
            key_norm,
            value: Some(value),
            epsilon,
            weight_offset,
            positions: self.rows.positions,
            rotation,
            append: Some(Append { cache: self.cache, sequences }),
        })?;
        // Both are there, as they were given.
        let rope = rope.key.zip(rope.value).map(|(key, value)| DecodeRope {
            key,
            value,
            query_norm,
            key_norm,
            query_scale,
            epsilon,
            weight_offset,
            rotation: rope.rotation,
        });
        Ok(AttentionDecode { rope, ..self })
    }

    /// The two operations that it does as one, with the queries between them in `query`, which has this query's dtype and shape.
    pub fn separate(&self, query: Heads) -> Option<(Rope, AttentionDecode)> {
        let DecodeRope { key, value, query_norm, key_norm, query_scale, epsilon, weight_offset, rotation } =
            self.rope?;
        let rope = Rope {
            tokens: self.query.tokens,
            head_dim: self.config.head_dim,
            query: Some(self.query),
            query_output: Some(query),
            query_norm,
            query_scale,
            key: Some(key),
            key_output: None,
            key_norm,
            value: Some(value),
            epsilon,
            weight_offset,
            positions: self.rows.positions,
            rotation,
            append: Some(Append { cache: self.cache, sequences: self.rows.sequences }),
        };
        Some((rope, AttentionDecode { query, rope: None, ..*self }))
    }

    /// f32 [query_heads] each.
    pub fn with_head_terms(mut self, sinks: Option<Tensor>, slopes: Option<Tensor>) -> Result<AttentionDecode> {
        let outputs = [Some(self.output.tensor()), self.lse];
        self.terms = HeadTerms::new([sinks, slopes], self.config.query_heads, outputs)?;
        Ok(self)
    }

    pub fn sequence_count(&self) -> usize {
        self.query.tokens / self.rows.per_sequence
    }

    /// An upper bound: every row is taken to be max_kv_length long.
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("query", Some(&self.query));
        visit.cache(&self.cache, Effect::Read);
        if let Some(rope) = &self.rope {
            visit.read("key", Some(&rope.key));
            visit.read("value", Some(&rope.value));
            visit.read("query_norm", rope.query_norm.as_ref());
            visit.read("key_norm", rope.key_norm.as_ref());
            visit.cache(&self.cache, Effect::Write);
        }
        visit.read("positions", Some(&self.rows.positions));
        visit.read("sequences", self.rows.sequences.as_ref());
        self.terms.accesses(visit);
        visit.write("output", Some(&self.output));
        visit.write("lse", self.lse.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let longest = self.rows.max_kv_length;
        let (begin, end) = self.config.visible(longest - 1, longest);
        let shared = self.prefix.map_or(0, |prefix| prefix.tokens);
        let seen = end - begin + self.config.sinks_before(begin);
        let keys = shared + (seen - shared) * self.sequence_count();
        self.cost_of_keys(seen * self.query.tokens, keys)
    }

    /// The positions, and the cost with the keys and values that the mask keeps at these.
    pub fn cost_by_content(&self) -> (Tensor, CostOf) {
        let op = *self;
        let shared = op.prefix.map_or(0, |prefix| prefix.tokens);
        let cost = move |positions: &[i32]| {
            let visible = |position: &i32| {
                let position = op.cache.check_position(*position).ok()?;
                Some(op.config.visible(position, position + 1))
            };
            let sinks = |begin: usize| op.config.sinks_before(begin);
            let pairs = positions.iter().filter_map(visible).map(|(begin, end)| end - begin + sinks(begin)).sum();
            // The rows of a sequence see keys without a gap, and what several see is read once.
            let keys = positions.chunks(op.rows.per_sequence).map(|rows| {
                let visible = || rows.iter().filter_map(visible);
                let begin = visible().map(|keys| keys.0).min();
                let end = visible().map(|keys| keys.1).max().unwrap_or(0);
                // Those of a shared prefix are counted once.
                end.saturating_sub(shared.max(begin.unwrap_or(0))) + begin.map_or(0, sinks)
            });
            op.cost_of_keys(pairs, keys.sum::<usize>() + if pairs > 0 { shared } else { 0 })
        };
        (self.rows.positions, Box::new(cost))
    }

    /// Of `pairs` of a row and a key that it sees, and of the keys of all sequences together.
    fn cost_of_keys(&self, pairs: usize, keys: usize) -> Cost {
        let rows = self.query.tokens;
        let dtypes = [self.query.dtype, self.output.dtype];
        let Cost { operations, bytes } =
            self.config.cost(pairs as f64, rows, keys, dtypes, self.cache.token_bytes(), self.lse);
        let indices = rows + self.rows.sequences.map_or(0, |sequences| sequences.shape[0]);
        let new = self.separate(self.query).map_or(Cost::default(), |(rope, _)| {
            let queries = rows * self.config.query_heads * self.config.head_dim * self.query.dtype.size();
            let cost = rope.cost();
            // The queries are read by the attention already, and are not written.
            Cost { bytes: cost.bytes - 2.0 * queries as f64, ..cost }
        });
        Cost {
            operations: operations + new.operations,
            bytes: bytes + new.bytes + (indices * DType::I32.size()) as f64,
        }
    }
}
