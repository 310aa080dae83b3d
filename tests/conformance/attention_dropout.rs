//! Dropout of a prefill's weights: which of them are dropped, place by place, and what is left beside the formula.

use crate::attention_cases::{attend, Keys};
use crate::run::{check, expect_error, Outcome, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::operation::attention::{philox, AttentionConfig, AttentionPrefill, Dropout, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone)]
struct Case {
    /// Query rows and keys of each sequence.
    sequences: Vec<(usize, usize)>,
    heads: (usize, usize),
    probability: f32,
    seed: u64,
    offset: u64,
    /// What device memory adds to it.
    added: Option<u64>,
    causal: bool,
    window: usize,
}

fn cases() -> Vec<Case> {
    let case = Case {
        sequences: vec![(19, 19), (33, 120), (1, 1), (0, 5), (70, 128)],
        heads: (4, 2),
        probability: 0.3,
        seed: 0x1234_5678_9abc_def0,
        offset: 0,
        added: None,
        causal: true,
        window: 0,
    };
    vec![
        Case { probability: 0.9, ..case.clone() },
        Case { probability: 1e-3, ..case.clone() },
        Case { causal: false, ..case.clone() },
        // Tiles that begin at any key.
        Case { window: 21, ..case.clone() },
        Case { window: 3, causal: false, ..case.clone() },
        Case { offset: (1 << 48) - 1, ..case.clone() },
        Case { offset: 5, added: Some(0), ..case.clone() },
        Case { offset: 1 << 33, added: Some((1 << 40) + 7), seed: 1, ..case.clone() },
        Case { heads: (6, 1), ..case.clone() },
        case,
    ]
}

/// Whether the weight stays, by the header's formula.
fn is_kept(case: &Case, row: usize, head: usize, key: usize) -> bool {
    let offset = (case.offset + case.added.unwrap_or(0)) % (1 << 48);
    let counter = [
        key as u32 / 64 * 4 + key as u32 % 8 / 2,
        row as u32,
        head as u32 | ((offset >> 32) as u32) << 16,
        offset as u32,
    ];
    let byte = key % 64 / 8 * 2 + key % 2;
    let word = philox::<7>(counter, [case.seed as u32, (case.seed >> 32) as u32])[byte / 4];
    (word >> (byte % 4 * 8)) & 0xff >= threshold(case)
}

