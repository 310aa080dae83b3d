//! `attention_decode` that norms, rotates and appends the one new token of each sequence: against the formulas of both in F64, and on
//! the CPU bit for bit against `rope` and the attention behind it.

use crate::attention_cases::{attend, expect_attention, filled_cache, one_row, Keys};
use crate::compare::bound;
use crate::run::{
    check, expect_error, key_tensor, rounded, value_tensor, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED,
};
use nvbackend::error::{Error, Status};
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, DecodeRopeArguments, EMPTY_ROW};
use nvbackend::operation::rope::Rotation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{CacheLayer, DType, Tensor};

#[derive(Debug, Clone)]
struct Case {
    /// Of each sequence's new token; −1: there is none.
    positions: Vec<i32>,
    heads: (usize, usize),
    dim: usize,
    rotary: usize,
    window: usize,
    soft_cap: f32,
    /// Of query, key, value and cache.
    dtype: DType,
    output: DType,
    norm: Option<DType>,
    offset: f32,
    query_scale: f32,
    layout: Layout,
    max_kv_length: usize,
}

fn case() -> Case {
    Case {
        positions: vec![40, 0, 7],
        heads: (4, 2),
        dim: 64,
        rotary: 64,
        window: 0,
        soft_cap: 0.0,
        dtype: DType::Bf16,
        output: DType::F32,
        norm: Some(DType::Bf16),
        offset: 1.0,
        query_scale: 1.0,
        layout: PLAIN,
        max_kv_length: 0,
    }
}

const BASE: f32 = 10_000.0;
const POSITION_SCALE: f32 = 0.5;

/// One head's norm and rotation, rounded to its dtype. Frequencies and angles are F32, as in HF transformers.
fn rotated(case: &Case, x: &[f64], norm: Option<&[f64]>, position: i32, scale: f64) -> Vec<f64> {
    let mut x = x.to_vec();
    if let Some(weight) = norm {
        let inverse = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
        x.iter_mut().zip(weight).for_each(|(x, weight)| *x *= inverse * (case.offset as f64 + weight));
    }
    for i in 0..case.rotary / 2 {
        let frequency = 1.0 / BASE.powf((2 * i) as f32 / case.rotary as f32);
        let (sin, cos) = ((position as f32 * frequency * POSITION_SCALE) as f64).sin_cos();
        let (a, b) = (x[i], x[i + case.rotary / 2]);
        x[i] = a * cos - b * sin;
        x[i + case.rotary / 2] = b * cos + a * sin;
    }
    x.iter_mut().for_each(|x| *x *= scale);
    rounded(case.dtype, &x)
}

/// Neighbouring heads of a token's row.
fn part(row: &Tensor, first: usize, heads: usize) -> Tensor {
    let dim = row.shape[2];
    let data = row.data.cast::<u8>().wrapping_add(first * dim * row.dtype.size()).cast();
    Tensor::new(data, row.dtype, &[row.shape[0], heads, dim]).with_strides(&[row.strides[0], dim, 1])
}

