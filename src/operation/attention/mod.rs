//! `attention`: softmax(cap(scale · Q·Kᵀ) + mask) · V with grouped query heads, over a KV cache or over tensors.
//!
//! One form reaches the executors whatever the caller's was: keys and values are a base address with strides, and each
//! sequence is a span of query rows that meets a span of keys. Query row i of a sequence with n rows and L keys stands
//! at position L − n + i, so a part of a prompt sees the cache before it (bottom-right alignment).
//!
//! Masks: causal keeps k ≤ q; a window W keeps 0 ≤ q − k < W, without causal |q − k| < W. The soft cap c turns a score
//! s into c·tanh(s/c) before the mask (Gemma 2). A prefix of P keys replaces k ≤ q by k ≤ max(q, P − 1) and the window by
//! |q − k| < W. S sink tokens keep k < S before the window as well. Chunks of C keep ⌊k / C⌋ = ⌊q / C⌋ (Llama 4). A row that sees no key
//! gives 0 and lse = −inf, or the head's sink.

mod decode;
mod device_lengths;
mod dropout;
mod head_terms;
pub mod mask;
mod prefill;
mod prefix;
mod tree;

use crate::error::{Error, Result, Status};
use crate::operation::{expect_extent, Cost};
use crate::tensor::{CacheLayer, DType, Heads, Placement, Tensor, MAX_HEAD_DIM, MAX_VALUE_DIM};
pub use decode::{AttentionDecode, DecodeRope, DecodeRopeArguments, DecodeRows, EMPTY_ROW, MAX_ROWS_PER_SEQUENCE};
pub use device_lengths::{DeviceLengths, DeviceSource};
pub use dropout::{philox, Dropout, DROPOUT_KEYS};
pub use head_terms::HeadTerms;
pub use prefill::{AttentionPrefill, KeySource, SequenceSpan};
pub use prefix::{Partial, SharedPrefix};
pub use tree::{Tree, MAX_TREE_ROWS};

/// What stays the same from call to call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    pub query_heads: usize,
    pub kv_heads: usize,
    /// Of queries and keys.
    pub head_dim: usize,
    /// Of values and outputs; 0: head_dim
    pub value_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// 0: none
    pub soft_cap: f32,
    /// 0: none
    pub window: usize,
    pub causal: bool,
    /// Keys of a chunk: a query sees those of its own chunk alone. 0: none
    pub chunk: usize,
    /// The first keys of a sequence, which a query sees beside its window (StreamingLLM, Xiao et al., arXiv:2309.17453). 0: none
    pub sink_tokens: usize,
}

impl Default for AttentionConfig {
    fn default() -> AttentionConfig {
        AttentionConfig {
            query_heads: 1,
            kv_heads: 1,
            head_dim: 1,
            value_dim: 0,
            scale: 0.0,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
        }
    }
}

/// The most keys that are seen beside a window.
pub const MAX_SINK_TOKENS: usize = 256;

impl AttentionConfig {
    /// Fills in the value dim and the default scale 1/√head_dim where they are 0.
    pub fn new(config: AttentionConfig) -> Result<AttentionConfig> {
        let mut config = config.with_value_dim();
        let AttentionConfig { query_heads, kv_heads, head_dim, value_dim, .. } = config;
        let fail = |message: String| Err(Error::new(Status::Attention, message));
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return fail(format!("head_dim is {head_dim}; 1 to {MAX_HEAD_DIM} is supported"));
        }
        if value_dim > MAX_VALUE_DIM {
            return fail(format!(
                "value_dim is {value_dim}; 1 to {MAX_VALUE_DIM} is supported, and 0 stands for head_dim = {head_dim}"
            ));
        }
        if kv_heads == 0 || query_heads == 0 || query_heads % kv_heads != 0 {
            return fail(format!(
                "{query_heads} query heads cannot be shared out to {kv_heads} key/value heads evenly"
            ));
        }
        expect_extent("query_heads", query_heads)?;
        expect_extent("window", config.window)?;
        expect_extent("chunk", config.chunk)?;
        if config.sink_tokens > MAX_SINK_TOKENS {
            return fail(format!("sink_tokens is {}; up to {MAX_SINK_TOKENS} are supported", config.sink_tokens));
        }
        if config.sink_tokens > 0 && (config.window == 0 || config.chunk > 0) {
            return fail("sink_tokens are keys beside a window: they need one, and exclude a chunk".to_string());
        }
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

