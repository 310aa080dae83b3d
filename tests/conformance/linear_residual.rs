//! `linear` with a residual: with weights of every encoding, in the place of the output, and before the one rounding.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::{bound, FLOATS};
use crate::linear_quantized_input::{kinds, weight, Kind, LinearCase};
use crate::quantized_rows::{quantized, rows_at, ENCODINGS, PLACES, TIGHT};
use crate::random::Random;
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::values_of;
use nvbackend::error::{Result, Status};
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{fp8, int8, Encoding};

#[derive(Debug, Clone, Copy)]
pub enum Residual {
    None,
    Apart(DType),
    /// One row for all.
    Row(DType),
    /// The memory of the output.
    Output,
}

/// The residual, what it adds to each element, and the output.
pub fn outputs(
    run: &mut Run,
    residual: Residual,
    output: DType,
    [m, n]: [usize; 2],
    layout: Layout,
) -> Result<(Option<Tensor>, Vec<f64>, Tensor)> {
    Ok(match residual {
        Residual::None => (None, vec![0.0; m * n], run.output(output, &[m, n], layout)?),
        Residual::Apart(dtype) => {
            let (tensor, values) = run.normal(dtype, &[m, n], layout, 1.0)?;
            (Some(tensor), values, run.output(output, &[m, n], layout)?)
        }
        Residual::Row(dtype) => {
            let (tensor, values) = run.normal(dtype, &[n], layout, 1.0)?;
            let rows = Tensor::new(tensor.data, dtype, &[m, n]).with_strides(&[0, 1]);
            (Some(rows), values.repeat(m), run.output(output, &[m, n], layout)?)
        }
        Residual::Output => {
            let (tensor, values) = run.normal(output, &[m, n], layout, 1.0)?;
            run.allow_write(&tensor);
            (Some(tensor), values, tensor)
        }
    })
}

#[derive(Debug, Clone, Copy)]
struct Case {
    product: LinearCase,
    /// The codes of this encoding in its place: `product.encoding`.
    codes: bool,
    input: DType,
    residual: Residual,
    layout: Layout,
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let LinearCase { encoding, m, n, k, activation, gated, output, .. } = case.product;
    let weight = weight(run, &case.product)?;
    let w = values_of(run, &weight, PLAIN)?;
    let mut x = rounded(case.input, &run.random.normals(m * k, 1.0));
    let bias = match case.product.bias {
        true => Some(run.normal(DType::Bf16, &[weight.view().rows], PLAIN, 1.0)?),
        false => None,
    };
    let (residual, added, output_tensor) = outputs(run, case.residual, output, [m, n], case.layout)?;
    let bias_tensor = bias.as_ref().map(|(tensor, _)| *tensor);
    let (view, to, stream) = (weight.view(), output_tensor, run.stream.raw());
    if case.codes {
        let values: Vec<f32> = x.iter().map(|&value| value as f32).collect();
        let codes = quantized(encoding, k, &values);
        let decode = if encoding == Encoding::Int8 { int8::decode } else { fp8::e4m3_to_f32 };
        let value = |(i, &code): (usize, &u8)| f64::from(codes.1[i / k]) * f64::from(decode(code));
        x = codes.0.iter().enumerate().map(value).collect();
        let rows = rows_at(run, encoding, (m, k), case.product.place, Some(&codes))?;
        let op = Linear::new(
            LinearTensors {
                quantized_input: Some(rows),
                bias: bias_tensor,
                residual,
                output: Some(to),
                ..LinearTensors::default()
            },
            view,
            activation,
        )?;
        run.executor().run(&Operation::from(op), stream)?;
    } else {
        let input = run.tensor(case.input, &[m, k], case.layout, &x)?;
        let op = LinearProduct::new(input, view, bias_tensor, activation, to)?.with_residual(residual)?;
        run.executor().run(&Operation::from(op), stream)?;
    }
    let mut reference = Vec::new();
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        let product = |n: usize| {
            let products = x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w);
            products.sum::<f64>() + bias.as_ref().map_or(0.0, |(_, bias)| bias[n])
        };
        let first = if gated { 2 * column } else { column };
        let result = activate(activation, product(first)) * if gated { product(first + 1) } else { 1.0 };
        reference.push(result + added[row * n + column]);
    }
    // A GPU may round a quantised weight to the input's dtype, and codes to BF16.
    let inexact = match run.device.is_cpu() {
        true => DType::F32,
        false if case.codes => DType::Bf16,
        false => case.input,
    };
    let factors = if gated { 2.0 } else { 1.0 };
    run.expect_within("output", &output_tensor, &reference, factors * bound(inexact).max(bound(output)))
}

