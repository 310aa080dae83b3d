//! `linear` of an input in 8 bits, against the product of what the codes stand for, and against `linear` that rounds.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::{bound, encode, FLOATS};
use crate::quantized_rows::{quantized, rows_at, Place, ENCODINGS, PLACES, TIGHT};
use crate::run::{check, rounded, Outcome, Run, PLAIN};
use crate::weight_formats::values_of;
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::error::Result;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{fp8, int8, Arrangement, Encoding, Format, Granularity};

/// Of a float dtype, or quantised.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Float(DType),
    Quantized(Format),
}

#[derive(Debug, Clone, Copy)]
pub struct LinearCase {
    pub kind: Kind,
    pub encoding: Encoding,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub output: DType,
    pub activation: Activation,
    pub gated: bool,
    pub bias: bool,
    pub place: Place,
    pub special: bool,
}

pub fn weight(run: &mut Run, case: &LinearCase) -> Result<Weight> {
    let &LinearCase { n, k, gated, .. } = case;
    let (dtype, format) = match case.kind {
        Kind::Float(dtype) => (dtype, None),
        Kind::Quantized(format) => (DType::F32, Some(format)),
    };
    let scale = 1.0 / (k.max(1) as f64).sqrt();
    let mut parts: Vec<Vec<u8>> =
        (0..1 + usize::from(gated)).map(|_| encode(dtype, &run.random.normals(n * k, scale))).collect();
    let tensors: Vec<Tensor> =
        parts.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), dtype, &[n, k])).collect();
    let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
    Weight::new(run.device.backend.memory(), &tensors, arrangement, Source::Host, format, run.stream)
}

fn test_linear(run: &mut Run, case: &LinearCase) -> Outcome {
    let &LinearCase { encoding, m, n, k, activation, gated, .. } = case;
    let weight = weight(run, case)?;
    let w = values_of(run, &weight, PLAIN)?;
    let mut values: Vec<f32> = run.random.normals(m * k, 1.0).iter().map(|&x| x as f32).collect();
    if case.special {
        values[k / 2] = f32::NAN;
        values[k + k / 2] = f32::INFINITY;
        values[2 * k..3 * k].fill(0.0);
    }
    let codes = quantized(encoding, k, &values);
    let rows = rows_at(run, encoding, (m, k), case.place, Some(&codes))?;
    let decode = if encoding == Encoding::Int8 { int8::decode } else { fp8::e4m3_to_f32 };
    let x: Vec<f64> =
        codes.0.iter().enumerate().map(|(i, &code)| f64::from(codes.1[i / k]) * f64::from(decode(code))).collect();
    let bias = if case.bias { Some(run.normal(DType::Bf16, &[weight.view().rows], PLAIN, 1.0)?) } else { None };
    // With the values themselves or rounded ones.
    let expected = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let element = |(row, column): (usize, usize)| {
            let product = |n: usize| {
                let products = x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w);
                products.sum::<f64>() + bias.as_ref().map_or(0.0, |(_, bias)| bias[n])
            };
            let first = if gated { 2 * column } else { column };
            activate(activation, product(first)) * if gated { product(first + 1) } else { 1.0 }
        };
        (0..m).flat_map(|row| (0..n).map(move |column| (row, column))).map(element).collect()
    };
    let reference = expected(&x, &w);
    let bias_tensor = bias.as_ref().map(|(tensor, _)| *tensor);
    let output = run.output(case.output, &[m, n], PLAIN)?;
    let op = Linear::new(
        LinearTensors {
            quantized_input: Some(rows),
            bias: bias_tensor,
            output: Some(output),
            ..LinearTensors::default()
        },
        weight.view(),
        activation,
    )?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    if case.special {
        let out = run.read(&output)?;
        if let Some(i) = out[..2 * n].iter().position(|out| out.is_finite()) {
            return Err(format!("row {} is not finite, but its output has {}", i / n, out[i]).into());
        }
        let finite = |row: usize| reference[row * n..][..n].iter().zip(&out[row * n..][..n]);
        let error = |(a, b): (&f64, &f64)| (a - b).abs() > 0.02 * (a.abs() + 1.0) || b.is_nan();
        return match (2..m).find(|&row| finite(row).any(error)) {
            None => Ok(()),
            Some(row) => Err(format!("a special value in another row has changed row {row}").into()),
        };
    }
    let within = |reference: &[f64], bound: f64| run.expect_within("output", &output, reference, bound);
    if run.device.is_cpu() {
        // A gated product multiplies two sums.
        let factors = if gated { 2.0 } else { 1.0 };
        within(&reference, factors * bound(DType::F32).max(bound(case.output)))?;
    } else {
        // A GPU multiplies the codes, in sums of its own precision, or what they stand for in the product's dtype, with the
        // weight as it is or rounded to that. No bound on rounding will do in place of these: an element of a gated product
        // whose one factor is small and whose other is large is off by many times the typical error. Scales times codes are
        // F32 before they are rounded.
        let dtype = weight.view().dtype().unwrap_or(DType::Bf16);
        let in_dtype = |values: &[f64]| rounded(dtype, &rounded(DType::F32, values));
        let (x_rounded, w_rounded) = (in_dtype(&x), in_dtype(&w));
        let least = bound(case.output);
        within(&reference, least.max(bound(DType::Bf16)))
            .or_else(|_| within(&expected(&x_rounded, &w), least.max(bound(DType::F16))))
            .or_else(|_| within(&expected(&x_rounded, &w_rounded), least.max(bound(DType::F16))))?;
    }
    expect_as_rounded_by_linear(run, case, &values, weight, bias_tensor, output)
}

