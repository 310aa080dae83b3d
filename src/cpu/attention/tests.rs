//! Both forms against the formula: grouped heads, masks, caps, odd head sizes, empty rows, stale cache rows.

use super::super::testing::{assert_close, at_every_level, threads, Buffer};
use super::super::threads::Threads;
use super::{decode, prefill};
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource};
use crate::tensor::{CacheLayer, DType, Tensor};

fn decode_rows(positions: Tensor, sequences: Option<Tensor>) -> DecodeRows {
    DecodeRows { per_sequence: 1, positions, sequences, max_kv_length: 0 }
}

const CONFIG: AttentionConfig = AttentionConfig {
    query_heads: 4,
    kv_heads: 2,
    head_dim: 64,
    value_dim: 0,
    scale: 0.0,
    soft_cap: 0.0,
    window: 0,
    causal: true,
    chunk: 0,
    sink_tokens: 0,
};

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
        config(AttentionConfig { head_dim: 48, value_dim: 33, ..CONFIG }),
        config(AttentionConfig { head_dim: 7, value_dim: 50, causal: false, ..CONFIG }),
        config(AttentionConfig { query_heads: 20, kv_heads: 1, head_dim: 576, value_dim: 512, ..CONFIG }),
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
            let value_dim = config.value_dim;
            let mut query = Buffer::random(DType::F32, rows * heads * dim, 1);
            let mut key = Buffer::random(dtype, keys * kv_heads * dim, 2);
            let mut value = Buffer::random(dtype, keys * kv_heads * value_dim, 3);
            let mut run = |threads: Option<&Threads>| {
                let mut output = Buffer::poisoned(DType::F32, rows * heads * value_dim);
                let mut lse = Buffer::poisoned(DType::F32, rows * heads);
                let source = KeySource::Tensors {
                    key: key.tensor(&[keys, kv_heads, dim]),
                    value: value.tensor(&[keys, kv_heads, value_dim]),
                    key_starts: &key_starts,
                };
                let op = AttentionPrefill::new(
                    config,
                    query.tensor(&[rows, heads, dim]),
                    &query_starts,
                    source,
                    output.tensor(&[rows, heads, config.value_dim]),
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
                let tokens = 5 * kv_heads * capacity;
                let stale_after = |dim: usize, seed: u64| {
                    let mut part = Buffer::random(dtype, tokens * dim, seed).values();
                    for (sequence, position) in sequences.iter().zip(positions) {
                        for head in 0..kv_heads {
                            let start = (*sequence as usize * kv_heads + head) * capacity * dim;
                            part[start + (position as usize + 1) * dim..start + capacity * dim].fill(f32::NAN);
                        }
                    }
                    Buffer::from(dtype, &part)
                };
                let (mut key, mut value) = (stale_after(dim, 2), stale_after(config.value_dim, 3));
                let mut query = Buffer::random(DType::F32, rows * heads * dim, 1);
                let mut positions = Buffer::from(DType::I32, &positions[5 - rows..]);
                let mut sequences = Buffer::from(DType::I32, &sequences[5 - rows..]);
                let cache = CacheLayer::of_dims(
                    (key.tensor(&[tokens * dim]).data, value.tensor(&[tokens * config.value_dim]).data),
                    (dtype, dtype),
                    [5, kv_heads, capacity],
                    (dim, config.value_dim),
                );
                let mut run = |threads: Option<&Threads>| {
                    let mut output = Buffer::poisoned(DType::F32, rows * heads * config.value_dim);
                    let mut lse = Buffer::poisoned(DType::F32, rows * heads);
                    let op = AttentionDecode::new(
                        config,
                        query.tensor(&[rows, heads, dim]),
                        cache,
                        output.tensor(&[rows, heads, config.value_dim]),
                        Some(lse.tensor(&[rows, heads])),
                        decode_rows(positions.tensor(&[rows]), Some(sequences.tensor(&[rows]))),
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

/// A cache of one layer whose sequences hold `lengths` tokens each, NaN behind them, and NaN before the first token that a row
/// from `seen_from` on sees.
struct Cached {
    key: Buffer,
    value: Buffer,
    layer: CacheLayer,
}

impl Cached {
    fn new(config: &AttentionConfig, dtype: DType, lengths: &[usize], seen_from: &[usize]) -> Cached {
        let (heads, dim, capacity) = (config.kv_heads, config.head_dim, lengths.iter().max().unwrap() + 3);
        let size = lengths.len() * heads * capacity * dim;
        let (mut key, mut value) = (Buffer::random(dtype, size, 2).values(), Buffer::random(dtype, size, 3).values());
        for (i, row) in (0..size).step_by(dim).enumerate() {
            let (sequence, token) = (i / capacity / heads, i % capacity);
            if token >= lengths[sequence] || token < seen_from[sequence] {
                key[row..row + dim].fill(f32::NAN);
                value[row..row + dim].fill(f32::NAN);
            }
        }
        let (mut key, mut value) = (Buffer::from(dtype, &key), Buffer::from(dtype, &value));
        let addresses = (key.tensor(&[size]).data, value.tensor(&[size]).data);
        let layer = CacheLayer::contiguous(addresses, dtype, [lengths.len(), heads, capacity, dim]);
        Cached { key, value, layer }
    }
}

/// Query, key/value and output dtypes.
const DTYPES: [(DType, DType, DType); 5] = [
    (DType::F32, DType::F32, DType::F32),
    (DType::Bf16, DType::Bf16, DType::Bf16),
    (DType::F16, DType::F16, DType::F16),
    (DType::F32, DType::Bf16, DType::F32),
    (DType::Bf16, DType::Bf16, DType::F32),
];

/// Prefill of sequences of (query rows, keys) over a cache: right, and the same to the bit on one, two and many threads.
fn check_prefill(config: AttentionConfig, dtypes: (DType, DType, DType), lengths: &[(usize, usize)], what: &str) {
    let rows: usize = lengths.iter().map(|pair| pair.0).sum();
    let kv_lengths: Vec<usize> = lengths.iter().map(|pair| pair.1).collect();
    let first = |&(queries, keys): &(usize, usize)| match config.window {
        0 => 0,
        window => (keys + 1).saturating_sub(queries + window),
    };
    let cached = Cached::new(&config, dtypes.1, &kv_lengths, &lengths.iter().map(first).collect::<Vec<_>>());
    assert_eq!((cached.key.len, cached.key.dtype), (cached.value.len, dtypes.1));
    let mut starts = vec![0];
    starts.extend(lengths.iter().scan(0, |sum, pair| {
        *sum += pair.0 as i32;
        Some(*sum)
    }));
    let sequences: Vec<i32> = (0..lengths.len() as i32).collect();
    let kv_lengths: Vec<i32> = kv_lengths.iter().map(|&length| length as i32).collect();
    let (heads, dim) = (config.query_heads, config.head_dim);
    let mut query = Buffer::random(dtypes.0, rows * heads * dim, 1);
    let mut run = |threads: Option<usize>| {
        let mut output = Buffer::poisoned(dtypes.2, rows * heads * dim);
        let mut lse = Buffer::poisoned(DType::F32, rows * heads);
        let op = AttentionPrefill::new(
            config,
            query.tensor(&[rows, heads, dim]),
            &starts,
            KeySource::Cache { layer: cached.layer, sequences: &sequences, kv_lengths: &kv_lengths },
            output.tensor(&[rows, heads, config.value_dim]),
            Some(lse.tensor(&[rows, heads])),
        )
        .unwrap();
        match threads {
            Some(count) => prefill::prefill(&Threads::new(count).unwrap(), &op).unwrap(),
            None => prefill::reference(&op),
        }
        (output, lse)
    };
    let what = format!("{what} {config:?} {dtypes:?} {lengths:?}");
    let ((output, lse), (expected, expected_lse)) = (run(Some(1)), run(None));
    assert_close(&output, &expected, &what);
    assert_close(&lse, &expected_lse, &what);
    for count in [2, 7] {
        let (other, other_lse) = run(Some(count));
        assert!(output.values() == other.values() && lse.values() == other_lse.values(), "{what}: {count} threads");
    }
}

/// As [`check_prefill`], with one query row a sequence.
fn check_decode(config: AttentionConfig, dtypes: (DType, DType, DType), lengths: &[usize], what: &str) {
    let first = |&length: &usize| if config.window == 0 { 0 } else { length.saturating_sub(config.window) };
    let cached = Cached::new(&config, dtypes.1, lengths, &lengths.iter().map(first).collect::<Vec<_>>());
    assert_eq!((cached.key.len, cached.key.dtype), (cached.value.len, dtypes.1));
    let (rows, heads, dim) = (lengths.len(), config.query_heads, config.head_dim);
    let mut query = Buffer::random(dtypes.0, rows * heads * dim, 1);
    let mut positions =
        Buffer::from(DType::I32, &lengths.iter().map(|&length| length as f32 - 1.0).collect::<Vec<_>>());
    let positions = positions.tensor(&[rows]);
    let mut run = |threads: Option<usize>| {
        let mut output = Buffer::poisoned(dtypes.2, rows * heads * dim);
        let mut lse = Buffer::poisoned(DType::F32, rows * heads);
        let (query, out) = (query.tensor(&[rows, heads, dim]), output.tensor(&[rows, heads, dim]));
        let sums = Some(lse.tensor(&[rows, heads]));
        let op = AttentionDecode::new(config, query, cached.layer, out, sums, decode_rows(positions, None)).unwrap();
        match threads {
            Some(count) => decode::decode(&Threads::new(count).unwrap(), &op, &mut Vec::new()).unwrap(),
            None => decode::reference(&op),
        }
        (output, lse)
    };
    let what = format!("decode {what} {config:?} {dtypes:?} {lengths:?}");
    let ((output, lse), (expected, expected_lse)) = (run(Some(1)), run(None));
    assert_close(&output, &expected, &what);
    assert_close(&lse, &expected_lse, &what);
    for count in [2, 7] {
        let (other, other_lse) = run(Some(count));
        assert!(output.values() == other.values() && lse.values() == other_lse.values(), "{what}: {count} threads");
    }
}

#[test]
fn lengths_and_windows_around_a_tile_are_exact() {
    let lengths = [(0, 0), (0, 5), (1, 1), (1, 127), (127, 127), (128, 128), (129, 129), (2, 128), (5, 129), (60, 300)];
    at_every_level(|level| {
        for (i, window) in [0, 1, 63, 127, 128, 129, 200].into_iter().enumerate() {
            let soft_cap = if i % 3 == 2 { 1.5 } else { 0.0 };
            let config = AttentionConfig { window, soft_cap, head_dim: 24, causal: i % 4 != 3, ..CONFIG };
            let config = AttentionConfig::new(config).unwrap();
            for dtypes in DTYPES {
                check_prefill(config, dtypes, &lengths, &format!("{level:?}"));
            }
        }
    });
}

#[test]
fn decode_lengths_and_windows_around_a_chunk_are_exact() {
    let lengths = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700];
    at_every_level(|level| {
        for (i, window) in [0, 1, 16, 65, 255, 256, 257].into_iter().enumerate() {
            let soft_cap = if i % 3 == 2 { 1.5 } else { 0.0 };
            let config = AttentionConfig::new(AttentionConfig { window, soft_cap, head_dim: 24, ..CONFIG }).unwrap();
            for dtypes in DTYPES {
                check_decode(config, dtypes, &lengths, &format!("{level:?}"));
                // One sequence is split over threads.
                check_decode(config, dtypes, &lengths[11..], &format!("{level:?}"));
            }
        }
    });
}

#[test]
fn every_width_of_a_head_is_right() {
    let widths =
        [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257];
    at_every_level(|level| {
        for (i, head_dim) in widths.into_iter().chain([320, 391, 511, 512]).enumerate() {
            let query_heads = [4, 14, 2][i % 3];
            let config = AttentionConfig::new(AttentionConfig { head_dim, query_heads, ..CONFIG }).unwrap();
            for dtypes in [DTYPES[0], DTYPES[1], DTYPES[2 + i % 3]] {
                check_prefill(config, dtypes, &[(3, 131)], &format!("{level:?}"));
                check_decode(config, dtypes, &[261], &format!("{level:?}"));
            }
        }
    });
}

#[test]
fn a_row_of_a_prefill_does_not_depend_on_the_rows_beside_it() {
    let config = AttentionConfig::new(AttentionConfig { window: 150, ..CONFIG }).unwrap();
    let (rows, dim, kv) = (200, config.head_dim, 200 * config.kv_heads * config.head_dim);
    at_every_level(|level| {
        for dtype in DType::FLOATS {
            let query = Buffer::random(dtype, rows * 4 * dim, 1);
            let (mut key, mut value) = (Buffer::random(dtype, kv, 2), Buffer::random(dtype, kv, 3));
            // The last `count` rows of the sequence, and what the last row gives.
            let mut last_row = |count: usize| {
                let mut query = Buffer::from(dtype, &query.values()[(rows - count) * 4 * dim..]);
                let mut output = Buffer::poisoned(dtype, count * 4 * dim);
                let (key, value) = (key.tensor(&[rows, 2, dim]), value.tensor(&[rows, 2, dim]));
                let source = KeySource::Tensors { key, value, key_starts: &[0, rows as i32] };
                let (query, out) = (query.tensor(&[count, 4, dim]), output.tensor(&[count, 4, dim]));
                let op = AttentionPrefill::new(config, query, &[0, count as i32], source, out, None).unwrap();
                prefill::prefill(threads(), &op).unwrap();
                output.values()[(count - 1) * 4 * dim..].to_vec()
            };
            let expected = last_row(rows);
            for count in [1, 2, 7, 63, 199] {
                assert!(last_row(count) == expected, "{level:?} {dtype}: {count} rows");
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
    for (position, sequence, named) in [(3.0, 0.0, "position 3"), (-2.0, 0.0, "position -2"), (0.0, 1.0, "sequence 1")]
    {
        let (mut query, mut output) = (Buffer::random(DType::F32, 4, 1), Buffer::poisoned(DType::F32, 4));
        let mut positions = Buffer::from(DType::I32, &[position]);
        let mut sequences = Buffer::from(DType::I32, &[sequence]);
        let (query, output) = (query.tensor(&[1, 1, 4]), output.tensor(&[1, 1, 4]));
        let sequences = Some(sequences.tensor(&[1]));
        let rows = decode_rows(positions.tensor(&[1]), sequences);
        let op = AttentionDecode::new(config, query, layer, output, None, rows).unwrap();
        let error = decode::decode(threads(), &op, &mut Vec::new()).unwrap_err();
        assert!(error.message.contains(named) && error.message.contains("row 0"), "{error}");
    }
}
