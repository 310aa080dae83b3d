//! `batch_invariant`: a row of a product is the same to the bit whatever the number of the other rows, their content and
//! where they lie. On the CPU that is so without the option too; on a GPU it is shown not to be.

use crate::activation::ACTIVATIONS;
use crate::compare::{encode, FLOATS};
use crate::run::{check, expect_error, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::formats;
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::device::DeviceKind;
use nvbackend::error::{Result, Status};
use nvbackend::executor::Executor;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::grouped_linear::{GroupedLinear, Routing};
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::matmul::Matmul;
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::operation::OperationKind;
use nvbackend::registry::{kernels_of, Kernel};
use nvbackend::tensor::{DType, Tensor};
use nvbackend::tuning::explain::explain;
use nvbackend::tuning::tuner::Options;
use nvbackend::tuning::Clock;
use nvbackend::weight::gptq::{gptq, GptqTensors, GptqVersion};
use nvbackend::weight::grouped::FloatBytes;
use nvbackend::weight::{Arrangement, Encoding, Format};
use std::ops::ControlFlow;

/// Across all borders between kernels and tiles.
const ROWS: [usize; 12] = [1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 130, 300];
const MOST: usize = 300;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// `None`: floats of the dtype below.
    format: Option<Format>,
    float: DType,
    n: usize,
    k: usize,
    input: DType,
    output: DType,
    activation: Activation,
    gated: bool,
    bias: bool,
    /// The layout of the batches; the row alone lies plainly.
    layout: Layout,
}

const CASE: Case = Case {
    format: None,
    float: DType::Bf16,
    n: 96,
    k: 256,
    input: DType::Bf16,
    output: DType::F32,
    activation: Activation::None,
    gated: false,
    bias: false,
    layout: PLAIN,
};

fn backend(run: &Run, batch_invariant: bool) -> Result<Backend> {
    let device = run.device.name.to_string();
    Backend::new(Configuration { device, batch_invariant, ..Configuration::default() })
}

fn weight(run: &mut Run, case: &Case, experts: usize) -> Result<Weight> {
    let &Case { format, k, gated, .. } = case;
    let (dtype, rows) = (if format.is_some() { DType::F32 } else { case.float }, case.n * experts);
    let values = |run: &mut Run| encode(dtype, &run.random.normals(rows * k, 1.0 / (k as f64).sqrt()));
    let mut parts: Vec<Vec<u8>> = (0..1 + usize::from(gated)).map(|_| values(run)).collect();
    let tensors: Vec<Tensor> =
        parts.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), dtype, &[rows, k])).collect();
    let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
    Weight::new(run.device.backend.memory(), &tensors, arrangement, Source::Host, format, run.stream)
}

/// `rows(run, first, count, layout)` computes rows of one and the same batch of `MOST`; the first that is not the same in
/// batches of other sizes, or alone.
fn first_difference(
    run: &mut Run,
    layout: Layout,
    mut rows: impl FnMut(&mut Run, usize, usize, Layout) -> Result<Vec<f64>>,
) -> Result<Option<String>> {
    let all = rows(run, 0, MOST, layout)?;
    let width = all.len() / MOST;
    let same = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    for count in ROWS {
        // From both ends, so that a row has other neighbours and another place in its tile.
        for first in [0, MOST - count] {
            let batch = rows(run, first, count, layout)?;
            if let Some(row) =
                (0..count).find(|row| !same(&batch[row * width..][..width], &all[(first + row) * width..]))
            {
                return Ok(Some(format!("row {row} of {count} is not row {} of {MOST}", first + row)));
            }
        }
    }
    for row in [0, 7, 8, 15, 16, 63, 64, 129, 255, MOST - 1] {
        if !same(&rows(run, row, 1, PLAIN)?, &all[row * width..]) {
            return Ok(Some(format!("row {row} of {MOST} is not the row alone")));
        }
    }
    Ok(None)
}

