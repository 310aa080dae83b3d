//! Decode over a prefix that all sequences share, which one of the cache holds. What the others have in its place is NaN, or no
//! page.

use crate::attention_cases::{attend, expect_attention, Keys};
use crate::run::{check, expect_error, Failure, Outcome, Run, PLAIN};
use nvbackend::error::{Error, Status};
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, DecodeRows, EMPTY_ROW};
use nvbackend::operation::Operation;
use nvbackend::tensor::{CacheLayer, DType, PageTable, Placement};

#[derive(Debug, Clone)]
struct Case {
    prefix: usize,
    /// Keys of each sequence behind the prefix; `None`: its rows are empty.
    own: Vec<Option<usize>>,
    rows: usize,
    heads: (usize, usize),
    dim: usize,
    dtypes: (DType, DType, DType),
    /// 0: none
    page_tokens: usize,
    soft_cap: f32,
    sinks: bool,
}

fn case() -> Case {
    Case {
        prefix: 48,
        own: vec![Some(1), None, Some(0), Some(40), Some(16)],
        rows: 1,
        heads: (4, 2),
        dim: 64,
        dtypes: (DType::F32, DType::F32, DType::F32),
        page_tokens: 0,
        soft_cap: 0.0,
        sinks: false,
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for prefix in [1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 700] {
        cases.push(Case { prefix, ..case() });
    }
    for page_tokens in [1, 16, 24] {
        cases.push(Case { page_tokens, ..case() });
        cases.push(Case { page_tokens, prefix: 240, rows: 3, sinks: true, ..case() });
    }
    for (heads, dim) in [((1, 1), 8), ((3, 1), 40), ((8, 1), 128), ((6, 2), 256), ((5, 5), 33), ((2, 1), 512)] {
        cases.push(Case { heads, dim, ..case() });
    }
    cases.push(Case { sinks: true, ..case() });
    cases.push(Case { soft_cap: 5.0, ..case() });
    cases.push(Case { rows: 4, own: vec![Some(3), Some(4), Some(0), None, Some(90)], ..case() });
    cases.push(Case { own: vec![Some(20); 40], prefix: 200, ..case() });
    cases.push(Case { own: vec![None; 3], ..case() });
    cases.push(Case { own: Vec::new(), ..case() });
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let dtypes = [(f32, f32, f32), (bf16, bf16, f32), (f16, f16, f16), (f32, bf16, bf16)];
    cases.iter().flat_map(|case| dtypes.map(|dtypes| Case { dtypes, ..case.clone() })).collect()
}

/// The layer, in which the last sequence has the prefix, and the keys of each sequence with it in front.
fn cache(run: &mut Run, case: &Case, config: &AttentionConfig) -> Result<(CacheLayer, Vec<Keys>), Failure> {
    let (dtype, heads, dim, prefix) = (case.dtypes.1, case.heads.1, case.dim, case.prefix);
    let sequences = case.own.len() + 1;
    let shared = Keys::new(run, config, dtype, prefix);
    let longest = case.own.iter().flatten().max().copied().unwrap_or(0);
    let step = case.page_tokens.max(1);
    let capacity = (prefix + longest + 3).next_multiple_of(step);
    let tokens = if case.page_tokens == 0 { capacity } else { case.page_tokens };
    let columns = capacity / tokens;
    // Without pages a sequence has one block.
    let blocks = sequences * columns + 2;
    let order: Vec<usize> = run.random.permutation(blocks);
    let mut table = vec![-1.0; sequences * columns];
    let mut images = [vec![f64::NAN; blocks * heads * tokens * dim], vec![f64::NAN; blocks * heads * tokens * dim]];
    let mut put = |sequence: usize, first: usize, keys: &Keys| {
        for token in 0..keys.length {
            let (column, place) = ((first + token) / tokens, (first + token) % tokens);
            let entry = sequence * columns + column;
            let block = if case.page_tokens == 0 { entry } else { order[entry] };
            table[entry] = block as f64;
            for head in 0..heads {
                let to = ((block * heads + head) * tokens + place) * dim;
                let from = (token * heads + head) * dim;
                images[0][to..][..dim].copy_from_slice(&keys.key[from..][..dim]);
                images[1][to..][..dim].copy_from_slice(&keys.value[from..][..dim]);
            }
        }
    };
    put(sequences - 1, 0, &shared);
    let mut whole = Vec::new();
    for (sequence, own) in case.own.iter().enumerate() {
        let own = Keys::new(run, config, dtype, own.unwrap_or(0));
        put(sequence, prefix, &own);
        whole.push(Keys {
            length: prefix + own.length,
            key: [&shared.key[..], &own.key].concat(),
            value: [&shared.value[..], &own.value].concat(),
        });
    }
    let shape = [blocks, heads, tokens, dim];
    let key = run.tensor(dtype, &shape, PLAIN, &images[0])?;
    let value = run.tensor(dtype, &shape, PLAIN, &images[1])?;
    let layer = CacheLayer::contiguous((key.data, value.data), dtype, [sequences, heads, tokens, dim]);
    if case.page_tokens == 0 {
        return Ok((layer, whole));
    }
    let entries = run.tensor(DType::I32, &[sequences, columns], PLAIN, &table)?;
    let table = PageTable {
        entries: entries.data.cast_const().cast(),
        sequences,
        columns,
        row_stride: columns,
        page_tokens: tokens,
        page_stride: heads * tokens * dim,
        pages: blocks,
    };
    let layer = CacheLayer { capacity, sequence_stride: columns, placement: Placement::Paged(table), ..layer };
    Ok((layer, whole))
}

fn config(case: &Case) -> Result<AttentionConfig, Error> {
    AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        soft_cap: case.soft_cap,
        ..AttentionConfig::default()
    })
}