/// Every kind of weight with numbers of rows for every kernel, and sizes that vectors fit and do not fit.
#[test]
fn every_encoding_and_number_of_rows() {
    let mut random = Random::new("residual cases");
    let mut cases = Vec::new();
    for (i, kind) in kinds().into_iter().enumerate() {
        for m in [0, 1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 100, 200, 300] {
            for (n, k) in [(64, 256), random.choose(&[(7, 33), (33, 128), (130, 64), (2, 192), (256, 320)])] {
                let input = match kind {
                    Kind::Float(dtype) => dtype,
                    Kind::Quantized(_) => random.choose(&[DType::Bf16, DType::Bf16, DType::F16, DType::F32]),
                };
                let output = random.choose(&[input, DType::F32]);
                let apart = random.choose(&FLOATS);
                let residual = random.choose(&[
                    Residual::Output,
                    Residual::Apart(output),
                    Residual::Apart(apart),
                    Residual::Row(output),
                ]);
                // Mostly what models do: the residual alone.
                let any = random.choose(&ACTIVATIONS);
                let activation = random.choose(&[Activation::None, Activation::None, any]);
                let (bias, gated) = (random.flip(), random.choose(&[false, false, true]));
                let layout = random.choose(&[PLAIN, PLAIN, PITCHED, UNALIGNED]);
                let (encoding, place, special) = (ENCODINGS[i % 2], TIGHT, false);
                let product = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
                cases.push(Case { product, codes: false, input, residual, layout });
            }
        }
    }
    check("linear with a residual", &cases, test);
}

#[test]
fn of_codes() {
    let mut cases = Vec::new();
    for (i, kind) in kinds().into_iter().enumerate() {
        for (j, encoding) in ENCODINGS.into_iter().enumerate() {
            for (l, (m, n, k)) in [(1, 64, 256), (5, 33, 77), (70, 33, 250), (200, 128, 256)].into_iter().enumerate() {
                let output = [DType::Bf16, DType::F32][(i + l) % 2];
                let residual =
                    [Residual::Output, Residual::Apart(output), Residual::Apart(DType::F16)][(i + j + l) % 3];
                let activation = [Activation::None, Activation::Silu][(j + l) % 2];
                let (place, gated, bias, special) = (PLACES[(i + l) % 4], l % 2 == 1, j == 0, false);
                let product = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
                cases.push(Case { product, codes: true, input: DType::F32, residual, layout: PLAIN });
            }
        }
    }
    check("linear of codes with a residual", &cases, test);
}

/// 1 + 2^-d, which the dtype rounds to 1, and 2^-d make 1 + 2^(1-d).
#[test]
fn it_is_added_before_the_rounding() {
    let cases: Vec<(DType, usize, usize)> = [DType::Bf16, DType::F16]
        .into_iter()
        .flat_map(|dtype| [1, 3, 8, 16, 17, 64, 200].map(|m| (dtype, m)))
        .flat_map(|(dtype, m)| [64, 72, 77].map(|k| (dtype, m, k)))
        .collect();
    check("a sum before its rounding", &cases, |run, &(dtype, m, k)| {
        let (n, small) = (40, if dtype == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) });
        let first = |count: usize, values: [f64; 2]| -> Vec<f64> {
            (0..count * k).map(|i| values.get(i % k).copied().unwrap_or(0.0)).collect()
        };
        let input = run.tensor(dtype, &[m, k], PLAIN, &first(m, [1.0, small]))?;
        let part = run.tensor(dtype, &[n, k], PLAIN, &first(n, [1.0, 1.0]))?;
        let (memory, stream) = (run.device.backend.memory(), run.stream);
        let (arrangement, source) = (nvbackend::weight::Arrangement::Stacked, nvbackend::loading::Source::Device);
        let weight = nvbackend::loading::Weight::new(memory, &[part], arrangement, source, None, stream)?;
        let residual = run.tensor(dtype, &[m, n], PLAIN, &vec![small; m * n])?;
        let output = run.output(dtype, &[m, n], PLAIN)?;
        let op =
            LinearProduct::new(input, weight.view(), None, Activation::None, output)?.with_residual(Some(residual))?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        match run.read(&output)?.into_iter().find(|&value| value != 1.0 + 2.0 * small) {
            None => Ok(()),
            Some(value) => Err(format!("{value:e}; {:e} is expected", 1.0 + 2.0 * small).into()),
        }
    });
}

