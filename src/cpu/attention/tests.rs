//! Both forms against the formula: grouped heads, masks, caps, odd head sizes, empty rows, stale cache rows.

use super::super::testing::{assert_close, at_every_level, threads, Buffer};
use super::super::threads::Threads;
use super::{decode, prefill};
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, KeySource};
use crate::tensor::{CacheLayer, DType};

const CONFIG: AttentionConfig =
    AttentionConfig { query_heads: 4, kv_heads: 2, head_dim: 64, scale: 0.0, soft_cap: 0.0, window: 0, causal: true };

fn configs() -> Vec<AttentionConfig> {
    let config = |config| AttentionConfig::new(config).unwrap();
    vec![
        config(CONFIG),
        config(AttentionConfig { causal: false, ..CONFIG }),
        config(AttentionConfig { window: 70, soft_cap: 2.0, ..CONFIG }),
        config(AttentionConfig { window: 33, causal: false, head_dim: 16, ..CONFIG }),
        config(AttentionConfig { query_heads: 7, kv_heads: 1, head_dim: 40, scale: 3.0, ..CONFIG }),
        config(AttentionConfig { query_heads: 3, kv_heads: 3, head_dim: 5, window: 1, ..CONFIG }),
        config(AttentionConfig { query_heads: 4, kv_heads: 1, head_dim: 256, ..CONFIG }),
        config(AttentionConfig { query_heads: 2, kv_heads: 2, head_dim: 512, soft_cap: 0.5, ..CONFIG }),
        config(AttentionConfig { query_heads: 100, kv_heads: 1, head_dim: 8, ..CONFIG }),
    ]
}

#[test]
fn prefill_over_tensors_matches_the_reference() {
    // (query rows, keys): a whole prompt, a chunk behind a longer cache, one row, none, more rows than keys.
    let lengths = [(130, 130), (3, 200), (1, 1), (0, 9), (20, 64), (9, 5)];
    at_every_level(|level| {
        for (i, config) in configs().into_iter().enumerate() {
            let lengths = if config.causal { &lengths[..5] } else { &lengths[..] };
            let starts = |counts: Vec<usize>| -> Vec<i32> {
                let mut sum = 0;
                std::iter::once(0)
                    .chain(counts.into_iter().map(|count| {
                        sum += count as i32;
                        sum
                    }))
                    .collect()
            };
            let query_starts = starts(lengths.iter().map(|pair| pair.0).collect());
            let key_starts = starts(lengths.iter().map(|pair| pair.1).collect());
            let (rows, keys) = (query_starts[lengths.len()] as usize, key_starts[lengths.len()] as usize);
            let dtype = DType::FLOATS[i % 3];
            let (heads, kv_heads, dim) = (config.query_heads, config.kv_heads, config.head_dim);
            let mut query = Buffer::random(DType::F32, rows * heads * dim, 1);
            let mut key = Buffer::random(dtype, keys * kv_heads * dim, 2);
            let mut value = Buffer::random(dtype, keys * kv_heads * dim, 3);
            let mut run = |threads: Option<&Threads>| {
                let mut output = Buffer::poisoned(DType::F32, rows * heads * dim);
                let mut lse = Buffer::poisoned(DType::F32, rows * heads);
                let source = KeySource::Tensors {
                    key: key.tensor(&[keys, kv_heads, dim]),
                    value: value.tensor(&[keys, kv_heads, dim]),
                    key_starts: &key_starts,
                };
                let op = AttentionPrefill::new(
                    config,
                    query.tensor(&[rows, heads, dim]),
                    &query_starts,
                    source,
                    output.tensor(&[rows, heads, dim]),
                    Some(lse.tensor(&[rows, heads])),
                )
                .unwrap();
                match threads {
                    Some(threads) => prefill::prefill(threads, &op).unwrap(),
                    None => prefill::reference(&op),
                }
                (output, lse)
            };
            let (output, lse) = run(Some(threads()));
            let (expected, expected_lse) = run(None);
            assert_close(&output, &expected, &format!("{level:?} {config:?} {dtype}"));
            assert_close(&lse, &expected_lse, &format!("{level:?} lse {config:?} {dtype}"));
            let (alone, _) = run(Some(&Threads::new(1).unwrap()));
            assert!(output.values() == alone.values(), "{level:?} {config:?}: the number of threads shows");
        }
    });
}

