//! Attention with chunks, sinks and slopes (ALiBi), in prefill and in decode.

use crate::attention_cases::{attend_masked, expect_attention, filled_cache, Keys};
use crate::run::{check, expect_error, Failure, Outcome, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::attention::{
    AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource, EMPTY_ROW,
};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone)]
struct Case {
    /// Query rows and keys of each sequence.
    sequences: Vec<(usize, usize)>,
    heads: (usize, usize),
    dim: usize,
    dtypes: (DType, DType, DType),
    causal: bool,
    window: usize,
    chunk: usize,
    sink_tokens: usize,
    soft_cap: f32,
    sinks: bool,
    slopes: bool,
    /// Added to every sink.
    sink: f64,
}

fn case() -> Case {
    Case {
        sequences: vec![(19, 19), (33, 170), (1, 1), (1, 300)],
        heads: (4, 2),
        dim: 64,
        dtypes: (DType::F32, DType::F32, DType::F32),
        causal: true,
        window: 0,
        chunk: 0,
        sink_tokens: 0,
        soft_cap: 0.0,
        sinks: true,
        slopes: true,
        sink: 0.0,
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (sinks, slopes, chunk) in [
        (true, false, 0),
        (false, true, 0),
        (false, false, 32),
        (true, true, 48),
        (true, true, 1),
        (true, false, 1 << 30),
    ] {
        for (window, soft_cap) in [(0, 0.0), (21, 0.0), (0, 20.0), (40, 5.0)] {
            cases.push(Case { sinks, slopes, chunk, window, soft_cap, ..case() });
        }
    }
    // The first tokens beside a window: within a tile, across tiles, more than there are, and where the window begins.
    for (window, sink_tokens) in [(21, 4), (40, 1), (5, 64), (3, 100), (100, 256), (1, 129), (400, 7)] {
        for (sinks, slopes, soft_cap) in [(false, false, 0.0), (true, true, 5.0)] {
            cases.push(Case { sinks, slopes, window, sink_tokens, soft_cap, ..case() });
        }
    }
    for sink in [-200.0, 30.0, 200.0, f64::NEG_INFINITY] {
        cases.push(Case { sink, ..case() });
    }
    for (dim, heads) in [(8, (1, 1)), (40, (3, 1)), (128, (8, 1)), (256, (6, 2)), (33, (5, 5)), (512, (2, 1))] {
        cases.push(Case { dim, heads, chunk: 100, ..case() });
    }
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let dtypes = [(f32, f32, f32), (bf16, bf16, f32), (f16, f16, f16), (f32, bf16, bf16)];
    cases.iter().flat_map(|case| dtypes.map(|dtypes| Case { dtypes, ..case.clone() })).collect()
}

/// The sinks and slopes of all heads, as tensors and as numbers.
struct Terms {
    tensors: [Option<Tensor>; 2],
    sinks: Vec<f64>,
    slopes: Vec<f64>,
}

fn terms(run: &mut Run, case: &Case) -> Result<(AttentionConfig, Terms), Failure> {
    let heads = case.heads.0;
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: heads,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        soft_cap: case.soft_cap,
        window: case.window,
        causal: case.causal,
        chunk: case.chunk,
        sink_tokens: case.sink_tokens,
        ..AttentionConfig::default()
    })?;
    let (sinks, sink_values) = run.normal(DType::F32, &[heads], PLAIN, 1.0)?;
    let sink_values: Vec<f64> = sink_values.iter().map(|value| f64::from((value + case.sink) as f32)).collect();
    run.write(&sinks, &sink_values)?;
    let slope_values: Vec<f64> = (0..heads).map(|head| 0.5f64.powi(head as i32 + 1)).collect();
    let slopes = run.tensor(DType::F32, &[heads], PLAIN, &slope_values)?;
    run.allow_write(&sinks);
    let terms = Terms {
        tensors: [case.sinks.then_some(sinks), case.slopes.then_some(slopes)],
        sinks: if case.sinks { sink_values } else { vec![f64::NEG_INFINITY; heads] },
        slopes: if case.slopes { slope_values } else { vec![0.0; heads] },
    };
    Ok((config, terms))
}

impl Terms {
    /// One row of one head by the formula.
    fn attend(
        &self,
        config: &AttentionConfig,
        query: &[f64],
        head: usize,
        keys: &Keys,
        position: i64,
    ) -> (Vec<f64>, f64) {
        let bias = |key: usize| -self.slopes[head] * (position - key as i64).abs() as f64;
        let (output, lse) = attend_masked(config, query, head, keys, position, &bias);
        let sink = self.sinks[head];
        let most = lse.max(sink);
        if most == f64::NEG_INFINITY {
            return (output, lse);
        }
        let all = most + ((lse - most).exp() + (sink - most).exp()).ln();
        (output.iter().map(|value| value * (lse - all).exp()).collect(), all)
    }
}