fn linear_difference(run: &mut Run, executor: &dyn Executor, case: &Case) -> Result<Option<String>> {
    let &Case { n, k, .. } = case;
    let weight = weight(run, case, 1)?;
    let bias = match case.bias {
        true => Some(run.normal(DType::Bf16, &[weight.view().rows], PLAIN, 1.0)?.0),
        false => None,
    };
    let x = rounded(case.input, &run.random.normals(MOST * k, 1.0));
    first_difference(run, case.layout, |run, first, count, layout| {
        let input = run.tensor(case.input, &[count, k], layout, &x[first * k..][..count * k])?;
        let output = run.output(case.output, &[count, n], layout)?;
        let op = LinearProduct::new(input, weight.view(), bias, case.activation, output)?;
        executor.run(&Operation::from(op), run.stream.raw())?;
        run.read(&output)
    })
}

fn expect_none(difference: Option<String>) -> Outcome {
    difference.map_or(Ok(()), |text| Err(text.into()))
}

fn invariant_linear(run: &mut Run, case: &Case) -> Outcome {
    let backend = backend(run, true)?;
    expect_none(linear_difference(run, &**backend.executor(), case)?)
}

#[test]
fn float_weights() {
    let mut cases = Vec::new();
    let pairs =
        FLOATS.map(|float| (float, float)).into_iter().chain([(DType::F32, DType::F16), (DType::F32, DType::Bf16)]);
    for (i, (input, float)) in pairs.enumerate() {
        for (j, (n, k)) in [(96, 256), (130, 1000), (33, 77), (520, 2048)].into_iter().enumerate() {
            let layout = [PLAIN, UNALIGNED, PITCHED, PLAIN][j];
            let (activation, gated, bias) = (ACTIVATIONS[(i + j) % ACTIVATIONS.len()], j % 2 == 1, i % 2 == 0);
            let output = FLOATS[(i + j) % 3];
            cases.push(Case { float, n, k, input, output, activation, gated, bias, layout, ..CASE });
        }
    }
    check("batch-invariant linear", &cases, invariant_linear);
}

#[test]
fn quantized_weights() {
    let mut cases = Vec::new();
    for (i, format) in formats().into_iter().filter(|format| !format.clipping).enumerate() {
        for (j, (input, n, k)) in
            [(DType::Bf16, 96, 256), (DType::F16, 160, 1024), (DType::F32, 40, 192), (DType::Bf16, 33, 100)]
                .into_iter()
                .enumerate()
        {
            let layout = [PLAIN, UNALIGNED, PLAIN, PITCHED][(i + j) % 4];
            let (activation, gated, bias) = (ACTIVATIONS[(i + j) % ACTIVATIONS.len()], (i + j) % 3 == 0, j % 2 == 0);
            let output = FLOATS[(i + j) % 3];
            let format = Some(format);
            cases.push(Case { format, n, k, input, output, activation, gated, bias, layout, ..CASE });
        }
    }
    check("batch-invariant quantised linear", &cases, invariant_linear);
}

/// A weight with columns in another order has its input copied in any case.
#[test]
fn ordered_weights() {
    check("batch-invariant ordered linear", &[PLAIN, UNALIGNED], |run, &layout| {
        let (n, k, group) = (48, 256, 64);
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
        let backend = backend(run, true)?;
        let x = rounded(DType::Bf16, &run.random.normals(MOST * k, 1.0));
        let difference = first_difference(run, layout, |run, first, count, layout| {
            let input = run.tensor(DType::Bf16, &[count, k], layout, &x[first * k..][..count * k])?;
            let output = run.output(DType::F32, &[count, n], layout)?;
            let op = LinearProduct::new(input, weight.view(), None, Activation::None, output)?;
            backend.executor().run(&Operation::from(op), run.stream.raw())?;
            run.read(&output)
        })?;
        expect_none(difference)
    });
}