    fn with_value_dim(self) -> AttentionConfig {
        let value_dim = if self.value_dim == 0 { self.head_dim } else { self.value_dim };
        AttentionConfig { value_dim, ..self }
    }

    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// The keys [begin, end) that a query at `position` sees of `kv_length`.
    pub fn visible(&self, position: usize, kv_length: usize) -> (usize, usize) {
        self.visible_with_prefix(position, kv_length, 0)
    }

    /// The same where the causal mask hides none of the first `prefix` keys.
    pub fn visible_with_prefix(&self, position: usize, kv_length: usize, prefix: usize) -> (usize, usize) {
        let end = if self.causal { (position + 1).max(prefix).min(kv_length) } else { kv_length };
        let (begin, end) = match self.window {
            0 => (0, end),
            window => ((position + 1).saturating_sub(window), end.min(position + window)),
        };
        let (begin, end) = match position.checked_div(self.chunk) {
            None => (begin, end),
            Some(chunk) => (begin.max(chunk * self.chunk), end.min((chunk + 1) * self.chunk)),
        };
        (begin.min(end), end)
    }

    /// How many of the first keys a query sees whose window begins at `begin`; from there on they are keys of the window.
    pub fn sinks_before(&self, begin: usize) -> usize {
        self.sink_tokens.min(begin)
    }

    /// Of `pairs` of a query row and a key, `rows` and `keys` that take `token_bytes` a head with their values, with queries and
    /// outputs of `dtypes`.
    fn cost(
        &self,
        pairs: f64,
        rows: usize,
        keys: usize,
        dtypes: [DType; 2],
        token_bytes: usize,
        lse: Option<Tensor>,
    ) -> Cost {
        let (dim, value_dim, heads) = (self.head_dim as f64, self.value_dim as f64, self.query_heads as f64);
        let width = dim * dtypes[0].size() as f64 + value_dim * dtypes[1].size() as f64;
        let sums = if lse.is_some() { DType::F32.size() as f64 } else { 0.0 };
        Cost {
            operations: 2.0 * pairs * (dim + value_dim) * heads,
            bytes: rows as f64 * heads * (width + sums) + keys as f64 * self.kv_heads as f64 * token_bytes as f64,
        }
    }

    fn check_cache(&self, cache: &CacheLayer) -> Result<()> {
        let dims = |(head_dim, value_dim)| match head_dim == value_dim {
            true => format!("{head_dim}"),
            false => format!("{head_dim} and values of {value_dim}"),
        };
        let (held, needed) = ((cache.head_dim, cache.value_dim), (self.head_dim, self.value_dim));
        if cache.heads == self.kv_heads && held == needed {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the cache holds {} heads of {}; the attention has {} of {}",
            cache.heads,
            dims(held),
            self.kv_heads,
            dims(needed)
        )))
    }

    /// A ring has lost the first tokens.
    fn check_ring(&self, cache: &CacheLayer) -> Result<()> {
        match cache.placement {
            Placement::Ring { .. } if self.sink_tokens > 0 => {
                Err(Error::unsupported("sink_tokens are keys that a ring has lost")
                    .with_advice("use a cache without a window, or one with pages"))
            }
            _ => Ok(()),
        }
    }

    fn query_heads_of(&self, name: &str, tensor: Tensor, tokens: usize, dim: usize) -> Result<Heads> {
        if !tensor.dtype.is_fp8() || name != "query" {
            tensor.expect_float(name)?;
        }
        let heads = Heads::of_any_dtype(name, tensor, tokens, dim)?;
        if heads.heads != self.query_heads {
            return Err(Error::invalid(format!("`{name}` has {} heads; {} are needed", heads.heads, self.query_heads)));
        }
        Ok(heads)
    }
}

