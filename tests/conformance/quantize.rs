//! Quantising and dequantising on the device: the same codes, scales and values as on the host. And large products whose
//! weight or input passes through another format on its way.

use crate::compare::{encode, FLOATS};
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::{formats, values_of};
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::error::Status;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, Encoding, Format, Granularity};
use std::sync::OnceLock;

#[derive(Debug, Clone)]
struct Case {
    format: Format,
    dtype: DType,
    /// The rows of each part.
    rows: Vec<usize>,
    columns: usize,
    layout: Layout,
    gated: bool,
    magnitude: f64,
}

fn on_host(run: &mut Run, weight: &Weight, dtype: DType, layout: Layout) -> Result<Vec<f64>, Failure> {
    let output = run.output(dtype, &[weight.view().rows, weight.view().columns], layout)?;
    weight.dequantize_on_host(run.device.backend.memory(), &output, run.stream)?;
    Ok(run.read(&output)?)
}

fn same(what: &str, actual: &[f64], expected: &[f64], columns: usize) -> Outcome {
    let differs = |(a, b): (&f64, &f64)| a != b && !(a.is_nan() && b.is_nan());
    match actual.iter().zip(expected).position(differs) {
        None => Ok(()),
        Some(i) => {
            let (row, column) = (i / columns, i % columns);
            Err(format!("{what}: row {row}, column {column} is {:e}; {:e} is expected", actual[i], expected[i]).into())
        }
    }
}

fn test_quantize(run: &mut Run, case: &Case) -> Outcome {
    let Case { columns, layout, .. } = *case;
    let (mut tensors, mut host) = (Vec::new(), Vec::new());
    for &rows in &case.rows {
        let values = rounded(case.dtype, &run.random.normals(rows * columns, case.magnitude));
        tensors.push(run.tensor(case.dtype, &[rows, columns], layout, &values)?);
        host.push(encode(case.dtype, &values));
    }
    let parts = host.iter_mut().zip(&case.rows);
    let copies: Vec<Tensor> =
        parts.map(|(bytes, &rows)| Tensor::new(bytes.as_mut_ptr().cast(), case.dtype, &[rows, columns])).collect();
    let arrangement = if case.gated { Arrangement::Gated } else { Arrangement::Stacked };
    let (expected_error, expected) = by_the_cpu(&copies, arrangement, case.format)?;
    let memory = run.device.backend.memory();
    for (from, parts, source) in [("device", &tensors, Source::Device), ("host", &copies, Source::Host)] {
        let weight = Weight::new(memory, parts, arrangement, source, Some(case.format), run.stream)?;
        let error = weight.relative_error();
        // What the code stands for exactly may be lost in the last place of its scale.
        if (error - expected_error).abs() > 1e-3 * expected_error + 1e-7 {
            return Err(
                format!("from the {from} the relative error is {error:e}; {expected_error:e} is expected").into()
            );
        }
        same(&format!("quantised from the {from}"), &on_host(run, &weight, DType::F32, PLAIN)?, &expected, columns)?;
    }
    Ok(())
}

/// The relative error and the values of a weight that the CPU executor makes of parts in host memory.
fn by_the_cpu(parts: &[Tensor], arrangement: Arrangement, format: Format) -> nvbackend::error::Result<(f64, Vec<f64>)> {
    static CPU: OnceLock<Backend> = OnceLock::new();
    let options = || Configuration { device: "cpu".into(), ..Configuration::default() };
    let cpu = CPU.get_or_init(|| Backend::new(options()).expect("the CPU is always there"));
    let stream = Stream::new(cpu.executor(), 0)?;
    let weight = Weight::new(cpu.memory(), parts, arrangement, Source::Host, Some(format), &stream)?;
    let (rows, columns) = (weight.view().rows, weight.view().columns);
    let mut values = vec![0f32; rows * columns];
    let output = Tensor::new(values.as_mut_ptr().cast(), DType::F32, &[rows, columns]);
    weight.dequantize_on_host(cpu.memory(), &output, &stream)?;
    Ok((weight.relative_error(), values.into_iter().map(f64::from).collect()))
}