fn codes_difference(run: &mut Run, executor: &dyn Executor, case: &Case, encoding: Encoding) -> Result<Option<String>> {
    let &Case { n, k, .. } = case;
    let weight = weight(run, case, 1)?;
    let codes: Vec<u8> = (0..MOST * k)
        .map(|_| match encoding {
            Encoding::Int8 => (run.random.below(255) as i32 - 127) as i8 as u8,
            // Finite E4M3.
            _ => (run.random.below(126) | run.random.below(2) << 7) as u8,
        })
        .collect();
    let scales: Vec<u8> = (0..MOST).flat_map(|_| (run.random.uniform() as f32 / 128.0).to_le_bytes()).collect();
    first_difference(run, case.layout, |run, first, count, layout| {
        let row_stride = k + layout.padding;
        let data = run.byte_rows((count, k), row_stride, layout.offset, Some(&codes[first * k..][..count * k]))?;
        let scales = run.byte_rows((count, 4), 4, 4 * layout.offset, Some(&scales[4 * first..][..4 * count]))?;
        let rows = QuantizedRows {
            data,
            scales: scales.cast(),
            given_scales: false,
            encoding,
            rows: count,
            columns: k,
            row_stride,
        };
        let output = run.output(case.output, &[count, n], PLAIN)?;
        let op = Linear::new(
            LinearTensors { quantized_input: Some(rows), output: Some(output), ..LinearTensors::default() },
            weight.view(),
            case.activation,
        )?;
        executor.run(&Operation::from(op), run.stream.raw())?;
        run.read(&output)
    })
}

/// An input in 8 bits, also where its codes would be multiplied if there were many rows.
#[test]
fn codes() {
    let mut cases = Vec::new();
    for encoding in [Encoding::Int8, Encoding::Fp8E4m3] {
        cases.extend(FLOATS.map(|float| (Case { float, ..CASE }, encoding)));
        let of = |format: Format| format.encoding == encoding || format.encoding == Encoding::Int4;
        for (i, format) in formats().into_iter().filter(|&format| of(format) && !format.clipping).enumerate() {
            let layout = [PLAIN, UNALIGNED][i % 2];
            cases.push((Case { format: Some(format), layout, ..CASE }, encoding));
        }
    }
    check("batch-invariant linear of codes", &cases, |run, &(case, encoding)| {
        let backend = backend(run, true)?;
        expect_none(codes_difference(run, &**backend.executor(), &case, encoding)?)
    });
}

fn grouped_difference(run: &mut Run, executor: &dyn Executor, case: &Case, experts: usize) -> Result<Option<String>> {
    let &Case { n, k, .. } = case;
    let weight = weight(run, case, experts)?;
    let x = rounded(case.input, &run.random.normals(MOST * k, 1.0));
    first_difference(run, case.layout, |run, first, count, layout| {
        let input = run.tensor(case.input, &[count, k], layout, &x[first * k..][..count * k])?;
        let output = run.output(case.output, &[count, n], layout)?;
        // All of one expert, the second of several, whose tokens are what changes.
        let owner = experts / 2;
        let offsets: Vec<i32> = (0..=experts).map(|expert| if expert > owner { count as i32 } else { 0 }).collect();
        let offsets = run.integers(&offsets)?;
        let op =
            GroupedLinear::new(input, (Routing::Offsets(offsets), 0), weight.view(), None, case.activation, output)?;
        executor.run(&Operation::from(op), run.stream.raw())?;
        run.read(&output)
    })
}

#[test]
fn grouped_products() {
    let mut cases = Vec::new();
    let all = formats().into_iter().filter(|format| !format.clipping).map(Some).chain([None, None, None]);
    for (i, format) in all.enumerate() {
        for (j, (n, k)) in [(128, 256), (128, 136)].into_iter().enumerate() {
            let float = FLOATS[i % 3];
            let input = if format.is_none() { float } else { FLOATS[(i + j) % 3] };
            let layout = [PLAIN, UNALIGNED, PITCHED][(i + j) % 3];
            let case = Case { format, float, n, k, input, layout, gated: i % 2 == 0, ..CASE };
            // Tiles are chosen by the tokens that an expert has on the average: those of one grow further.
            cases.extend([(case, 3), (case, 1)]);
        }
    }
    check("batch-invariant grouped linear", &cases, |run, (case, experts)| {
        let backend = backend(run, true)?;
        expect_none(grouped_difference(run, &**backend.executor(), case, *experts)?)
    });
}