fn output_heads(config: &AttentionConfig, output: Tensor, tokens: usize) -> Result<Heads> {
    let heads = config.query_heads_of("output", output, tokens, config.value_dim)?;
    output.expect_writable("output")?;
    Ok(heads)
}

pub(super) fn check_lse(lse: Option<Tensor>, rows: usize, heads: usize) -> Result<()> {
    let Some(lse) = lse else { return Ok(()) };
    lse.expect_dtype("lse", DType::F32)?;
    lse.expect_shape("lse", &[rows, heads])?;
    lse.expect_writable("lse")?;
    if lse.is_contiguous() {
        return Ok(());
    }
    Err(Error::invalid("tensor `lse` is strided; a contiguous one is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(causal: bool, window: usize) -> AttentionConfig {
        AttentionConfig { query_heads: 2, kv_heads: 1, head_dim: 4, window, causal, ..AttentionConfig::default() }
    }

    #[test]
    fn visible_ranges_follow_the_mask() {
        assert_eq!(config(true, 0).visible(3, 10), (0, 4));
        assert_eq!(config(true, 2).visible(3, 10), (2, 4));
        assert_eq!(config(true, 1).visible(0, 10), (0, 1));
        assert_eq!(config(false, 0).visible(3, 10), (0, 10));
        assert_eq!(config(false, 2).visible(3, 10), (2, 5));
        assert_eq!(config(false, 2).visible(9, 4), (4, 4));
        let chunked = |causal, window| AttentionConfig { chunk: 4, ..config(causal, window) };
        assert_eq!(chunked(true, 0).visible(3, 10), (0, 4));
        assert_eq!(chunked(true, 0).visible(4, 10), (4, 5));
        assert_eq!(chunked(true, 2).visible(7, 10), (6, 8));
        assert_eq!(chunked(false, 0).visible(5, 10), (4, 8));
        assert_eq!(chunked(false, 0).visible(9, 10), (8, 10));
        assert_eq!(chunked(false, 0).visible(9, 4), (4, 4));
        assert_eq!(config(true, 0).visible_with_prefix(3, 10, 6), (0, 6));
        assert_eq!(config(true, 0).visible_with_prefix(7, 10, 6), (0, 8));
        assert_eq!(config(true, 2).visible_with_prefix(3, 10, 6), (2, 5));
        assert_eq!(config(true, 2).visible_with_prefix(7, 10, 6), (6, 8));
        assert_eq!(chunked(true, 0).visible_with_prefix(3, 10, 6), (0, 4));
        let beside = AttentionConfig { sink_tokens: 3, ..config(true, 2) };
        assert_eq!([0, 2, 3, 9].map(|begin| beside.sinks_before(begin)), [0, 2, 3, 3]);
        assert!(AttentionConfig::new(beside).is_ok());
        for wrong in [
            AttentionConfig { window: 0, ..beside },
            AttentionConfig { chunk: 4, ..beside },
            AttentionConfig { sink_tokens: MAX_SINK_TOKENS + 1, ..beside },
        ] {
            let error = AttentionConfig::new(wrong).unwrap_err();
            assert!(error.status == Status::Attention && error.message.contains("sink_tokens"), "{error}");
        }
    }

    #[test]
    fn the_default_scale_is_one_over_root_d() {
        assert_eq!(AttentionConfig::new(config(true, 0)).unwrap().scale, 0.5);
        assert_eq!(AttentionConfig::new(config(true, 0)).unwrap().value_dim, 4);
        let latent = AttentionConfig { head_dim: 576, value_dim: 512, ..config(true, 0) };
        assert_eq!(AttentionConfig::new(latent).unwrap().value_dim, 512);
        for (head_dim, value_dim) in [(576, 0), (577, 512), (64, 513)] {
            let error = AttentionConfig::new(AttentionConfig { head_dim, value_dim, ..latent }).unwrap_err();
            assert!(error.status == Status::Attention && error.message.contains("_dim is 5"), "{error}");
        }
        let uneven = AttentionConfig { query_heads: 3, kv_heads: 2, ..config(true, 0) };
        assert_eq!(AttentionConfig::new(uneven).unwrap_err().status, Status::Attention);
    }
}
