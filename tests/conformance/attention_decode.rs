//! `attention_decode`: one or a few query rows a sequence; positions and sequences are read from device memory.

use crate::attention_cases::{attend, attention_bound, dtypes, expect_attention, filled_cache, one_row, Keys};
use crate::compare::compare;
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, LAYOUTS, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::argmax::Argmax;
use nvbackend::operation::attention::{
    AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource, EMPTY_ROW,
};
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone)]
struct Case {
    /// The position of each sequence's last row: it sees the keys up to and including it. The rows before it stand one
    /// position before the next each, and are empty where there is none.
    positions: Vec<usize>,
    rows_per_sequence: usize,
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
        rows_per_sequence: 1,
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
    let (count, per_sequence) = (case.positions.len(), case.rows_per_sequence);
    let rows = count * per_sequence;
    let row_positions: Vec<i32> = case
        .positions
        .iter()
        .flat_map(|&last| {
            (0..per_sequence).map(move |row| (last as i32 + row as i32 + 1 - per_sequence as i32).max(EMPTY_ROW))
        })
        .collect();
    let keys: Vec<Keys> = case.positions.iter().map(|&position| Keys::new(run, &config, kv, position + 1)).collect();
    let longest = case.positions.iter().max().map_or(1, |position| position + 1);
    let order = if case.permuted { run.random.permutation(count + 2) } else { (0..count + 2).collect() };
    let placed: Vec<(usize, &Keys)> = order.iter().copied().zip(&keys).collect();
    let cache = filled_cache(run, &config, kv, count + 2, longest + 9, &placed)?;
    let shape = [rows, case.heads.0, case.dim];
    let queries = rounded(query_dtype, &run.random.normals(rows * case.heads.0 * case.dim, 1.0));
    let query = run.tensor(query_dtype, &shape, case.layout, &queries)?;
    let output = run.output(output_dtype, &shape, case.layout)?;
    let lse = if case.lse { Some(run.output(DType::F32, &[rows, case.heads.0], PLAIN)?) } else { None };
    let positions = run.integers(&row_positions)?;
    let sequences = run.integers(&order[..count].iter().map(|&sequence| sequence as i32).collect::<Vec<_>>())?;
    let sequences = Some(sequences).filter(|_| case.permuted);
    let max_kv_length = case.headroom.map_or(0, |headroom| longest + headroom);
    let decoded = DecodeRows { per_sequence, positions, sequences, max_kv_length };
    let op = AttentionDecode::new(config, query, cache.layer(1)?, output, lse, decoded)?;
    // Twice: whatever scratch the first call leaves must not reach the second.
    for _ in 0..2 {
        run.executor().run(&Operation::from(op), run.stream.raw())?;
    }
    let mut reference = Vec::new();
    for (row, &position) in row_positions.iter().enumerate() {
        for head in 0..case.heads.0 {
            let at = (row * case.heads.0 + head) * case.dim;
            reference.push(attend(
                &config,
                &queries[at..][..case.dim],
                head,
                &keys[row / per_sequence],
                position.into(),
            ));
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

/// Sequences of unequal length, whose tiles are divided evenly among the blocks of a GPU: long ones by many, short ones
/// together by one.
#[test]
fn unequal_sequences() {
    let mut cases = Vec::new();
    for (heads, dim) in [((8, 2), 64), ((4, 1), 128), ((2, 1), 256)] {
        for positions in [vec![2999, 0, 127, 128, 129, 63, 64, 1], vec![3, 1500, 15, 1023, 16, 0, 600]] {
            cases.push(Case { positions: positions.clone(), heads, dim, ..case() });
            cases.push(Case { positions, heads, dim, window: 70, headroom: Some(0), ..case() });
        }
        // Several sequences a lane, and more than a launch of the ring takes.
        for count in [45, 257] {
            let positions = (0..count).map(|i| i * 7 % 93).collect();
            cases.push(Case { positions, heads: (2, 1), dim, ..case() });
        }
    }
    check("attention_decode of unequal sequences", &variants(&cases), test);
}

#[test]
fn rows_of_a_sequence() {
    let mut cases = Vec::new();
    for rows_per_sequence in [2, 3, 4, 7, 8, 16] {
        for (heads, dim) in [((1, 1), 64), ((4, 1), 128), ((6, 2), 256), ((8, 1), 40), ((12, 2), 320), ((3, 3), 33)] {
            cases.push(Case { rows_per_sequence, heads, dim, positions: vec![5, 70, 0, 300], ..case() });
        }
        for (position, window) in [(15, 0), (16, 0), (130, 20), (500, 64), (500, 1), (1040, 1024), (3000, 0)] {
            let positions = vec![position, position / 2, rows_per_sequence - 1];
            let case = Case { rows_per_sequence, window, positions, heads: (4, 2), dim: 64, ..case() };
            cases.push(Case { headroom: Some(0), soft_cap: 5.0, ..case.clone() });
            cases.push(Case { permuted: false, ..case });
        }
        cases.push(Case { rows_per_sequence, positions: vec![], ..case() });
        // More blocks than a GPU runs at once.
        let positions = (0..70).map(|i| i * 37 % 300).collect();
        cases.push(Case { rows_per_sequence, positions, heads: (8, 2), dim: 128, headroom: Some(0), ..case() });
    }
    check("attention_decode", &variants(&cases), test);
}

/// A row of several is what it is alone, whichever rows stand beside it, also behind rows that its sequence does not need.
#[test]
fn rows_beside_each_other() {
    let cases: Vec<(DType, usize, usize)> =
        DType::FLOATS.into_iter().flat_map(|dtype| [(dtype, 150, 0), (dtype, 40, 16), (dtype, 2000, 0)]).collect();
    check("attention_decode beside empty rows", &cases, |run, &(dtype, length, window)| {
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: 4,
            kv_heads: 2,
            head_dim: 64,
            value_dim: 0,
            scale: 0.0,
            soft_cap: 0.0,
            window,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
        })?;
        let keys = Keys::new(run, &config, dtype, length);
        let cache = filled_cache(run, &config, dtype, 2, length + 4, &[(0, &keys), (1, &keys)])?;
        let last = length as i32 - 1;
        let positions =
            [EMPTY_ROW, last - 7, last - 6, last, EMPTY_ROW, last, EMPTY_ROW, EMPTY_ROW, EMPTY_ROW, EMPTY_ROW];
        let (query, queries) = run.normal(dtype, &[10, 4, 64], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[10, 4, 64], PLAIN)?;
        let lse = run.output(DType::F32, &[10, 4], PLAIN)?;
        let rows =
            DecodeRows { per_sequence: 5, positions: run.integers(&positions)?, sequences: None, max_kv_length: 0 };
        let op = AttentionDecode::new(config, query, cache.layer(1)?, output, Some(lse), rows)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let row = |i: usize| attend(&config, &queries[i * 64..][..64], i % 4, &keys, positions[i / 4].into());
        expect_attention(run, dtype, &output, Some(&lse), &(0..40).map(row).collect::<Vec<_>>())
    });
}

#[test]
fn rows_that_are_refused() {
    check("attention_decode of rows", &[(17, 17, 1), (0, 4, 4), (3, 4, 1), (2, 4, 4), (2, 4, 1)], |run, case| {
        let &(per_sequence, rows, sequences) = case;
        let config = AttentionConfig {
            query_heads: 2,
            kv_heads: 1,
            head_dim: 16,
            value_dim: 0,
            scale: 0.25,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
        };
        let cache = filled_cache(run, &config, DType::F32, 1, 32, &[])?;
        let (query, _) = run.normal(DType::F32, &[rows, 2, 16], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[rows, 2, 16], PLAIN)?;
        let rows = DecodeRows {
            per_sequence,
            positions: run.integers(&vec![3; rows])?,
            sequences: Some(run.integers(&vec![0; sequences])?).filter(|_| sequences > 1),
            max_kv_length: 0,
        };
        let words: &[&str] = match case {
            (17 | 0, ..) => &["rows_per_sequence", "1 to 16"],
            (3, ..) => &["4 rows", "multiple", "3"],
            (_, _, 4) => &["sequences", "[4]", "[2]"],
            _ => &["2 sequences without `sequences`", "has 1"],
        };
        expect_error(
            AttentionDecode::new(config, query, cache.layer(1)?, output, None, rows),
            Status::InvalidArgument,
            words,
        )
    });
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
            value_dim: 0,
            scale: 0.0,
            soft_cap: 0.0,
            window,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
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
        let decode = AttentionDecode::new(
            config,
            query,
            cache.layer(1)?,
            decoded,
            None,
            one_row(positions, Some(sequences), 0),
        )?;
        run.executor().run(&Operation::from(decode), run.stream.raw())?;
        let (prefilled, decoded) = (run.read(&prefilled)?, run.read(&decoded)?);
        compare(DType::F32, &decoded, &prefilled, 2.0 * attention_bound(dtype, DType::F32), &[]).map_err(Failure::from)
    });
}