/// A GPU that may round the input of many rows itself comes to the same.
fn expect_as_rounded_by_linear(
    run: &mut Run,
    case: &LinearCase,
    values: &[f32],
    weight: Weight,
    bias: Option<Tensor>,
    output: Tensor,
) -> Outcome {
    let Kind::Quantized(format) = case.kind else { return Ok(()) };
    let int8 = format.encoding == Encoding::Int8;
    let rows =
        matches!(format.granularity, Granularity::Rows | Granularity::Tensor) && format.encoding != Encoding::Int4;
    if run.device.is_cpu() || case.m <= 64 || !rows || int8 != (case.encoding == Encoding::Int8) {
        return Ok(());
    }
    // FP8 of other sizes, or on older devices, has no product of codes: `linear` does not round its input there.
    let fp8_rounds = run.device.backend.device().compute_capability >= 89 && weight.view().rows.is_multiple_of(16);
    if !int8 && !fp8_rounds {
        return Ok(());
    }
    let name = run.device.name.to_string();
    let options = Configuration { device: name, quantized_activations: true, ..Configuration::default() };
    let backend = Backend::new(options)?;
    let stream = Stream::new(backend.executor(), 0)?;
    let values: Vec<f64> = values.iter().map(|&value| value.into()).collect();
    let input = run.tensor(DType::F32, &[case.m, case.k], PLAIN, &values)?;
    let rounded = run.output(case.output, &[case.m, case.n], PLAIN)?;
    let op = LinearProduct::new(input, weight.view(), bias, case.activation, rounded)?;
    backend.executor().run(&Operation::from(op), stream.raw())?;
    stream.synchronize()?;
    let expected = run.read(&rounded)?;
    // Padding may lead to another kernel, which adds in another order.
    let tolerance = if case.output == DType::F32 { 1e-3 } else { bound(case.output) };
    run.expect_within("the output of codes", &output, &expected, tolerance)
}

pub fn kinds() -> Vec<Kind> {
    let mut kinds = FLOATS.map(Kind::Float).to_vec();
    for (encoding, granularity) in [
        (Encoding::Fp8E4m3, Granularity::Rows),
        (Encoding::Fp8E4m3, Granularity::Tensor),
        (Encoding::Fp8E4m3, Granularity::Blocks),
        (Encoding::Fp8E5m2, Granularity::Rows),
        (Encoding::Int8, Granularity::Rows),
        (Encoding::Int8, Granularity::Groups(64)),
        (Encoding::Int4, Granularity::Groups(32)),
    ] {
        kinds.push(Kind::Quantized(Format::new(encoding, granularity, false, false).expect("a format")));
    }
    kinds
}

#[test]
fn linear_of_codes() {
    let mut cases = Vec::new();
    for (i, kind) in kinds().into_iter().enumerate() {
        for (j, encoding) in ENCODINGS.into_iter().enumerate() {
            let shapes = [
                (1, 1, 1),
                (0, 16, 64),
                (1, 64, 256),
                (5, 33, 77),
                (64, 48, 64),
                (70, 33, 250),
                (200, 128, 256),
                (600, 16, 600),
            ];
            for (l, (m, n, k)) in shapes.into_iter().enumerate() {
                for place in PLACES {
                    // A single sum may cancel, and no norm of others hides that.
                    let several = n > 1;
                    let (gated, bias) = ((i + l) % 3 == 0 && several, (j + l) % 2 == 0 && several);
                    let activation = ACTIVATIONS[if several { (i + j + l + place.padding) % 4 } else { 0 }];
                    let output = FLOATS[(i + l + place.offset) % 3];
                    let special = false;
                    let case = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
                    cases.push(case);
                }
            }
            for m in [4, 80, 200] {
                let (output, activation, place) = (DType::F32, Activation::None, PLACES[m % 4]);
                let (n, k, gated, bias, special) = (32, 128, false, false, true);
                cases.push(LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special });
            }
        }
    }
    check("linear of codes", &cases, test_linear);
}

/// Without columns a product is its bias, and nothing is read of the codes.
#[test]
fn linear_of_no_columns() {
    check("linear of no columns", &kinds(), |run, &kind| {
        let (encoding, output, activation, place) = (Encoding::Int8, DType::F32, Activation::None, TIGHT);
        let (m, n, k, gated, bias, special) = (3, 8, 0, false, true, false);
        let case = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
        let Ok(weight) = weight(run, &case) else { return Ok(()) };
        let (bias, biases) = run.normal(DType::F32, &[n], PLAIN, 1.0)?;
        let output = run.output(output, &[m, n], PLAIN)?;
        let rows = QuantizedRows {
            data: std::ptr::null_mut(),
            scales: std::ptr::null_mut(),
            given_scales: false,
            encoding,
            rows: m,
            columns: 0,
            row_stride: 0,
        };
        let op = Linear::new(
            LinearTensors {
                quantized_input: Some(rows),
                bias: Some(bias),
                output: Some(output),
                ..LinearTensors::default()
            },
            weight.view(),
            activation,
        )?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        run.expect("output", &output, &biases.repeat(m))
    });
}
