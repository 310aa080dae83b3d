//! `attention_prefill` of dense batches, with additive masks, and of queries, keys and values in FP8 with scales.

use crate::attention_cases::{attend_masked, expect_attention, filled_cache, value_dim, Keys};
use crate::run::{check, expect_error, rounded, Failure, Outcome, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::attention::{AttentionConfig, AttentionPrefill, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

/// How the axes of [batch, tokens, heads, dim] lie.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    TokensFirst,
    /// As PyTorch has them.
    HeadsFirst,
    /// Heads first, with rows that begin at no multiple of 16 bytes and gaps between all axes.
    Gaps,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Masked {
    No,
    /// An extent of each axis: whether it is the batch's, the heads' and the rows', and how many columns are too many.
    By(bool, bool, bool, usize),
    /// [N, M] alone.
    Plane,
}

#[derive(Debug, Clone)]
struct Case {
    batch: usize,
    rows: usize,
    keys: usize,
    heads: (usize, usize),
    dims: (usize, usize),
    causal: bool,
    window: usize,
    soft_cap: f32,
    dtypes: (DType, DType, DType),
    /// Of queries and outputs, of keys, of values.
    orders: [Order; 3],
    masked: Masked,
    mask_dtype: DType,
    lse: bool,
    /// Of queries, keys and values in FP8: none, one, or one a head.
    scales: [usize; 3],
}

fn case() -> Case {
    Case {
        batch: 2,
        rows: 33,
        keys: 70,
        heads: (4, 2),
        dims: (64, 0),
        causal: true,
        window: 0,
        soft_cap: 0.0,
        dtypes: (DType::F32, DType::F32, DType::F32),
        orders: [Order::TokensFirst; 3],
        masked: Masked::No,
        mask_dtype: DType::F32,
        lse: true,
        scales: [0; 3],
    }
}

/// Strides of [batch, tokens, heads, dim], elements before the first, and elements in all.
fn placed(order: Order, [batch, tokens, heads, dim]: [usize; 4]) -> ([usize; 4], usize, usize) {
    match order {
        Order::TokensFirst => ([tokens * heads * dim, heads * dim, dim, 1], 0, batch * tokens * heads * dim),
        Order::HeadsFirst => ([tokens * heads * dim, dim, tokens * dim, 1], 0, batch * tokens * heads * dim),
        Order::Gaps => {
            let (row, head) = (dim + 3, (dim + 3) * tokens + 5);
            ([heads * head + 7, row, head, 1], 1, batch * (heads * head + 7))
        }
    }
}

fn tensor(run: &mut Run, dtype: DType, order: Order, shape: [usize; 4], values: &[f64]) -> Result<Tensor, Failure> {
    let (strides, offset, span) = placed(order, shape);
    Ok(run.strided(dtype, &shape, &strides, offset, span, Some(values))?)
}

/// A mask's tensor, and what it holds for (sequence, head, row, key).
type Held = Box<dyn Fn(usize, usize, usize, usize) -> f64>;

/// Normal values, of which a fifth is −∞, and all of the first row.
fn mask(run: &mut Run, masked: Masked, dtype: DType, extents: [usize; 4]) -> Result<(Option<Tensor>, Held), Failure> {
    let [batch, heads, rows, keys] = extents;
    let one = |is: bool, extent: usize| if is { extent } else { 1 };
    let shape = match masked {
        Masked::No => return Ok((None, Box::new(|_, _, _, _| 0.0))),
        Masked::Plane => [1, 1, rows, keys],
        Masked::By(b, h, r, more) => [one(b, batch), one(h, heads), one(r, rows), keys + more],
    };
    let count: usize = shape.iter().product();
    let mut values = run.random.normals(count, 2.0);
    let hidden = run.random.normals(count, 1.0);
    for (at, (value, hidden)) in values.iter_mut().zip(hidden).enumerate() {
        let row = at / shape[3] % shape[2];
        if hidden > 0.84 || (row == 0 && shape[2] > 1) {
            *value = f64::NEG_INFINITY;
        }
    }
    let bits = dtype == DType::I32;
    let mut stored = shape;
    let mut elements = rounded(if bits { DType::F32 } else { dtype }, &values);
    if bits {
        // What is not hidden counts as it is. Bits behind the last key are set.
        values.iter_mut().filter(|value| value.is_finite()).for_each(|value| *value = 0.0);
        elements = values.chunks(shape[3]).flat_map(words).collect();
        stored[3] = shape[3].div_ceil(32);
    } else {
        values.clone_from(&elements);
    }
    let shown: &[usize] = if masked == Masked::Plane { &stored[2..] } else { &stored };
    let tensor = run.tensor(dtype, shown, PLAIN, &elements)?;
    let held = move |b: usize, h: usize, r: usize, k: usize| {
        let at = [b, h, r].iter().zip(shape).fold(0, |at, (i, extent)| at * extent + if extent == 1 { 0 } else { *i });
        values[at * shape[3] + k]
    };
    Ok((Some(tensor), Box::new(held)))
}

/// A row of a mask as words of bits, in which a key of −∞ is 0.
pub fn words(row: &[f64]) -> Vec<f64> {
    let word = |keys: &[f64]| {
        let hidden = keys.iter().enumerate().filter(|key| *key.1 == f64::NEG_INFINITY);
        hidden.fold(u32::MAX, |word, (bit, _)| word & !(1 << bit))
    };
    row.chunks(32).map(|keys| f64::from(word(keys) as i32)).collect()
}

fn config(case: &Case) -> Result<AttentionConfig, Failure> {
    Ok(AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dims.0,
        value_dim: case.dims.1,
        soft_cap: case.soft_cap,
        window: case.window,
        causal: case.causal,
        ..AttentionConfig::default()
    })?)
}

