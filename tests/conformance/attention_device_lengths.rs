//! `attention_prefill` with lengths in device memory: one operation serves whatever they hold within its bounds; and rows of
//! prefill and of decode mixed in one call.

use crate::attention_cases::{attend, expect_attention, filled_cache, value_dim, Keys};
use crate::run::{check, expect_error, rounded, Failure, Outcome, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::attention::{AttentionConfig, AttentionPrefill, DeviceSource, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone)]
struct Case {
    /// Query rows and keys of each sequence, of one step after the other; as many sequences in each.
    steps: Vec<Vec<(usize, usize)>>,
    heads: (usize, usize),
    dim: usize,
    value_dim: usize,
    window: usize,
    causal: bool,
    soft_cap: f32,
    dtypes: (DType, DType, DType),
    cache: bool,
    /// Rows behind the last sequence's, which nobody writes.
    padding: usize,
    /// Whether the caller bounds rows and keys of a sequence.
    bounded: bool,
}

fn case() -> Case {
    Case {
        steps: vec![vec![(19, 19), (33, 70), (1, 40)], vec![(0, 0), (1, 90), (64, 65)], vec![(1, 20), (1, 71), (1, 1)]],
        heads: (4, 2),
        dim: 64,
        value_dim: 0,
        window: 0,
        causal: true,
        soft_cap: 0.0,
        dtypes: (DType::F32, DType::F32, DType::F32),
        cache: true,
        padding: 3,
        bounded: false,
    }
}

fn variants(cases: &[Case]) -> Vec<Case> {
    let (f32, bf16, f16) = (DType::F32, DType::Bf16, DType::F16);
    let dtypes = [(f32, f32, f32), (bf16, bf16, f32), (bf16, bf16, bf16), (f16, f16, f16)];
    let expand = |case: &Case| {
        let with = |cache: bool, bounded: bool| dtypes.map(|dtypes| Case { dtypes, cache, bounded, ..case.clone() });
        [with(true, false), with(false, true), with(true, true)].concat()
    };
    cases.iter().flat_map(expand).collect()
}

fn starts(counts: impl Iterator<Item = usize>) -> Vec<f64> {
    let mut starts = vec![0.0];
    for count in counts {
        starts.push(starts[starts.len() - 1] + count as f64);
    }
    starts
}

fn config_of(case: &Case) -> Result<AttentionConfig, Failure> {
    Ok(AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        value_dim: case.value_dim,
        soft_cap: case.soft_cap,
        window: case.window,
        causal: case.causal,
        ..AttentionConfig::default()
    })?)
}

/// All rows of a step by the formula.
fn expected(config: &AttentionConfig, step: &[(usize, usize)], queries: &[f64], keys: &[Keys]) -> Vec<(Vec<f64>, f64)> {
    let (heads, dim) = (config.query_heads, config.head_dim);
    let mut rows = Vec::new();
    for (&(count, length), keys) in step.iter().zip(keys) {
        let keys = Keys {
            length,
            key: keys.key[..length * config.kv_heads * dim].to_vec(),
            value: keys.value[..length * config.kv_heads * value_dim(config)].to_vec(),
        };
        for row in 0..count {
            for head in 0..heads {
                let query = &queries[rows.len() * dim..][..dim];
                rows.push(attend(config, query, head, &keys, (length + row) as i64 - count as i64));
            }
        }
    }
    rows
}

/// The first rows of a tensor.
fn first_rows(tensor: &Tensor, rows: usize) -> Tensor {
    Tensor::new(tensor.data, tensor.dtype, &[&[rows], &tensor.shape[1..tensor.rank]].concat())
}

