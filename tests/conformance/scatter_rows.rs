//! `scatter_rows`: output[i, j, rows[i, j, t]] = input[i, j, t], called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Layout, Outcome, Run, PLAIN};
use crate::strided::{Placement, ROW_MAJOR, SWAPPED};
use nvbackend::capi::strided::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    /// i, j, t and the width.
    shape: [usize; 4],
    /// Rows of the output.
    places: usize,
    /// Extents of `rows` along i and j.
    repeats: [usize; 2],
    dtypes: [DType; 2],
    placement: Placement,
    /// 2: the low halves of 64-bit numbers.
    stride: usize,
}

const CASE: Case = Case {
    shape: [2, 4, 3, 40],
    places: 9,
    repeats: [2, 4],
    dtypes: [DType::F32, DType::F16],
    placement: ROW_MAJOR,
    stride: 1,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let [outer, inner, tokens, width] = case.shape;
    let values = rounded(case.dtypes[0], &run.random.normals(outer * inner * tokens * width, 1.0));
    let before = rounded(case.dtypes[1], &run.random.normals(outer * inner * case.places * width, 1.0));
    let input = case.placement.tensor(run, case.dtypes[0], case.shape, &values)?;
    let output = case.placement.tensor(run, case.dtypes[1], [outer, inner, case.places, width], &before)?;
    run.allow_write(&output);

    // No place is named twice.
    let [first, second] = case.repeats;
    let mut numbers = Vec::new();
    for _ in 0..first * second {
        numbers.extend(run.random.permutation(case.places)[..tokens].iter().map(|&place| place as f64));
    }
    let strides = [second * tokens, tokens, 1].map(|stride| stride * case.stride);
    let span = (first * second * tokens).max(1) * case.stride;
    let rows = run.strided(DType::I32, &[first, second, tokens], &strides, 0, span, Some(&numbers))?;

    let mut args: nvb_scatter_rows_args = init();
    (args.input, args.rows, args.output) = (c_tensor(&input), c_tensor(&rows), c_tensor(&output));
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_scatter_rows(backend, &args, stream) })?;

    let mut reference = before;
    for i in 0..outer {
        for j in 0..inner {
            for t in 0..tokens {
                let place = numbers[((i % first) * second + j % second) * tokens + t] as usize;
                let from = ((i * inner + j) * tokens + t) * width;
                let to = ((i * inner + j) * case.places + place) * width;
                reference[to..to + width].copy_from_slice(&values[from..from + width]);
            }
        }
    }
    run.expect("output", &output, &reference)
}

#[test]
fn dtypes_shapes_and_repetitions() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for output in FLOATS {
            for placement in [ROW_MAJOR, SWAPPED] {
                for stride in [1, 2] {
                    cases.push(Case { dtypes: [input, output], placement, stride, ..CASE });
                }
            }
        }
    }
    for repeats in [[1, 1], [1, 4], [2, 1], [1, 2], [2, 2]] {
        cases.push(Case { repeats, ..CASE });
    }
    for (shape, places) in [
        ([1, 1, 1, 1], 1),
        ([1, 1, 5, 1], 5),
        ([1, 1, 512, 64], 1000),
        ([1, 3, 2, 1024], 4),
        ([1, 1, 7, 333], 7),
        ([3, 1, 0, 8], 4),
        ([1, 1, 3, 0], 4),
    ] {
        cases.push(Case { shape, places, repeats: [1, 1], ..CASE });
    }
    check("scatter_rows", &cases, test);
}

#[test]
fn numbers_outside_the_output() {
    check("scatter_rows", &[-1, 4, i32::MAX, i32::MIN], |run, &number| {
        let input = run.tensor(DType::F32, &[2, 3], PLAIN, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
        let output = run.tensor(DType::F32, &[4, 3], PLAIN, &[0.0; 12])?;
        let rows = run.integers(&[2, number])?;
        let mut args: nvb_scatter_rows_args = init();
        (args.input, args.rows, args.output) = (c_tensor(&input), c_tensor(&rows), c_tensor(&output));
        // SAFETY: as in `test`.
        let result = run.call(|backend, stream| unsafe { nvb_scatter_rows(backend, &args, stream) });
        if run.device.is_cpu() {
            // Nothing is written then.
            return expect_error(result, Status::InvalidArgument, &["row 1", &number.to_string(), "4 rows"]);
        }
        run.allow_write(&output);
        result?;
        let mut reference = [0.0; 12];
        reference[6..9].copy_from_slice(&[1.0, 2.0, 3.0]);
        run.expect("output", &output, &reference)
    });
}

#[test]
fn what_is_refused() {
    check("scatter_rows", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[2, 3, 8], PLAIN, &[1.0; 48])?;
        let output = run.output(DType::F32, &[2, 5, 8], Layout { offset: 0, padding: 8 })?;
        let rows = run.integers(&[0, 1, 2])?;
        let mut good: nvb_scatter_rows_args = init();
        (good.input, good.rows, good.output) = (c_tensor(&input), c_tensor(&rows), c_tensor(&output));
        let refused = |change: &dyn Fn(&mut nvb_scatter_rows_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_scatter_rows(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.rows.dtype = DType::F32 as u32, &["`rows`", "f32", "i32"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.output.dtype = DType::I32 as u32, &["`output`", "i32"])?;
        refused(&|args| args.rows.shape[0] = 2, &["`rows`", "[1, 1, 2]", "[1, 2, 3]"])?;
        refused(&|args| args.output.shape[0] = 1, &["output", "shape"])?;
        refused(&|args| args.output.shape[2] = 7, &["output", "shape"])?;
        refused(&|args| args.output.strides = [40, 4, 1, 0], &["`output`", "overlap"])?;
        refused(&|args| args.output.strides = [40, 8, 2, 0], &["`output`", "innermost"])?;
        refused(&|args| args.rows.data = output.data, &["rows", "output"])?;
        refused(&|args| args.output = c_tensor(&Tensor::new(input.data, DType::F32, &[2, 3, 8])), &["output", "input"])
    });
}
