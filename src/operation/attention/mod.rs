//! `attention`: softmax(cap(scale · Q·Kᵀ) + mask) · V with grouped query heads, over a KV cache or over tensors.
//!
//! One form reaches the executors whatever the caller's was: keys and values are a base address with strides, and each
//! sequence is a span of query rows that meets a span of keys. Query row i of a sequence with n rows and L keys stands
//! at position L − n + i, so a chunk of a prompt sees the cache before it (bottom-right alignment).
//!
//! Masks: causal keeps k ≤ q; a window W keeps 0 ≤ q − k < W, without causal |q − k| < W. The soft cap c turns a score
//! s into c·tanh(s/c) before the mask (Gemma 2). A row that sees no key gives 0 and lse = −inf.

mod decode;
mod prefill;

use crate::error::{Error, Result, Status};
use crate::operation::{expect_extent, Cost};
use crate::tensor::{CacheLayer, DType, Heads, Tensor, MAX_HEAD_DIM};
pub use decode::{AttentionDecode, DecodeRows, EMPTY_ROW, MAX_ROWS_PER_SEQUENCE};
pub use prefill::{AttentionPrefill, KeySource, SequenceSpan};

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

fn output_heads(config: &AttentionConfig, output: Tensor, tokens: usize) -> Result<Heads> {
    let heads = config.query_heads_of("output", output, tokens)?;
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
}