fn steps(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let config = config_of(case)?;
    let (heads, kv_heads, count) = (case.heads.0, case.heads.1, case.steps[0].len());
    let rows_of = |step: &[(usize, usize)]| step.iter().map(|sequence| sequence.0).sum::<usize>();
    let keys_of = |step: &[(usize, usize)]| step.iter().map(|sequence| sequence.1).sum::<usize>();
    let tokens = case.steps.iter().map(|step| rows_of(step)).max().unwrap_or(0) + case.padding;
    let all_keys = case.steps.iter().map(|step| keys_of(step)).max().unwrap_or(0) + case.padding;
    let all = || case.steps.iter().flatten();
    let (most_rows, longest) =
        (all().map(|sequence| sequence.0).max().unwrap_or(0), all().map(|sequence| sequence.1).max().unwrap_or(0));
    let bounds = if case.bounded { (most_rows, longest) } else { (0, 0) };
    let query = run.output(query_dtype, &[tokens, heads, case.dim], PLAIN)?;
    let output = run.strided(
        output_dtype,
        &[tokens, heads, value_dim(&config)],
        &[heads * value_dim(&config), value_dim(&config), 1],
        0,
        tokens * heads * value_dim(&config),
        None,
    )?;
    let lse = run.strided(DType::F32, &[tokens, heads], &[heads, 1], 0, tokens * heads, None)?;
    // Steps with more rows come first in no order, so what the largest writes may be written.
    let written = tokens - case.padding;
    run.allow_write(&first_rows(&output, written));
    run.allow_write(&first_rows(&lse, written));
    let [query_starts, key_starts] = [run.integers(&vec![0; count + 1])?, run.integers(&vec![0; count + 1])?];
    let [kv_lengths, places] = [run.integers(&vec![0; count])?, run.integers(&vec![0; count])?];
    for numbers in [query_starts, key_starts, kv_lengths, places] {
        run.allow_write(&numbers);
    }
    let keys: Vec<Keys> = (0..count).map(|_| Keys::new(run, &config, kv, longest)).collect();
    let order = run.random.permutation(count + 1);
    let placed: Vec<(usize, &Keys)> = order.iter().copied().zip(&keys).collect();
    let cache = filled_cache(run, &config, kv, count + 1, longest + 5, &placed)?;
    let key = run.output(kv, &[all_keys, kv_heads, case.dim], PLAIN)?;
    let value = run.output(kv, &[all_keys, kv_heads, value_dim(&config)], PLAIN)?;
    let source = match case.cache {
        true => DeviceSource::Cache { layer: cache.layer(1)?, sequences: Some(places), kv_lengths },
        false => DeviceSource::Tensors { key, value, key_starts },
    };
    let op = AttentionPrefill::with_device_lengths(config, query, query_starts, source, (output, Some(lse)), bounds)?;
    let op = Operation::from(op);
    for step in &case.steps {
        let queries = rounded(query_dtype, &run.random.normals(rows_of(step) * heads * case.dim, 1.0));
        run.write(&first_rows(&query, rows_of(step)), &queries)?;
        run.write(&query_starts, &starts(step.iter().map(|sequence| sequence.0)))?;
        run.write(&key_starts, &starts(step.iter().map(|sequence| sequence.1)))?;
        run.write(&kv_lengths, &step.iter().map(|sequence| sequence.1 as f64).collect::<Vec<_>>())?;
        run.write(&places, &order[..count].iter().map(|&place| place as f64).collect::<Vec<_>>())?;
        let ragged = |part: fn(&Keys) -> &Vec<f64>, dim: usize| {
            let of = |(&(_, length), keys): (&(usize, usize), &Keys)| part(keys)[..length * kv_heads * dim].to_vec();
            step.iter().zip(&keys).flat_map(of).collect::<Vec<f64>>()
        };
        run.write(&first_rows(&key, keys_of(step)), &ragged(|keys| &keys.key, case.dim))?;
        run.write(&first_rows(&value, keys_of(step)), &ragged(|keys| &keys.value, value_dim(&config)))?;
        run.executor().run(&op, run.stream.raw())?;
        run.stream.synchronize()?;
        let reference = expected(&config, step, &queries, &keys);
        let (output, lse) = (first_rows(&output, rows_of(step)), first_rows(&lse, rows_of(step)));
        expect_attention(run, kv, &output, Some(&lse), &reference)?;
    }
    Ok(())
}