fn config(case: &Case) -> Result<AttentionConfig, nvbackend::error::Error> {
    AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        window: case.window,
        soft_cap: case.soft_cap,
        causal: true,
        ..AttentionConfig::default()
    })
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let config = config(case)?;
    let ((query_heads, kv_heads), dim, count) = (case.heads, case.dim, case.positions.len());
    let mut keys: Vec<Keys> =
        case.positions.iter().map(|&position| Keys::new(run, &config, case.dtype, position.max(0) as usize)).collect();
    let longest = case.positions.iter().max().map_or(1, |&position| position.max(0) as usize + 1);
    let order = run.random.permutation(count + 2);
    let placed: Vec<(usize, &Keys)> = order.iter().copied().zip(&keys).collect();
    let cache = filled_cache(run, &config, case.dtype, count + 2, longest + 9, &placed)?;
    let layer = cache.layer(1)?;
    let width = query_heads + 2 * kv_heads;
    let values = rounded(case.dtype, &run.random.normals(count * width * dim, 1.0));
    let row = run.tensor(case.dtype, &[count, width, dim], case.layout, &values)?;
    let mut norms = Vec::new();
    for _ in 0..2 {
        norms.push(case.norm.map(|dtype| run.normal(dtype, &[dim], PLAIN, 1.0)).transpose()?);
    }
    let output = run.output(case.output, &[count, query_heads, dim], case.layout)?;
    let lse = run.output(DType::F32, &[count, query_heads], PLAIN)?;
    let positions = run.integers(&case.positions)?;
    let sequences = run.integers(&order[..count].iter().map(|&sequence| sequence as i32).collect::<Vec<_>>())?;
    let rows = one_row(positions, Some(sequences), case.max_kv_length);
    let op = AttentionDecode::new(config, part(&row, 0, query_heads), layer, output, Some(lse), rows)?;
    let op = op.with_rope(DecodeRopeArguments {
        key: part(&row, query_heads, kv_heads),
        value: part(&row, query_heads + kv_heads, kv_heads),
        query_norm: norms[0].as_ref().map(|norm| norm.0),
        key_norm: norms[1].as_ref().map(|norm| norm.0),
        query_scale: case.query_scale,
        epsilon: 1e-6,
        weight_offset: case.offset,
        rotation: Some(Rotation { base: BASE, position_scale: POSITION_SCALE, rotary_dim: case.rotary }),
    })?;
    let operation = Operation::from(op);
    if let (Err(error), false) = (run.executor().plan(&operation), run.device.is_cpu()) {
        // A device that has no kernel for it says so, and computes nothing.
        expect_error(run.executor().run(&operation, run.stream.raw()), Status::Unsupported, &["rotates", "one pass"])?;
        return match error.advice.contains("nvb_rope") {
            true => Ok(()),
            false => Err(Error::invalid(format!("the advice {:?} does not name nvb_rope", error.advice)).into()),
        };
    }
    // Twice: the second appends the same again.
    for _ in 0..2 {
        run.executor().run(&operation, run.stream.raw())?;
    }
    run.stream.synchronize()?;

    // The formulas.
    let head = |token: usize, head: usize| &values[(token * width + head) * dim..][..dim];
    let weight = |place: usize| norms[place].as_ref().map(|norm| norm.1.as_slice());
    let mut reference = Vec::new();
    for (token, &position) in case.positions.iter().enumerate() {
        if position != EMPTY_ROW {
            let keys = &mut keys[token];
            keys.length += 1;
            for kv_head in 0..kv_heads {
                keys.key.extend(rotated(case, head(token, query_heads + kv_head), weight(1), position, 1.0));
                keys.value.extend(head(token, query_heads + kv_heads + kv_head));
            }
        }
        for query_head in 0..query_heads {
            let query = rotated(case, head(token, query_head), weight(0), position.max(0), case.query_scale as f64);
            reference.push(attend(&config, &query, query_head, &keys[token], position.into()));
        }
    }
    expect_attention(run, case.dtype, &output, Some(&lse), &reference)?;
    // The cache has what was there, and the new keys and values.
    let capacity = longest + 9;
    for (name, tensor, is_key) in
        [("cached keys", key_tensor(&layer), true), ("cached values", value_tensor(&layer), false)]
    {
        let mut expected = vec![f64::NAN; (count + 2) * kv_heads * capacity * dim];
        for (keys, &sequence) in keys.iter().zip(&order) {
            let rows = if is_key { &keys.key } else { &keys.value };
            for (i, row) in rows.chunks(dim).enumerate() {
                let (token, head) = (i / kv_heads, i % kv_heads);
                expected[((sequence * kv_heads + head) * capacity + token) * dim..][..dim].copy_from_slice(row);
            }
        }
        run.expect_within(name, &tensor, &expected, bound(case.dtype) * 4.0)?;
    }
    if !run.device.is_cpu() {
        return Ok(());
    }
    // The same bits as two calls leave.
    let bits = |run: &Run| -> Result<Vec<Vec<u64>>, nvbackend::error::Error> {
        let tensors = [output, lse, key_tensor(&layer), value_tensor(&layer)];
        tensors.iter().map(|tensor| Ok(run.read(tensor)?.into_iter().map(f64::to_bits).collect())).collect()
    };
    let fused = bits(run)?;
    let between = run.output(case.dtype, &[count, query_heads, dim], PLAIN)?;
    let query = nvbackend::tensor::Heads::new("between", between, count, dim)?;
    let Some((rope, attention)) = op.separate(query) else { return Err("it has no two parts".to_owned().into()) };
    for operation in [Operation::from(rope), attention.into()] {
        run.executor().run(&operation, run.stream.raw())?;
    }
    match fused == bits(run)? {
        true => Ok(()),
        false => Err("two calls leave other bits".to_owned().into()),
    }
}

#[test]
fn shapes_and_dtypes() {
    let mut cases = Vec::new();
    for dtype in DType::FLOATS {
        for norm in [None, Some(DType::F32), Some(dtype)] {
            for layout in [PLAIN, PITCHED, UNALIGNED] {
                cases.push(Case { dtype, norm, layout, output: dtype, ..case() });
            }
        }
        for (dim, rotary) in
            [(1, 0), (2, 2), (40, 20), (64, 32), (80, 80), (128, 128), (256, 256), (256, 64), (512, 512)]
        {
            cases.push(Case { dtype, dim, rotary, ..case() });
        }
        for heads in [(1, 1), (3, 1), (4, 1), (8, 1), (16, 8), (7, 7)] {
            cases.push(Case { dtype, heads, dim: 128, rotary: 128, ..case() });
        }
    }
    check("attention_decode with rope", &cases, test);
}

