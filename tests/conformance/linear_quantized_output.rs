//! `linear` in 8 bits: the codes of the f32 values that the product has without them, and scales that are given.

use crate::activation::ACTIVATIONS;
use crate::compare::FLOATS;
use crate::linear_quantized_input::{kinds, weight, Kind, LinearCase};
use crate::linear_residual::{outputs, Residual};
use crate::quantized_rows::{expect_same, floats, quantized, read, rows_at, Codes, Place, ENCODINGS, PLACES, TIGHT};
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::error::Status;
use nvbackend::operation::gated_activation::GatedActivation;
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{fp8, Encoding};

#[derive(Debug, Clone, Copy)]
struct Case {
    product: LinearCase,
    /// Of the input, in the place of floats.
    codes: Option<Encoding>,
    residual: Residual,
    layout: Layout,
    special: Option<f64>,
}

/// The f32 output says what the unrounded values are; the same codes come without it and beside a rounded one.
fn test(run: &mut Run, case: &Case) -> Outcome {
    let LinearCase { encoding, m, n, k, activation, place, .. } = case.product;
    let weight = weight(run, &case.product)?;
    let dtype = weight.view().dtype().unwrap_or(DType::Bf16);
    let mut x = rounded(dtype, &run.random.normals(m * k, 1.0));
    if let Some(special) = case.special {
        x[k / 2] = special;
    }
    let input = match case.codes {
        None => of_floats(run.tensor(dtype, &[m, k], case.layout, &x)?),
        Some(encoding) => {
            let values: Vec<f32> = x.iter().map(|&value| value as f32).collect();
            let codes = quantized(encoding, k, &values);
            LinearTensors {
                quantized_input: Some(rows_at(run, encoding, (m, k), place, Some(&codes))?),
                ..LinearTensors::default()
            }
        }
    };
    let bias =
        if case.product.bias { Some(run.normal(DType::F32, &[weight.view().rows], PLAIN, 1.0)?.0) } else { None };
    // In the place of an output of its dtype the residual is there once, so that case compares with its own values.
    let in_place = matches!(case.residual, Residual::Output);
    let shared = match case.residual {
        Residual::Output => Residual::Apart(DType::F32),
        residual => residual,
    };
    let (residual, added, first) = outputs(run, shared, DType::F32, [m, n], case.layout)?;
    let over = if in_place { Some(run.tensor(DType::F32, &[m, n], case.layout, &added)?) } else { None };
    let mut expected: Option<(Codes, Vec<f32>)> = None;
    for output in [Some(first), None, Some(run.output(case.product.output, &[m, n], case.layout)?), over] {
        if output.is_none() && expected.is_none() {
            continue;
        }
        let residual = match (output, over) {
            (Some(output), Some(over)) if output.data == over.data => {
                run.allow_write(&over);
                Some(over)
            }
            _ => residual,
        };
        let codes = rows_at(run, encoding, (m, n), place, None)?;
        let op = Linear::new(
            LinearTensors { bias, residual, output, quantized_output: Some(codes), ..input },
            weight.view(),
            activation,
        )?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let codes = read(run, &codes)?;
        let (expected, values) = match (&expected, output) {
            (None, Some(output)) => {
                let values = floats(run, &output)?;
                &*expected.insert((quantized(encoding, n, &values), values))
            }
            (expected, _) => expected.as_ref().expect("the f32 output is the first"),
        };
        expect_same(&format!("beside {output:?}"), encoding, n, &codes, expected)?;
        if let Some(output) = output {
            let values: Vec<f64> = values.iter().map(|&value| value.into()).collect();
            let (out, rounded) = (run.read(&output)?, rounded(output.dtype, &values));
            let differs = |(a, b): (&f64, &f64)| a != b && !(a.is_nan() && b.is_nan());
            if let Some(i) = out.iter().zip(&rounded).position(differs) {
                return Err(format!("{output:?}: element {i} is {:e}; {:e} is expected", out[i], rounded[i]).into());
            }
        }
    }
    expect_values(run, case, &weight.view(), (input, bias, residual), first)
}

fn of_floats(input: Tensor) -> LinearTensors {
    LinearTensors { input: Some(input), ..LinearTensors::default() }
}