/// Scales of a tensor, and that of each head.
fn scales(run: &mut Run, count: usize, heads: usize) -> Result<(Option<Tensor>, Vec<f64>), Failure> {
    if count == 0 {
        return Ok((None, vec![1.0; heads]));
    }
    let values: Vec<f64> = (0..count).map(|i| 0.5 + 0.25 * i as f64).collect();
    let tensor = run.tensor(DType::F32, &[count], PLAIN, &values)?;
    Ok((Some(tensor), (0..heads).map(|head| values[head % count]).collect()))
}

fn scaled(values: &[f64], width: usize, scales: &[f64], group: usize) -> Vec<f64> {
    let head = |at: usize| at / width % (scales.len() * group) / group;
    values.iter().enumerate().map(|(at, value)| value * scales[head(at)]).collect()
}

fn dense(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let config = config(case)?;
    let (batch, rows, keys, dim, value_dim) = (case.batch, case.rows, case.keys, case.dims.0, value_dim(&config));
    let (heads, kv_heads) = case.heads;
    let mut sequences: Vec<Keys> = (0..batch).map(|_| Keys::new(run, &config, kv, keys)).collect();
    let mut queries = rounded(query_dtype, &run.random.normals(batch * rows * heads * dim, 1.0));
    let [order, key_order, value_order] = case.orders;
    let query = tensor(run, query_dtype, order, [batch, rows, heads, dim], &queries)?;
    let all = |part: fn(&Keys) -> &Vec<f64>| sequences.iter().flat_map(|keys| part(keys).clone()).collect::<Vec<_>>();
    let key = tensor(run, kv, key_order, [batch, keys, kv_heads, dim], &all(|keys| &keys.key))?;
    let value = tensor(run, kv, value_order, [batch, keys, kv_heads, value_dim], &all(|keys| &keys.value))?;
    let shape = [batch, rows, heads, value_dim];
    let (strides, offset, span) = placed(order, shape);
    let output = run.strided(output_dtype, &shape, &strides, offset, span, None)?;
    run.allow_write(&output);
    let lse = if case.lse { Some(run.output(DType::F32, &shape[..3], PLAIN)?) } else { None };
    let (mask, held) = mask(run, case.masked, case.mask_dtype, [batch, heads, rows, keys])?;
    let [of_query, of_key, of_value] = case.scales;
    let (query_scale, query_scales) = scales(run, of_query, kv_heads)?;
    let (key_scale, key_scales) = scales(run, of_key, kv_heads)?;
    let (value_scale, value_scales) = scales(run, of_value, kv_heads)?;
    let op = AttentionPrefill::dense(config, query, (key, value), output, lse)?
        .with_scales(query_scale, key_scale, value_scale)?
        .with_mask(mask)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    queries = scaled(&queries, dim, &query_scales, heads / kv_heads);
    for keys in &mut sequences {
        keys.key = scaled(&keys.key, dim, &key_scales, 1);
        keys.value = scaled(&keys.value, value_dim, &value_scales, 1);
    }
    let mut reference = Vec::new();
    for (b, keys_of) in sequences.iter().enumerate() {
        for row in 0..rows {
            for head in 0..heads {
                let at = ((b * rows + row) * heads + head) * dim;
                let position = keys as i64 - rows as i64 + row as i64;
                let bias = |key: usize| held(b, head, row, key);
                reference.push(attend_masked(&config, &queries[at..][..dim], head, keys_of, position, &bias));
            }
        }
    }
    run.stream.synchronize()?;
    if !run.device.is_cpu() && query_dtype.is_fp8() {
        // The kernel of FP8 rounds the weights to it.
        let flat: Vec<f64> = reference.iter().flat_map(|row| row.0.iter().copied()).collect();
        return run.expect_rows("output", &output, &flat, 4e-2, value_dim);
    }
    let flat_lse = lse.map(|lse| Tensor::new(lse.data, DType::F32, &[batch * rows, heads]));
    expect_attention(run, kv, &output, flat_lse.as_ref(), &reference)
}