/// Each call before a decode writes the position that it reads: what a kernel looks up before the one in front has finished may be
/// the position of the call before that.
#[test]
fn positions_that_the_call_before_writes() {
    let cases = [(DType::Bf16, 256, 0), (DType::F16, 64, 0), (DType::Bf16, 128, 50), (DType::F32, 64, 0)];
    check("attention_decode at positions of the call before", &cases, |run, &(dtype, dim, window)| {
        const LENGTH: usize = 200;
        const STEPS: [usize; 12] = [3, 190, 64, 199, 0, 130, 1, 180, 77, 5, 150, 20];
        let heads = 4;
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: heads,
            kv_heads: 2,
            head_dim: dim,
            window,
            causal: true,
            ..AttentionConfig::default()
        })?;
        let keys = Keys::new(run, &config, dtype, LENGTH);
        let cache = filled_cache(run, &config, dtype, 1, LENGTH, &[(0, &keys)])?;
        let (query, queries) = run.normal(dtype, &[1, heads, dim], PLAIN, 1.0)?;
        let positions = run.output(DType::I32, &[1], PLAIN)?;
        let mut steps = Vec::new();
        for position in STEPS {
            let mut scores = vec![0.0; LENGTH];
            scores[position] = 1.0;
            let scores = run.tensor(DType::F32, &[1, LENGTH], PLAIN, &scores)?;
            let output = run.output(DType::F32, &[1, heads, dim], PLAIN)?;
            let rows = one_row(positions, None, 0);
            let decode = AttentionDecode::new(config, query, cache.layer(1)?, output, None, rows)?;
            steps.push((Operation::from(Argmax::new(scores, positions)?), Operation::from(decode), output));
        }
        for (find, decode, _) in &steps {
            run.executor().run(find, run.stream.raw())?;
            run.executor().run(decode, run.stream.raw())?;
        }
        run.stream.synchronize()?;
        for ((_, _, output), position) in steps.iter().zip(STEPS) {
            let row = |head: usize| attend(&config, &queries[head * dim..][..dim], head, &keys, position as i64);
            expect_attention(run, dtype, output, None, &(0..heads).map(row).collect::<Vec<_>>())?;
        }
        Ok(())
    });
}

/// The CPU names the row's number and the limit; a GPU writes an empty row and the others as they should be.
#[test]
fn places_outside_the_cache() {
    let cases = [(-2, 0), (16, 0), (i32::MAX, 0), (i32::MIN, 1), (3, -1), (3, 2), (3, i32::MAX)];
    check("attention_decode outside the cache", &cases, |run, &(position, sequence)| {
        let config = AttentionConfig {
            query_heads: 2,
            kv_heads: 1,
            head_dim: 16,
            value_dim: 0,
            scale: 0.25,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
        };
        let keys = Keys::new(run, &config, DType::F32, 10);
        let cache = filled_cache(run, &config, DType::F32, 2, 16, &[(1, &keys)])?;
        let (query, queries) = run.normal(DType::F32, &[2, 2, 16], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[2, 2, 16], PLAIN)?;
        let lse = run.output(DType::F32, &[2, 2], PLAIN)?;
        let positions = run.integers(&[position, 9])?;
        let sequences = run.integers(&[sequence, 1])?;
        let op = AttentionDecode::new(
            config,
            query,
            cache.layer(1)?,
            output,
            Some(lse),
            one_row(positions, Some(sequences), 0),
        )?;
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
