//! `linear` and `embedding` with quantised weights: the formula over what the weight says its values are.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::{bound, encode, FLOATS};
use crate::random::Random;
use crate::run::{check, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::{formats, values_of};
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::embedding::Embedding;
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::gptq::{gptq, GptqTensors, GptqVersion};
use nvbackend::weight::grouped::FloatBytes;
use nvbackend::weight::{Arrangement, Encoding, Format, Granularity};

#[derive(Debug, Clone, Copy)]
struct Case {
    format: Format,
    m: usize,
    n: usize,
    k: usize,
    input: DType,
    output: DType,
    bias: bool,
    activation: Activation,
    gated: bool,
    layout: Layout,
    special: Option<f64>,
}

fn weight(run: &mut Run, format: Format, parts: usize, n: usize, k: usize) -> nvbackend::error::Result<Weight> {
    let scale = 1.0 / (k as f64).sqrt();
    let mut host: Vec<Vec<u8>> = (0..parts).map(|_| encode(DType::F32, &run.random.normals(n * k, scale))).collect();
    let tensors: Vec<Tensor> =
        host.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), DType::F32, &[n, k])).collect();
    let arrangement = if parts == 2 { Arrangement::Gated } else { Arrangement::Stacked };
    Weight::new(run.device.backend.memory(), &tensors, arrangement, Source::Host, Some(format), run.stream)
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { m, n, k, gated, .. } = case;
    let weight = weight(run, case.format, 1 + gated as usize, n, k)?;
    let w = values_of(run, &weight, PLAIN)?;
    let mut x = rounded(case.input, &run.random.normals(m * k, 1.0));
    if let Some(special) = case.special {
        x[k / 2] = special;
    }
    let input = run.tensor(case.input, &[m, k], case.layout, &x)?;
    let bias = match case.bias {
        true => Some(run.normal(DType::Bf16, &[weight.view().rows], case.layout, 1.0)?),
        false => None,
    };
    let output = run.output(case.output, &[m, n], case.layout)?;
    expect(run, case, &weight, &w, (input, &x), bias, output)
}

fn expect(
    run: &mut Run,
    case: &Case,
    weight: &Weight,
    w: &[f64],
    (input, x): (Tensor, &[f64]),
    bias: Option<(Tensor, Vec<f64>)>,
    output: Tensor,
) -> Outcome {
    let &Case { m, n, k, activation, gated, .. } = case;
    // With the weight's own values or rounded ones.
    let expected = |w: &[f64]| {
        let (mut reference, mut most, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..m {
            for column in 0..n {
                let product = |n: usize| {
                    let products = x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w);
                    products.sum::<f64>() + bias.as_ref().map_or(0.0, |(_, bias)| bias[n])
                };
                let first = if gated { 2 * column } else { column };
                let (gate, up) = (product(first), if gated { product(first + 1) } else { 1.0 });
                reference.push(activate(activation, gate) * up);
                most.push(gate * up);
                let products = x[row * k..][..k].iter().zip(&w[first * k..][..k]).map(|(x, w)| (x * w).abs());
                terms.push(products.filter(|term| term.is_finite()).sum::<f64>() * up.abs());
            }
        }
        (reference, most, terms)
    };
    let (reference, most, terms) = expected(w);
    let bias_tensor = bias.as_ref().map(|(tensor, _)| *tensor);
    let op = LinearProduct::new(input, weight.view(), bias_tensor, activation, output)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    if rounds_weight(run, case) {
        let bound = bound(case.input).max(bound(case.output));
        return run
            .expect_within("output", &output, &reference, bound)
            .or_else(|_| run.expect_within("output", &output, &expected(&rounded(case.input, w)).0, bound));
    }
    match activation {
        Activation::None => run.expect_summed("output", &output, &reference, &terms),
        _ => run.expect_activated("output", &output, &reference, &most),
    }
}

/// A GPU multiplies many rows, or those that its kernels for few rows cannot take, with the weight rounded to the input's
/// dtype.
fn rounds_weight(run: &Run, case: &Case) -> bool {
    let device = run.device.backend.device();
    // SFP's smallest values are no numbers of F16, so no kernel multiplies them by F16 on tensor cores.
    let multiplied = case.format.encoding != Encoding::Sfp || case.input != DType::F16;
    let tensor_cores =
        device.compute_capability >= 80 && case.k.is_multiple_of(64) && case.layout != UNALIGNED && multiplied;
    !run.device.is_cpu() && case.input != DType::F32 && case.m > if tensor_cores { 64 } else { 16 }
}

