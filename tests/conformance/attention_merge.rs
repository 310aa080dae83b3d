//! `attention_merge`: the attention over all keys from parts' outputs and lse, called as an engine calls it.

use crate::attention_cases::{attend, expect_attention, Keys};
use crate::compare::{bound, FLOATS};
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PLAIN};
use nvbackend::capi::attention_merge::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::operation::attention::AttentionConfig;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    Normal,
    /// Every second part, and all of the first head's, have seen no key; their outputs hold NaN.
    Empty,
    /// Sums of weights that f32 alone would not hold.
    Huge,
    /// NaN in a part of the first head.
    Nan,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    parts: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    dtypes: [DType; 2],
    /// Elements between rows of heads, between tokens and between parts, beyond their own.
    padding: [usize; 3],
    lse: bool,
    content: Content,
}

const CASE: Case = Case {
    parts: 3,
    tokens: 5,
    heads: 3,
    dim: 64,
    dtypes: [DType::F32; 2],
    padding: [0; 3],
    lse: true,
    content: Content::Normal,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { parts, tokens, heads, dim, dtypes: [input_dtype, output_dtype], padding, .. } = case;
    let rows = tokens * heads;
    let mut values = rounded(input_dtype, &run.random.normals(parts * rows * dim, 1.0));
    let spread = if case.content == Content::Huge { 3000.0 } else { 3.0 };
    let mut sums = rounded(DType::F32, &run.random.normals(parts * rows, spread));
    for (i, sum) in sums.iter_mut().enumerate() {
        let (part, head) = (i / rows, i % heads);
        match case.content {
            Content::Empty if head == 0 || part % 2 == 1 => {
                *sum = f64::NEG_INFINITY;
                values[i * dim..][..dim].fill(f64::NAN);
            }
            Content::Nan if head == 0 && part == parts / 2 => *sum = f64::NAN,
            _ => {}
        }
    }
    let head_stride = dim + padding[0];
    let token_stride = heads * head_stride + padding[1];
    let part_stride = tokens * token_stride + padding[2];
    let strides = [part_stride, token_stride, head_stride, 1];
    let shape = [parts, tokens, heads, dim];
    let outputs = run.strided(input_dtype, &shape, &strides, padding[0], parts * part_stride, Some(&values))?;
    let lses = run.tensor(DType::F32, &shape[..3], PLAIN, &sums)?;
    let output = run.strided(output_dtype, &shape[1..], &strides[1..], padding[1], tokens * token_stride, None)?;
    run.allow_write(&output);
    let lse = if case.lse { Some(run.output(DType::F32, &[tokens, heads], PLAIN)?) } else { None };
    let mut args: nvb_attention_merge_args = init();
    args.outputs = c_tensor(&outputs);
    args.lses = c_tensor(&lses);
    args.output = c_tensor(&output);
    if let Some(lse) = &lse {
        args.lse = c_tensor(lse);
    }
    // SAFETY: the tensors are the device's, and live until the stream has passed.
    run.call(|backend, stream| unsafe { nvb_attention_merge(backend, &args, stream) })?;

    let (mut reference, mut joint) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let sum = |part: usize| sums[part * rows + row];
        let most =
            (0..parts).map(sum).fold(f64::NEG_INFINITY, |most, sum| if sum.is_nan() { sum } else { most.max(sum) });
        let seen: Vec<usize> = (0..parts).filter(|&part| sum(part) != f64::NEG_INFINITY).collect();
        let weight =
            |part: usize| if most.is_nan() || sum(part).is_nan() { f64::NAN } else { (sum(part) - most).exp() };
        let total: f64 = seen.iter().map(|&part| weight(part)).sum();
        for column in 0..dim {
            let value = |part: usize| values[(part * rows + row) * dim + column];
            reference.push(seen.iter().map(|&part| weight(part) / total * value(part)).sum());
        }
        joint.push(if seen.is_empty() { f64::NEG_INFINITY } else { most + total.ln() });
    }
    run.stream.synchronize()?;
    let limit = bound(input_dtype).max(bound(output_dtype));
    run.expect_rows("output", &output, &reference, limit, dim)?;
    let Some(lse) = lse else { return Ok(()) };
    for (i, (out, expected)) in run.read(&lse)?.into_iter().zip(joint).enumerate() {
        let near = out == expected || (out - expected).abs() <= 1e-5 * (1.0 + expected.abs());
        if !(near || out.is_nan() && expected.is_nan()) {
            return Err(format!("lse[{i}] is {out}; {expected} is expected").into());
        }
    }
    Ok(())
}

#[test]
fn dtypes_and_strides() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for output in FLOATS {
            for padding in [[0; 3], [8, 0, 0], [1, 3, 5], [0, 16, 64]] {
                cases.push(Case { dtypes: [input, output], padding, ..CASE });
                cases.push(Case { dtypes: [input, output], padding, dim: 33, lse: false, ..CASE });
            }
        }
    }
    check("attention_merge", &cases, test);
}

#[test]
fn shapes_and_contents() {
    let mut cases = Vec::new();
    for parts in [1, 2, 31, 32, 33, 100] {
        cases.push(Case { parts, ..CASE });
        for content in [Content::Empty, Content::Huge, Content::Nan] {
            cases.push(Case { parts, content, dtypes: [DType::Bf16, DType::F32], ..CASE });
        }
    }
    for dim in [1, 2, 8, 40, 127, 128, 256, 320, 512] {
        cases.push(Case { dim, ..CASE });
        cases.push(Case { dim, dtypes: [DType::F16; 2], ..CASE });
    }
    for (tokens, heads) in [(0, 4), (1, 1), (1, 128), (700, 2), (4, 0)] {
        cases.push(Case { tokens, heads, ..CASE });
    }
    check("attention_merge", &cases, test);
}