/// Those of the product that leaves no codes.
fn expect_values(
    run: &mut Run,
    case: &Case,
    weight: &nvbackend::weight::WeightView,
    (input, bias, residual): (LinearTensors, Option<Tensor>, Option<Tensor>),
    values: Tensor,
) -> Outcome {
    let LinearCase { m, n, activation, .. } = case.product;
    if case.special.is_some() {
        return Ok(());
    }
    let alone = run.output(DType::F32, &[m, n], PLAIN)?;
    let stream = run.stream.raw();
    let op = Linear::new(LinearTensors { bias, residual, output: Some(alone), ..input }, *weight, activation)?;
    run.executor().run(&Operation::from(op), stream)?;
    let reference = run.read(&alone)?;
    // Alignment may lead to a kernel that adds in another order, and sums of FP8 codes are as exact as tensor cores are.
    let tolerance = if case.codes.is_some() { 2e-3 } else { 1e-4 };
    run.expect_within("the values", &values, &reference, tolerance)
}

#[test]
fn every_encoding_and_number_of_rows() {
    let mut cases = Vec::new();
    for (i, kind) in kinds().into_iter().enumerate() {
        for (j, encoding) in ENCODINGS.into_iter().enumerate() {
            let shapes = [
                (0, 16, 64),
                (1, 1, 1),
                (1, 64, 256),
                (3, 33, 77),
                (9, 130, 128),
                (64, 48, 64),
                (70, 33, 250),
                (200, 128, 256),
            ];
            for (l, (m, n, k)) in shapes.into_iter().enumerate() {
                let activation = ACTIVATIONS[(i + l) % 4];
                let (gated, bias) = ((i + l) % 3 == 0, (j + l) % 2 == 0);
                let residual =
                    [Residual::None, Residual::Apart(FLOATS[i % 3]), Residual::Output, Residual::Row(DType::F32)]
                        [(i + j + l) % 4];
                let codes = [None, None, Some(ENCODINGS[l % 2])][(i + j + l) % 3];
                let (layout, place) = ([PLAIN, PITCHED, UNALIGNED][l % 3], PLACES[(i + l) % 4]);
                let (output, special) = ([DType::Bf16, DType::F16][(i + l) % 2], false);
                let product = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
                cases.push(Case { product, codes, residual, layout, special: None });
            }
        }
    }
    check("linear in 8 bits", &cases, test);
}

/// Rows that a block keeps and does not keep, more than fit a slice, and values that no scale spans.
#[test]
fn long_rows_slices_and_special_values() {
    let mut cases = Vec::new();
    let (kind, activation, place) = (Kind::Float(DType::Bf16), Activation::None, PLACES[3]);
    for encoding in ENCODINGS {
        let (output, gated, bias, special) = (DType::Bf16, false, true, false);
        let product = LinearCase { kind, encoding, m: 2, n: 64, k: 8, output, activation, gated, bias, place, special };
        let case = Case { product, codes: None, residual: Residual::Apart(DType::Bf16), layout: PLAIN, special: None };
        for (m, n) in [(2, 255), (2, 256), (2, 257), (3, 4096), (2, 16_384), (2, 16_385), (3, 40_000), (450, 40_000)] {
            cases.push(Case { product: LinearCase { m, n, ..product }, ..case });
        }
        for special in [f64::NAN, f64::INFINITY] {
            for m in [1, 20, 200] {
                let product = LinearCase { m, k: 64, ..product };
                cases.push(Case { product, special: Some(special), ..case });
            }
        }
    }
    check("linear in 8 bits", &cases, test);
}