#[test]
fn every_format() {
    let mut random = Random::new("quantised linear cases");
    let mut cases = Vec::new();
    let sizes = [(1, 1), (7, 33), (16, 64), (33, 129), (130, 256), (96, 320), (64, 192)];
    for format in formats().into_iter().filter(|format| !format.clipping) {
        for m in [0, 1, 2, 5, 8, 17, 64, 70] {
            let (n, k) = random.choose(&sizes);
            let (input, output) = (random.choose(&FLOATS), random.choose(&FLOATS));
            let activation = random.choose(&ACTIVATIONS);
            let layout = random.choose(&[PLAIN, PLAIN, UNALIGNED, PITCHED]);
            let (bias, gated) = (random.flip(), random.flip());
            cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special: None });
        }
    }
    check("quantised linear", &cases, test);
}

/// Shapes at which tensor-core kernels run, with every number of rows that they are made for.
#[test]
fn aligned_shapes() {
    let mut cases = Vec::new();
    for (i, format) in formats().into_iter().filter(|format| !format.clipping).enumerate() {
        for (j, m) in [1, 2, 3, 4, 8, 9, 16, 24, 32, 33, 48, 64, 100].into_iter().enumerate() {
            let input = [DType::Bf16, DType::F16][(i + j) % 2];
            let (n, k) = [(64, 256), (48, 512), (256, 128)][(i + j) % 3];
            let activation = [Activation::None, Activation::GeluTanh][j % 2];
            let (output, gated) = ([DType::F32, input][i % 2], j % 3 == 0);
            let case =
                Case { format, m, n, k, input, output, bias: false, activation, gated, layout: PLAIN, special: None };
            cases.push(case);
        }
    }
    check("quantised linear", &cases, test);
}

/// Rows and columns from which other tensor-core kernels take over.
#[test]
fn long_and_wide_weights() {
    let shapes = [(48, 10240), (4400, 192), (6600, 128), (16500, 64)];
    let mut cases = Vec::new();
    for (i, format) in formats().into_iter().filter(|format| !format.clipping).enumerate() {
        for (j, m) in [3, 8, 13, 40].into_iter().enumerate() {
            let (n, k) = shapes[(i + j) % shapes.len()];
            let input = [DType::Bf16, DType::F16][j % 2];
            let (output, activation, layout) = (DType::F32, Activation::None, PLAIN);
            let (bias, gated, special) = (i % 2 == 0, j == 1, None);
            cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
        }
    }
    check("quantised linear", &cases, test);
}

/// Int4 weights that are large enough for kernels whose blocks keep x and let W pass by.
#[test]
fn large_int4_weights() {
    let shapes = [(9, 2570, 2048), (16, 3208, 2176), (12, 1930, 8256), (7, 14090, 2688), (3, 19210, 2112)];
    let mut cases = Vec::new();
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        for (group, zero_points) in [(32, true), (128, true), (32, false), (128, false)] {
            if (i != 1 && group == 128) || (i % 2 == 0 && !zero_points) {
                continue; // the same again, or a kernel that small weights take too
            }
            let format = Format::new(Encoding::Int4, Granularity::Groups(group), zero_points, false).unwrap();
            let (input, output, activation) = ([DType::Bf16, DType::F16][i % 2], DType::F32, Activation::None);
            let (bias, gated, layout, special) = (zero_points, false, PLAIN, None);
            cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
        }
    }
    check("quantised linear", &cases, test);
}