fn variants(cases: &[Case]) -> Vec<Case> {
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let dtypes = [(f32, f32, f32), (bf16, bf16, bf16), (f16, f16, f32), (f32, bf16, f32)];
    cases.iter().flat_map(|case| dtypes.map(|dtypes| Case { dtypes, ..case.clone() })).collect()
}

const LENGTHS: [(usize, usize); 10] =
    [(0, 5), (1, 1), (1, 128), (5, 127), (63, 63), (64, 64), (64, 129), (65, 65), (129, 257), (130, 200)];

#[test]
fn dense_batches() {
    let mut cases = Vec::new();
    for (rows, keys) in LENGTHS {
        for batch in [1, 3] {
            cases.push(Case { batch, rows, keys, heads: (2, 1), dims: (32, 0), ..case() });
        }
        cases.push(Case { rows, keys, causal: false, window: 9, soft_cap: 20.0, dims: (40, 24), ..case() });
    }
    cases.push(Case { batch: 0, ..case() });
    cases.push(Case { rows: 9, keys: 0, causal: false, ..case() });
    cases.push(Case { rows: 70, keys: 5, causal: false, ..case() });
    // More sequences than one launch takes.
    cases.push(Case { batch: 300, rows: 2, keys: 5, dims: (16, 0), ..case() });
    use Order::*;
    for orders in [[HeadsFirst; 3], [Gaps; 3], [TokensFirst, HeadsFirst, Gaps], [HeadsFirst, Gaps, TokensFirst]] {
        for (dims, lse) in [((64, 0), true), ((192, 128), true), ((24, 0), false), ((128, 0), false)] {
            cases.push(Case { orders, dims, lse, ..case() });
        }
    }
    check("attention_prefill of a batch", &variants(&cases), dense);
}

#[test]
fn masks() {
    let mut cases = Vec::new();
    let shapes = [
        Masked::By(true, true, true, 0),
        Masked::By(false, false, true, 0),
        Masked::By(true, false, true, 5),
        Masked::By(false, true, true, 1),
        Masked::By(true, true, false, 0),
        Masked::Plane,
    ];
    for masked in shapes {
        for mask_dtype in DType::FLOATS.into_iter().chain([DType::I32]) {
            for (causal, window, soft_cap) in [(false, 0, 0.0), (true, 0, 0.0), (true, 11, 30.0), (false, 7, 2.0)] {
                cases.push(Case { masked, mask_dtype, causal, window, soft_cap, dims: (32, 0), ..case() });
            }
        }
        for (rows, keys) in LENGTHS {
            cases.push(Case { masked, rows, keys, causal: false, heads: (2, 1), dims: (40, 24), ..case() });
        }
        cases.push(Case { masked, orders: [Order::Gaps; 3], lse: false, ..case() });
    }
    check("attention_prefill with a mask", &variants(&cases), dense);
}

/// Few rows of which more blocks share the keys than a cluster has, and then meet in memory: with one KV head and with some, and
/// batches of which each sequence has blocks of its own.
#[test]
fn masks_over_many_keys() {
    let mut cases = Vec::new();
    let shapes =
        [(1, 1, (4, 1), 128), (1, 3, (6, 2), 64), (1, 1, (8, 4), 256), (2, 1, (3, 1), 128), (1, 9, (4, 1), 64)];
    for (i, (batch, rows, heads, dim)) in shapes.into_iter().enumerate() {
        let masked = Masked::By(batch > 1, false, true, i);
        for (kv, mask_dtype) in [(DType::F16, DType::F16), (DType::Bf16, DType::F32)] {
            let dtypes = ([DType::F32, kv][i % 2], kv, DType::F32);
            let soft_cap = if i == 2 { 30.0 } else { 0.0 };
            let of = Case { batch, rows, keys: 9_001, heads, dims: (dim, 0), causal: false, soft_cap, ..case() };
            cases.push(Case { dtypes, masked, mask_dtype, ..of });
        }
    }
    check("attention_prefill with a mask over many keys", &cases, dense);
}