/// Parts of the keys that are attended to apart and merged are the attention over all of them.
#[test]
fn a_merge_of_parts_is_the_attention_over_all_keys() {
    check("attention_merge of attention", &[[1, 80, 19], [100, 0, 0], [3, 4, 5]], |run, lengths| {
        let config = AttentionConfig::new(AttentionConfig {
            query_heads: 4,
            kv_heads: 2,
            head_dim: 48,
            value_dim: 0,
            scale: 0.0,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            chunk: 0,
            sink_tokens: 0,
        })?;
        let length: usize = lengths.iter().sum();
        let keys = Keys::new(run, &config, DType::F32, length);
        let row = config.kv_heads * config.head_dim;
        let query = run.random.normals(4 * 48, 1.0);
        let (mut values, mut sums, mut begin) = (Vec::new(), Vec::new(), 0);
        for &count in lengths {
            let of = |all: &[f64]| all[begin * row..(begin + count) * row].to_vec();
            let part = Keys { length: count, key: of(&keys.key), value: of(&keys.value) };
            for head in 0..4 {
                let (output, lse) = attend(&config, &query[head * 48..][..48], head, &part, length as i64);
                values.extend(output);
                sums.push(lse);
            }
            begin += count;
        }
        let outputs = run.tensor(DType::F32, &[3, 1, 4, 48], PLAIN, &values)?;
        let lses = run.tensor(DType::F32, &[3, 1, 4], PLAIN, &sums)?;
        let (output, lse) = (run.output(DType::F32, &[1, 4, 48], PLAIN)?, run.output(DType::F32, &[1, 4], PLAIN)?);
        let mut args: nvb_attention_merge_args = init();
        args.outputs = c_tensor(&outputs);
        args.lses = c_tensor(&lses);
        args.output = c_tensor(&output);
        args.lse = c_tensor(&lse);
        // SAFETY: as above.
        run.call(|backend, stream| unsafe { nvb_attention_merge(backend, &args, stream) })?;
        run.stream.synchronize()?;
        let row = |head: usize| attend(&config, &query[head * 48..][..48], head, &keys, length as i64);
        expect_attention(run, DType::F32, &output, Some(&lse), &(0..4).map(row).collect::<Vec<_>>())
    });
}

#[test]
fn what_is_refused() {
    let refuse = |run: &mut Run, shapes: [&[usize]; 4], dtypes: [DType; 2], words: &[&str]| -> Outcome {
        let [outputs, lses, output, lse] = shapes;
        let mut tensor = |dtype: DType, shape: &[usize]| -> Result<Tensor, _> { run.output(dtype, shape, PLAIN) };
        let (outputs, lses) = (tensor(dtypes[0], outputs)?, tensor(dtypes[1], lses)?);
        let (output, lse) = (tensor(DType::F32, output)?, tensor(DType::F32, lse)?);
        let mut args: nvb_attention_merge_args = init();
        args.outputs = c_tensor(&outputs);
        args.lses = c_tensor(&lses);
        args.output = c_tensor(&output);
        args.lse = c_tensor(&lse);
        // SAFETY: as above.
        let result = run.call(|backend, stream| unsafe { nvb_attention_merge(backend, &args, stream) });
        expect_error(result, Status::InvalidArgument, words)
    };
    check("attention_merge that is refused", &[()], |run, ()| {
        let good: [&[usize]; 4] = [&[2, 3, 4, 8], &[2, 3, 4], &[3, 4, 8], &[3, 4]];
        let floats = [DType::F32; 2];
        refuse(run, [&[0, 3, 4, 8], &[0, 3, 4], good[2], good[3]], floats, &["no parts"])?;
        refuse(run, [&[3, 4, 8], good[1], good[2], good[3]], floats, &["outputs", "rank 3", "4 is needed"])?;
        refuse(run, [good[0], &[2, 3, 5], good[2], good[3]], floats, &["lses", "[2, 3, 5]", "[2, 3, 4]"])?;
        refuse(run, [good[0], good[1], &[3, 4, 9], good[3]], floats, &["output", "[3, 4, 9]", "[3, 4, 8]"])?;
        refuse(run, [good[0], good[1], good[2], &[4, 3]], floats, &["lse", "[4, 3]", "[3, 4]"])?;
        refuse(run, good, [DType::I32, DType::F32], &["outputs", "i32"])?;
        refuse(run, good, [DType::F32, DType::F16], &["lses", "f16", "f32"])?;
        refuse(run, [&[1, 1, 1, 513], &[1, 1, 1], &[1, 1, 513], &[1, 1]], floats, &["513", "512"])?;
        let outputs = run.output(DType::F32, &[2, 3, 4, 8], PLAIN)?;
        let lses = run.output(DType::F32, &[2, 3, 4], PLAIN)?;
        let mut args: nvb_attention_merge_args = init();
        args.outputs = c_tensor(&outputs);
        args.lses = c_tensor(&lses);
        args.output = c_tensor(&Tensor::new(outputs.data, DType::F32, &[3, 4, 8]));
        // SAFETY: as above.
        let result = run.call(|backend, stream| unsafe { nvb_attention_merge(backend, &args, stream) });
        expect_error(result, Status::InvalidArgument, &["outputs", "output"])
    });
}