/// Shapes of the rows of the tables in csrc/linear/sm90/linear_quantized_choices.h that no other case reaches.
#[test]
fn divisions_of_few_rows() {
    let int4 = [
        (3, 40, 5824),
        (4, 50, 9280),
        (8, 70, 9280),
        (7, 33, 18240),
        (16, 40, 2368),
        (13, 45, 3008),
        (11, 30, 4672),
        (12, 60, 9216),
        (10, 33, 18240),
        (2, 4600, 3520),
        (6, 4600, 5824),
    ];
    let offsets = [
        (3, 4600, 4672),
        (8, 4600, 2880),
        (5, 40, 12160),
        (9, 50, 4672),
        (16, 40, 7616),
        (12, 4600, 1152),
        (15, 70, 9280),
        (9, 70, 18240),
        (16, 33, 18240),
        (13, 4600, 9216),
        (16, 4600, 8192),
    ];
    let bytes = [(1, 40, 4672), (3, 1400, 4672), (7, 40, 5312), (8, 1200, 7616), (9, 50, 3520), (16, 1200, 5248)];
    let int4 = int4.map(|shape| (shape, Encoding::Int4, Granularity::Groups(32), false));
    let offsets = offsets.map(|shape| (shape, Encoding::Int4, Granularity::Groups(64), true));
    let int8 = bytes.map(|shape| (shape, Encoding::Int8, Granularity::Rows, false));
    let fp8 = bytes.map(|shape| (shape, Encoding::Fp8E4m3, Granularity::Rows, false));
    let sfp = bytes.map(|shape| (shape, Encoding::Sfp, Granularity::Tensor, false));
    let mut cases = Vec::new();
    for (i, ((m, n, k), encoding, granularity, zero_points)) in
        int4.into_iter().chain(offsets).chain(int8).chain(fp8).chain(sfp).enumerate()
    {
        let format = Format::new(encoding, granularity, zero_points, false).unwrap();
        let (input, output, activation) = ([DType::Bf16, DType::F16][i % 2], DType::F32, Activation::None);
        let (bias, gated, layout, special) = (i % 3 == 0, false, PLAIN, None);
        cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
    }
    check("quantised linear", &cases, test);
}

/// Int4 weights with zero points and few rows, in both input dtypes: odd numbers of rows of W and of chunks of k, from
/// one chunk to several batches a warp, half a group at the end, and infinities.
#[test]
fn offsets_of_few_rows() {
    let shapes = [
        (1, 40, 4160),
        (2, 33, 64),
        (3, 130, 192),
        (4, 500, 2112),
        (5, 136, 1088),
        (6, 2570, 576),
        (7, 4105, 320),
        (8, 200, 10304),
    ];
    let mut cases = Vec::new();
    for (m, n, k) in shapes {
        for group in [32, 64, 128] {
            for input in [DType::Bf16, DType::F16] {
                let format = Format::new(Encoding::Int4, Granularity::Groups(group), true, false).unwrap();
                let (output, activation, layout) = (DType::F32, Activation::None, PLAIN);
                let (bias, gated) = (m == 6, m == 4);
                let special = (m == 5).then_some(f64::INFINITY);
                cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
            }
        }
    }
    check("quantised linear", &cases, test);
}

/// Int4 weights with zero points and more rows than the kernels for few take: groups that fill their stages and that do
/// not, divided and undivided, half a group at the end, every number of rows of W a block, and infinities.
#[test]
fn offsets_of_many_rows() {
    let shapes = [
        (17, 40, 4160),
        (33, 264, 2112),
        (64, 136, 1088),
        (32, 1000, 4096),
        (20, 17000, 320),
        (50, 17000, 192),
        (64, 25600, 64),
    ];
    let mut cases = Vec::new();
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        for (j, group) in [32, 64, 128].into_iter().enumerate() {
            if n > 10_000 && i % 3 != j {
                continue; // large, and the same again
            }
            let format = Format::new(Encoding::Int4, Granularity::Groups(group), true, false).unwrap();
            let (input, output, activation) = ([DType::Bf16, DType::F16][(i + j) % 2], DType::F32, Activation::None);
            let (bias, gated, layout) = (i == 2, i == 1, PLAIN);
            let special = (m == 17).then_some(f64::INFINITY);
            cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
        }
    }
    check("quantised linear", &cases, test);
}

/// Inputs and outputs in BF16, whose kernels for many rows may round finer than the outputs: weights that these take and
/// neighbours that they do not, divided and undivided, values far larger than the others, infinities and NaN.
#[test]
fn rounding_within_bf16() {
    let int4 = |zero_points| Format::new(Encoding::Int4, Granularity::Groups(32), zero_points, false).unwrap();
    let fp8 = |encoding, granularity| Format::new(encoding, granularity, false, false).unwrap();
    let formats = [
        int4(true),
        int4(false),
        fp8(Encoding::Fp8E4m3, Granularity::Rows),
        fp8(Encoding::Fp8E4m3, Granularity::Blocks),
        fp8(Encoding::Fp8E5m2, Granularity::Rows),
        fp8(Encoding::Sfp, Granularity::Rows),
    ];
    let shapes = [(17, 40, 192), (33, 40, 4160), (64, 264, 2112), (48, 1000, 320), (40, 12_304, 192), (34, 25_600, 64)];
    let mut cases = Vec::new();
    for (i, format) in formats.into_iter().enumerate() {
        for (j, (m, n, k)) in shapes.into_iter().enumerate() {
            let special = [None, Some(f64::INFINITY), Some(65_536.0), Some(f64::NAN), None][(i + j) % 5];
            let (input, output, activation) = (DType::Bf16, DType::Bf16, Activation::None);
            let (bias, gated, layout) = (j % 2 == 1, j == 2, if i % 2 == 0 { PLAIN } else { PITCHED });
            cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
        }
    }
    check("quantised linear", &cases, test);
}