fn matmul_difference(run: &mut Run, executor: &dyn Executor, case: &Case, transposed: bool) -> Result<Option<String>> {
    let &Case { n, k, input, .. } = case;
    let x = rounded(input, &run.random.normals(MOST * k, 1.0));
    let (b, _) = run.normal(input, &if transposed { [n, k] } else { [k, n] }, PLAIN, 1.0)?;
    first_difference(run, case.layout, |run, first, count, layout| {
        let a = run.tensor(input, &[count, k], layout, &x[first * k..][..count * k])?;
        let output = run.output(case.output, &[count, n], layout)?;
        executor.run(&Operation::from(Matmul::new(a, b, false, transposed, 0.5, output)?), run.stream.raw())?;
        run.read(&output)
    })
}

#[test]
fn batched_products() {
    let mut cases = Vec::new();
    for (i, input) in FLOATS.into_iter().enumerate() {
        for (j, (n, k)) in [(96, 256), (130, 1000), (33, 77)].into_iter().enumerate() {
            let case =
                Case { input, n, k, output: FLOATS[(i + j) % 3], layout: [PLAIN, UNALIGNED, PITCHED][j], ..CASE };
            cases.push((case, i % 2 == j % 2));
        }
    }
    check("batch-invariant matmul", &cases, |run, &(case, transposed)| {
        let backend = backend(run, true)?;
        expect_none(matmul_difference(run, &**backend.executor(), &case, transposed)?)
    });
}

/// These tests can fail: without the option kernels are chosen by the number of rows, and some row differs.
#[test]
fn without_the_option() {
    let (n, k) = (512, 2048);
    let all = formats().into_iter().filter(|format| !format.clipping && !format.zero_points).map(Some);
    let cases: Vec<Case> = all.chain([None]).map(|format| Case { format, n, k, ..CASE }).collect();
    check("linear with kernels by the number of rows", &cases, |run, case| {
        let backend = backend(run, false)?;
        let difference = linear_difference(run, &**backend.executor(), case)?;
        match (run.device.is_cpu(), difference) {
            (true, difference) => expect_none(difference),
            (false, Some(_)) => Ok(()),
            (false, None) => Err("all rows are the same without batch_invariant".to_string().into()),
        }
    });
}

/// What else chooses kernels is refused or left aside, and the explanation says so.
#[test]
fn one_kernel_a_product() {
    check("batch-invariant choices", &[None, Some(4)], |run, &bits| {
        let backend = backend(run, true)?;
        let format = formats().into_iter().find(|format| bits == Some(8 * format.encoding.bytes(2) / 2));
        let case = Case { format, ..CASE };
        let weight = weight(run, &case, 1)?;
        let (input, _) = run.normal(case.input, &[20, case.k], PLAIN, 1.0)?;
        let output = run.output(case.output, &[20, case.n], PLAIN)?;
        let op = LinearProduct::new(input, weight.view(), None, case.activation, output)?;
        let executor = &**backend.executor();
        executor.run(&Operation::from(op), run.stream.raw())?;
        let text = explain(executor, &op);
        if run.device.is_cpu() {
            // Its kernels give the same bits, so any may be chosen.
            executor.choices().set_override(OperationKind::Linear, "linear_cpu_64")?;
            return match text.contains("the default for this shape") {
                true => Ok(()),
                false => Err(text.into()),
            };
        }
        let candidates = executor.linear_candidates(&op);
        if candidates.len() != 1 || !text.contains("batch_invariant is set") || text.contains("nothing is tuned") {
            return Err(format!("{} candidates: {text}", candidates.len()).into());
        }
        let of_linear = |(_, kernel): &(_, &'static Kernel)| kernel.operation == OperationKind::Linear;
        for (_, kernel) in kernels_of(DeviceKind::Cuda).filter(of_linear) {
            let outcome = executor.choices().set_override(OperationKind::Linear, kernel.name);
            expect_error(outcome, Status::Configuration, &[kernel.name, "batch_invariant"])?;
        }
        executor.choices().set_override(OperationKind::Linear, "")?;
        let tuned = backend.tune(&[], Options::default(), Clock::Host, &mut |_| ControlFlow::Continue(()));
        expect_error(tuned, Status::Configuration, &["batch_invariant", "nothing to tune"])
    });
}