/// Of 256.
fn threshold(case: &Case) -> u32 {
    ((case.probability * 256.0).round() as u32).clamp(1, 255)
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (heads, kv_heads, dim) = (case.heads.0, case.heads.1, 128);
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: heads,
        kv_heads,
        head_dim: dim,
        window: case.window,
        causal: case.causal,
        ..AttentionConfig::default()
    })?;
    // The value of key k is the k-th unit vector, so that an output is its row's weights.
    let keys: Vec<Keys> = case
        .sequences
        .iter()
        .map(|&(_, length)| {
            let unit = |at: usize| if at % dim == at / dim / kv_heads { 1.0 } else { 0.0 };
            let keys = Keys::new(run, &config, DType::F32, length);
            Keys { value: (0..length * kv_heads * dim).map(unit).collect(), ..keys }
        })
        .collect();
    let (mut starts, mut key_starts) = (vec![0i32], vec![0i32]);
    for &(rows, length) in &case.sequences {
        starts.push(starts[starts.len() - 1] + rows as i32);
        key_starts.push(key_starts[key_starts.len() - 1] + length as i32);
    }
    let (rows, total) = (starts[keys.len()] as usize, key_starts[keys.len()] as usize);
    let joined = |of: fn(&Keys) -> &Vec<f64>| keys.iter().flat_map(|keys| of(keys).clone()).collect::<Vec<f64>>();
    let key = run.tensor(DType::F32, &[total, kv_heads, dim], PLAIN, &joined(|keys| &keys.key))?;
    let value = run.tensor(DType::F32, &[total, kv_heads, dim], PLAIN, &joined(|keys| &keys.value))?;
    let (query, queries) = run.normal(DType::F32, &[rows, heads, dim], PLAIN, 1.0)?;
    let output = run.output(DType::F32, &[rows, heads, dim], PLAIN)?;
    let lse = run.output(DType::F32, &[rows, heads], PLAIN)?;
    let added = match case.added {
        Some(added) => Some(run.integers(&[added as u32 as i32, (added >> 32) as i32])?),
        None => None,
    };
    let dropout = Dropout::new(case.probability, case.seed, case.offset, added, heads)?;
    let source = KeySource::Tensors { key, value, key_starts: &key_starts };
    let op = AttentionPrefill::new(config, query, &starts, source, output, Some(lse))?.with_dropout(dropout)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    run.stream.synchronize()?;
    let (found, sums) = (run.read(&output)?, run.read(&lse)?);
    let scale = 256.0 / f64::from(256 - threshold(case));
    let (mut kept, mut all) = (0usize, 0usize);
    for (sequence, (&(count, length), keys)) in case.sequences.iter().zip(&keys).enumerate() {
        for (row, head) in (0..count).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let place = starts[sequence] as usize + row;
            let at = (place * heads + head) * dim;
            let position = (length + row) as i64 - count as i64;
            let (weights, sum) = attend(&config, &queries[at..][..dim], head, keys, position);
            let what = format!("row {row} of sequence {sequence}, head {head}");
            if (sums[place * heads + head] - sum).abs() > 1e-5 * (2.0 + sum.abs()) {
                return Err(format!("{what}: the lse is {}; {sum} is expected", sums[place * heads + head]).into());
            }
            for k in 0..dim {
                let stays = weights[k] > 0.0 && is_kept(case, place, head, k);
                (kept, all) = (kept + usize::from(stays), all + usize::from(weights[k] > 0.0));
                let expected = if stays { weights[k] * scale } else { 0.0 };
                // A weight that is dropped is 0, and one that is not is none.
                let is_right = if stays {
                    (found[at + k] - expected).abs() <= 1e-5 * expected + 1e-9
                } else {
                    found[at + k] == 0.0
                };
                if !is_right {
                    return Err(format!("{what}, key {k}: {}; {expected} is expected", found[at + k]).into());
                }
            }
        }
    }
    let (share, expected) = (kept as f64 / all as f64, 1.0 / scale);
    let deviation = (expected * (1.0 - expected) / all as f64).sqrt();
    if (share - expected).abs() > 4.0 * deviation {
        return Err(format!("a share of {share} is kept; {expected} ± {deviation} is expected").into());
    }
    Ok(())
}

#[test]
fn weights_are_dropped_by_their_place() {
    check("dropout of attention", &cases(), test);
}

/// What lies in device memory when the work runs counts, not what lay there when it was made.
#[test]
fn the_offset_is_read_when_the_work_runs() {
    check("the offset of dropout", &[()], |run, ()| {
        let config =
            AttentionConfig::new(AttentionConfig { head_dim: 8, causal: false, ..AttentionConfig::default() })?;
        let of =
            |run: &mut Run, rows: usize| run.normal(DType::F32, &[rows, 1, 8], PLAIN, 1.0).map(|(tensor, _)| tensor);
        let (query, key, value) = (of(run, 40)?, of(run, 64)?, of(run, 64)?);
        let output = run.output(DType::F32, &[40, 1, 8], PLAIN)?;
        let offset = run.integers(&[0, 0])?;
        run.allow_write(&offset);
        let new = || {
            let source = KeySource::Tensors { key, value, key_starts: &[0, 64] };
            AttentionPrefill::new(config, query, &[0, 40], source, output, None)
        };
        let op = new()?.with_dropout(Dropout::new(0.5, 3, 0, Some(offset), 1)?)?;
        let op = Operation::from(op);
        let mut outputs = Vec::new();
        for added in [0.0, 1.0, 0.0] {
            run.write(&offset, &[added, 0.0])?;
            run.executor().run(&op, run.stream.raw())?;
            run.stream.synchronize()?;
            outputs.push(run.read(&output)?);
        }
        if outputs[0] == outputs[1] || outputs[0] != outputs[2] {
            return Err("the offset in device memory does not decide alone".to_string().into());
        }
        // What is refused.
        let invalid = Status::InvalidArgument;
        let of_memory = |tensor: Tensor| Dropout::new(0.5, 3, 0, Some(tensor), 1);
        expect_error(of_memory(run.integers(&[0])?), invalid, &["dropout_device_offset", "[1]", "[2]"])?;
        expect_error(of_memory(query), invalid, &["dropout_device_offset", "f32", "i32"])?;
        let inside = Tensor::new(output.data, DType::I32, &[2]);
        let overlapping = new()?.with_dropout(of_memory(inside)?);
        expect_error(overlapping, invalid, &["output", "dropout_device_offset"])
    });
}