#[test]
fn quantising_on_the_device_gives_the_codes_of_the_host() {
    let mut cases = Vec::new();
    for format in formats() {
        let case = Case {
            format,
            dtype: DType::Bf16,
            rows: vec![40],
            columns: 256,
            layout: PLAIN,
            gated: false,
            magnitude: 0.02,
        };
        for dtype in FLOATS {
            for (columns, layout) in [(256, PLAIN), (77, UNALIGNED), (200, PITCHED), (1, PLAIN), (1030, PLAIN)] {
                cases.push(Case { dtype, columns, layout, ..case.clone() });
            }
        }
        for rows in [vec![1], vec![5, 3, 17], vec![128, 200], vec![1, 2, 3, 4, 5]] {
            cases.push(Case { rows, columns: 130, ..case.clone() });
        }
        cases.push(Case { rows: vec![33, 33], gated: true, ..case.clone() });
        for magnitude in [0.0, 1e-30, 1e3] {
            cases.push(Case { magnitude, dtype: DType::F32, ..case.clone() });
        }
    }
    check("quantize", &cases, test_quantize);
}

/// Sources beyond the 32 MiB that travel to a device at once, whose panels end inside a part.
#[test]
fn panels_of_a_large_source_give_the_codes_of_the_host() {
    let int4 = |zero_points| Format::new(Encoding::Int4, Granularity::Groups(32), zero_points, true).unwrap();
    let of = |encoding, granularity| Format::new(encoding, granularity, false, false).unwrap();
    let mut cases = Vec::new();
    for format in [
        int4(false),
        int4(true),
        of(Encoding::Int8, Granularity::Rows),
        of(Encoding::Int8, Granularity::Groups(64)),
        of(Encoding::Fp8E4m3, Granularity::Blocks),
        of(Encoding::Fp8E5m2, Granularity::Tensor),
    ] {
        let case = |rows, gated| Case {
            format,
            dtype: DType::F32,
            rows,
            columns: 2056,
            layout: PLAIN,
            gated,
            magnitude: 0.02,
        };
        cases.push(case(vec![4000, 77, 500], false));
        if format.encoding == Encoding::Int4 {
            cases.push(case(vec![2100, 2100], true));
        }
    }
    check("quantize panels", &cases, test_quantize);
}

#[test]
fn what_no_code_stands_for_is_refused_by_name() {
    let cases: Vec<(Format, f64)> = formats()
        .into_iter()
        .filter(|format| !format.clipping)
        .flat_map(|format| [(format, f64::NAN), (format, f64::NEG_INFINITY)])
        .collect();
    check("quantize special values", &cases, |run, &(format, special)| {
        let (rows, columns) = (20, 150);
        let mut values = run.random.normals(rows * columns, 1.0);
        values[7 * columns + 140] = special;
        let tensor = run.tensor(DType::Bf16, &[rows, columns], PLAIN, &values)?;
        let memory = run.device.backend.memory();
        let made = Weight::new(memory, &[tensor], Arrangement::Stacked, Source::Device, Some(format), run.stream);
        expect_error(made, Status::InvalidArgument, &["row 7"])
    });
}

#[test]
fn dequantising_on_the_device_gives_the_values_of_the_host() {
    let mut cases = Vec::new();
    for format in formats().into_iter().filter(|format| !format.clipping) {
        for (rows, columns) in [(40, 256), (17, 77), (1, 1), (130, 328), (200, 1030)] {
            for (dtype, layout) in [(DType::F32, PLAIN), (DType::Bf16, PITCHED), (DType::F16, UNALIGNED)] {
                cases.push((format, rows, columns, dtype, layout));
            }
        }
    }
    check("dequantize", &cases, |run, &(format, rows, columns, dtype, layout)| {
        let mut values = encode(DType::F32, &run.random.normals(rows * columns, 0.02));
        let tensor = Tensor::new(values.as_mut_ptr().cast(), DType::F32, &[rows, columns]);
        let memory = run.device.backend.memory();
        let weight = Weight::new(memory, &[tensor], Arrangement::Stacked, Source::Host, Some(format), run.stream)?;
        let output = run.output(dtype, &[rows, columns], layout)?;
        weight.dequantize(memory, &output, run.stream)?;
        let expected = on_host(run, &weight, dtype, PLAIN)?;
        same("dequantised on the device", &run.read(&output)?, &expected, columns)
    });
}