#[test]
fn special_values_stay_in_their_row() {
    let mut cases = Vec::new();
    for format in formats().into_iter().filter(|format| !format.clipping) {
        for special in [f64::NAN, f64::INFINITY] {
            for m in [2, 20] {
                let (input, output, activation) = (DType::Bf16, DType::F32, Activation::None);
                let (layout, special) = (PLAIN, Some(special));
                let (n, k, bias, gated) = (32, 128, false, false);
                cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
            }
        }
    }
    check("quantised linear", &cases, test);
}

/// A weight whose columns were sorted multiplies the inputs that belong to them.
#[test]
fn orders_are_followed() {
    check("ordered linear", &[1, 6, 40], |run, &m| {
        let (n, k, group) = (24, 256, 64);
        let bytes = |run: &mut Run, count: usize| -> Vec<u8> {
            run.random.normals(count, 1000.0).iter().map(|&x| x as i64 as u8).collect()
        };
        let (weights, zeros) = (bytes(run, n * k / 2), bytes(run, n * k / group / 2));
        let scales = encode(DType::F16, &vec![0.03125; n * k / group]);
        let group_index: Vec<u8> =
            (0..k).flat_map(|at| ((at * 29 + 3) % k / group).to_le_bytes()[..4].to_vec()).collect();
        let source = gptq(GptqTensors {
            rows: n,
            columns: k,
            group_size: group,
            weights: &weights,
            zeros: Some(&zeros),
            scales: FloatBytes { bytes: &scales, dtype: DType::F16 },
            group_index: Some(&group_index),
            version: GptqVersion::V1,
        })?;
        let memory = run.device.backend.memory();
        let weight = Weight::import(memory, &[&source], Arrangement::Stacked, None, run.stream)?;
        let w = values_of(run, &weight, PLAIN)?;
        let (input, x) = run.normal(DType::Bf16, &[m, k], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[m, n], PLAIN)?;
        let format = weight.format();
        let (bias, gated, layout, special) = (false, false, PLAIN, None);
        let (input_dtype, activation) = (DType::Bf16, Activation::None);
        let case =
            Case { format, m, n, k, input: input_dtype, output: DType::F32, bias, activation, gated, layout, special };
        expect(run, &case, &weight, &w, (input, &x), None, output)
    });
}

#[test]
fn embeddings_are_gathered_from_every_format() {
    let cases: Vec<Format> = formats().into_iter().filter(|format| !format.clipping).collect();
    check("quantised embedding", &cases, |run, &format| {
        for (vocabulary, width, output) in [(300, 160, DType::F32), (17, 77, DType::Bf16)] {
            let weight = weight(run, format, 1, vocabulary, width)?;
            let table = values_of(run, &weight, PLAIN)?;
            let tokens = [0, vocabulary as i32 - 1, 3, 3, 9];
            let token_tensor = run.integers(&tokens)?;
            let result = run.output(output, &[tokens.len(), width], UNALIGNED)?;
            let op = Embedding::new(token_tensor, weight.view(), 25.5, result)?;
            run.executor().run(&Operation::from(op), run.stream.raw())?;
            let rows = tokens.iter().flat_map(|&token| &table[token as usize * width..][..width]);
            let reference: Vec<f64> = rows.map(|value| value * 25.5).collect();
            run.expect("output", &result, &reference)?;
        }
        Ok(())
    });
}

/// The group size of a whole row of Int4 is stored as 128, and products read it so.
#[test]
fn whole_rows_of_int4() {
    let format = Format::new(Encoding::Int4, Granularity::Rows, false, false).unwrap();
    let mut cases = Vec::new();
    for (m, k) in [(1, 100), (3, 128), (20, 500)] {
        let (input, output, activation) = (DType::F32, DType::F32, Activation::None);
        let (n, bias, gated, layout, special) = (20, true, false, PLAIN, None);
        cases.push(Case { format, m, n, k, input, output, bias, activation, gated, layout, special });
    }
    check("quantised linear", &cases, test);
}
