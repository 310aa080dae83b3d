//! `attention_decode`: one query row a sequence; positions and sequences are read from device memory.

use crate::attention_cases::{attend, attention_bound, dtypes, expect_attention, filled_cache, Keys};
use crate::compare::compare;
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, LAYOUTS, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone)]
struct Case {
    /// The position of each row: it sees the keys up to and including it.
    positions: Vec<usize>,
    heads: (usize, usize),
    dim: usize,
    window: usize,
    scale: f32,
    soft_cap: f32,
    dtypes: (DType, DType, DType),
    lse: bool,
    layout: Layout,
    /// Slots are given and out of order.
    permuted: bool,
    /// Above the largest position; `None`: the whole capacity.
    headroom: Option<usize>,
}

fn case() -> Case {
    Case {
        positions: vec![40, 0, 7],
        heads: (4, 2),
        dim: 64,
        window: 0,
        scale: 0.0,
        soft_cap: 0.0,
        dtypes: (DType::F32, DType::F32, DType::F32),
        lse: true,
        layout: PLAIN,
        permuted: true,
        headroom: None,
    }
}

fn variants(cases: &[Case]) -> Vec<Case> {
    let dtypes = [
        (DType::F32, DType::F32, DType::F32),
        (DType::Bf16, DType::Bf16, DType::Bf16),
        (DType::F32, DType::Bf16, DType::F32),
        (DType::F16, DType::F16, DType::F32),
    ];
    cases.iter().flat_map(|case| dtypes.map(|dtypes| Case { dtypes, ..case.clone() })).collect()
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        scale: case.scale,
        soft_cap: case.soft_cap,
        window: case.window,
        causal: true,
        ..AttentionConfig::default()
    })?;
    let rows = case.positions.len();
    let keys: Vec<Keys> = case.positions.iter().map(|&position| Keys::new(run, &config, kv, position + 1)).collect();
    let longest = case.positions.iter().max().map_or(1, |position| position + 1);
    let order = if case.permuted { run.random.permutation(rows + 2) } else { (0..rows + 2).collect() };
    let placed: Vec<(usize, &Keys)> = order.iter().copied().zip(&keys).collect();
    let cache = filled_cache(run, &config, kv, rows + 2, longest + 9, &placed)?;
    let shape = [rows, case.heads.0, case.dim];
    let queries = rounded(query_dtype, &run.random.normals(rows * case.heads.0 * case.dim, 1.0));
    let query = run.tensor(query_dtype, &shape, case.layout, &queries)?;
    let output = run.output(output_dtype, &shape, case.layout)?;
    let lse = if case.lse { Some(run.output(DType::F32, &[rows, case.heads.0], PLAIN)?) } else { None };
    let positions = run.integers(&case.positions.iter().map(|&position| position as i32).collect::<Vec<_>>())?;
    let sequences = run.integers(&order[..rows].iter().map(|&sequence| sequence as i32).collect::<Vec<_>>())?;
    let sequences = Some(sequences).filter(|_| case.permuted);
    let max_kv_length = case.headroom.map_or(0, |headroom| longest + headroom);
    let op = AttentionDecode::new(config, query, cache.layer(1)?, output, lse, positions, sequences, max_kv_length)?;
    // Twice: whatever scratch the first call leaves must not reach the second.
    for _ in 0..2 {
        run.executor().run(&Operation::from(op), run.stream.raw())?;
    }
    let mut reference = Vec::new();
    for (row, (&position, keys)) in case.positions.iter().zip(&keys).enumerate() {
        for head in 0..case.heads.0 {
            let at = (row * case.heads.0 + head) * case.dim;
            reference.push(attend(&config, &queries[at..][..case.dim], head, keys, position as i64));
        }
    }
    run.stream.synchronize()?;
    expect_attention(run, kv, &output, lse.as_ref(), &reference)
}

#[test]
fn dtypes_and_layouts() {
    let mut cases = Vec::new();
    for dtypes in dtypes() {
        for layout in LAYOUTS {
            for (permuted, lse) in [(true, true), (false, false)] {
                cases.push(Case { dtypes, layout, permuted, lse, dim: 32, ..case() });
            }
        }
    }
    check("attention_decode", &cases, test);
}

#[test]
fn head_dims_and_groups() {
    let dims = [1, 2, 8, 24, 33, 40, 64, 72, 80, 96, 128, 160, 192, 256, 320, 511, 512];
    let heads = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 1), (8, 1), (8, 8), (16, 1), (12, 4), (32, 8)];
    let mut cases = variants(&dims.map(|dim| Case { dim, ..case() }));
    cases.extend(variants(&heads.map(|heads| Case { heads, dim: 40, positions: vec![90, 3], ..case() })));
    check("attention_decode", &cases, test);
}

