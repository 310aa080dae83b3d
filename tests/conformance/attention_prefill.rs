//! `attention_prefill`: several query rows a sequence, over a cache or over tensors.

use crate::attention_cases::{attend, dtypes, expect_attention, filled_cache, value_dim, Keys};
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::error::Status;
use nvbackend::operation::attention::{AttentionConfig, AttentionPrefill, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone)]
struct Case {
    /// Query rows and keys of each sequence.
    sequences: Vec<(usize, usize)>,
    heads: (usize, usize),
    dim: usize,
    /// 0: `dim`
    value_dim: usize,
    /// Values are a view of the keys' first columns; over tensors alone.
    values_in_keys: bool,
    window: usize,
    causal: bool,
    scale: f32,
    soft_cap: f32,
    dtypes: (DType, DType, DType),
    cache: bool,
    lse: bool,
    layout: Layout,
    /// Multiplies the queries.
    magnitude: f64,
}

fn case() -> Case {
    Case {
        sequences: vec![(19, 19), (33, 70)],
        heads: (4, 2),
        dim: 64,
        value_dim: 0,
        values_in_keys: false,
        window: 0,
        causal: true,
        scale: 0.0,
        soft_cap: 0.0,
        dtypes: (DType::F32, DType::F32, DType::F32),
        cache: true,
        lse: true,
        layout: PLAIN,
        magnitude: 1.0,
    }
}

/// Over a cache and over tensors, in F32 and on the tensor cores' dtype.
fn variants(cases: &[Case]) -> Vec<Case> {
    let dtypes = [(DType::F32, DType::F32, DType::F32), (DType::Bf16, DType::Bf16, DType::F32)];
    let expand = |case: &Case| {
        let with = |cache: bool| dtypes.map(|dtypes| Case { dtypes, cache, ..case.clone() });
        [with(true), with(false)].concat()
    };
    cases.iter().flat_map(expand).collect()
}

fn starts(counts: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut starts = vec![0];
    for count in counts {
        starts.push(starts[starts.len() - 1] + count as i32);
    }
    starts
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        value_dim: case.value_dim,
        scale: case.scale,
        soft_cap: case.soft_cap,
        window: case.window,
        causal: case.causal,
        chunk: 0,
        sink_tokens: 0,
    })?;
    let keys = case.sequences.iter().map(|&(_, length)| match case.values_in_keys {
        true => Keys::new(run, &config, kv, length).with_values_in_keys(&config),
        false => Keys::new(run, &config, kv, length),
    });
    let keys: Vec<Keys> = keys.collect();
    let query_starts = starts(case.sequences.iter().map(|sequence| sequence.0));
    let key_starts = starts(case.sequences.iter().map(|sequence| sequence.1));
    let rows = query_starts[case.sequences.len()] as usize;
    let shape = [rows, case.heads.0, case.dim];
    let queries = rounded(query_dtype, &run.random.normals(rows * case.heads.0 * case.dim, case.magnitude));
    let query = run.tensor(query_dtype, &shape, case.layout, &queries)?;
    let output = run.output(output_dtype, &[rows, case.heads.0, value_dim(&config)], case.layout)?;
    let lse = if case.lse { Some(run.output(DType::F32, &[rows, case.heads.0], PLAIN)?) } else { None };
    if case.cache {
        let count = keys.len();
        let order = run.random.permutation(count + 1);
        let capacity = case.sequences.iter().map(|sequence| sequence.1).max().unwrap_or(0) + 5;
        let placed: Vec<(usize, &Keys)> = order.iter().copied().zip(&keys).collect();
        let cache = filled_cache(run, &config, kv, count + 1, capacity, &placed)?;
        let sequences: Vec<i32> = order[..count].iter().map(|&sequence| sequence as i32).collect();
        let kv_lengths: Vec<i32> = keys.iter().map(|keys| keys.length as i32).collect();
        let source = KeySource::Cache { layer: cache.layer(1)?, sequences: &sequences, kv_lengths: &kv_lengths };
        let op = AttentionPrefill::new(config, query, &query_starts, source, output, lse)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        run.stream.synchronize()?;
    } else {
        let shape = |dim: usize| [key_starts[keys.len()] as usize, case.heads.1, dim];
        let all = |part: fn(&Keys) -> &Vec<f64>| keys.iter().flat_map(|keys| part(keys).clone()).collect::<Vec<f64>>();
        let key = run.tensor(kv, &shape(case.dim), case.layout, &all(|keys| &keys.key))?;
        let value = match case.values_in_keys {
            true => Tensor::new(key.data, kv, &shape(value_dim(&config))).with_strides(&key.strides),
            false => run.tensor(kv, &shape(value_dim(&config)), case.layout, &all(|keys| &keys.value))?,
        };
        let source = KeySource::Tensors { key, value, key_starts: &key_starts };
        let op = AttentionPrefill::new(config, query, &query_starts, source, output, lse)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
    }
    let mut reference = Vec::new();
    for (b, (&(count, length), keys)) in case.sequences.iter().zip(&keys).enumerate() {
        for row in 0..count {
            let position = length as i64 - count as i64 + row as i64;
            for head in 0..case.heads.0 {
                let at = ((query_starts[b] as usize + row) * case.heads.0 + head) * case.dim;
                reference.push(attend(&config, &queries[at..][..case.dim], head, keys, position));
            }
        }
    }
    expect_attention(run, kv, &output, lse.as_ref(), &reference)
}