/// A weight that CUDA dequantises in several slices; sampled columns of the result.
#[test]
fn large_weights_are_multiplied_slice_by_slice() {
    let int4 = Format::new(Encoding::Int4, Granularity::Groups(32), true, false).unwrap();
    let int8 = Format::new(Encoding::Int8, Granularity::Rows, false, false).unwrap();
    check("large quantised linear", &[(int4, true), (int8, false)], |run, &(format, gated)| {
        let (m, rows, k) = (70, 70_000, 512);
        let (part_rows, parts) = if gated { (rows / 2, 2) } else { (rows, 1) };
        let mut host = encode(DType::Bf16, &run.random.normals(part_rows * k, 0.05));
        let tensor = Tensor::new(host.as_mut_ptr().cast(), DType::Bf16, &[part_rows, k]);
        let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
        let memory = run.device.backend.memory();
        let tensors = vec![tensor; parts];
        let weight = Weight::new(memory, &tensors, arrangement, Source::Host, Some(format), run.stream)?;
        let w = values_of(run, &weight, PLAIN)?;
        let (input, x) = run.normal(DType::Bf16, &[m, k], PLAIN, 1.0)?;
        let (bias, biases) = run.normal(DType::F32, &[rows], PLAIN, 1.0)?;
        let columns = rows / parts;
        let output = run.output(DType::F32, &[m, columns], PLAIN)?;
        let op = LinearProduct::new(input, weight.view(), Some(bias), Activation::None, output)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let results = run.read(&output)?;
        let dot = |row: usize, n: usize| {
            let products = x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w);
            products.sum::<f64>() + biases[n]
        };
        for column in (0..columns).step_by(97).chain([columns - 1]) {
            for row in [0, 31, 69] {
                let expected = match gated {
                    true => dot(row, 2 * column) * dot(row, 2 * column + 1),
                    false => dot(row, column),
                };
                let actual = results[row * columns + column];
                if (actual - expected).abs() > 0.03 * (expected.abs() + 1.0) {
                    return Err(format!("row {row}, column {column} is {actual}; {expected} is expected").into());
                }
            }
        }
        Ok(())
    });
}

/// A backend that may round a product's input to 8 bits does so within what 8 bits hold.
#[test]
fn activations_in_8_bits_lose_what_8_bits_must() {
    let mut cases = Vec::new();
    for (encoding, bound) in [(Encoding::Fp8E4m3, 0.04), (Encoding::Fp8E5m2, 0.04), (Encoding::Int8, 0.02)] {
        for granularity in [Granularity::Rows, Granularity::Tensor] {
            let format = Format::new(encoding, granularity, false, false).unwrap();
            for (m, n, k) in [(80, 128, 512), (200, 96, 250), (65, 33, 77)] {
                for (input, output, gated) in
                    [(DType::Bf16, DType::Bf16, false), (DType::F16, DType::F32, true), (DType::F32, DType::F32, false)]
                {
                    cases.push((format, bound, (m, n, k), input, output, gated));
                }
            }
        }
    }
    check("linear with 8-bit activations", &cases, |run, &(format, bound, (m, n, k), input, output, gated)| {
        let options = Configuration {
            device: run.device.name.to_string(),
            quantized_activations: true,
            ..Configuration::default()
        };
        let backend = Backend::new(options)?;
        let stream = Stream::new(backend.executor(), 0)?;
        let parts = 1 + usize::from(gated);
        let mut host = encode(DType::F32, &run.random.normals(n * k, 1.0 / (k as f64).sqrt()));
        let tensors = vec![Tensor::new(host.as_mut_ptr().cast(), DType::F32, &[n, k]); parts];
        let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
        let memory = run.device.backend.memory();
        let weight = Weight::new(memory, &tensors, arrangement, Source::Host, Some(format), run.stream)?;
        let w = values_of(run, &weight, PLAIN)?;
        let (x_tensor, x) = run.normal(input, &[m, k], PITCHED, 1.0)?;
        let result = run.output(output, &[m, n], PLAIN)?;
        let op = LinearProduct::new(x_tensor, weight.view(), None, Activation::None, result)?;
        backend.executor().run(&Operation::from(op), stream.raw())?;
        stream.synchronize()?;
        let dot =
            |row: usize, n: usize| -> f64 { x[row * k..][..k].iter().zip(&w[n * k..][..k]).map(|(x, w)| x * w).sum() };
        let mut reference = Vec::new();
        for row in 0..m {
            for column in 0..n {
                reference.push(match gated {
                    true => dot(row, 2 * column) * dot(row, 2 * column + 1),
                    false => dot(row, column),
                });
            }
        }
        // A product of two such sums carries the errors of both.
        run.expect_within("output", &result, &reference, bound * parts as f64)
    });
}