fn decode(run: &mut Run, case: &Case) -> Outcome {
    let config = config(case)?;
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let (heads, dim, rows) = (case.heads.0, case.dim, case.rows);
    let (layer, keys) = cache(run, case, &config)?;
    let count = case.own.len() * rows;
    let position = |row: usize| {
        let behind = case.own[row / rows].map(|own| (case.prefix + own + row % rows) as i32 - rows as i32);
        behind.filter(|&position| position + 1 >= case.prefix as i32).unwrap_or(EMPTY_ROW)
    };
    let positions: Vec<i32> = (0..count).map(position).collect();
    let (query, queries) = run.normal(query_dtype, &[count, heads, dim], PLAIN, 1.0)?;
    let output = run.output(output_dtype, &[count, heads, dim], PLAIN)?;
    let lse = run.output(DType::F32, &[count, heads], PLAIN)?;
    let of_rows =
        DecodeRows { per_sequence: rows, positions: run.integers(&positions)?, sequences: None, max_kv_length: 0 };
    let (sinks, sink_values) = run.normal(DType::F32, &[heads], PLAIN, 1.0)?;
    let op = AttentionDecode::new(config, query, layer, output, Some(lse), of_rows)?
        .with_head_terms(case.sinks.then_some(sinks), None)?
        .with_prefix(case.prefix, case.own.len())?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    run.stream.synchronize()?;
    let mut reference = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        let none = Keys { length: 0, ..keys[row / rows].clone() };
        let keys = if position == EMPTY_ROW { &none } else { &keys[row / rows] };
        for head in 0..heads {
            let query = &queries[(row * heads + head) * dim..][..dim];
            let (mut output, mut lse) = attend(&config, query, head, keys, position.into());
            if case.sinks && position != EMPTY_ROW {
                let (seen, sink) = (lse, sink_values[head]);
                lse = seen.max(sink) + (-(seen - sink).abs()).exp().ln_1p();
                output.iter_mut().for_each(|value| *value *= (seen - lse).exp());
            }
            reference.push((output, lse));
        }
    }
    expect_attention(run, kv, &output, Some(&lse), &reference)
}

#[test]
fn prefixes_and_what_follows() {
    check("attention_decode over a shared prefix", &cases(), decode);
}

#[test]
fn what_is_refused() {
    check("attention errors of shared prefixes", &[()], |run, ()| {
        let case = Case { heads: (2, 1), dim: 8, page_tokens: 16, ..case() };
        let config = config(&case)?;
        let (layer, _) = cache(run, &case, &config)?;
        let count = case.own.len();
        let (query, _) = run.normal(DType::F32, &[count, 2, 8], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[count, 2, 8], PLAIN)?;
        let slopes = run.output(DType::F32, &[2], PLAIN)?;
        let positions = run.integers(&vec![EMPTY_ROW; count])?;
        let of = |config: AttentionConfig, max_kv_length: usize| {
            let rows = DecodeRows { per_sequence: 1, positions, sequences: None, max_kv_length };
            AttentionDecode::new(config, query, layer, output, None, rows)
        };
        let with = |tokens: usize, sequence: usize| of(config, 0)?.with_prefix(tokens, sequence);
        let invalid = Status::InvalidArgument;
        with(48, count)?;
        with(0, 0)?;
        expect_error(with(0, 1), invalid, &["prefix_sequence is 1", "prefix_tokens 0"])?;
        expect_error(with(48, count + 1), invalid, &["prefix_sequence is 6", "6 sequences"])?;
        expect_error(with(47, 0), invalid, &["prefix_tokens is 47", "16 tokens"])?;
        expect_error(with(usize::MAX & !15, 0), invalid, &["prefix_tokens is", "max_kv_length is"])?;
        expect_error(of(config, 32)?.with_prefix(48, 0), invalid, &["prefix_tokens is 48", "max_kv_length is 32"])?;
        for other in [AttentionConfig { window: 5, ..config }, AttentionConfig { chunk: 5, ..config }] {
            expect_error(of(other, 0)?.with_prefix(48, 0), invalid, &["window, chunk and alibi_slopes"])?;
        }
        let sloped = of(config, 0)?.with_head_terms(None, Some(slopes))?;
        expect_error(sloped.with_prefix(48, 0), invalid, &["alibi_slopes"])
    });
}

/// What device memory holds is an error on the CPU, and an empty row on a GPU.
#[test]
fn positions_within_the_prefix() {
    check("positions within a shared prefix", &[()], |run, ()| {
        let case = Case { own: vec![Some(4), Some(4)], ..case() };
        let config = config(&case)?;
        let (layer, keys) = cache(run, &case, &config)?;
        let (query, queries) = run.normal(DType::F32, &[2, 4, 64], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[2, 4, 64], PLAIN)?;
        let positions = run.integers(&[51, 46])?;
        let rows = DecodeRows { per_sequence: 1, positions, sequences: None, max_kv_length: 0 };
        let op = AttentionDecode::new(config, query, layer, output, None, rows)?.with_prefix(48, 2)?;
        let ran = run.executor().run(&Operation::from(op), run.stream.raw());
        if run.device.is_cpu() {
            return expect_error(ran, Status::InvalidArgument, &["row 1", "position 46", "prefix of 48 tokens"]);
        }
        ran?;
        run.stream.synchronize()?;
        let mut reference = Vec::new();
        for row in 0..2 {
            for head in 0..4 {
                let none = Keys { length: 0, ..keys[row].clone() };
                let keys = if row == 0 { &keys[row] } else { &none };
                reference.push(attend(&config, &queries[(row * 4 + head) * 64..][..64], head, keys, 51));
            }
        }
        expect_attention(run, DType::F32, &output, None, &reference)
    });
}