#[test]
fn decode_matches_the_reference_and_reads_no_stale_row() {
    let capacity = 1100;
    let positions = [0.0, 255.0, 256.0, 1099.0, 700.0];
    let sequences = [4.0, 0.0, 3.0, 1.0, 2.0];
    at_every_level(|level| {
        for (i, config) in configs().into_iter().enumerate().filter(|(_, config)| config.causal) {
            let dtype = DType::FLOATS[i % 3];
            let (heads, kv_heads, dim) = (config.query_heads, config.kv_heads, config.head_dim);
            for rows in [1, 5] {
                let size = 5 * kv_heads * capacity * dim;
                let (mut key, mut value) =
                    (Buffer::random(dtype, size, 2).values(), Buffer::random(dtype, size, 3).values());
                for (sequence, position) in sequences.iter().zip(positions) {
                    for head in 0..kv_heads {
                        let start = (*sequence as usize * kv_heads + head) * capacity * dim;
                        let stale = start + (position as usize + 1) * dim..start + capacity * dim;
                        key[stale.clone()].fill(f32::NAN);
                        value[stale].fill(f32::NAN);
                    }
                }
                let (mut key, mut value) = (Buffer::from(dtype, &key), Buffer::from(dtype, &value));
                let mut query = Buffer::random(DType::F32, rows * heads * dim, 1);
                let mut positions = Buffer::from(DType::I32, &positions[5 - rows..]);
                let mut sequences = Buffer::from(DType::I32, &sequences[5 - rows..]);
                let cache = CacheLayer::contiguous(
                    (key.tensor(&[size]).data, value.tensor(&[size]).data),
                    dtype,
                    [5, kv_heads, capacity, dim],
                );
                let mut run = |threads: Option<&Threads>| {
                    let mut output = Buffer::poisoned(DType::F32, rows * heads * dim);
                    let mut lse = Buffer::poisoned(DType::F32, rows * heads);
                    let op = AttentionDecode::new(
                        config,
                        query.tensor(&[rows, heads, dim]),
                        cache,
                        output.tensor(&[rows, heads, dim]),
                        Some(lse.tensor(&[rows, heads])),
                        positions.tensor(&[rows]),
                        Some(sequences.tensor(&[rows])),
                        0,
                    )
                    .unwrap();
                    match threads {
                        Some(threads) => decode::decode(threads, &op, &mut Vec::new()).unwrap(),
                        None => decode::reference(&op),
                    }
                    (output, lse)
                };
                let (output, lse) = run(Some(threads()));
                let (expected, expected_lse) = run(None);
                assert_close(&output, &expected, &format!("{level:?} {rows} rows {config:?} {dtype}"));
                assert_close(&lse, &expected_lse, &format!("{level:?} lse {rows} rows {config:?} {dtype}"));
                // One thread merges within a task what three merge across tasks.
                let (alone, _) = run(Some(&Threads::new(1).unwrap()));
                assert!(output.values() == alone.values(), "{level:?} {config:?}: the number of threads shows");
            }
        }
    });
}

#[test]
fn a_position_outside_the_cache_is_named() {
    let config = AttentionConfig::new(AttentionConfig { query_heads: 1, kv_heads: 1, head_dim: 4, ..CONFIG }).unwrap();
    let mut cache = Buffer::random(DType::F32, 12, 1);
    let data = cache.tensor(&[12]).data;
    let layer = CacheLayer::contiguous((data, data), DType::F32, [1, 1, 3, 4]);
    for (position, sequence, named) in [(3.0, 0.0, "position 3"), (-1.0, 0.0, "position -1"), (0.0, 1.0, "sequence 1")]
    {
        let (mut query, mut output) = (Buffer::random(DType::F32, 4, 1), Buffer::poisoned(DType::F32, 4));
        let mut positions = Buffer::from(DType::I32, &[position]);
        let mut sequences = Buffer::from(DType::I32, &[sequence]);
        let (query, output) = (query.tensor(&[1, 1, 4]), output.tensor(&[1, 1, 4]));
        let sequences = Some(sequences.tensor(&[1]));
        let op =
            AttentionDecode::new(config, query, layer, output, None, positions.tensor(&[1]), sequences, 0).unwrap();
        let error = decode::decode(threads(), &op, &mut Vec::new()).unwrap_err();
        assert!(error.message.contains(named) && error.message.contains("row 0"), "{error}");
    }
}