#[test]
fn lengths_and_windows() {
    let mut cases = Vec::new();
    for position in [0, 1, 14, 15, 16, 31, 32, 62, 63, 64, 126, 127, 128, 255, 256, 1000, 4095] {
        cases.push(Case { positions: vec![position], heads: (2, 1), dim: 32, ..case() });
        cases.push(Case { positions: vec![position, 2], headroom: Some(0), heads: (2, 1), dim: 32, ..case() });
    }
    for window in [1, 2, 16, 31, 64, 65, 128, 512, 1023, 1024, 5000] {
        cases.push(Case { positions: vec![1000, 5, 511, 64, 1023], window, heads: (4, 1), dim: 32, ..case() });
    }
    for (heads, dim) in [((2, 1), 256), ((4, 1), 200), ((3, 3), 128), ((6, 1), 96), ((2, 2), 64), ((10, 2), 8)] {
        for (position, window) in [(0, 0), (63, 0), (128, 0), (129, 0), (700, 0), (1030, 0), (1500, 1024), (1500, 77)] {
            cases.push(Case { positions: vec![position, position / 3], heads, dim, window, ..case() });
        }
    }
    for batch in [0, 1, 2, 7, 32, 130] {
        let positions = (0..batch).map(|i| i * 37 % 200).collect();
        cases.push(Case { positions, heads: (2, 1), dim: 32, headroom: Some(3), ..case() });
    }
    // More blocks than a GPU runs at once if each took its keys in one pass, or even without dividing them.
    for (batch, keys) in [(70, 120), (40, 300), (140, 70)] {
        let positions = (0..batch).map(|i| i * 37 % keys).collect();
        cases.push(Case { positions, heads: (2, 1), dim: 200, headroom: Some(0), ..case() });
    }
    cases.push(Case { positions: vec![9000, 20], heads: (4, 2), dim: 16, ..case() });
    check("attention_decode", &variants(&cases), test);
}

#[test]
fn scores() {
    let mut cases = Vec::new();
    for (scale, soft_cap) in [(0.0, 50.0), (1.0, 30.0), (0.0625, 0.0), (0.25, 0.0), (0.5, 1.0)] {
        for window in [0, 20] {
            cases.push(Case { scale, soft_cap, window, positions: vec![200, 33], dim: 32, ..case() });
        }
    }
    check("attention_decode", &variants(&cases), test);
}

/// The last row of a prefill is what decode gives at its position.
#[test]
fn decode_agrees_with_prefill() {
    let cases: Vec<(DType, usize, usize)> = DType::FLOATS
        .into_iter()
        .flat_map(|dtype| [(dtype, 77, 0), (dtype, 200, 64), (dtype, 1, 3), (dtype, 1500, 0)])
        .collect();
    check("attention_decode against prefill", &cases, |run, &(dtype, length, window)| {
        let (heads, dim) = (4, 64);
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: heads,
            kv_heads: 2,
            head_dim: dim,
            scale: 0.0,
            soft_cap: 0.0,
            window,
            causal: true,
            ..AttentionConfig::default()
        })?;
        let keys = Keys::new(run, &config, dtype, length);
        let cache = filled_cache(run, &config, dtype, 3, length + 1, &[(2, &keys)])?;
        let (query, _) = run.normal(dtype, &[1, heads, dim], PLAIN, 1.0)?;
        let prefilled = run.output(DType::F32, &[1, heads, dim], PLAIN)?;
        let decoded = run.output(DType::F32, &[1, heads, dim], PLAIN)?;
        let lengths = [length as i32];
        let source = KeySource::Cache { layer: cache.layer(1)?, sequences: &[2], kv_lengths: &lengths };
        let prefill = AttentionPrefill::new(config, query, &[0, 1], source, prefilled, None)?;
        run.executor().run(&Operation::from(prefill), run.stream.raw())?;
        let positions = run.integers(&[length as i32 - 1])?;
        let sequences = run.integers(&[2])?;
        let decode =
            AttentionDecode::new(config, query, cache.layer(1)?, decoded, None, positions, Some(sequences), 0)?;
        run.executor().run(&Operation::from(decode), run.stream.raw())?;
        let (prefilled, decoded) = (run.read(&prefilled)?, run.read(&decoded)?);
        compare(DType::F32, &decoded, &prefilled, 2.0 * attention_bound(dtype, DType::F32), &[]).map_err(Failure::from)
    });
}

/// The CPU names the row's number and the limit; a GPU writes an empty row and the others as they should be.
#[test]
fn places_outside_the_cache() {
    let cases = [(-1, 0), (16, 0), (i32::MAX, 0), (i32::MIN, 1), (3, -1), (3, 2), (3, i32::MAX)];
    check("attention_decode outside the cache", &cases, |run, &(position, sequence)| {
        let config = AttentionConfig {
            query_heads: 2,
            kv_heads: 1,
            head_dim: 16,
            scale: 0.25,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            ..AttentionConfig::default()
        };
        let keys = Keys::new(run, &config, DType::F32, 10);
        let cache = filled_cache(run, &config, DType::F32, 2, 16, &[(1, &keys)])?;
        let (query, queries) = run.normal(DType::F32, &[2, 2, 16], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[2, 2, 16], PLAIN)?;
        let lse = run.output(DType::F32, &[2, 2], PLAIN)?;
        let positions = run.integers(&[position, 9])?;
        let sequences = run.integers(&[sequence, 1])?;
        let op =
            AttentionDecode::new(config, query, cache.layer(1)?, output, Some(lse), positions, Some(sequences), 0)?;
        let result = run.executor().run(&Operation::from(op), run.stream.raw());
        if run.device.is_cpu() {
            let (outside, limit) = if (0..16).contains(&position) { (sequence, "2") } else { (position, "16") };
            return expect_error(result, Status::InvalidArgument, &[&outside.to_string(), limit]);
        }
        result?;
        let empty = (vec![0.0; 16], f64::NEG_INFINITY);
        let row =
            |i: usize| if i < 2 { empty.clone() } else { attend(&config, &queries[i * 16..][..16], i % 2, &keys, 9) };
        expect_attention(run, DType::F32, &output, Some(&lse), &(0..4).map(row).collect::<Vec<_>>())
    });
}