/// NaN and infinity of the residual stay where they are.
#[test]
fn special_values_stay_in_their_element() {
    let cases: Vec<(Kind, usize)> = kinds().into_iter().flat_map(|kind| [1, 12, 40, 200].map(|m| (kind, m))).collect();
    check("special residuals", &cases, |run, &(kind, m)| {
        let (n, k, activation, place) = (48, 128, Activation::None, TIGHT);
        let (encoding, output, gated, bias, special) = (Encoding::Int8, DType::F32, false, false, false);
        let case = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
        let weight = weight(run, &case)?;
        let input = run.tensor(weight.view().dtype().unwrap_or(DType::Bf16), &[m, k], PLAIN, &vec![0.0; m * k])?;
        let mut values = run.random.normals(m * n, 1.0);
        (values[3], values[m * n - 2]) = (f64::NAN, f64::NEG_INFINITY);
        let values = rounded(DType::Bf16, &values);
        let residual = run.tensor(DType::Bf16, &[m, n], PLAIN, &values)?;
        let output = run.output(output, &[m, n], PLAIN)?;
        let op = LinearProduct::new(input, weight.view(), None, activation, output)?.with_residual(Some(residual))?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        run.expect("output", &output, &values)
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    check("refused residuals", &[()], |run, ()| {
        let (m, n, k) = (3, 8, 16);
        let input = run.normal(DType::F32, &[m, k], PLAIN, 1.0)?.0;
        let (kind, encoding, output, activation) =
            (Kind::Float(DType::F32), Encoding::Int8, DType::F32, Activation::None);
        let (gated, bias, place, special) = (false, false, TIGHT, false);
        let case = LinearCase { kind, encoding, m, n, k, output, activation, gated, bias, place, special };
        let weight = weight(run, &case)?;
        let output = run.output(output, &[m, n], PLAIN)?;
        let op = LinearProduct::new(input, weight.view(), None, activation, output)?;
        let at = |dtype, shape: &[usize]| Tensor::new(output.data, dtype, shape);
        let nowhere = Tensor::new(std::ptr::null_mut(), DType::F32, &[m, n]);
        let odd = Tensor::new(output.data.wrapping_byte_add(1), DType::F16, &[m, n]);
        let wrong: [(Tensor, &[&str]); 8] = [
            (at(DType::F32, &[m, n + 1]), &["residual", "3 rows of 9", "3 rows of 8"]),
            (at(DType::F32, &[m + 1, n]), &["residual", "4 rows of 8"]),
            (at(DType::I32, &[m, n]), &["residual", "i32"]),
            (at(DType::F16, &[m, n]), &["residual", "same memory", "f16", "f32"]),
            (at(DType::F32, &[m, n]).with_strides(&[n + 1, 1]), &["residual", "same memory", "9 apart", "8 apart"]),
            (at(DType::F32, &[m, n]).with_strides(&[n, 2]), &["residual", "innermost stride"]),
            (nowhere, &["residual", "NULL"]),
            (odd, &["residual", "not aligned"]),
        ];
        for (residual, words) in wrong {
            expect_error(op.with_residual(Some(residual)), Status::InvalidArgument, words)?;
        }
        op.with_residual(Some(output))?;
        Ok::<(), Failure>(())
    });
}