#[test]
fn dtypes_and_layouts() {
    let mut cases = Vec::new();
    for dtypes in dtypes() {
        for layout in LAYOUTS {
            for (cache, lse) in [(true, true), (false, true), (true, false)] {
                cases.push(Case { dtypes, layout, cache, lse, sequences: vec![(9, 9), (3, 21)], dim: 32, ..case() });
            }
        }
    }
    check("attention_prefill", &cases, test);
}

#[test]
fn head_dims() {
    let dims = [1, 2, 8, 24, 33, 40, 64, 72, 80, 96, 128, 160, 192, 256, 320, 511, 512];
    let mut cases = variants(&dims.map(|dim| Case { dim, ..case() }));
    for dim in [64, 80, 128, 256] {
        for dtypes in [(DType::F16, DType::F16, DType::F16), (DType::Bf16, DType::Bf16, DType::Bf16)] {
            cases.push(Case { dim, dtypes, sequences: vec![(70, 200)], ..case() });
        }
    }
    check("attention_prefill", &cases, test);
}

/// Values narrower and wider than keys, and values that are a part of their keys, as of latent attention.
#[test]
fn value_dims() {
    let mut cases = Vec::new();
    for (dim, value_dim) in
        [(192, 128), (96, 64), (64, 40), (128, 8), (8, 128), (17, 3), (3, 17), (256, 192), (64, 512)]
    {
        for sequences in [vec![(19, 19), (33, 70)], vec![(0, 0), (1, 1), (63, 63), (64, 64), (65, 129)]] {
            cases.push(Case { dim, value_dim, sequences, ..case() });
        }
        cases.push(Case { dim, value_dim, window: 9, soft_cap: 20.0, causal: false, ..case() });
    }
    let mut cases = variants(&cases);
    for dtypes in dtypes() {
        for layout in LAYOUTS {
            cases.push(Case { dtypes, layout, cache: false, dim: 192, value_dim: 128, ..case() });
        }
        let latent = Case { dim: 576, value_dim: 512, heads: (5, 1), values_in_keys: true, cache: false, ..case() };
        for sequences in [vec![(9, 70), (1, 1)], vec![(0, 5), (65, 65)]] {
            cases.push(Case { sequences, dtypes, ..latent.clone() });
        }
    }
    check("attention_prefill of values of other dims", &cases, test);
}

/// Few rows, whose keys are divided among the multiprocessors of a GPU.
#[test]
fn few_rows_over_many_keys() {
    let mut cases = Vec::new();
    for sequences in [vec![(1, 3000)], vec![(64, 5000)], vec![(70, 2100), (3, 4096), (0, 9), (65, 1025)]] {
        for (dim, heads) in [(64, (2, 1)), (128, (3, 1)), (256, (2, 2))] {
            for (causal, window, lse) in [(true, 0, true), (false, 0, false), (true, 2500, true)] {
                cases.push(Case { sequences: sequences.clone(), dim, heads, causal, window, lse, ..case() });
            }
        }
    }
    let dtypes = [(DType::Bf16, DType::Bf16, DType::Bf16), (DType::F16, DType::F16, DType::F32)];
    let expand = |(at, case): (usize, &Case)| Case { dtypes: dtypes[at % 2], cache: at % 3 == 0, ..case.clone() };
    let cases: Vec<Case> = cases.iter().enumerate().map(expand).collect();
    check("attention_prefill of few rows", &cases, test);
}

#[test]
fn groups() {
    let heads = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 1), (8, 1), (8, 2), (6, 6), (16, 1), (12, 4)];
    check("attention_prefill", &variants(&heads.map(|heads| Case { heads, dim: 40, ..case() })), test);
}

#[test]
fn windows() {
    let mut cases = Vec::new();
    for window in [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 131, 1000] {
        for causal in [true, false] {
            cases.push(Case {
                window,
                causal,
                sequences: vec![(130, 130), (5, 200)],
                heads: (2, 1),
                dim: 16,
                ..case()
            });
        }
    }
    check("attention_prefill", &variants(&cases), test);
}

