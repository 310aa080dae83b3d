//! `sum_rows`: output = scale · Σ input over each row, called as an engine calls it.

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
    scale: f32,
    /// Of input and output.
    dtypes: [DType; 2],
    placements: [Placement; 2],
    magnitude: f64,
    /// Put into one place.
    special: Option<f64>,
}

const CASE: Case = Case {
    shape: [2, 3, 4, 37],
    scale: 0.0,
    dtypes: [DType::F32; 2],
    placements: [ROW_MAJOR; 2],
    magnitude: 1.0,
    special: None,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let [first, second, third, columns] = case.shape;
    let mut x = run.random.normals(case.shape.iter().product(), case.magnitude);
    if let Some(special) = case.special {
        let place = x.len() / 2;
        x[place] = special;
    }
    let x = rounded(case.dtypes[0], &x);
    let input = case.placements[0].tensor(run, case.dtypes[0], case.shape, &x)?;
    let output = case.placements[1].output(run, case.dtypes[1], [first, second, third, 1])?;
    let mut args: nvb_sum_rows_args = init();
    (args.input, args.output, args.scale) = (c_tensor(&input), c_tensor(&output), case.scale);
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_sum_rows(backend, &args, stream) })?;

    let scale = f64::from(if case.scale == 0.0 { 1.0 } else { case.scale });
    let rows: Vec<&[f64]> = match columns {
        0 => vec![&[]; first * second * third],
        _ => x.chunks(columns).collect(),
    };
    let reference: Vec<f64> = rows.iter().map(|row| row.iter().sum::<f64>() * scale).collect();
    let slack: Vec<f64> = rows
        .iter()
        .map(|row| row.iter().map(|x| x.abs()).sum::<f64>() * scale.abs())
        .map(|sum| if sum.is_finite() { sum } else { 0.0 })
        .collect();
    run.expect_summed("output", &output, &reference, &slack)
}

#[test]
fn sum_rows() {
    let mut cases = Vec::new();
    for input in PLACEMENTS {
        for output in PLACEMENTS {
            cases.push(Case { placements: [input, output], ..CASE });
        }
    }
    for input in FLOATS {
        for output in FLOATS {
            cases.push(Case { dtypes: [input, output], scale: 0.25, ..CASE });
        }
    }
    for columns in [0, 1, 2, 31, 32, 33, 255, 257, 1025, 70_001] {
        cases.push(Case { shape: [1, 1, 3, columns], scale: -1.5, ..CASE });
    }
    for shape in [[0, 3, 4, 5], [2, 0, 4, 5], [2, 3, 0, 5], [1, 1, 3000, 5]] {
        cases.push(Case { shape, ..CASE });
    }
    for magnitude in [0.0, 1e-30, 1e30] {
        cases.push(Case { magnitude, ..CASE });
    }
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        cases.push(Case { special: Some(special), ..CASE });
    }
    check("sum_rows", &cases, test);
}

#[test]
fn what_is_refused() {
    check("sum_rows", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[3, 8], PLAIN, &[1.0; 24])?;
        let output = run.output(DType::F32, &[3, 1], PLAIN)?;
        let mut good: nvb_sum_rows_args = init();
        (good.input, good.output) = (c_tensor(&input), c_tensor(&output));
        let refused = |change: &dyn Fn(&mut nvb_sum_rows_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_sum_rows(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.scale = f32::NAN, &["scale is NaN"])?;
        refused(&|args| args.reserved = 1, &["reserved"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.output.dtype = DType::I32 as u32, &["`output`", "i32"])?;
        refused(&|args| (args.output.shape[1], args.output.strides) = (2, [0; 4]), &["`output`", "[1, 1, 3, 1]"])?;
        refused(&|args| args.output.shape[0] = 2, &["`output`", "[1, 1, 3, 1]"])?;
        refused(&|args| args.output.data = input.data, &["output", "input"])
    });
}