#[test]
fn one_operation_serves_every_step() {
    let mut cases = vec![
        case(),
        Case { padding: 0, ..case() },
        Case { padding: 200, ..case() },
        Case { steps: vec![vec![(600, 700), (1, 1300)], vec![(257, 257), (129, 1025)]], heads: (2, 1), ..case() },
    ];
    for (dim, value_dim) in [(8, 0), (40, 0), (96, 0), (128, 0), (192, 128), (256, 0), (33, 17)] {
        cases.push(Case { dim, value_dim, ..case() });
    }
    for (causal, window) in [(true, 17), (false, 0), (false, 9)] {
        cases.push(Case { causal, window, soft_cap: 30.0, dim: 32, ..case() });
    }
    // More sequences than a table has, and than a warp has lanes.
    let many: Vec<(usize, usize)> = (0..300).map(|i| (i % 4, i % 4 + i % 7)).collect();
    let others: Vec<(usize, usize)> = (0..300).map(|i| ((i + 1) % 3, 5 + i % 3)).collect();
    cases.push(Case { steps: vec![many, others], heads: (2, 1), dim: 16, ..case() });
    check("attention_prefill with lengths on the device", &variants(&cases), steps);
}

/// Of each sequence of a batch the first keys count, and what lies behind them is NaN.
#[test]
fn batches() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, keys) in [(1, 1), (1, 70), (33, 70), (64, 64), (65, 200)] {
            for causal in [true, false] {
                cases.push((dtype, rows, keys, causal));
            }
        }
    }
    check("attention_prefill of batches with lengths on the device", &cases, |run, &(dtype, rows, keys, causal)| {
        let (batch, heads, dim) = (3, 2, 64);
        let config = config_of(&Case { heads: (heads, 1), dim, causal, ..case() })?;
        let lengths = [keys, rows, (rows + keys) / 2];
        let sequences: Vec<Keys> = lengths.iter().map(|&length| Keys::new(run, &config, dtype, length)).collect();
        let (query, queries) = run.normal(dtype, &[batch, rows, heads, dim], PLAIN, 1.0)?;
        let padded = |part: fn(&Keys) -> &Vec<f64>| {
            let of = |of: &Keys| [&part(of)[..], &vec![f64::NAN; (keys - of.length) * dim]].concat();
            sequences.iter().flat_map(of).collect::<Vec<f64>>()
        };
        let key = run.tensor(dtype, &[batch, keys, 1, dim], PLAIN, &padded(|keys| &keys.key))?;
        let value = run.tensor(dtype, &[batch, keys, 1, dim], PLAIN, &padded(|keys| &keys.value))?;
        let output = run.output(DType::F32, &[batch, rows, heads, dim], PLAIN)?;
        let kv_lengths = run.integers(&lengths.map(|length| length as i32))?;
        let op = AttentionPrefill::dense(config, query, (key, value), output, None)?.with_kv_lengths(kv_lengths, 0)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let step: Vec<(usize, usize)> = lengths.iter().map(|&length| (rows, length)).collect();
        expect_attention(run, dtype, &output, None, &expected(&config, &step, &queries, &sequences))
    });
}

