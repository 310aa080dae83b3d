//! `masked_softmax`: softmax with a mask, ALiBi and sinks, called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PLAIN};
use crate::strided::{places, repeated, Placement, ROW_MAJOR, SWAPPED};
use nvbackend::capi::strided::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// Batch, heads, rows, columns.
    shape: [usize; 4],
    /// Of the leading axes; `None`: no mask.
    mask: Option<[usize; 3]>,
    sinks: bool,
    scale: f32,
    alibi_bias: f32,
    /// Of input, mask and output.
    dtypes: [DType; 3],
    placement: Placement,
    in_place: bool,
    /// A row of the mask hides every column.
    hidden_row: bool,
}

const CASE: Case = Case {
    shape: [2, 6, 5, 40],
    mask: Some([1, 1, 5]),
    sinks: false,
    scale: 0.3,
    alibi_bias: 0.0,
    dtypes: [DType::F32, DType::F16, DType::F32],
    placement: ROW_MAJOR,
    in_place: false,
    hidden_row: false,
};

fn slope(case: &Case, head: usize) -> f64 {
    if case.alibi_bias == 0.0 {
        return 1.0;
    }
    let mut power = 1;
    while power * 2 <= case.shape[1] {
        power *= 2;
    }
    let (bias, n) = (f64::from(case.alibi_bias), power as f64);
    match head < power {
        true => 2f64.powf(-bias * (head + 1) as f64 / n),
        false => 2f64.powf(-bias * (2 * (head - power) + 1) as f64 / (2.0 * n)),
    }
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let columns = case.shape[3];
    let x = rounded(case.dtypes[0], &run.random.normals(case.shape.iter().product(), 3.0));
    let input = case.placement.tensor(run, case.dtypes[0], case.shape, &x)?;
    let mut args: nvb_masked_softmax_args = init();
    args.input = c_tensor(&input);
    let mut mask = None;
    if let Some([batch, heads, rows]) = case.mask {
        let shape = [batch, heads, rows, columns];
        let mut values = run.random.normals(batch * heads * rows * columns, 1.0);
        for (number, value) in values.iter_mut().enumerate() {
            if number % 3 == 1 || (case.hidden_row && number < columns) {
                *value = f64::NEG_INFINITY;
            }
        }
        let values = rounded(case.dtypes[1], &values);
        args.mask = c_tensor(&case.placement.tensor(run, case.dtypes[1], shape, &values)?);
        mask = Some((shape, values));
    }
    let sinks = run.random.normals(case.shape[1], 2.0);
    let sinks = rounded(DType::F32, &sinks);
    if case.sinks {
        args.sinks = c_tensor(&run.tensor(DType::F32, &[case.shape[1]], PLAIN, &sinks)?);
    }
    let output = match case.in_place {
        true => input,
        false => ROW_MAJOR.output(run, case.dtypes[2], case.shape)?,
    };
    run.allow_write(&output);
    args.output = c_tensor(&output);
    (args.scale, args.alibi_bias) = (case.scale, case.alibi_bias);
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_masked_softmax(backend, &args, stream) })?;

    let all = places(case.shape);
    let scores: Vec<f64> = all
        .iter()
        .zip(&x)
        .map(|(&place, x)| {
            let hidden = mask.as_ref().map_or(0.0, |(shape, values)| values[repeated(*shape, place)]);
            x * f64::from(if case.scale == 0.0 { 1.0 } else { case.scale }) + slope(case, place[1]) * hidden
        })
        .collect();
    let mut reference = Vec::new();
    for (row, scores) in scores.chunks(columns.max(1)).enumerate() {
        let sink = if case.sinks { sinks[all[row * columns][1]] } else { f64::NEG_INFINITY };
        let max = scores.iter().fold(sink, |max: f64, &score| max.max(score));
        let weight = |score: f64| if max == f64::NEG_INFINITY { 0.0 } else { (score - max).exp() };
        let sum: f64 = scores.iter().map(|&score| weight(score)).sum::<f64>() + weight(sink);
        reference.extend(scores.iter().map(|&score| if sum == 0.0 { 0.0 } else { weight(score) / sum }));
    }
    run.expect("output", &output, &reference)
}

#[test]
fn masks_dtypes_and_shapes() {
    let mut cases = Vec::new();
    for mask in [None, Some([1, 1, 5]), Some([2, 6, 5]), Some([2, 1, 5]), Some([1, 3, 1])] {
        for sinks in [false, true] {
            for alibi_bias in [0.0, 8.0] {
                for placement in [ROW_MAJOR, SWAPPED] {
                    cases.push(Case { mask, sinks, alibi_bias, placement, ..CASE });
                }
            }
        }
    }
    for input in FLOATS {
        for mask in FLOATS {
            for output in FLOATS {
                cases.push(Case { dtypes: [input, mask, output], ..CASE });
            }
        }
        cases.push(Case { dtypes: [input, DType::F32, input], in_place: true, ..CASE });
    }
    for shape in [[1, 1, 1, 1], [1, 1, 5, 1], [1, 2, 5, 3000], [1, 1, 5, 20_001], [1, 8, 5, 17], [2, 1, 5, 0]] {
        for sinks in [false, true] {
            cases.push(Case { shape, sinks, mask: Some([1, 1, if shape[2] == 1 { 1 } else { 5 }]), ..CASE });
        }
    }
    for sinks in [false, true] {
        cases.push(Case { hidden_row: true, sinks, ..CASE });
    }
    cases.push(Case { scale: 0.0, ..CASE });
    check("masked_softmax", &cases, test);
}

#[test]
fn what_is_refused() {
    check("masked_softmax", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[2, 3, 8], PLAIN, &[1.0; 48])?;
        let output = run.output(DType::F32, &[2, 3, 8], PLAIN)?;
        let mask = run.tensor(DType::F16, &[3, 8], PLAIN, &[0.0; 24])?;
        let sinks = run.tensor(DType::F32, &[2], PLAIN, &[0.0; 2])?;
        let mut good: nvb_masked_softmax_args = init();
        (good.input, good.output) = (c_tensor(&input), c_tensor(&output));
        (good.mask, good.sinks) = (c_tensor(&mask), c_tensor(&sinks));
        let refused = |change: &dyn Fn(&mut nvb_masked_softmax_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_masked_softmax(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.mask.shape[0] = 2, &["`mask`", "[1, 1, 2, 8]"])?;
        refused(&|args| args.mask.shape[1] = 4, &["`mask`"])?;
        refused(&|args| args.mask.dtype = DType::I32 as u32, &["`mask`", "i32"])?;
        refused(&|args| args.sinks.shape[0] = 1, &["sinks", "[2]"])?;
        refused(&|args| args.sinks.dtype = DType::F16 as u32, &["sinks", "f32"])?;
        refused(&|args| args.scale = f32::INFINITY, &["scale", "inf"])?;
        refused(&|args| args.alibi_bias = -1.0, &["alibi_bias", "-1"])?;
        refused(&|args| args.alibi_bias = f32::NAN, &["alibi_bias", "NaN"])?;
        refused(&|args| args.output.shape[0] = 1, &["output", "shape"])?;
        refused(&|args| args.output.strides = [0, 8, 1, 0], &["output", "overlap"])?;
        refused(&|args| args.mask.data = output.data, &["output", "mask"])?;
        refused(&|args| args.output.data = input.data.wrapping_byte_add(4), &["output", "input"])
    });
}
