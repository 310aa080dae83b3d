//! What prefill and decode share: the formula, a filled cache, and the bounds.

use crate::compare::bound;
use crate::run::{key_tensor, rounded, value_tensor, Failure, Outcome, Run};
use nvbackend::kv_cache::{KvCache, KvCacheOptions};
use nvbackend::operation::attention::{AttentionConfig, DecodeRows};
use nvbackend::tensor::{DType, Tensor};

/// Query, key/value and output dtypes: the query has the keys' dtype or F32, the output any.
pub fn dtypes() -> Vec<(DType, DType, DType)> {
    let pairs =
        DType::FLOATS.map(|kv| (kv, kv)).into_iter().chain([(DType::F32, DType::F16), (DType::F32, DType::Bf16)]);
    pairs.flat_map(|(query, kv)| DType::FLOATS.map(|output| (query, kv, output))).collect()
}

/// One row a sequence.
pub fn one_row(positions: Tensor, sequences: Option<Tensor>, max_kv_length: usize) -> DecodeRows {
    DecodeRows { per_sequence: 1, positions, sequences, max_kv_length }
}

/// Keys and values of one sequence, [length, kv_heads, head_dim] and [length, kv_heads, value_dim].
#[derive(Clone)]
pub struct Keys {
    pub length: usize,
    pub key: Vec<f64>,
    pub value: Vec<f64>,
}

impl Keys {
    pub fn new(run: &mut Run, config: &AttentionConfig, dtype: DType, length: usize) -> Keys {
        let rows = length * config.kv_heads;
        let mut normals = |dim: usize| rounded(dtype, &run.random.normals(rows * dim, 1.0));
        let key = normals(config.head_dim);
        Keys { length, key, value: normals(value_dim(config)) }
    }

    /// Each value becomes the first elements of its key.
    pub fn with_values_in_keys(mut self, config: &AttentionConfig) -> Keys {
        let value = |key: &[f64]| key[..value_dim(config)].to_vec();
        self.value = self.key.chunks(config.head_dim).flat_map(value).collect();
        self
    }
}

pub fn value_dim(config: &AttentionConfig) -> usize {
    if config.value_dim == 0 {
        config.head_dim
    } else {
        config.value_dim
    }
}

/// One query row of one head: the output and ln Σ exp(score); 0 and −∞ when it sees no key.
pub fn attend(config: &AttentionConfig, query: &[f64], head: usize, keys: &Keys, position: i64) -> (Vec<f64>, f64) {
    attend_masked(config, query, head, keys, position, &|_| 0.0)
}

/// As `attend`, with what a mask holds for each key added to its capped score.
pub fn attend_masked(
    config: &AttentionConfig,
    query: &[f64],
    head: usize,
    keys: &Keys,
    position: i64,
    mask: &dyn Fn(usize) -> f64,
) -> (Vec<f64>, f64) {
    let (dim, value_dim, heads) = (config.head_dim, value_dim(config), config.kv_heads);
    let row = |token: usize| token * heads + head / (config.query_heads / heads);
    let window = config.window as i64;
    let visible = |token: &usize| {
        let distance = position - *token as i64;
        (!config.causal || distance >= 0)
            && (window == 0
                || distance < window && (config.causal || distance > -window)
                || *token < config.sink_tokens && distance >= window)
            && (config.chunk == 0 || position.div_euclid(config.chunk as i64) == (*token / config.chunk) as i64)
            && mask(*token) > f64::NEG_INFINITY
    };
    let tokens: Vec<usize> = (0..keys.length).filter(visible).collect();
    let score = |&token: &usize| {
        let key = &keys.key[row(token) * dim..][..dim];
        let score = config.scale as f64 * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
        let cap = config.soft_cap as f64;
        mask(token) + if cap > 0.0 { cap * (score / cap).tanh() } else { score }
    };
    let scores: Vec<f64> = tokens.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut output = vec![0.0; value_dim];
    if scores.is_empty() {
        return (output, f64::NEG_INFINITY);
    }
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    for (&token, score) in tokens.iter().zip(&scores) {
        let weight = (score - max).exp() / sum;
        output.iter_mut().zip(&keys.value[row(token) * value_dim..]).for_each(|(out, value)| *out += weight * value);
    }
    (output, max + sum.ln())
}

/// A cache of three layers for `count` sequences, poisoned but for those given, which the middle layer has.
pub fn filled_cache(
    run: &mut Run,
    config: &AttentionConfig,
    dtype: DType,
    count: usize,
    capacity: usize,
    sequences: &[(usize, &Keys)],
) -> Result<KvCache, Failure> {
    let options = KvCacheOptions {
        layers: 3,
        sequences: count,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        value_dim: config.value_dim,
        capacity,
        dtype,
        ..KvCacheOptions::default()
    };
    let cache = KvCache::new(run.device.backend.memory(), options, run.stream)?;
    for layer in 0..3 {
        run.poison(&cache.layer(layer)?)?;
    }
    let layer = cache.layer(1)?;
    let heads = config.kv_heads;
    for (tensor, key) in [(key_tensor(&layer), true), (value_tensor(&layer), false)] {
        let dim = tensor.shape[3];
        let mut image = vec![f64::NAN; count * heads * capacity * dim];
        for (sequence, keys) in sequences {
            let values = if key { &keys.key } else { &keys.value };
            for (i, row) in values.chunks(dim).enumerate() {
                let (token, head) = (i / heads, i % heads);
                image[((sequence * heads + head) * capacity + token) * dim..][..dim].copy_from_slice(row);
            }
        }
        run.write(&tensor, &image)?;
    }
    Ok(cache)
}

/// Tensor cores round the probabilities to the keys' dtype, and an F32 query likewise.
pub fn attention_bound(kv: DType, output: DType) -> f64 {
    bound(kv).max(bound(output))
}

pub fn expect_attention(
    run: &Run,
    kv: DType,
    output: &Tensor,
    lse: Option<&Tensor>,
    rows: &[(Vec<f64>, f64)],
) -> Outcome {
    let reference: Vec<f64> = rows.iter().flat_map(|row| row.0.iter().copied()).collect();
    let head_dim = rows.first().map_or(0, |row| row.0.len());
    run.expect_rows("output", output, &reference, attention_bound(kv, output.dtype), head_dim)?;
    let Some(lse) = lse else { return Ok(()) };
    let limit = bound(kv);
    for (i, (out, row)) in run.read(lse)?.into_iter().zip(rows).enumerate() {
        // A rounded query moves a score by its own relative error.
        if !((out - row.1).abs() <= limit * (2.0 + row.1.abs()) || out == row.1) {
            return Err(format!("lse[{i}] is {out}; {} is expected", row.1).into());
        }
    }
    Ok(())
}