/// x / scale to nearest, and no further than the codes go; every operation that leaves codes.
#[test]
fn given_scales() {
    let scales = [0.01f32, 1.0, 0.001, 0.03, 2.0, 0.0, f32::INFINITY, 1e-40];
    let cases: Vec<(Encoding, Place, usize)> = ENCODINGS
        .into_iter()
        .flat_map(|encoding| PLACES.map(|place| (encoding, place)))
        .flat_map(|(encoding, place)| [8, 33, 700].map(|columns| (encoding, place, columns)))
        .collect();
    check("given scales", &cases, |run, &(encoding, place, columns)| {
        let rows = scales.len();
        let shape = [rows, columns];
        let mut x = rounded(DType::F32, &run.random.normals(rows * columns, 2.0));
        (x[1], x[2], x[columns + 1]) = (f64::INFINITY, f64::NEG_INFINITY, f64::NAN);
        let input = run.tensor(DType::F32, &shape, PLAIN, &x)?;
        let identity: Vec<f64> = (0..columns * columns).map(|i| f64::from(u8::from(i % (columns + 1) == 0))).collect();
        let identity = run.tensor(DType::F32, &[columns, columns], PLAIN, &identity)?;
        let (memory, stream) = (run.device.backend.memory(), run.stream);
        let (arrangement, source) = (nvbackend::weight::Arrangement::Stacked, nvbackend::loading::Source::Device);
        let weight = nvbackend::loading::Weight::new(memory, &[identity], arrangement, source, None, stream)?;
        let ones = run.tensor(DType::F32, &shape, PLAIN, &vec![1.0; rows * columns])?;
        for operation in ["linear", "gated_activation", "rms_norm"] {
            let output = run.output(DType::F32, &shape, PLAIN)?;
            let codes =
                rows_at(run, encoding, (rows, columns), place, Some(&(vec![0; rows * columns], scales.to_vec())))?;
            let written = rows_at(run, encoding, (rows, columns), place, None)?;
            let codes = QuantizedRows { scales: codes.scales, given_scales: true, ..written };
            let stream = run.stream.raw();
            match operation {
                "linear" => {
                    let (input, activation) = (of_floats(input), Activation::None);
                    let op = Linear::new(
                        LinearTensors { output: Some(output), quantized_output: Some(codes), ..input },
                        weight.view(),
                        activation,
                    )?;
                    run.executor().run(&Operation::from(op), stream)?;
                }
                "gated_activation" => {
                    let op = GatedActivation::new(input, ones, Activation::None, Some(output), Some(codes))?;
                    run.executor().run(&Operation::from(op), stream)?;
                }
                _ => {
                    let call = RmsNorm {
                        input,
                        post_weight: None,
                        residual: None,
                        residual_output: None,
                        weight: None,
                        output: Some(output),
                        quantized_output: Some(codes),
                        epsilon: 1e-6,
                        weight_offset: 0.0,
                    };
                    run.executor().run(&Operation::from(call.validated()?), stream)?;
                }
            }
            let values = floats(run, &output)?;
            let code = |(i, value): (usize, &f32)| {
                let inverse = Some(1.0 / scales[i / columns]).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
                match encoding {
                    Encoding::Int8 if (value * inverse).is_nan() => -127i8 as u8,
                    Encoding::Int8 => (value * inverse).clamp(-127.0, 127.0).round_ties_even() as i8 as u8,
                    _ => fp8::e4m3_from_f32(value * inverse),
                }
            };
            let expected = (values.iter().enumerate().map(code).collect(), scales.to_vec());
            expect_same(operation, encoding, columns, &read(run, &codes)?, &expected)?;
        }
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    check("refused outputs", &[()], |run, ()| {
        let (m, n, k, activation) = (3, 8, 16, Activation::None);
        let (kind, encoding, output, place) = (Kind::Float(DType::F32), Encoding::Int8, DType::F32, TIGHT);
        let (gated, bias, special) = (false, false, false);
        let case = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
        let weight = weight(run, &case)?;
        let floats = run.normal(DType::F32, &[m, k], PLAIN, 1.0)?.0;
        let good = rows_at(run, encoding, (m, n), place, None)?;
        let output = run.output(output, &[m, n], PLAIN)?;
        let make = |residual: Option<Tensor>, output: Option<Tensor>, codes: QuantizedRows| {
            let input = of_floats(floats);
            Linear::new(
                LinearTensors { residual, output, quantized_output: Some(codes), ..input },
                weight.view(),
                activation,
            )
        };
        let half = Tensor::new(output.data, DType::F16, &[m, n]);
        let wide = Tensor::new(output.data, DType::F32, &[m, n + 1]);
        let integers = Tensor::new(output.data, DType::I32, &[m, n]);
        let narrow = QuantizedRows { columns: n - 1, ..good };
        let unscaled = QuantizedRows { scales: std::ptr::null_mut(), ..good };
        type Wrong<'a> = (Option<Tensor>, Option<Tensor>, QuantizedRows, &'a [&'a str]);
        let wrong: [Wrong; 7] = [
            (None, None, narrow, &["quantized_output", "3 rows of 7", "3 rows of 8"]),
            (None, None, unscaled, &["quantized_output", "no scales"]),
            (None, None, QuantizedRows { encoding: Encoding::Int4, ..good }, &["quantized_output", "int4"]),
            (None, Some(wide), good, &["output", "3 rows of 9"]),
            (None, Some(integers), good, &["output", "i32"]),
            (Some(half), Some(output), good, &["residual", "same memory"]),
            (Some(wide), None, good, &["residual", "3 rows of 9"]),
        ];
        for (residual, output, codes, words) in wrong {
            expect_error(make(residual, output, codes), Status::InvalidArgument, words)?;
        }
        make(Some(output), Some(output), good)?;
        Ok::<(), Failure>(())
    });
}