/// Queries, keys and values in FP8, and wider queries over keys and values in FP8.
#[test]
fn fp8() {
    let mut cases = Vec::new();
    for kv in [DType::F8E4m3, DType::F8E5m2] {
        for query in [kv, DType::F32, DType::Bf16, DType::F16] {
            let of_query = usize::from(query == kv);
            for (scales, dims) in [([0; 3], (64, 0)), ([of_query, 1, 1], (33, 0)), ([2 * of_query, 2, 2], (128, 64))] {
                for output in [DType::F32, DType::Bf16] {
                    cases.push(Case { dtypes: (query, kv, output), scales, dims, ..case() });
                }
            }
            let dtypes = (query, kv, DType::F32);
            for (rows, keys) in LENGTHS {
                let scales = [of_query, 2, 1];
                cases.push(Case { dtypes, scales, rows, keys, dims: (48, 0), soft_cap: 30.0, ..case() });
            }
            cases.push(Case { dtypes, masked: Masked::By(true, true, true, 0), scales: [of_query, 1, 2], ..case() });
        }
    }
    check("attention_prefill in FP8", &cases, dense);
}

/// Rows of several sequences one after the other have their rows of the mask, over tensors and over a cache.
#[test]
fn masks_of_ragged_rows() {
    let lengths = [vec![(19, 19), (33, 70)], vec![(0, 3), (1, 1), (64, 64), (3, 129)]];
    let mut cases = Vec::new();
    for lengths in lengths {
        for dtype in [DType::F32, DType::Bf16] {
            for cached in [false, true] {
                for masked in [Masked::Plane, Masked::By(false, true, true, 3)] {
                    cases.push((lengths.clone(), dtype, cached, masked));
                }
            }
        }
    }
    check("attention_prefill of ragged rows with a mask", &cases, |run, (lengths, dtype, cached, masked)| {
        let case = Case { dims: (40, 24), dtypes: (*dtype, *dtype, DType::F32), ..case() };
        let (config, (heads, kv_heads), dim) = (config(&case)?, case.heads, case.dims.0);
        let keys: Vec<Keys> = lengths.iter().map(|pair| Keys::new(run, &config, *dtype, pair.1)).collect();
        let starts = |lengths: Vec<usize>| {
            let mut starts = vec![0i32];
            lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + *length as i32));
            starts
        };
        let query_starts = starts(lengths.iter().map(|pair| pair.0).collect());
        let key_starts = starts(lengths.iter().map(|pair| pair.1).collect());
        let rows = query_starts[lengths.len()] as usize;
        let longest = lengths.iter().map(|pair| pair.1).max().unwrap_or(0);
        let (query, queries) = run.normal(*dtype, &[rows, heads, dim], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[rows, heads, 24], PLAIN)?;
        let lse = run.output(DType::F32, &[rows, heads], PLAIN)?;
        let (mask, held) = mask(run, *masked, DType::F16, [1, heads, rows, longest])?;
        let cache;
        let places: Vec<i32> = (0..keys.len() as i32).collect();
        let kv_lengths: Vec<i32> = lengths.iter().map(|pair| pair.1 as i32).collect();
        let source = if *cached {
            let placed: Vec<(usize, &Keys)> = keys.iter().enumerate().collect();
            cache = filled_cache(run, &config, *dtype, keys.len(), longest + 2, &placed)?;
            KeySource::Cache { layer: cache.layer(1)?, sequences: &places, kv_lengths: &kv_lengths }
        } else {
            let all =
                |part: fn(&Keys) -> &Vec<f64>| keys.iter().flat_map(|keys| part(keys).clone()).collect::<Vec<_>>();
            let tokens = key_starts[keys.len()] as usize;
            let key = run.tensor(*dtype, &[tokens, kv_heads, dim], PLAIN, &all(|keys| &keys.key))?;
            let value = run.tensor(*dtype, &[tokens, kv_heads, 24], PLAIN, &all(|keys| &keys.value))?;
            KeySource::Tensors { key, value, key_starts: &key_starts }
        };
        let op = AttentionPrefill::new(config, query, &query_starts, source, output, Some(lse))?.with_mask(mask)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let mut reference = Vec::new();
        for (b, (&(count, length), keys)) in lengths.iter().zip(&keys).enumerate() {
            for row in 0..count {
                for head in 0..heads {
                    let place = query_starts[b] as usize + row;
                    let query = &queries[(place * heads + head) * dim..][..dim];
                    let bias = |key: usize| held(0, head, place, key);
                    let position = (length + row) as i64 - count as i64;
                    reference.push(attend_masked(&config, query, head, keys, position, &bias));
                }
            }
        }
        expect_attention(run, *dtype, &output, Some(&lse), &reference)
    });
}

