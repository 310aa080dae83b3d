//! `l2_norm`: output = input / max(‖input‖₂, ε) over each row, called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PLAIN};
use crate::strided::{Placement, PLACEMENTS, ROW_MAJOR};
use nvbackend::capi::rows::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
struct Case {
    shape: [usize; 4],
    epsilon: f32,
    /// Of input and output.
    dtypes: [DType; 2],
    placements: [Placement; 2],
    in_place: bool,
    magnitude: f64,
    /// Put into one place.
    special: Option<f64>,
}

const CASE: Case = Case {
    shape: [2, 3, 4, 37],
    epsilon: 0.0,
    dtypes: [DType::F32; 2],
    placements: [ROW_MAJOR; 2],
    in_place: false,
    magnitude: 1.0,
    special: None,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let mut x = run.random.normals(case.shape.iter().product(), case.magnitude);
    if let Some(special) = case.special {
        let place = x.len() / 2;
        x[place] = special;
    }
    let x = rounded(case.dtypes[0], &x);
    let input = case.placements[0].tensor(run, case.dtypes[0], case.shape, &x)?;
    let output = match case.in_place {
        true => input,
        false => case.placements[1].output(run, case.dtypes[1], case.shape)?,
    };
    run.allow_write(&output);
    let mut args: nvb_l2_norm_args = init();
    (args.input, args.output, args.epsilon) = (c_tensor(&input), c_tensor(&output), case.epsilon);
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_l2_norm(backend, &args, stream) })?;

    let epsilon = if case.epsilon == 0.0 { 1e-12 } else { f64::from(case.epsilon) };
    let mut reference = Vec::new();
    for row in x.chunks(case.shape[3].max(1)) {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        let divisor = if length < epsilon { epsilon } else { length };
        reference.extend(row.iter().map(|x| x / divisor));
    }
    run.expect("output", &output, &reference)
}

#[test]
fn l2_norm() {
    let mut cases = Vec::new();
    for input in PLACEMENTS {
        for output in PLACEMENTS {
            cases.push(Case { placements: [input, output], ..CASE });
        }
        cases.push(Case { placements: [input; 2], in_place: true, ..CASE });
    }
    for input in FLOATS {
        for output in FLOATS {
            cases.push(Case { dtypes: [input, output], ..CASE });
        }
        cases.push(Case { dtypes: [input; 2], in_place: true, ..CASE });
    }
    for columns in [1, 2, 31, 32, 33, 255, 257, 1025, 70_001] {
        cases.push(Case { shape: [1, 1, 3, columns], ..CASE });
    }
    for shape in [[0, 3, 4, 5], [2, 0, 4, 5], [2, 3, 4, 0], [1, 1, 3000, 5]] {
        cases.push(Case { shape, ..CASE });
    }
    for magnitude in [0.0, 1e-30, 1e-12, 1e-3, 1e15, 1e36] {
        for epsilon in [0.0, 1e-6, 10.0] {
            cases.push(Case { magnitude, epsilon, ..CASE });
        }
    }
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        cases.push(Case { special: Some(special), ..CASE });
    }
    check("l2_norm", &cases, test);
}

#[test]
fn what_is_refused() {
    check("l2_norm", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[3, 8], PLAIN, &[1.0; 24])?;
        let output = run.output(DType::F32, &[3, 8], PLAIN)?;
        let mut good: nvb_l2_norm_args = init();
        (good.input, good.output) = (c_tensor(&input), c_tensor(&output));
        let refused = |change: &dyn Fn(&mut nvb_l2_norm_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_l2_norm(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.epsilon = -1.0, &["epsilon is -1"])?;
        refused(&|args| args.epsilon = f32::NAN, &["epsilon is NaN"])?;
        refused(&|args| args.reserved = 1, &["reserved"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.output.dtype = DType::I32 as u32, &["`output`", "i32"])?;
        refused(&|args| args.output.shape[0] = 2, &["output", "shape"])?;
        refused(&|args| args.output.strides = [0, 1, 0, 0], &["output", "overlap"])?;
        refused(&|args| args.output.data = input.data.wrapping_byte_add(4), &["output", "input"])
    });
}
