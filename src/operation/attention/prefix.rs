//! A decode whose sequences share their first tokens: the keys of these are read once for all.
//!
//! A row that sees its whole prefix needs no mask there, so the prefix is a bidirectional prefill with the rows of all sequences as
//! its queries, and what follows is a decode over a cache that begins behind it ("cascade" or "shared-prefix attention", Juravsky
//! et al., arXiv:2402.05099). `attention_merge` has the sum of both. Sinks are a term of the second alone.

use super::prefill::Starts;
use super::{AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, HeadTerms, SequenceSpan};
use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::tensor::{CacheLayer, DType, Heads, KvView, PageTable, Placement, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedPrefix {
    /// At least 1; a position is at `tokens` − 1 or behind.
    pub tokens: usize,
    /// Of the cache: it holds them.
    pub sequence: usize,
}

/// Where an attention leaves f32 results: its outputs and their lse, rows and heads one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Partial {
    pub output: *mut f32,
    pub lse: *mut f32,
}

impl AttentionDecode {
    /// Reads the first `tokens` keys of all sequences from one; 0: of none.
    pub fn with_prefix(self, tokens: usize, sequence: usize) -> Result<AttentionDecode> {
        let (cache, rows, config) = (&self.cache, &self.rows, &self.config);
        if tokens == 0 {
            return match sequence {
                0 => Ok(self),
                _ => Err(Error::invalid(format!("prefix_sequence is {sequence} and prefix_tokens 0"))),
            };
        }
        if self.rope.is_some() {
            return Err(Error::invalid("a decode that rotates and appends its tokens has no shared prefix")
                .with_advice("call rope before it"));
        }
        if config.window > 0 || config.chunk > 0 || self.terms.slopes.is_some() {
            return Err(Error::invalid(
                "a shared prefix is seen whole and at no distance: it excludes window, chunk and alibi_slopes",
            )
            .with_advice("decode without prefix_tokens"));
        }
        if tokens > rows.max_kv_length {
            return Err(Error::invalid(format!("prefix_tokens is {tokens}; max_kv_length is {}", rows.max_kv_length))
                .with_limit(tokens as u64, rows.max_kv_length as u64));
        }
        if sequence >= cache.sequences {
            return Err(Error::invalid(format!(
                "prefix_sequence is {sequence}; the cache has {} sequences",
                cache.sequences
            ))
            .with_limit(sequence as u64, cache.sequences as u64));
        }
        match &cache.placement {
            Placement::Ring { .. } => return Err(Error::invalid("the cache is a ring, which keeps no prefix")),
            Placement::Paged(table) if !tokens.is_multiple_of(table.page_tokens) => {
                return Err(Error::invalid(format!(
                    "prefix_tokens is {tokens}; a multiple of the pages' {} tokens is needed",
                    table.page_tokens
                )))
            }
            _ => {}
        }
        Ok(AttentionDecode { prefix: Some(SharedPrefix { tokens, sequence }), ..self })
    }
}

impl SharedPrefix {
    /// The attention of `query` over the prefix, whose keys are cut into parts of `part_tokens`, whole pages of them: part i of the
    /// results lies behind those before it. A row of `query` has heads that are those of the call, or key/value heads, and the
    /// next part's queries are `query_start` elements behind; 0: they are the same.
    pub fn prefill(
        &self,
        op: &AttentionDecode,
        (query, query_start): (Heads, usize),
        part_tokens: usize,
        to: Partial,
    ) -> Result<AttentionPrefill> {
        let Heads { tokens, heads, .. } = query;
        let config = AttentionConfig { query_heads: heads, causal: false, ..op.config };
        let parts = self.tokens.div_ceil(part_tokens);
        let mut sequences = with_room(parts, "the parts of a shared prefix")?;
        for part in 0..parts {
            let kv_length = part_tokens.min(self.tokens - part * part_tokens);
            sequences.push(SequenceSpan {
                query_start: part,
                query_count: tokens,
                kv_start: part,
                kv_length,
                prefix: 0,
            });
        }
        if tokens == 0 {
            sequences.clear();
        }
        let output = rows_of(to.output, tokens, heads, config.value_dim);
        Ok(AttentionPrefill {
            key: self.parts(&op.cache.key_view(), part_tokens),
            value: self.parts(&op.cache.value_view(), part_tokens),
            starts: Starts { query: query_start, output: tokens * output.token_stride, lse: tokens },
            config,
            query,
            output,
            lse: Some(Tensor::new(to.lse.cast(), DType::F32, &[parts * tokens, heads])),
            sequences,
            lengths: None,
            blocks: 1,
            mask: None,
            query_scales: None,
            terms: HeadTerms::default(),
            tree: None,
            dropout: None,
        })
    }

    /// The prefix's tokens as sequences of `part_tokens`.
    fn parts(&self, view: &KvView, part_tokens: usize) -> KvView {
        let start = view.origin(self.sequence);
        match view.placement {
            Placement::Paged(table) => {
                let row_stride = part_tokens / table.page_tokens;
                let entries = table.entries.wrapping_add(start);
                let sequences = self.tokens.div_ceil(part_tokens);
                let table = PageTable { entries, sequences, columns: row_stride, row_stride, ..table };
                KvView { sequence_stride: row_stride, placement: Placement::Paged(table), ..*view }
            }
            _ => KvView {
                data: view.data.wrapping_byte_add(start * view.dtype.size()),
                sequence_stride: part_tokens * view.token_stride,
                ..*view
            },
        }
    }

    /// The attention over what follows the prefix, at `positions` that count from there; −1 where nothing does.
    pub fn own(&self, op: &AttentionDecode, positions: Tensor, to: Partial) -> AttentionDecode {
        let (tokens, heads) = (op.query.tokens, op.config.query_heads);
        AttentionDecode {
            cache: op.cache.behind(self.tokens),
            output: rows_of(to.output, tokens, heads, op.config.value_dim),
            lse: Some(Tensor::new(to.lse.cast(), DType::F32, &[tokens, heads])),
            rows: DecodeRows { positions, max_kv_length: op.rows.max_kv_length - self.tokens, ..op.rows },
            prefix: None,
            ..*op
        }
    }
}

fn rows_of(data: *mut f32, tokens: usize, heads: usize, head_dim: usize) -> Heads {
    Heads {
        data: data.cast(),
        dtype: DType::F32,
        tokens,
        heads,
        head_dim,
        token_stride: heads * head_dim,
        head_stride: head_dim,
    }
}

impl CacheLayer {
    /// The layer without the first tokens of each sequence, whole pages of them.
    fn behind(&self, tokens: usize) -> CacheLayer {
        let skipped = |stride: usize, dtype: DType| tokens * stride * dtype.size();
        let capacity = self.capacity - tokens;
        match self.placement {
            Placement::Paged(table) => {
                let pages = tokens / table.page_tokens;
                let (entries, columns) = (table.entries.wrapping_add(pages), table.columns.saturating_sub(pages));
                let placement = Placement::Paged(PageTable { entries, columns, ..table });
                CacheLayer { capacity, placement, ..*self }
            }
            _ => CacheLayer {
                capacity,
                key: self.key.wrapping_byte_add(skipped(self.token_stride, self.dtype)),
                value: self.value.wrapping_byte_add(skipped(self.value_strides.token, self.value_dtype)),
                ..*self
            },
        }
    }
}