fn prefill(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let (config, terms) = terms(run, case)?;
    let (heads, dim) = (case.heads.0, case.dim);
    let keys: Vec<Keys> = case.sequences.iter().map(|pair| Keys::new(run, &config, kv, pair.1)).collect();
    let longest = case.sequences.iter().map(|pair| pair.1).max().unwrap_or(0);
    let placed: Vec<(usize, &Keys)> = keys.iter().enumerate().collect();
    let cache = filled_cache(run, &config, kv, keys.len(), longest + 3, &placed)?;
    let mut starts = vec![0i32];
    case.sequences.iter().for_each(|pair| starts.push(starts[starts.len() - 1] + pair.0 as i32));
    let rows = starts[keys.len()] as usize;
    let (query, queries) = run.normal(query_dtype, &[rows, heads, dim], PLAIN, 1.0)?;
    let output = run.output(output_dtype, &[rows, heads, dim], PLAIN)?;
    let lse = run.output(DType::F32, &[rows, heads], PLAIN)?;
    let places: Vec<i32> = (0..keys.len() as i32).collect();
    let kv_lengths: Vec<i32> = case.sequences.iter().map(|pair| pair.1 as i32).collect();
    let source = KeySource::Cache { layer: cache.layer(1)?, sequences: &places, kv_lengths: &kv_lengths };
    let [sinks, slopes] = terms.tensors;
    let op =
        AttentionPrefill::new(config, query, &starts, source, output, Some(lse))?.with_head_terms(sinks, slopes)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    run.stream.synchronize()?;
    let mut reference = Vec::new();
    for (&(count, length), keys) in case.sequences.iter().zip(&keys) {
        for row in 0..count {
            for head in 0..heads {
                let query = &queries[reference.len() * dim..][..dim];
                reference.push(terms.attend(&config, query, head, keys, (length + row) as i64 - count as i64));
            }
        }
    }
    expect_attention(run, kv, &output, Some(&lse), &reference)
}

#[test]
fn prefills() {
    let mut all = cases();
    for (window, chunk) in [(0, 0), (17, 0), (0, 32)] {
        for dtypes in [(DType::F32, DType::F32, DType::F32), (DType::Bf16, DType::Bf16, DType::F32)] {
            let sequences = vec![(40, 17), (33, 70), (65, 129), (0, 9)];
            let sink_tokens = if window > 0 { 9 } else { 0 };
            all.push(Case { causal: false, window, chunk, dtypes, sequences, sink_tokens, ..case() });
        }
    }
    check("attention_prefill with terms of heads", &all, prefill);
}

fn decode(run: &mut Run, case: &Case, rows: usize) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let (config, terms) = terms(run, case)?;
    let (heads, dim) = (case.heads.0, case.dim);
    let lengths = [1, 31, 129, 700];
    let keys: Vec<Keys> = lengths.iter().map(|&length| Keys::new(run, &config, kv, length)).collect();
    let placed: Vec<(usize, &Keys)> = keys.iter().enumerate().collect();
    let cache = filled_cache(run, &config, kv, keys.len(), 703, &placed)?;
    let count = lengths.len() * rows;
    let positions: Vec<i32> = (0..count)
        .map(|row| lengths[row / rows] as i32 - rows as i32 + (row % rows) as i32)
        .map(|position| position.max(EMPTY_ROW))
        .collect();
    let (query, queries) = run.normal(query_dtype, &[count, heads, dim], PLAIN, 1.0)?;
    let output = run.output(output_dtype, &[count, heads, dim], PLAIN)?;
    let lse = run.output(DType::F32, &[count, heads], PLAIN)?;
    let of_rows =
        DecodeRows { per_sequence: rows, positions: run.integers(&positions)?, sequences: None, max_kv_length: 0 };
    let [sinks, slopes] = terms.tensors;
    let op = AttentionDecode::new(config, query, cache.layer(1)?, output, Some(lse), of_rows)?;
    run.executor().run(&Operation::from(op.with_head_terms(sinks, slopes)?), run.stream.raw())?;
    run.stream.synchronize()?;
    let mut reference = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        let keys = &keys[row / rows];
        // An empty row sees no key.
        let none = Keys { length: 0, ..keys.clone() };
        let keys = if position == EMPTY_ROW { &none } else { keys };
        for head in 0..heads {
            let query = &queries[(row * heads + head) * dim..][..dim];
            reference.push(terms.attend(&config, query, head, keys, position.into()));
        }
    }
    expect_attention(run, kv, &output, Some(&lse), &reference)
}

#[test]
fn decodes() {
    let cases: Vec<(Case, usize)> =
        cases().into_iter().flat_map(|case| [1, 3].map(|rows| (case.clone(), rows))).collect();
    check("attention_decode with terms of heads", &cases, |run, (case, rows)| decode(run, case, *rows));
}

#[test]
fn what_is_refused() {
    check("attention errors of terms of heads", &[()], |run, ()| {
        let (config, _) = terms(run, &Case { heads: (2, 1), dim: 8, ..case() })?;
        let mut of = |dtype: DType, shape: &[usize]| run.output(dtype, shape, PLAIN);
        let (query, key) = (of(DType::F32, &[3, 2, 8])?, of(DType::F32, &[3, 1, 8])?);
        let output = of(DType::F32, &[3, 2, 8])?;
        let (good, long, half) = (of(DType::F32, &[2])?, of(DType::F32, &[3])?, of(DType::F16, &[2])?);
        let new = || {
            let source = KeySource::Tensors { key, value: key, key_starts: &[0, 3] };
            AttentionPrefill::new(config, query, &[0, 3], source, output, None)
        };
        let invalid = Status::InvalidArgument;
        new()?.with_head_terms(Some(good), Some(good)).map_err(Failure::from)?;
        expect_error(new()?.with_head_terms(Some(long), None), invalid, &["sinks", "[3]", "[2]"])?;
        expect_error(new()?.with_head_terms(None, Some(half)), invalid, &["alibi_slopes", "f16"])?;
        let inside = Tensor::new(output.data, DType::F32, &[2]);
        expect_error(new()?.with_head_terms(Some(inside), None), invalid, &["sinks", "output"])
    });
}