#[test]
fn lengths() {
    let mut cases = Vec::new();
    for length in [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257] {
        for count in [length, length.min(1), length.min(16), length.min(65)] {
            cases.push(Case { sequences: vec![(count, length)], heads: (2, 1), dim: 32, ..case() });
        }
        // More query rows than keys, down to none: bidirectional only.
        cases.push(Case { sequences: vec![(40, length)], causal: false, heads: (2, 2), dim: 16, ..case() });
    }
    cases.push(Case { sequences: vec![(600, 600)], heads: (2, 1), ..case() });
    cases.push(Case { sequences: vec![(1, 4000), (3, 3001)], heads: (4, 1), ..case() });
    cases.push(Case { sequences: vec![(200, 1500)], heads: (2, 1), window: 300, ..case() });
    check("attention_prefill", &variants(&cases), test);
}

#[test]
fn ragged() {
    let ragged = vec![(0, 0), (1, 1), (0, 17), (17, 17), (64, 64), (1, 129), (65, 65), (0, 0), (3, 100)];
    let mut cases = vec![
        Case { sequences: vec![], ..case() },
        Case { sequences: vec![(0, 0)], ..case() },
        Case { sequences: ragged.clone(), heads: (2, 1), ..case() },
        Case { sequences: ragged.clone(), heads: (4, 4), dim: 80, window: 20, ..case() },
        Case { sequences: ragged, heads: (2, 2), dim: 48, causal: false, ..case() },
    ];
    // More sequences than one launch takes.
    let many: Vec<(usize, usize)> = (0..300).map(|i| (i % 4, i % 4 + i % 7)).collect();
    cases.push(Case { sequences: many, heads: (2, 1), dim: 16, ..case() });
    check("attention_prefill", &variants(&cases), test);
}

#[test]
fn scores() {
    let mut cases = Vec::new();
    for (soft_cap, magnitude) in [(50.0, 1.0), (50.0, 20.0), (2.0, 5.0), (1e6, 1.0)] {
        cases.push(Case { soft_cap, magnitude, ..case() });
        cases.push(Case { soft_cap, magnitude, window: 9, causal: false, scale: 0.1, ..case() });
    }
    for scale in [1.0 / 256.0, 0.25, 0.5] {
        cases.push(Case { scale, ..case() });
    }
    for magnitude in [0.0, 1e-20, 8.0] {
        cases.push(Case { magnitude, ..case() });
    }
    check("attention_prefill", &variants(&cases), test);
}

/// Sharp scores leave one key; the sum must neither overflow nor vanish.
#[test]
fn one_key_takes_all() {
    let cases = [(DType::F32, 1e4), (DType::Bf16, 1e3), (DType::F16, 100.0), (DType::F32, -1e4)];
    check("attention_prefill of sharp scores", &cases, |run, &(dtype, scale)| {
        let (count, dim) = (37, 40);
        let config = AttentionConfig {
            query_heads: 1,
            kv_heads: 1,
            head_dim: dim,
            scale: scale as f32,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            ..AttentionConfig::default()
        };
        // Query and key i point along axis i, so that only a row's own key has a score of `scale`.
        let axes: Vec<f64> = (0..count * dim).map(|i| ((i / dim) == i % dim) as u8 as f64).collect();
        let shape = [count, 1, dim];
        let query = run.tensor(dtype, &shape, PLAIN, &axes)?;
        let key = run.tensor(dtype, &shape, PLAIN, &axes)?;
        let (value, values) = run.normal(dtype, &shape, PLAIN, 1.0)?;
        let output = run.output(DType::F32, &shape, PLAIN)?;
        let starts = [0, count as i32];
        let source = KeySource::Tensors { key, value, key_starts: &starts };
        let op = AttentionPrefill::new(config, query, &starts, source, output, None)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let keys = Keys { length: count, key: axes.clone(), value: values };
        let rows = (0..count).map(|i| attend(&config, &axes[i * dim..][..dim], 0, &keys, i as i64)).collect::<Vec<_>>();
        expect_attention(run, dtype, &output, None, &rows)
    });
}