#[test]
fn lengths_and_windows() {
    let mut cases = Vec::new();
    for position in [0, 1, 7, 8, 47, 48, 63, 64, 383, 384, 511, 512, 1000, 1535] {
        for (heads, dim) in [((4, 1), 256), ((4, 2), 64)] {
            let one = Case { positions: vec![position], heads, dim, rotary: dim, ..case() };
            cases.push(Case { max_kv_length: position as usize + 1, ..one.clone() });
            cases.push(Case { positions: vec![position, 3, EMPTY_ROW], ..one.clone() });
            cases.push(Case { window: 33, soft_cap: 3.0, query_scale: 0.25, ..one });
        }
    }
    cases.push(Case { positions: vec![], ..case() });
    cases.push(Case { positions: vec![EMPTY_ROW, EMPTY_ROW], ..case() });
    cases.push(Case { positions: (0..64).collect(), heads: (2, 1), ..case() });
    check("attention_decode with rope", &cases, test);
}

#[test]
fn what_cannot_be_is_refused() {
    check("attention_decode with rope", &[()], |run, ()| {
        let case = Case { dtype: DType::F32, norm: None, ..case() };
        let config = config(&case)?;
        let cache = filled_cache(run, &config, DType::F32, 3, 9, &[])?;
        let layer = cache.layer(1)?;
        let row = run.output(DType::F32, &[2, 8, 64], PLAIN)?;
        let output = run.output(DType::F32, &[2, 4, 64], PLAIN)?;
        let positions = run.integers(&[0, 1])?;
        let sequences = run.integers(&[0, 1])?;
        let decode = |layer: CacheLayer, per_sequence: usize, sequences: Option<Tensor>| {
            let rows = nvbackend::operation::attention::DecodeRows { per_sequence, ..one_row(positions, sequences, 0) };
            AttentionDecode::new(config, part(&row, 0, 4), layer, output, None, rows)
        };
        let arguments = DecodeRopeArguments {
            key: part(&row, 4, 2),
            value: part(&row, 6, 2),
            query_norm: None,
            key_norm: None,
            query_scale: 1.0,
            epsilon: 1e-6,
            weight_offset: 0.0,
            rotation: Some(Rotation { base: BASE, position_scale: 1.0, rotary_dim: 64 }),
        };
        let two_rows = run.integers(&[0])?;
        let refused = |op: AttentionDecode, arguments: DecodeRopeArguments, words: &[&str]| {
            expect_error(op.with_rope(arguments), Status::InvalidArgument, words)
        };
        let op = decode(layer, 1, Some(sequences))?;
        op.with_rope(arguments)?;
        refused(decode(layer, 2, Some(two_rows))?, arguments, &["rows_per_sequence is 2"])?;
        refused(decode(layer, 1, None)?, arguments, &["`sequences` is needed"])?;
        refused(op, DecodeRopeArguments { key: part(&row, 4, 1), ..arguments }, &["`key` has 1 heads"])?;
        refused(op, DecodeRopeArguments { value: part(&row, 4, 3), ..arguments }, &["`value` has 3 heads"])?;
        refused(op, DecodeRopeArguments { query_scale: f32::NAN, ..arguments }, &["query_scale is NaN"])?;
        let rotation = Some(Rotation { base: BASE, position_scale: 1.0, rotary_dim: 66 });
        refused(op, DecodeRopeArguments { rotation, ..arguments }, &["rotary_dim is 66"])?;
        let norm = run.output(DType::F32, &[32], PLAIN)?;
        refused(op, DecodeRopeArguments { key_norm: Some(norm), ..arguments }, &["key_norm"])?;
        // A position outside the cache appends nothing and is named on the CPU.
        if run.device.is_cpu() {
            let far = run.integers(&[0, 9])?;
            let rows = one_row(far, Some(sequences), 0);
            let op = AttentionDecode::new(config, part(&row, 0, 4), layer, output, None, rows)?.with_rope(arguments)?;
            let outcome = run.executor().run(&op.into(), run.stream.raw());
            expect_error(outcome, Status::InvalidArgument, &["token 1", "position 9"])?;
            if run.read(&key_tensor(&layer))?.iter().any(|value| !value.is_nan()) {
                return Err("something was appended".to_owned().into());
            }
        }
        Ok(())
    });
}
