//! `grouped_linear`: each token's product with the weight of its expert, over every encoding.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::{encode, FLOATS};
use crate::random::Random;
use crate::run::{check, expect_error, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::{formats, values_of};
use nvbackend::error::Status;
use nvbackend::ops::grouped_linear::GroupedLinear;
use nvbackend::ops::Activation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, Format, Granularity, Source, Weight};

#[derive(Debug, Clone, Copy)]
struct Case {
    /// None: floats of the input's dtype.
    format: Option<Format>,
    counts: [usize; 4],
    /// Tokens behind the last expert's.
    rest: usize,
    n: usize,
    k: usize,
    input: DType,
    output: DType,
    bias: bool,
    activation: Activation,
    gated: bool,
    layout: Layout,
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { n, k, gated, activation, layout, .. } = case;
    let experts = case.counts.len();
    let scale = 1.0 / (k as f64).sqrt();
    let float = if case.format.is_none() { case.input } else { DType::F32 };
    let parts = 1 + usize::from(gated);
    let mut host: Vec<Vec<u8>> =
        (0..parts).map(|_| encode(float, &run.random.normals(experts * n * k, scale))).collect();
    let tensors: Vec<Tensor> =
        host.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), float, &[experts * n, k])).collect();
    let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
    let memory = run.device.backend.memory();
    let weight = Weight::new(memory, &tensors, arrangement, Source::Host, case.format, run.stream)?;
    let w = values_of(run, &weight, PLAIN)?;

    let mut offsets = vec![0];
    for count in case.counts {
        offsets.push(offsets[offsets.len() - 1] + count as i32);
    }
    let routed = offsets[experts] as usize;
    let rows = routed + case.rest;
    let x = rounded(case.input, &run.random.normals(rows * k, 1.0));
    let input = run.tensor(case.input, &[rows, k], layout, &x)?;
    let bias = match case.bias {
        true => Some(run.normal(DType::Bf16, &[weight.view().rows], layout, 1.0)?),
        false => None,
    };
    let output = run.output(case.output, &[rows, n], layout)?;
    let offset_tensor = run.integers(&offsets)?;

    let (mut reference, mut most, mut terms) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..routed {
        let expert = offsets.iter().rposition(|&first| first as usize <= row).expect("the first offset is 0");
        for column in 0..n {
            let first = expert * n * parts + if gated { 2 * column } else { column };
            let products = |n: usize| x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w);
            let product = |n: usize| products(n).sum::<f64>() + bias.as_ref().map_or(0.0, |(_, bias)| bias[n]);
            let (gate, up) = (product(first), if gated { product(first + 1) } else { 1.0 });
            reference.push(activate(activation, gate) * up);
            most.push(gate * up);
            terms.push(products(first).map(f64::abs).sum::<f64>() * up.abs());
        }
    }
    let bias_tensor = bias.as_ref().map(|(tensor, _)| *tensor);
    let op = GroupedLinear::new(input, offset_tensor, weight.view(), bias_tensor, activation, output)?;
    run.executor().grouped_linear(&op, run.stream.raw())?;
    let mut written = output;
    written.shape[0] = routed;
    if activation == Activation::None && !gated {
        run.expect_summed("output", &written, &reference, &terms)?;
    } else {
        run.expect_activated("output", &written, &reference, &most)?;
    }
    // What has no expert is as poisoned as it was.
    let all = run.read(&output)?;
    match all[routed * n..].iter().all(|value| value.is_nan()) {
        true => Ok(()),
        false => Err("a token without an expert was written".to_string().into()),
    }
}

#[test]
fn every_format() {
    let mut random = Random::new("grouped linear cases");
    let mut cases = Vec::new();
    let all = formats().into_iter().filter(|format| !format.clipping).map(Some);
    let floats = std::iter::repeat_n(None, 12);
    let counts = [[1, 0, 2, 1], [0, 0, 0, 0], [5, 70, 0, 3], [64, 64, 1, 65], [0, 0, 9, 0], [8, 1, 17, 2]];
    for format in all.chain(floats) {
        for counts in counts {
            let blocks = format.is_some_and(|format| matches!(format.granularity, Granularity::Blocks));
            let (n, k) = if blocks {
                (128, 256)
            } else {
                random.choose(&[(7, 33), (16, 64), (33, 136), (72, 320), (80, 192), (160, 576)])
            };
            let case = Case {
                format,
                counts,
                rest: random.choose(&[0, 3]),
                n,
                k,
                input: random.choose(&FLOATS),
                output: random.choose(&FLOATS),
                bias: random.flip(),
                activation: random.choose(&ACTIVATIONS),
                gated: random.flip(),
                layout: random.choose(&[PLAIN, PLAIN, UNALIGNED, PITCHED]),
            };
            cases.push(case);
        }
    }
    check("grouped linear", &cases, test);
}

/// Offsets that no routing gives are named on the CPU; a GPU never reads or writes past the tensors.
#[test]
fn wrong_offsets() {
    let cases = [[0, 4, 2, 4], [0, 1, 2, 9], [1, 2, 3, 4], [0, -3, 2, 4]];
    check("grouped linear", &cases, |run, offsets| {
        let mut host = encode(DType::F32, &run.random.normals(3 * 4 * 8, 1.0));
        let part = Tensor::new(host.as_mut_ptr().cast(), DType::F32, &[12, 8]);
        let memory = run.device.backend.memory();
        let weight = Weight::new(memory, &[part], Arrangement::Stacked, Source::Host, None, run.stream)?;
        let (input, _) = run.normal(DType::F32, &[4, 8], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[4, 4], PLAIN)?;
        let offset_tensor = run.integers(offsets)?;
        let op = GroupedLinear::new(input, offset_tensor, weight.view(), None, Activation::None, output)?;
        let outcome = run.executor().grouped_linear(&op, run.stream.raw());
        if run.device.is_cpu() {
            return expect_error(outcome, Status::InvalidArgument, &["offsets[", "4 rows"]);
        }
        outcome?;
        Ok(run.stream.synchronize()?)
    });
}