/// What passes a bound is named on the CPU; on CUDA its rows see no key, or stay as they were.
#[test]
fn lengths_beyond_the_bounds() {
    type Content = ([i32; 3], [i32; 2], [i32; 2]);
    let good: Content = ([0, 3, 8], [10, 12], [1, 0]);
    let cases: [(Content, &str, [bool; 2]); 7] = [
        (good, "", [true, true]),
        (([0, 3, 8], [10, 17], [1, 0]), "17 keys", [true, true]),
        (([0, 3, 8], [-1, 12], [1, 0]), "-1", [true, true]),
        (([0, 3, 8], [10, 12], [2, 0]), "sequence 2", [true, true]),
        (([0, 3, 8], [10, 12], [1, -1]), "sequence -1", [true, true]),
        (([4, 3, 8], [10, 12], [1, 0]), "4 to 3", [false, true]),
        (([0, 3, 9], [10, 12], [1, 0]), "3 to 9", [true, false]),
    ];
    check("attention_prefill with wrong lengths on the device", &cases, |run, (content, named, has_rows)| {
        let (starts, lengths, places) = content;
        let config = config_of(&Case { heads: (1, 1), dim: 8, ..case() })?;
        let keys = [Keys::new(run, &config, DType::F32, 16), Keys::new(run, &config, DType::F32, 16)];
        let cache = filled_cache(run, &config, DType::F32, 2, 16, &[(1, &keys[0]), (0, &keys[1])])?;
        let (query, queries) = run.normal(DType::F32, &[8, 1, 8], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[8, 1, 8], PLAIN)?;
        let query_starts = run.integers(starts)?;
        let (kv_lengths, sequences) = (run.integers(lengths)?, Some(run.integers(places)?));
        let source = DeviceSource::Cache { layer: cache.layer(1)?, sequences, kv_lengths };
        let op = AttentionPrefill::with_device_lengths(config, query, query_starts, source, (output, None), (0, 0))?;
        let result = run.executor().run(&Operation::from(op), run.stream.raw());
        if run.device.is_cpu() && !named.is_empty() {
            return expect_error(result, Status::InvalidArgument, &["sequence ", named]);
        }
        result?;
        run.stream.synchronize()?;
        let found = run.read(&output)?;
        for (b, (from, to)) in [(0usize, 3usize), (3, 8)].into_iter().enumerate() {
            let in_cache = (0..2).contains(&places[b]) && (0..=16).contains(&lengths[b]);
            let keys = Keys { length: lengths[b].clamp(0, 16) as usize, ..keys[b].clone() };
            for row in from..to {
                let part = &found[row * 8..][..8];
                let position = keys.length as i64 + row as i64 - to as i64;
                let expected = match in_cache {
                    true => attend(&config, &queries[row * 8..][..8], 0, &keys, position).0,
                    false => vec![0.0; 8],
                };
                let is_right = match has_rows[b] {
                    true => part.iter().zip(&expected).all(|(out, of)| (out - of).abs() < 1e-5),
                    false => part.iter().all(|out| out.is_nan()),
                };
                if !is_right {
                    return Err(format!("row {row} is {part:?}; {expected:?} is expected").into());
                }
            }
        }
        Ok(())
    });
}

#[test]
fn wrong_bounds_are_named() {
    check("attention_prefill errors of lengths on the device", &[()], |run, ()| {
        let config = config_of(&Case { heads: (1, 1), dim: 8, ..case() })?;
        let cache = filled_cache(run, &config, DType::F32, 2, 16, &[])?;
        let layer = cache.layer(1)?;
        let (query, output) = (run.output(DType::F32, &[8, 1, 8], PLAIN)?, run.output(DType::F32, &[8, 1, 8], PLAIN)?);
        let numbers = |run: &mut Run, count: usize| run.integers(&vec![0; count]);
        let (none, two, three, four) = (numbers(run, 0)?, numbers(run, 2)?, numbers(run, 3)?, numbers(run, 4)?);
        let floats = run.output(DType::F32, &[3], PLAIN)?;
        let prefill = |starts: Tensor, kv_lengths: Tensor, sequences: Option<Tensor>, bounds: (usize, usize)| {
            let source = DeviceSource::Cache { layer, sequences, kv_lengths };
            AttentionPrefill::with_device_lengths(config, query, starts, source, (output, None), bounds)
        };
        let invalid = Status::InvalidArgument;
        prefill(three, two, Some(two), (8, 16)).map_err(Failure::from)?;
        expect_error(prefill(none, two, None, (0, 0)), invalid, &["device_query_starts", "empty"])?;
        expect_error(prefill(floats, two, None, (0, 0)), invalid, &["device_query_starts", "f32"])?;
        expect_error(prefill(three, three, None, (0, 0)), invalid, &["device_kv_lengths", "[3]", "[2]"])?;
        expect_error(prefill(three, two, Some(four), (0, 0)), invalid, &["device_sequences", "[4]", "[2]"])?;
        expect_error(prefill(four, three, None, (0, 0)), invalid, &["3 sequences", "the cache has 2"])?;
        expect_error(prefill(three, two, None, (9, 0)), invalid, &["max_query_rows is 9", "8"])?;
        expect_error(prefill(three, two, None, (0, 17)), invalid, &["max_kv_length is 17", "16"])?;
        let inside = Tensor::new(output.data, DType::I32, &[2]);
        expect_error(prefill(three, inside, None, (0, 0)), invalid, &["device_kv_lengths", "output"])
    });
}