/// Heads before tokens: [heads, T, head_dim] in memory.
#[test]
fn heads_first_tensors() {
    let cases = [DType::F32, DType::F16, DType::Bf16];
    check("attention_prefill, heads first", &cases, |run, &dtype| {
        let (count, heads, dim) = (21, 3, 32);
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: heads,
            kv_heads: heads,
            head_dim: dim,
            scale: 0.0,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            ..AttentionConfig::default()
        })?;
        let shape = [count, heads, dim];
        let mut tensors = Vec::new();
        for _ in 0..3 {
            let values = rounded(dtype, &run.random.normals(count * heads * dim, 1.0));
            let span = count * heads * dim;
            tensors.push((run.strided(dtype, &shape, &[dim, count * dim, 1], 0, span, Some(&values))?, values));
        }
        let [(query, queries), (key, key_values), (value, values)] = &tensors[..] else {
            unreachable!("three tensors")
        };
        let output = run.output(DType::F32, &shape, UNALIGNED)?;
        let starts = [0, count as i32];
        let source = KeySource::Tensors { key: *key, value: *value, key_starts: &starts };
        let op = AttentionPrefill::new(config, *query, &starts, source, output, None)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let keys = Keys { length: count, key: key_values.clone(), value: values.clone() };
        let row = |i: usize| attend(&config, &queries[i * dim..][..dim], i % heads, &keys, (i / heads) as i64);
        expect_attention(run, dtype, &output, None, &(0..count * heads).map(row).collect::<Vec<_>>())
    });
}

/// A prompt in chunks over the same cache gives what it gives in one call.
#[test]
fn chunks_agree_with_the_whole() {
    let cases = [(vec![50, 1, 29], 0), (vec![1, 63, 16], 7), (vec![16, 64], 33)];
    check("attention_prefill in chunks", &cases, |run, (chunks, window)| {
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: 4,
            kv_heads: 2,
            head_dim: 48,
            scale: 0.0,
            soft_cap: 30.0,
            window: *window,
            causal: true,
            ..AttentionConfig::default()
        })?;
        let total: usize = chunks.iter().sum();
        let keys = Keys::new(run, &config, DType::Bf16, total);
        let cache = filled_cache(run, &config, DType::Bf16, 2, total + 3, &[(1, &keys)])?;
        let (query, queries) = run.normal(DType::Bf16, &[total, 4, 48], PLAIN, 1.0)?;
        let mut first = 0;
        for &count in chunks {
            let view = |tensor: nvbackend::tensor::Tensor| {
                let skip = first * 4 * 48 * tensor.dtype.size();
                let data = tensor.data.cast::<u8>().wrapping_add(skip).cast();
                nvbackend::tensor::Tensor::new(data, tensor.dtype, &[count, 4, 48])
            };
            let output = run.output(DType::F32, &[count, 4, 48], PLAIN)?;
            let lengths = [(first + count) as i32];
            let source = KeySource::Cache { layer: cache.layer(1)?, sequences: &[1], kv_lengths: &lengths };
            let op = AttentionPrefill::new(config, view(query), &[0, count as i32], source, output, None)?;
            run.executor().run(&Operation::from(op), run.stream.raw())?;
            let whole = |i: usize| {
                attend(&config, &queries[(first * 4 + i) * 48..][..48], i % 4, &keys, (first + i / 4) as i64)
            };
            expect_attention(run, DType::Bf16, &output, None, &(0..count * 4).map(whole).collect::<Vec<_>>())?;
            first += count;
        }
        Ok(())
    });
}

#[test]
fn wrong_lengths_are_named() {
    check("attention_prefill errors", &[()], |run, _| {
        let config = AttentionConfig {
            query_heads: 1,
            kv_heads: 1,
            head_dim: 8,
            scale: 1.0,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            ..AttentionConfig::default()
        };
        let cache = filled_cache(run, &config, DType::F32, 2, 10, &[])?;
        let layer = cache.layer(1)?;
        let query = run.output(DType::F32, &[4, 1, 8], PLAIN)?;
        let prefill = |starts: &[i32], sequences: &[i32], kv_lengths: &[i32]| {
            AttentionPrefill::new(config, query, starts, KeySource::Cache { layer, sequences, kv_lengths }, query, None)
        };
        let invalid = Status::InvalidArgument;
        prefill(&[0, 4], &[1], &[10]).map_err(Failure::from)?;
        expect_error(prefill(&[0, 4], &[1], &[11]), invalid, &["kv_lengths[0]", "11", "10"])?;
        expect_error(prefill(&[0, 4], &[1], &[-1]), invalid, &["kv_lengths[0]", "-1"])?;
        expect_error(prefill(&[0, 4], &[2], &[10]), invalid, &["sequence", "2"])?;
        expect_error(prefill(&[0, 4], &[-1], &[10]), invalid, &["sequence", "-1"])?;
        expect_error(prefill(&[0, 4], &[1], &[3]), invalid, &["4 query rows", "3 keys"])?;
        expect_error(prefill(&[0, 3], &[1], &[10]), invalid, &["query_starts", "4"])?;
        expect_error(prefill(&[0, 5, 4], &[0, 1], &[9, 9]), invalid, &["query_starts", "falls from 5 to 4"])?;
        expect_error(prefill(&[0, 4], &[1, 0], &[10]), invalid, &["2 entries in sequences", "sequence_count of 1"])
    });
}
