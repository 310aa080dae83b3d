//! `grouped_linear`: each token's product with the weight of its expert, over every encoding.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::{encode, FLOATS};
use crate::random::Random;
use crate::run::{check, expect_error, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::{formats, values_of};
use nvbackend::error::Status;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::grouped_linear::{GroupedLinear, Routing};
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, Format, Granularity};

#[derive(Debug, Clone, Copy)]
struct Case {
    /// None: floats of the input's dtype.
    format: Option<Format>,
    counts: &'static [usize],
    /// Tokens behind the last expert's.
    rest: usize,
    /// A token and a row of W, the first of the third expert's, have a NaN, and no other.
    nan: bool,
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
    let values = |run: &mut Run, rows: usize, scale: f64, nan: usize| {
        let mut values = run.random.normals(rows * k, scale);
        if case.nan {
            values[nan * k + k / 2] = f64::NAN;
        }
        values
    };
    let mut host: Vec<Vec<u8>> = (0..parts).map(|_| encode(float, &values(run, experts * n, scale, 2 * n))).collect();
    let tensors: Vec<Tensor> =
        host.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), float, &[experts * n, k])).collect();
    let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
    let memory = run.device.backend.memory();
    let weight = Weight::new(memory, &tensors, arrangement, Source::Host, case.format, run.stream)?;
    let w = values_of(run, &weight, PLAIN)?;

    let mut offsets = vec![0];
    for count in case.counts {
        offsets.push(offsets[offsets.len() - 1] + *count as i32);
    }
    let routed = offsets[experts] as usize;
    let rows = routed + case.rest;
    let x = rounded(case.input, &values(run, rows, 1.0, routed / 2));
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
    let op = GroupedLinear::new(
        input,
        (Routing::Offsets(offset_tensor), 0),
        weight.view(),
        bias_tensor,
        activation,
        output,
    )?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
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
    let counts: [&[usize]; 6] =
        [&[1, 0, 2, 1], &[0, 0, 0, 0], &[5, 70, 0, 3], &[64, 64, 1, 65], &[0, 0, 9, 0], &[8, 1, 17, 2]];
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
                nan: false,
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

/// The tiles of float weights on tensor cores, which grow with the tokens that an expert has on the average: 8 of them up to
/// 2 tokens, 32 up to 16, 64 up to 48, 128 up to 160, then 256.
const TILES: [&[usize]; 16] = [
    &[1, 1, 1, 1, 1, 1, 1, 1],
    &[0, 8, 0, 0],
    &[9, 0, 7, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    &[9, 0, 0, 0],
    &[31, 32, 0, 1],
    &[33, 0, 15, 16],
    &[65, 0, 0, 0],
    &[63, 64, 65, 0],
    &[129, 0, 7, 56],
    &[193, 0, 0, 0],
    &[127, 128, 129, 1],
    &[0, 383, 257, 0],
    &[641, 0, 0, 0],
    &[256, 255, 257, 3],
    &[0, 0, 512, 513],
    &[1000],
];

#[test]
fn float_tiles() {
    let mut cases = Vec::new();
    // One group of eight rows; k of less than a stage, of many rounds of a ring, of an odd number of blocks; n of no group.
    for (i, counts) in TILES.into_iter().enumerate() {
        for (j, (n, k)) in [(8, 64), (40, 192), (136, 1088), (264, 320), (36, 128)].into_iter().enumerate() {
            let case = Case {
                format: None,
                counts,
                rest: [0, 3][(i + j) % 2],
                nan: j == 3 && counts.len() > 2,
                n,
                k,
                input: [DType::Bf16, DType::F16][(i + j) % 2],
                output: FLOATS[(i + j) % 3],
                bias: j % 2 == 0,
                activation: if j == 3 { Activation::None } else { ACTIVATIONS[(i / 2 + j) % 4] },
                gated: (i + j / 2) % 2 == 0,
                layout: [PLAIN, PITCHED, PLAIN, PLAIN, UNALIGNED][(i + j) % 5],
            };
            cases.push(case);
        }
    }
    // More rows of W than the blocks of a GPU take at a time, whose shares begin and end inside of experts.
    let many: [(&[usize], usize); 7] = [
        (&[1, 1, 0, 1, 2, 1, 1, 1], 1544),
        (&[1, 1, 1, 1, 3, 1, 1, 1], 4104),
        (&[16, 1, 20, 9], 1544),
        (&[33, 64, 0, 30], 4104),
        (&[65, 0, 96, 16], 1544),
        (&[129, 1, 130, 140], 4104),
        (&[513, 3, 200, 1], 4104),
    ];
    for (i, (counts, n)) in many.into_iter().enumerate() {
        for input in [DType::Bf16, DType::F16] {
            let case = Case {
                format: None,
                counts,
                rest: 0,
                nan: false,
                n,
                k: 64,
                input,
                output: input,
                bias: true,
                activation: Activation::Silu,
                gated: i % 2 == 1,
                layout: PLAIN,
            };
            cases.push(case);
        }
    }
    check("grouped linear", &cases, test);
}

/// Offsets that no routing gives are named on the CPU; a GPU never reads or writes past the tensors.
#[test]
fn wrong_offsets() {
    let offsets = [[0, 4, 2, 4], [0, 1, 2, 9], [1, 2, 3, 4], [0, -3, 2, 4], [i32::MIN, i32::MAX, i32::MIN, 4]];
    // Products without tensor cores and with them.
    let products = [(DType::F32, 4, 8), (DType::Bf16, 8, 64)];
    let cases: Vec<_> = offsets.into_iter().flat_map(|offsets| products.map(|product| (offsets, product))).collect();
    check("grouped linear", &cases, |run, &(offsets, (dtype, n, k))| {
        let mut host = encode(dtype, &run.random.normals(3 * n * k, 1.0));
        let part = Tensor::new(host.as_mut_ptr().cast(), dtype, &[3 * n, k]);
        let memory = run.device.backend.memory();
        let weight = Weight::new(memory, &[part], Arrangement::Stacked, Source::Host, None, run.stream)?;
        let (input, _) = run.normal(dtype, &[4, k], PLAIN, 1.0)?;
        let output = run.output(dtype, &[4, n], PLAIN)?;
        let offset_tensor = run.integers(&offsets)?;
        let op = GroupedLinear::new(
            input,
            (Routing::Offsets(offset_tensor), 0),
            weight.view(),
            None,
            Activation::None,
            output,
        )?;
        let outcome = run.executor().run(&Operation::from(op), run.stream.raw());
        if run.device.is_cpu() {
            return expect_error(outcome, Status::InvalidArgument, &["expert_offsets[", "4 rows"]);
        }
        outcome?;
        Ok(run.stream.synchronize()?)
    });
}