/// Sequences with one row, with a few and with many in one call have what each has in a call of its own, to the bit, on the
/// CPU and by the kernel that an override names, wherever they stand.
#[test]
fn mixed_rows() {
    let mixes = [vec![(1, 200), (40, 300), (1, 1), (16, 17), (3, 129)], vec![(130, 130), (1, 90), (1, 700), (2, 65)]];
    let mut cases = Vec::new();
    for mix in mixes {
        for dtype in [DType::F32, DType::Bf16] {
            for dim in [40, 64, 128] {
                cases.push((mix.clone(), dtype, dim));
            }
        }
    }
    check("attention_prefill of mixed rows", &cases, |run, (mix, dtype, dim)| {
        let config = config_of(&Case { heads: (4, 2), dim: *dim, ..case() })?;
        let keys: Vec<Keys> = mix.iter().map(|pair| Keys::new(run, &config, *dtype, pair.1)).collect();
        let longest = mix.iter().map(|pair| pair.1).max().unwrap_or(0);
        let placed: Vec<(usize, &Keys)> = keys.iter().enumerate().collect();
        let cache = filled_cache(run, &config, *dtype, mix.len(), longest, &placed)?;
        let rows: usize = mix.iter().map(|pair| pair.0).sum();
        let (query, queries) = run.normal(*dtype, &[rows, 4, *dim], PLAIN, 1.0)?;
        let (output, lse) =
            (run.output(DType::F32, &[rows, 4, *dim], PLAIN)?, run.output(DType::F32, &[rows, 4], PLAIN)?);
        let (alone, lse_alone) =
            (run.output(DType::F32, &[rows, 4, *dim], PLAIN)?, run.output(DType::F32, &[rows, 4], PLAIN)?);
        let starts: Vec<i32> = std::iter::once(0)
            .chain(mix.iter().scan(0, |at, pair| {
                *at += pair.0 as i32;
                Some(*at)
            }))
            .collect();
        let places: Vec<i32> = (0..mix.len() as i32).collect();
        let lengths: Vec<i32> = mix.iter().map(|pair| pair.1 as i32).collect();
        let source = KeySource::Cache { layer: cache.layer(1)?, sequences: &places, kv_lengths: &lengths };
        let op = AttentionPrefill::new(config, query, &starts, source, output, Some(lse))?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        run.stream.synchronize()?;
        expect_attention(run, *dtype, &output, Some(&lse), &expected(&config, mix, &queries, &keys))?;
        for (b, &(count, _)) in mix.iter().enumerate() {
            let part = |tensor: &Tensor| {
                let row = tensor.strides[0] * tensor.dtype.size();
                let data = tensor.data.wrapping_byte_add(starts[b] as usize * row);
                first_rows(&Tensor { data, ..*tensor }, count)
            };
            let source =
                KeySource::Cache { layer: cache.layer(1)?, sequences: &places[b..=b], kv_lengths: &lengths[b..=b] };
            let (alone, lse) = (part(&alone), part(&lse_alone));
            let op = AttentionPrefill::new(config, part(&query), &[0, count as i32], source, alone, Some(lse))?;
            run.executor().run(&Operation::from(op), run.stream.raw())?;
        }
        run.stream.synchronize()?;
        let is_equal = |one: &Tensor, other: &Tensor| -> Result<bool, Failure> {
            let bits = |tensor: &Tensor| -> Result<Vec<u64>, Failure> {
                Ok(run.read(tensor)?.into_iter().map(f64::to_bits).collect())
            };
            Ok(bits(one)? == bits(other)?)
        };
        // Short sequences alone have a tile of their own at head_dim 64 on 9.0, which adds in another order.
        if (run.device.is_cpu() || *dtype == DType::F32) && !(is_equal(&output, &alone)? && is_equal(&lse, &lse_alone)?)
        {
            return Err("rows differ from those of calls of their own".to_string().into());
        }
        expect_attention(run, *dtype, &alone, Some(&lse_alone), &expected(&config, mix, &queries, &keys))
    });
}