#[test]
fn wrong_batches_and_masks_are_named() {
    check("attention_prefill errors of batches", &[()], |run, ()| {
        let config = config(&Case { dims: (8, 0), ..case() })?;
        let mut of = |dtype: DType, shape: &[usize]| run.output(dtype, shape, PLAIN);
        let (query, output) = (of(DType::F32, &[2, 3, 4, 8])?, of(DType::F32, &[2, 3, 4, 8])?);
        let (key, value) = (of(DType::F32, &[2, 5, 2, 8])?, of(DType::F32, &[2, 5, 2, 8])?);
        let (short, other) = (of(DType::F32, &[2, 2, 2, 8])?, of(DType::F32, &[1, 5, 2, 8])?);
        let (half, flat) = (of(DType::F16, &[2, 5, 2, 8])?, of(DType::F32, &[6, 4, 8])?);
        let byte = of(DType::F8E4m3, &[2, 5, 2, 8])?;
        let good = || AttentionPrefill::dense(config, query, (key, value), output, None);
        let dense = |key, value| AttentionPrefill::dense(config, query, (key, value), output, None);
        let invalid = Status::InvalidArgument;
        good().map_err(Failure::from)?;
        expect_error(dense(short, short), invalid, &["3 query rows", "2 keys"])?;
        expect_error(dense(other, value), invalid, &["`key`", "batch of 1", "2"])?;
        expect_error(dense(key, short), invalid, &["value", "5"])?;
        expect_error(dense(key, half), invalid, &["one dtype"])?;
        let half_query = of(DType::F16, &[2, 3, 4, 8])?;
        let result = AttentionPrefill::dense(config, half_query, (key, value), output, None);
        expect_error(result, invalid, &["query", "f16"])?;
        expect_error(AttentionPrefill::dense(config, flat, (key, value), output, None), invalid, &["query", "rank 3"])?;
        let overlapping = output.with_strides(&[4, 8, 8, 1]);
        let result = AttentionPrefill::dense(config, query, (key, value), overlapping, None);
        expect_error(result, invalid, &["output", "overlap"])?;
        let lse = of(DType::F32, &[6, 4])?;
        let result = AttentionPrefill::dense(config, query, (key, value), output, Some(lse));
        expect_error(result, invalid, &["lse"])?;
        for shape in [&[3, 4][..], &[4, 5], &[3, 3, 5], &[3, 1, 3, 5], &[5]] {
            let mask = of(DType::F32, shape)?;
            expect_error(good()?.with_mask(Some(mask)), invalid, &["mask", &format!("{shape:?}")])?;
        }
        let bytes = of(DType::F8E4m3, &[3, 5])?;
        expect_error(good()?.with_mask(Some(bytes)), invalid, &["mask", "fp8 e4m3", "i32"])?;
        let words = of(DType::I32, &[2, 1])?;
        expect_error(good()?.with_mask(Some(words)), invalid, &["mask", "[2, 1]", "words of 32 keys"])?;
        let (one, three) = (of(DType::F32, &[1])?, of(DType::F32, &[3])?);
        expect_error(good()?.with_scales(None, Some(one), None), invalid, &["key_scale", "f32"])?;
        let fp8 = || dense(byte, byte);
        expect_error(fp8()?.with_scales(None, None, Some(three)), invalid, &["value_scale", "3 scales"])?;
        expect_error(fp8()?.with_scales(Some(one), None, None), invalid, &["query_scale"])?;
        fp8()?.with_scales(None, Some(one), Some(one)).map(|_| ()).map_err(Failure::from)
    });
}
